"""Groups of one, two and four processes in one job: 4 devices each, one mesh, and the undisturbed bits."""

import socket
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clusters import Cluster, Worker, cluster

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

DEVICES = 4
STEPS = 30
GATE = 8
LAST_GATE = 20
AGAIN = 75


@dataclass
class Group:
    """The processes of one life of a group."""

    ranks: list[Worker]

    @property
    def leader(self) -> Worker:
        return self.ranks[0]


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def start(here: Cluster, name: str, ranks: int, *flags: str, die: tuple[int, str] | None = None) -> Group:
    """Start a group of so many processes. `die`: which of them kills itself, and in which phase."""
    world = f"{ranks}:{free_port()}:{DEVICES // ranks}"
    return Group(
        [
            here.start(
                name,
                *("--world", f"{rank}:{world}", "--steps", str(STEPS), *flags),
                *(("--die", die[1]) if die is not None and die[0] == rank else ()),
                coordinated=name != "alone",
            )
            for rank in range(ranks)
        ]
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the same training by one process, without a job."""
    with cluster(tmp_path_factory.mktemp("alone")) as here:
        group = start(here, "alone", 1)
        here.until_finished(*group.ranks)
        return group.leader.events()[-1]["digest"]


def test_straight(undisturbed: str, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with cluster(tmp_path) as here:
        here.start_coordinator()
        gate = ("--gate", f"start:{go}", "--gate", f"{GATE}:{tmp_path}/healed")
        one, two = start(here, "group-1", 1, *gate), start(here, "group-2", 2, *gate)
        for name in ("group-1", "group-2"):
            here.until(lambda name=name: f"{name} is present" in here.coordinator_log.read_text(), name)
        go.touch()
        here.until(lambda: len(one.leader.steps()) >= GATE, "steps")
        four = start(here, "group-4", 4)
        here.until(lambda: four.leader.says("heals to step"), "the heal")
        (tmp_path / "healed").touch()
        everyone = [*one.ranks, *two.ranks, *four.ranks]
        here.until_finished(*everyone)
        assert {worker.digest for worker in everyone} == {undisturbed}
