"""Groups of several processes save checkpoints, and resume from them with the bits of a run without a failure."""

import signal
from pathlib import Path

import pytest
from orbax.checkpoint.experimental import v1 as ocp

from tests.clusters import Cluster, cluster
from tests.processes.ranks import Group, assert_ends_with_its_group, digest_of, start_ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

STEPS = 12
EVERY = 4
# The job resumes after as long a time without its groups. A group that gets no CPU for this long heals instead.
TIMEOUT = ("--heartbeat-timeout-ms", "4000")


def start(here: Cluster, name: str, ranks: int, *flags: str, die: tuple[int, str] = (0, "")) -> Group:
    """A group with two devices in one process or in two."""
    saved = ("--checkpoints", str(here.folder / "saved"), "--checkpoint-every", str(EVERY))
    own = {die[0]: ("--die", die[1])}
    return start_ranks(
        here, name, ranks, ("--steps", str(STEPS), *saved, *flags), own=own, devices=2 // ranks
    )


def gate(here: Cluster, step: int) -> tuple[str, str]:
    """Stay before that step, until the group is killed."""
    return "--gate", f"{step}:{here.folder / 'never'}"


def saved_steps(here: Cluster) -> set[str]:
    folder = here.folder / "saved"
    return {path.name for path in folder.glob("[0-9]*")}


def kill_once_saved(here: Cluster, *groups: Group, step: int) -> None:
    here.until(lambda: str(step) in saved_steps(here), f"the checkpoint of step {step}")
    # Another group may still start up: a group that the coordinator never saw is never lost.
    for group in groups:
        present = f"{group.name} is present"
        here.until(lambda text=present: text in here.coordinator_log.read_text(), f"{group.name}'s Hello")
    kill(here, *groups)


def kill(here: Cluster, *groups: Group) -> None:
    workers = [worker for group in groups for worker in group.ranks]
    for worker in workers:
        worker.process.send_signal(signal.SIGKILL)
    # A rank may have ended with the status of a lost rank just before.
    here.until(lambda: all(worker.process.poll() is not None for worker in workers), "all ranks to die")
    here.until_lost(*(group.name for group in groups))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return digest_of(tmp_path_factory.mktemp("alone"), 2, "--steps", str(STEPS))


@pytest.mark.long
def test_groups_that_all_die_resume_with_the_same_bits(undisturbed: str, tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator(*TIMEOUT)
        first = [start(here, name, 2, *gate(here, 6)) for name in ("group-0", "group-1")]
        kill_once_saved(here, *first, step=4)
        back = [start(here, name, 2) for name in ("group-0", "group-1")]
        here.until_finished(*(worker for group in back for worker in group.ranks))
        assert {worker.digest for group in back for worker in group.ranks} == {undisturbed}
        assert any(group.leader.logged(f"restored step 4 from {tmp_path}/saved/4") for group in back)
        assert "resumes at step 4" in here.coordinator_log.read_text()


@pytest.mark.long
def test_groups_of_other_process_counts_read_it(undisturbed: str, tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator(*TIMEOUT)
        kill_once_saved(here, start(here, "group-0", 2, *gate(here, 5)), step=4)
        one = start(here, "group-0", 1, *gate(here, 9))
        kill_once_saved(here, one, step=8)
        two = start(here, "group-0", 2)
        here.until_finished(*two.ranks)
        assert one.leader.logged("restored step 4")
        for worker in two.ranks:
            assert worker.logged("restored step 8")
            assert worker.digest == undisturbed
        read = {step: ocp.load(str(tmp_path / "saved" / step)) for step in ("4", "8", "12")}
        assert [int(state["count"]) for state in read.values()] == [4, 8, 12]
        assert read["12"]["params"]["hidden"].shape == read["8"]["params"]["hidden"].shape


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_in_a_save_leaves_the_one_before(
    rank: int, undisturbed: str, tmp_path: Path
) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator(*TIMEOUT)
        first = tmp_path / "first-saved"
        gates = ("--gate", f"7:{first}", *gate(here, 9))
        victim = start(here, "group-0", 2, *gates, die=(rank, "write step 8"))
        here.until(lambda: "4" in saved_steps(here), "the checkpoint of step 4")
        first.touch()
        here.until_dead(victim.ranks[rank])
        other = victim.ranks[1 - rank]
        here.until(lambda: other.process.poll() is not None, "the other rank to end too")
        assert_ends_with_its_group(other, 1 - rank)
        here.until_lost("group-0")
        assert saved_steps(here) == {"4"}
        assert list((tmp_path / "saved").glob(".unfinished-*"))
        back = start(here, "group-0", 2)
        here.until_finished(*back.ranks)
        assert {worker.digest for worker in back.ranks} == {undisturbed}
        assert all(worker.logged("restored step 4") for worker in back.ranks)
        assert saved_steps(here) == {"4", "8", "12"}
        assert not list((tmp_path / "saved").glob(".unfinished-*"))


@pytest.mark.long
def test_ranks_that_do_not_see_one_folder_are_refused_before_the_first_step(tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator("--heartbeat-timeout-ms", "2000")
        saved = ("--checkpoints", str(tmp_path / "saved"), "--checkpoint-every", str(EVERY))
        elsewhere = {1: ("--checkpoints", str(tmp_path / "elsewhere"))}
        group = start_ranks(here, "group-0", 2, ("--steps", str(STEPS), *saved), own=elsewhere)
        for worker in group.ranks:
            here.until(lambda worker=worker: worker.process.poll() is not None, "both ranks to end")
            assert worker.process.returncode == 1, worker.log()
            assert not worker.steps()
        assert group.ranks[1].logged("Rank 1 does not see in")
        assert group.leader.logged("put the checkpoints on a file system that all processes share")
        assert [path.name for path in (tmp_path / "saved").iterdir()] == [".job"]


@pytest.mark.long
def test_a_rank_that_raises_while_its_group_saves_holds_up_no_other(tmp_path: Path) -> None:
    """The other rank waits in a collective, and the other groups for both. Its part of the save ends with it."""
    with cluster(tmp_path) as here:
        here.start_coordinator(*TIMEOUT)
        hold = ("--hold", f"write step {EVERY}:{here.folder / 'never'}")
        saved = ("--checkpoints", str(here.folder / "saved"), "--checkpoint-every", str(EVERY))
        flags = ("--steps", str(STEPS), *saved, *hold)
        group = start_ranks(here, "group-0", 2, flags, own={1: ("--unreadable", f"{EVERY + 2}:0")})
        for worker in group.ranks:
            here.until(lambda worker=worker: worker.process.poll() is not None, "both ranks to end")
        assert group.ranks[1].process.returncode == 1, group.ranks[1].log()
        assert saved_steps(here) == set()
