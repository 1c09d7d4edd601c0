"""SIGSTOP, for shorter and longer than the heartbeat timeout; the kernel still answers for the stopped process."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.trial import GROUPS, Trial, figures, slack_s, trial

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

# A busy machine adds seconds to the short stop, and to the silence of the others, none of which loses its patience
# with an exchange before the coordinator has noticed the silence.
HEARTBEAT_S, FAILURE_S = 6.0, 40.0
SHORT_S = 0.1 * HEARTBEAT_S


def stop_for(job: Trial, group: str, until: Callable[[], None]) -> tuple[float, float]:
    """Stop a group `until` something; returns for how long the job stood still, and how long it was still away."""
    process = job.workers[group].process
    with job.fault(group) as heard:
        process.send_signal(signal.SIGSTOP)
        until()
        process.send_signal(signal.SIGCONT)
    return job.standstill_s(heard()), job.again_s(heard(), group)


@pytest.mark.long
def test_a_stop_of_any_length_changes_nothing(tmp_path: Path, undisturbed: str) -> None:
    with trial(tmp_path, heartbeat_s=HEARTBEAT_S, failure_s=FAILURE_S) as job:

        def a_moment() -> None:
            over_s = time.monotonic() + SHORT_S
            job.here.until(lambda: time.monotonic() >= over_s, "the stop to have lasted")

        standstill_s, again_s = stop_for(job, "group-1", a_moment)
        figures.info("stopped shortly: stood still %.2f s, back after %.2f s", standstill_s, again_s)
        assert not job.coordinator_says("lost group-1"), "shorter than the timeout: the others wait"
        assert job.workers["group-0"].steps()[-1]["members"] == list(GROUPS)

        def the_others_go_on() -> None:
            job.until_coordinator_says("lost group-1 (no heartbeat for")
            for group in ("group-0", "group-2"):
                job.until_step(group, 3)

        standstill_s, again_s = stop_for(job, "group-1", the_others_go_on)
        figures.info("stopped long: stood still %.2f s, back after %.2f s", standstill_s, again_s)
        assert standstill_s < HEARTBEAT_S + slack_s()
        assert again_s < slack_s(), "it comes back by itself"
        victim = job.workers["group-1"]
        caught_up = [event for event in victim.steps() if event["healed"] is not None]
        assert [(event["attempts"], event["shards"]) for event in caught_up] == [(0, [])] * len(caught_up)
        assert caught_up, "it reports that it only caught up, whatever it had tried before it was stopped"
        job.finish(undisturbed)
