"""A step whose means are not finite, on real processes: the whole job decides, never one group."""

import signal
from pathlib import Path

import pytest

from tests.clusters import cluster, digest_alone

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

GROUPS = ("group-0", "group-1", "group-2")
POISON = ("--poison", "7:1")


def test_raise_ends_the_job_in_all_groups_at_the_same_step(tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator()
        flags = ("--steps", "12", "--nonfinite", "raise", *POISON)
        workers = here.start_together(GROUPS, lambda _group: flags).values()
        for worker in workers:
            here.until(lambda worker=worker: worker.process.poll() is not None, "the end")
            assert worker.process.returncode == 1
            assert "NonFinite: " in worker.log()
            assert "the means of step 7 of job 'toy' are not finite: " in worker.log()
            assert [event["step"] for event in worker.steps()] == list(range(1, 8))
        assert here.coordinator_log.read_text().count("halts: the means of step 7") == 1


@pytest.mark.long
def test_skip_leaves_the_state_as_it_was_also_for_one_that_replays_it(tmp_path: Path) -> None:
    flags = ("--steps", "16", "--nonfinite", "skip", *POISON)
    expected = digest_alone(16, *flags)
    with cluster(tmp_path) as here:
        here.start_coordinator()
        gate, later = tmp_path / "gate", tmp_path / "later"

        def gated(_group: str) -> tuple[str, ...]:
            return (*flags, "--gate", f"5:{gate}", "--gate", f"14:{later}")

        workers = here.start_together(GROUPS, gated)
        here.until(lambda: all(worker.step == 5 for worker in workers.values()), "step 5")
        workers["group-2"].process.send_signal(signal.SIGKILL)
        # Pinned at step 5, it replays 5, 6 and the skipped 7.
        again = here.start("group-2", *gated("group-2"))
        here.until(lambda: again.logged("heals to step 5"), "the heal to begin")
        gate.touch()
        survivors = [workers["group-0"], workers["group-1"]]

        def in_or_held() -> bool:
            healed = any(event["healed"] is not None for event in again.steps())
            return healed or all(worker.step == 14 for worker in survivors)

        here.until(in_or_held, "the heal, or the survivors to come to the gate")
        later.touch()
        ended = [*survivors, again]
        here.until_finished(*ended)
        for worker in ended:
            assert worker.digest == expected
        assert any(event["healed"] is not None for event in again.steps())
        assert [e["nonfinite"] != "" for e in workers["group-0"].steps()] == [s == 8 for s in range(1, 17)]
        assert "step 7 changes nothing: " in workers["group-0"].log()
        assert "step 7 changes nothing: " in again.log(), "it has not replayed the step"
