"""Edits of the state between two steps: made by the whole job, or by none of it. On real processes."""

from pathlib import Path

import pytest

from tests.clusters import Cluster, Worker, cluster

LOOPS = Path(__file__).with_name("loops.py")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
EDITS = ("--edit", "5", "--edit", "10", "--edit", "15")
DIFFER = "the groups did not make the same edit of state 5"


def finished_alone(here: Cluster, *flags: str) -> str:
    worker = here.start("alone", *flags, coordinated=False, script=LOOPS)
    here.until_finished(worker)
    assert worker.digest is not None
    return worker.digest


def started(here: Cluster, flags: dict[str, tuple[str, ...]], *, script: Path = LOOPS) -> dict[str, Worker]:
    """Start groups that are all members from the first step on."""
    present, gate = here.folder / "all-present", here.folder / "all-joined"
    gates = ("--gate", f"start:{present}", "--gate", f"joined:{gate}")
    made = {name: here.start(name, *gates, *own, script=script) for name, own in flags.items()}
    # A group that founded the job alone would wait at its gate for the others, which wait for the end of its step.
    for name in made:
        text = f"{name} is present"
        here.until(lambda text=text: text in here.coordinator_log.read_text(), f"{name} to be present")
    present.touch()
    members = [name for name, own in flags.items() if "--spare" not in own]
    for name in members:
        here.until(made[name].events, f"{name} to join")
    for name in flags.keys() - members:
        text = f"{name} stands by at step 0"
        here.until(lambda text=text: text in here.coordinator_log.read_text(), f"{name} to follow")
    quorum = f"now {', '.join(members)}; from step 0"
    here.until(lambda: all(made[name].logged(quorum) for name in members), "all to be in one quorum")
    gate.touch()
    return made


def until_ended(here: Cluster, worker: Worker) -> None:
    here.until(lambda: worker.process.poll() is not None, f"{worker.log_path.stem} to end")


def test_a_joiner_a_spare_and_a_resumed_job_make_the_same_edits(tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator()
        expected = finished_alone(here, *EDITS)
        held = tmp_path / "held"
        gated = (*EDITS, "--gate", f"12:{held}")
        workers = started(
            here,
            {
                "group-0": gated,
                "group-1": (*gated, "--die", "exchange step 7"),
                "spare": (*gated, "--spare"),
            },
        )
        here.until_dead(workers["group-1"])
        back = here.start("group-1", *gated, script=LOOPS)
        here.until(lambda: back.logged("heals to step") or back.events(), "it to heal")
        held.touch()
        here.until_finished(workers["group-0"], workers["spare"], back)
        assert {worker.digest for worker in (workers["group-0"], workers["spare"], back)} == {expected}


@pytest.mark.long
def test_a_spare_that_makes_an_edit_of_its_own_is_told(tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator()
        held = tmp_path / "held"
        workers = started(here, {"group-0": ("--gate", f"8:{held}"), "spare": ("--spare", "--edit", "8")})
        group, spare = workers.values()
        # A spare that was slow takes several steps in one call, or all of them as it joins.
        both = (group, spare)
        here.until(
            lambda: all(each.events()[-1:] and each.events()[-1]["step"] == 8 for each in both), "step 8"
        )
        held.touch()
        until_ended(here, spare)
        assert spare.process.returncode == 1
        assert spare.logged("This group has edited the state before step 8")
        here.until_finished(group)


@pytest.mark.long
def test_of_two_groups_only_one_edits(tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator()
        workers = started(here, {"group-0": ("--edit", "5"), "group-1": ()})
        for worker in workers.values():
            until_ended(here, worker)
            assert worker.process.returncode == 1
            assert worker.logged("JobHalted")
            assert worker.logged(f"{DIFFER} of job 'loops': edited by group-0; not edited by group-1")
            assert len(worker.steps()) == 5
