"""Groups of several processes: one rank dies at each phase of a step, and the run ends in the same bits."""

import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clusters import Cluster, Worker, cluster

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

STEPS = 40
KILLED_AT = 5
GATE = 10
LAST_GATE = 30
RANKS = 2
AGAIN = 75


@dataclass
class Group:
    """The processes of one life of a group."""

    name: str
    ranks: list[Worker]

    @property
    def leader(self) -> Worker:
        return self.ranks[0]


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def start(
    here: Cluster, name: str, *flags: str, die: tuple[int, str] | None = None, **options: bool
) -> Group:
    port = free_port()
    ranks = [
        here.start(
            name,
            *("--world", f"{rank}:{RANKS}:{port}", "--steps", str(STEPS), *flags),
            *(("--die", die[1]) if die is not None and die[0] == rank else ()),
            **options,
        )
        for rank in range(RANKS)
    ]
    return Group(name, ranks)


def start_together(here: Cluster, die: tuple[str, int, str], *flags: str) -> dict[str, Group]:
    gate = here.folder / "all-present"
    groups = {
        name: start(
            here,
            name,
            *("--gate", f"start:{gate}", *flags),
            die=(die[1], die[2]) if die[0] == name else None,
        )
        for name in ("group-0", "group-1")
    }
    for name in groups:
        here.until(lambda name=name: f"{name} is present" in here.coordinator_log.read_text(), f"{name}")
    gate.touch()
    return groups


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the same training by one group of as many processes, without a job."""
    with cluster(tmp_path_factory.mktemp("alone")) as here:
        group = start(here, "alone", coordinated=False)
        here.until_finished(*group.ranks)
        digests = {worker.events()[-1]["digest"] for worker in group.ranks}
        assert len(digests) == 1
        return digests.pop()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", ["compute", "exchange", "vote", "apply"])
def test_a_rank_that_is_killed_changes_nothing(
    phase: str, rank: int, undisturbed: str, tmp_path: Path
) -> None:
    started, back_in = tmp_path / "started", tmp_path / "back"
    gates = ("--gate", f"{GATE}:{started}", "--gate", f"{LAST_GATE}:{back_in}")
    with cluster(tmp_path) as here:
        here.start_coordinator()
        groups = start_together(here, ("group-1", rank, f"{phase} step {KILLED_AT}"), *gates)
        victim, survivor = groups["group-1"], groups["group-0"]
        here.until_dead(victim.ranks[rank])
        other = victim.ranks[1 - rank]
        here.until(lambda: other.process.poll() is not None, "the other rank to end too")
        assert other.process.returncode == AGAIN, other.log()
        back = start(here, "group-1", *gates)
        here.until(lambda: back.leader.says("heals to step"), "the group to heal")
        started.touch()
        here.until(
            lambda: (
                any(event["shards"] for event in back.leader.steps())
                or len(survivor.leader.steps()) >= LAST_GATE
            ),
            "the group to contribute",
        )
        back_in.touch()
        here.until_finished(*survivor.ranks, *back.ranks)
        assert {worker.digest for worker in (*survivor.ranks, *back.ranks)} == {undisturbed}
        for worker in survivor.ranks:
            assert [event["step"] for event in worker.steps()] == list(range(1, STEPS + 1))


def test_a_rank_that_is_stopped_ends_its_group(undisturbed: str, tmp_path: Path) -> None:
    """Its host answers for it: only silence shows it."""
    started, back_in = tmp_path / "started", tmp_path / "back"
    gates = ("--gate", f"{GATE}:{started}", "--gate", f"{LAST_GATE}:{back_in}")
    with cluster(tmp_path) as here:
        here.start_coordinator()
        groups = start_together(here, ("", 0, ""), *gates, "--failure-timeout-s", "30")
        victim, survivor = groups["group-1"], groups["group-0"]
        here.until(lambda: len(victim.leader.steps()) >= KILLED_AT, "a few steps")
        victim.ranks[1].process.send_signal(signal.SIGSTOP)
        here.until(lambda: victim.leader.process.poll() is not None, "rank 0 to end")
        assert victim.leader.process.returncode == AGAIN, victim.leader.log()
        assert "a group shares fate: rank 1 is lost" in victim.leader.log()
        victim.ranks[1].process.kill()
        back = start(here, "group-1", *gates)
        here.until(lambda: back.leader.says("heals to step"), "the group to heal")
        started.touch()
        back_in.touch()
        here.until_finished(*survivor.ranks, *back.ranks)
        assert {worker.digest for worker in (*survivor.ranks, *back.ranks)} == {undisturbed}
