"""SIGKILL while groups exchange with several threads each, on real processes: the bits of one process alone."""

from pathlib import Path

import pytest

from tests.clusters import cluster, digest_alone
from tests.operate import port
from tests.processes.test_kill_phases import GROUPS, KILLED_AT, assert_same_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

STEPS = 14
GATE, LAST_GATE = 8, 11
# 14 MB of gradients: enough for three strands.
WIDTH = ("--width", "200000")
OFFERS = dict(zip(GROUPS, (4, 3, 8), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("phase", ["exchange", "vote"])
def test_a_kill_in_an_exchange_of_several_threads_changes_nothing(phase: str, tmp_path: Path) -> None:
    undisturbed = digest_alone(STEPS, *WIDTH)
    first, last = tmp_path / "victim-started", tmp_path / "victim-back"
    flags = ("--steps", str(STEPS), *WIDTH, "--gate", f"{GATE}:{first}", "--gate", f"{LAST_GATE}:{last}")
    victim, *others = GROUPS

    def flags_of(group: str) -> tuple[str, ...]:
        at = KILLED_AT if group == victim else STEPS  # the others never come so far
        return (*flags, "--exchange-threads", str(OFFERS[group]), "--die", f"{phase} step {at}")

    with cluster(tmp_path) as here:
        web = port.start(here)
        workers = here.start_together(GROUPS, flags_of)
        here.until_dead(workers[victim])
        # It comes back with fewer threads than the others have used so far.
        back = here.start(victim, *flags, "--exchange-threads", "2")
        # Until it is ready, and not just heals: it could enter too late for the few steps that are left.
        here.until(
            lambda: back.logged("heals to step") and web.group(victim)["state"] == "ready",
            f"{victim} to heal and stand by",
        )
        first.touch()
        survivors = [workers[name] for name in others]
        here.until(
            lambda: all(worker.step >= LAST_GATE for worker in survivors),
            "the survivors to reach the last gate",
        )
        last.touch()
        here.until_finished(back, *survivors)
        assert_same_run([back, *survivors], undisturbed)
        for worker in survivors:
            assert worker.logged("exchanges in up to 3 strands")
            assert worker.logged("exchanges in up to 2 strands")
