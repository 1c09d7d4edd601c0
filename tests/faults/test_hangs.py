"""A group's training stands still while its process still reports that it lives: evicted by progress alone."""

from pathlib import Path

import pytest

from tests.faults.trial import figures, slack_s, trial

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

HANGS_AT = 6
HEARTBEAT_S = 4.0
# Long enough that no exchange loses its patience before the coordinator does.
FAILURE_S = 40.0


@pytest.mark.long
def test_a_group_that_hangs_in_compute_is_put_out_and_comes_back(tmp_path: Path, undisturbed: str) -> None:
    gate = tmp_path / "hang-over"

    def own_flags(group: str) -> tuple[str, ...]:
        return ("--gate", f"{HANGS_AT}:{gate}") if group == "group-1" else ()

    with trial(tmp_path, heartbeat_s=HEARTBEAT_S, failure_s=FAILURE_S, own_flags=own_flags) as job:
        victim = job.workers["group-1"]
        job.here.until(lambda: len(victim.steps()) >= HANGS_AT, "the hang to begin")
        with job.fault("group-1") as heard:
            job.until_coordinator_says("evicts group-1: it hangs")
            for group in ("group-0", "group-2"):
                job.until_step(group, 3)
            assert not job.coordinator_says("no heartbeat"), "its process lives, and reports it"
            gate.touch()
        standstill_s, again_s = job.standstill_s(heard()), job.again_s(heard(), "group-1")
        figures.info("hung in compute: stood still %.2f s, back after %.2f s", standstill_s, again_s)
        assert again_s < slack_s()
        job.finish(undisturbed)
