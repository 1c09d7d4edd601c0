"""`jaxft launch` over real programs: groups of two processes over gloo, and groups with a Manager."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import patience
from tests.clusters import WORKER, digest_alone
from tests.launch.launches import NOWHERE, Launch, launch
from tests.processes.ranks import digest_of
from tests.shared import compiled_environment

GLOO = (sys.executable, str(Path(__file__).with_name("gloo_program.py")), "{folder}", "6")
GROUPS = ("group-0", "group-1", "group-2")
STEPS = 120
# Of groups of two ranks: each step costs them more, in busy loops of gloo.
RANKS_STEPS = 40
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_group_of_two_processes_comes_back_together(folder: Path, victim: int) -> None:
    """The survivor waits, as in a collective that never ends, and is ended by its supervisor."""
    folder.mkdir()
    (folder / "hold").touch()
    with launch(folder, "--nproc", "2", *NOWHERE, program=GLOO, JAX_PLATFORMS="cpu") as running:
        for rank in range(2):
            file = folder / f"group-0.{rank}"
            patience.until(lambda file=file: file.exists(), f"rank {rank} to hold", context=running.text)
        first = running.until("group_started")
        assert first["warm"]
        os.kill(first["pids"][victim], signal.SIGKILL)
        running.until("rank_ended")  # before the other can fail by itself
        (folder / "hold").unlink()
        second = running.until("group_started", 2)
        assert running.status() == 0, running.text()
    assert second["warm"]
    (ended,) = running.events("rank_ended")
    assert (ended["rank"], ended["ending"]) == (victim, "killed")
    for rank in range(2):
        assert (folder / f"group-0.{rank}").read_text() == "done 3.0 with 2 devices"


class Training:
    """A launch of groups that train with a Manager, slowly until `hurry` is called."""

    def __init__(self, running: Launch) -> None:
        self.running = running

    def events(self, group: str) -> list[dict[str, Any]]:
        file = self.running.folder / f"{group}.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [json.loads(line) for line in lines]

    def until_step(self, step: int, *groups: str) -> None:
        """Wait until these groups have taken part in a step."""
        for group in groups:
            patience.until(
                lambda group=group: any(
                    event["event"] == "step" and event["step"] >= step for event in self.events(group)
                ),
                f"step {step} of {group}",
                context=self.running.text,
            )

    def begin(self, groups: tuple[str, ...]) -> None:
        """Let the groups join once all are present, so that all take part from the first step on."""
        self.running.until("coordinator_started")
        log = self.running.file("coordinator.log")
        for group in groups:
            text = f"{group} is present"
            patience.until(lambda text=text: text in log.read_text(), text, context=self.running.text)
        self.running.file("begin").touch()

    def until_back(self, group: str, lives: int) -> None:
        """Wait until a group has taken part in a step after its restart."""
        self._until_back(group, group, lives)

    def until_rank_back(self, group: str, rank: int, lives: int) -> None:
        self._until_back(group, f"{group}.{rank}", lives)

    def _until_back(self, group: str, file: str, lives: int) -> None:

        def back() -> bool:
            started = [event for event in self.running.events("group_started") if event["group"] == group]
            if len(started) < lives:
                return False
            return any(
                event["t"] > started[-1]["t"] and event["event"] == "step" for event in self.events(file)
            )

        patience.until(back, f"{group} to come back", context=self.running.text)

    def hurry(self) -> None:
        (self.running.folder / "hurry").touch()

    def digests(self, *groups: str) -> set[str]:
        return {
            event["digest"]
            for group in groups
            for event in self.events(group)
            if event["event"] == "finished"
        }


def flags_of(groups: tuple[str, ...]) -> tuple[str, ...]:
    spares = sum(group.startswith("spare-") for group in groups)
    return ("--groups", str(len(groups) - spares), "--spares", str(spares))


@contextlib.contextmanager
def training(
    folder: Path, groups: tuple[str, ...], *words: str, flags: tuple[str, ...] = ()
) -> Iterator[Training]:
    program = (
        *(sys.executable, str(WORKER), "--group", "{group}", "--coordinator", "{coordinator}"),
        *("--events", "{folder}/{group}.jsonl", "--steps", str(STEPS)),
        *("--gate", "start:{folder}/begin", "--pace", "0.3", "--hurry", "{folder}/hurry", *flags),
    )
    environment = {"JAX_PLATFORMS": "cpu", **compiled_environment()}
    with launch(folder, *flags_of(groups), *words, program=program, **environment) as running:
        job = Training(running)
        job.begin(groups)
        yield job


def test_groups_that_are_killed_end_with_the_undisturbed_bits(folder: Path) -> None:
    with training(folder, GROUPS) as job:
        job.until_step(3, *GROUPS)
        for group in GROUPS:
            os.kill(job.running.pids(group)[0], signal.SIGKILL)
            job.until_back(group, lives=2)
        job.hurry()
        assert job.running.status() == 0, job.running.text()
    assert job.digests(*GROUPS) == {digest_alone(STEPS)}
    assert all(event["warm"] for event in job.running.events("group_started"))
    assert {event["wait_s"] for event in job.running.events("group_restarts")} == {0.0}


@pytest.mark.long
def test_a_stopped_coordinator_is_replaced_and_no_group_ends(folder: Path) -> None:
    with training(folder, GROUPS[:2], "--deadlines", "silence=15") as job:
        job.until_step(3, "group-0", "group-1")
        os.kill(job.running.until("coordinator_started")["pid"], signal.SIGSTOP)
        job.running.until("coordinator_started", 2)
        job.hurry()
        assert job.running.status() == 0, job.running.text()
    assert job.running.events("group_restarts") == []
    assert job.digests("group-0", "group-1") == {digest_alone(STEPS)}


@pytest.mark.long
def test_a_spare_stands_by_and_takes_the_place_of_a_lost_group(folder: Path) -> None:
    with training(folder, (*GROUPS[:2], "spare-0"), "--max-restarts", "0") as job:
        job.until_step(3, "group-0", "group-1", "spare-0")
        assert not any(event["event"] == "step" and event["shards"] for event in job.events("spare-0"))
        os.kill(job.running.pids("group-1")[0], signal.SIGKILL)
        patience.until(
            lambda: any(event["event"] == "step" and event["shards"] for event in job.events("spare-0")),
            "the spare to compute",
            context=job.running.text,
        )
        job.hurry()
        assert job.running.status() == 0, job.running.text()
    assert job.digests("group-0", "spare-0") == {digest_alone(STEPS)}


def ranks_of(groups: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the event files of all ranks."""
    return tuple(f"{group}.{rank}" for group in groups for rank in range(2))


