"""Loops over the steps of a job: they join before they begin, follow heals, and end at one state. Real processes."""

import signal
from pathlib import Path

import pytest

from tests.clusters import cluster
from tests.processes.test_edits import LOOPS, finished_alone, started, until_ended

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


def test_a_loop_over_steps_joins_first_and_ends_with_the_others(tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator("--min-replicas", "2")  # so the survivor waits at step 7
        expected = finished_alone(here)
        workers = started(here, {"group-0": (), "group-1": ("--die", "exchange step 7")})
        here.until_dead(workers["group-1"])
        survivor, back = workers["group-0"], here.start("group-1", script=LOOPS)
        here.until_finished(survivor, back)
        joined = back.events()[0]
        # The numbers and the state of the job, before the first step and so before the first evaluation.
        assert joined["step"] == joined["count"] == 7
        assert {survivor.digest, back.digest} == {expected}
        assert [event["number"] for event in back.steps()] == list(range(joined["step"], 20))


@pytest.mark.long
@pytest.mark.parametrize("loop", ["steps", "while"])
def test_a_group_that_comes_after_the_end_has_the_last_checkpoint(loop: str, tmp_path: Path) -> None:
    flags = ("--checkpoints", str(tmp_path / "checkpoints"), "--loop", loop)
    with cluster(tmp_path) as here:
        here.start_coordinator()
        first = here.start("group-0", *flags, script=LOOPS)
        here.until_finished(first)
        late = here.start("group-0", *flags, script=LOOPS)
        here.until_finished(late)
        assert late.digest == first.digest
        assert not late.steps()


@pytest.mark.long
def test_a_group_that_would_train_on_after_the_end_is_told_that_the_job_is_over(tmp_path: Path) -> None:
    flags = ("--checkpoints", str(tmp_path / "checkpoints"))
    with cluster(tmp_path) as here:
        here.start_coordinator()
        here.until_finished(here.start("group-0", *flags, script=LOOPS))
        late = here.start("group-0", *flags, "--steps", "30", script=LOOPS)
        here.until_finished(late)
        assert not late.steps()
        assert late.logged("finished at step 20, the state of group 'group-0': it takes no further steps")
        assert late.logged("restore with changed={'job'}")


def test_groups_whose_loops_end_at_different_steps_are_told(tmp_path: Path) -> None:
    """As with early stopping by a counter of the program, which a restarted group does not have."""
    with cluster(tmp_path) as here:
        here.start_coordinator()
        first, second = started(here, {"group-0": (), "group-1": ("--steps", "7")}).values()
        here.until_finished(first, second)
        assert first.digest != second.digest
        assert first.logged("the loop of group-1 has ended at step 7, and this group's loop continues")
        assert first.log().count("they will hold other states") == 1
        assert first.logged("decide by the state alone")
        assert not second.logged("they will hold other states")


@pytest.mark.long
def test_checkpoints_without_restore_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    flags = ("--checkpoints", str(folder))
    with cluster(tmp_path) as here:
        here.start_coordinator()
        first = here.start("group-0", *flags, "--gate", f"13:{tmp_path / 'never'}", script=LOOPS)
        here.until(lambda: (folder / "10").is_dir() and first.step == 13, "step 13")
        first.process.send_signal(signal.SIGKILL)
        here.until_dead(first)
        here.until_lost("group-0")
        before = sorted(path.name for path in folder.iterdir())
        again = here.start("group-0", *flags, "--no-restore", script=LOOPS)
        until_ended(here, again)
        assert again.process.returncode == 1
        assert again.logged(
            "holds checkpoints up to step 10, but the program of group 'group-0' has not restored one"
        )
        assert again.logged("state = manager.restore(state)")
        assert sorted(path.name for path in folder.iterdir()) == before
