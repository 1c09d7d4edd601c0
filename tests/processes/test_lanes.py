"""Groups of one, two and four processes in one job: 4 devices each, one mesh, and the undisturbed bits."""

import re
from pathlib import Path

import pytest

from jaxft_launch.processes._ranks import free_ports
from tests.clusters import Cluster, cluster
from tests.processes.ranks import Group, assert_ends_with_its_group, digest_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

DEVICES = 4
STEPS = 14
KILLED_AT = 3
GATE = 6


def start(
    here: Cluster,
    name: str,
    ranks: int,
    *flags: str,
    devices: int = DEVICES,
    die: tuple[int, str] | None = None,
) -> Group:
    """Start a group of `size` processes. `die`: which of them kills itself, and in which phase."""
    world = f"{ranks}:{free_ports(1)[0]}:{devices // ranks}"
    return Group(
        name,
        [
            here.start(
                name,
                *("--world", f"{rank}:{world}", "--steps", str(STEPS), *flags),
                *(("--die", die[1]) if die is not None and die[0] == rank else ()),
            )
            for rank in range(ranks)
        ],
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return digest_of(tmp_path_factory.mktemp("alone"), DEVICES, "--steps", str(STEPS))


@pytest.mark.long
@pytest.mark.parametrize(
    ("killed", "rank", "phase", "flags"),
    [
        (4, 2, "exchange", ()),
        (2, 1, "compute", ()),
        pytest.param(1, 0, "apply", (), marks=pytest.mark.storm),
        # The paths of an accelerator, with a bucket for each leaf.
        pytest.param(2, 1, "exchange", ("--accelerator", "1"), id="accelerator"),
        pytest.param(2, 1, "exchange", ("--set-mesh",), id="set_mesh"),
    ],
)
def test_a_kill_in_a_group_of_any_number_of_processes_changes_nothing(
    killed: int, rank: int, phase: str, flags: tuple[str, ...], undisturbed: str, tmp_path: Path
) -> None:
    """The group that comes back heals from groups of other numbers of processes, lane by lane."""
    back_in = tmp_path / "back"
    gate = ("--gate", f"{GATE}:{back_in}", *flags)
    with cluster(tmp_path) as here:
        here.start_coordinator()
        groups = {
            ranks: start(
                here,
                f"group-{ranks}",
                ranks,
                *(*here.together, *gate),
                die=(rank, f"{phase} step {KILLED_AT}") if ranks == killed else None,
            )
            for ranks in (1, 2, 4)
        }
        here.begin_once_present(*(f"group-{ranks}" for ranks in groups))
        victim = groups.pop(killed)
        here.until_dead(victim.ranks[rank])
        for number, other in enumerate(victim.ranks):
            here.until(lambda other=other: other.process.poll() is not None, "the other ranks to end too")
            if number != rank:
                assert_ends_with_its_group(other, number)
        back = start(here, f"group-{killed}", killed, *gate)
        here.until(lambda: back.leader.logged("heals to step"), "the group to heal")
        back_in.touch()
        survivors = [worker for group in groups.values() for worker in group.ranks]
        here.until_finished(*survivors, *back.ranks)
        assert {worker.digest for worker in (*survivors, *back.ranks)} == {undisturbed}
        for worker in survivors:
            assert [event["step"] for event in worker.steps()] == list(range(1, STEPS + 1))


@pytest.mark.long
def test_a_mesh_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator()
        first = start(here, "group-0", 2, "--gate", f"{KILLED_AT}:{tmp_path}/go", devices=2)
        here.until(lambda: first.leader.steps(), "a step")
        (other,) = start(here, "group-1", 1, devices=4).ranks
        here.until(lambda: other.process.poll() is not None, "the refusal")
        assert other.process.returncode == 1
        wanted = r"lanes: the job has '2 devices on \(fsdp: 2\), \w+', this group '4 devices on \(fsdp: 4\)"
        assert re.search(wanted, other.log()), other.log()
        (tmp_path / "go").touch()
        here.until_finished(*first.ranks)