@contextlib.contextmanager
def training_ranks(folder: Path, groups: tuple[str, ...], *words: str, nproc: int = 2) -> Iterator[Training]:
    """Groups of two ranks; each rank has an event file."""
    program = (
        *(sys.executable, str(WORKER), "--group", "{group}", "--coordinator", "{coordinator}"),
        *("--events", f"{folder}/{{group}}.{{rank}}.jsonl", "--steps", str(RANKS_STEPS), "--world", "env"),
        *("--gate", f"start:{folder}/begin", "--pace", "0.6", "--hurry", f"{folder}/hurry"),
    )
    environment = {"JAX_PLATFORMS": "cpu", **compiled_environment()}
    words = ("--nproc", str(nproc), *flags_of(groups), *words)
    with launch(folder, *words, program=program, **environment) as running:
        job = Training(running)
        job.begin(groups)
        yield job


def undisturbed_ranks(folder: Path) -> str:
    """The digest that `training_ranks` must end with."""
    return digest_of(folder, 2, "--steps", str(RANKS_STEPS))


@pytest.mark.long
def test_sigterm_lets_all_ranks_of_a_group_leave_after_the_same_step(folder: Path) -> None:
    with training_ranks(folder, GROUPS[:2]) as job:
        job.until_step(3, *ranks_of(GROUPS[:2]))
        job.running.process.send_signal(signal.SIGTERM)
        assert job.running.status() == 75, job.running.text()
    for group in GROUPS[:2]:
        first, second = (job.events(f"{group}.{rank}")[-1]["step"] for rank in range(2))
        assert first == second < RANKS_STEPS
        for rank in range(2):
            log = (folder / f"{group}.0.{rank}.log").read_text()
            assert "is lost" not in log, log
    assert [event["ending"] for event in job.running.events("group_ended")] == ["drained", "drained"]


@pytest.mark.long
def test_a_rank_of_each_of_two_groups_is_killed_and_the_bits_stay(folder: Path, tmp_path: Path) -> None:
    groups = GROUPS[:2]
    with training_ranks(folder, groups) as job:
        job.until_step(3, *ranks_of(groups))
        for rank, group in enumerate(groups):
            os.kill(job.running.pids(group)[rank], signal.SIGKILL)
            job.until_rank_back(group, rank, lives=2)
        job.hurry()
        assert job.running.status() == 0, job.running.text()
    named = {event["group"]: (event["rank"], event["ending"]) for event in job.running.events("rank_ended")}
    assert named == {"group-0": (0, "killed"), "group-1": (1, "killed")}
    assert job.digests(*ranks_of(groups)) == {undisturbed_ranks(tmp_path)}


@pytest.mark.long
@pytest.mark.parametrize("raises", ["in-manager", "leader"])
def test_a_program_that_raises_in_one_rank_of_two_is_started_once_more(folder: Path, raises: str) -> None:
    """The other rank waits for it in a collective, and JAX's exit handlers would have each wait for the other."""
    with launch(folder, "--nproc", "2", program=(*GLOO, raises), JAX_PLATFORMS="cpu") as running:
        assert running.status() == 1, running.text()
    rank = 0 if raises == "leader" else 1
    ended = running.events("group_ended")
    assert [(event["ending"], event["status"]) for event in ended] == [("error", 1)] * 2
    assert [event["rank"] for event in running.events("rank_ended")] == [rank] * 2
    assert "ValueError: this rank cannot train" in running.text().partition("is given up")[2]
    for life in range(2):
        log = (folder / f"group-0.{life}.{rank}.log").read_text()
        assert log.count("ValueError: this rank cannot train") == 1, log
