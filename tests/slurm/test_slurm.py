"""The scripts of deploy/slurm under a real Slurm: a node dies, an element is drained, and the bits stay."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxft_launch.processes._ranks import free_ports
from tests import patience
from tests.clusters import WORKER, digest_alone
from tests.launch.test_real import ranks_of
from tests.processes.ranks import digest_of
from tests.shared import shared
from tests.slurm.machine import Slurm, slurm

SCRIPTS = Path(__file__).parents[2] / "deploy" / "slurm"
STEPS = 120
GROUPS = 2
ELEMENTS = ("group-0", "group-1", "group-2")
SPARE = "group-2"
# Steps at which all wait for the test.
GATES = (40, 60, 80)
pytestmark = [pytest.mark.slurm, pytest.mark.processes, pytest.mark.timeout(400)]


@dataclass
class Run:
    """A training run under Slurm: two groups and a spare."""

    slurm: Slurm
    folder: Path
    array: str = ""

    def submit(self) -> None:
        """Submit the coordinator, and three elements of one process each."""
        gates = (word for step in GATES for word in ("--gate", f"{step}:{self.gate(step)}"))
        events = ("--events", f"{self.folder}/{{group}}.jsonl")
        self.submit_groups(len(ELEMENTS), (*events, *gates))

    def submit_groups(self, elements: int, flags: Sequence[str], *words: str) -> None:
        """Submit the coordinator, and groups; `words` are further words of sbatch for these."""
        environment = {
            "JAXFT_RUN": str(self.folder),
            "JAXFT_GROUPS": str(GROUPS),
            "JAXFT_JOB": "toy",
            "JAXFT_PORT": str(free_ports(1)[0]),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(shared("launch-compiled")),
        }
        program = (
            *(sys.executable, str(WORKER), "--group", "{group}", "--coordinator", "{coordinator}"),
            *("--steps", str(STEPS), *flags),
        )
        coordinator = self.sbatch("coordinator.sbatch", "%x", "--nodelist=n1", **environment)
        words = (f"--array=0-{elements - 1}", f"--dependency=after:{coordinator}", *words)
        self.array = self.sbatch("groups.sbatch", "%x-%a", *words, program=program, **environment)

    def sbatch(
        self, script: str, log: str, *words: str, program: tuple[str, ...] = (), **environment: str
    ) -> str:
        command = ("sbatch", "--parsable", f"--output={self.slurm.folder}/{log}.out", *words)
        return self.slurm.ask(*command, str(SCRIPTS / script), *program, **environment)

    def gate(self, step: int) -> Path:
        return self.folder / f"gate-{step}"

    def element(self, group: str) -> str:
        return f"{self.array}_{group.rpartition('-')[2]}"

    def show(self, group: str, name: str) -> str:
        """What Slurm knows of a group's element."""
        return self.slurm.show(self.element(group))[name]

    def steps(self, group: str) -> list[int]:
        """The steps of which a group has computed shards."""
        events = read(self.folder / f"{group}.jsonl")
        return [event["step"] for event in events if event["event"] == "step" and event["shards"]]

    def passed(self, group: str) -> list[int]:
        """The steps of which a group has the state, also if others have computed them."""
        return [event["step"] for event in read(self.folder / f"{group}.jsonl") if event["event"] == "step"]

    def readied(self, group: str) -> int:
        """How often a group has healed, by the coordinator's events."""
        events = read(self.folder / "events.jsonl")
        return sum(event["event"] == "group_ready" and event["group"] == group for event in events)

    def until(self, condition: Callable[[], Any], what: str) -> None:
        patience.until(condition, what, limit_s=120, context=self.slurm.logs)

    def until_at(self, step: int, *groups: str) -> None:
        """Wait until groups stand before a gate, having computed all until then."""
        for group in groups:
            self.until(lambda group=group: step in self.steps(group), f"{group} at step {step}")


def coordinator_of(folder: Path) -> int:
    """The process that serves with the run's secret, and not srun, which has started it."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if str(folder / "secret") in words and not words[0].endswith("srun"):
                found.append(int(process.name))
    [pid] = found
    return pid


def read(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with slurm(tmp_path / "slurm") as machine:
        made = Run(machine, tmp_path / "run")
        made.folder.mkdir()
        made.submit()
        yield made


def test_a_node_dies_and_a_group_is_drained_and_the_bits_stay(run: Run) -> None:
    first, second, third = GATES
    run.until_at(first, *ELEMENTS[:GROUPS])
    # Only a spare that has caught up takes the place of a group.
    run.until(lambda: first in run.passed(SPARE), f"the spare to follow to step {first}")
    assert not run.steps(SPARE)
    [lost] = [group for group in ELEMENTS if run.show(group, "NodeList") == "n2"]
    [kept] = {*ELEMENTS} - {lost, SPARE}

    before = run.readied(lost)
    run.slurm.kill_node("n2")
    run.slurm.ask("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    run.until(lambda: run.readied(lost) > before, f"{lost} to heal on another node")
    assert (run.show(lost, "Restarts"), run.show(lost, "NodeList")) == ("1", "n1")
    assert (run.show(kept, "Restarts"), run.show(SPARE, "Restarts")) == ("0", "0")
    run.gate(first).touch()
    run.until_at(second, lost, kept)
    assert first + 1 in run.steps(SPARE)  # it has taken the place of the lost one

    # What Slurm does before the time limit, and before it takes the node for another job.
    before = run.readied(kept)
    run.slurm.ask("scancel", "--signal=TERM", run.element(kept))
    seen = run.folder / kept / "node-0" / "events.jsonl"
    run.until(lambda: any(event["event"] == "drain_began" for event in read(seen)), "the order to leave")
    run.gate(second).touch()
    run.until(lambda: run.readied(kept) > before, f"{kept} to be requeued and to heal")
    assert run.show(kept, "Restarts") == "1"
    [ended] = [event for event in read(seen) if event["event"] == "group_ended"]
    # It has finished its step before it left.
    assert (ended["ending"], ended["step"]) == ("drained", second + 1)
    run.gate(third).touch()

    for group in ELEMENTS:
        run.until(lambda group=group: run.show(group, "JobState") == "COMPLETED", f"the end of {group}")
    finished = [event for group in ELEMENTS for event in read(run.folder / f"{group}.jsonl")]
    finished = [event for event in finished if event["event"] == "finished"]
    assert {event["digest"] for event in finished} == {digest_alone(STEPS)}
    assert {event["step"] for event in finished} == {STEPS}


def test_groups_of_two_nodes_lose_a_process_and_the_bits_stay(tmp_path: Path) -> None:
    """Each group has a process on each node. The launchers of both nodes start theirs again, and they meet."""
    groups = ELEMENTS[:GROUPS]
    undisturbed = digest_of(tmp_path, 2, "--steps", str(STEPS))
    with slurm(tmp_path / "slurm", (3, 2)) as machine:
        run = Run(machine, tmp_path / "run")
        run.folder.mkdir()
        gate = run.gate(GATES[0])
        events = ("--events", f"{run.folder}/{{group}}.{{rank}}.jsonl", "--world", "env")
        run.submit_groups(len(groups), (*events, "--gate", f"{GATES[0]}:{gate}"), "--nodes=2")
        run.until_at(GATES[0], *ranks_of(groups))
        before = run.readied("group-1")
        started = read(run.folder / "group-1" / "node-1" / "events.jsonl")
        [[pid]] = [event["pids"] for event in started if event["event"] == "group_started"]
        os.kill(pid, signal.SIGKILL)
        run.until(lambda: run.readied("group-1") > before, "group-1 to heal")
        gate.touch()
        for group in groups:
            run.until(lambda group=group: run.show(group, "JobState") == "COMPLETED", f"the end of {group}")
            assert run.show(group, "Restarts") == "0"
        finished = [event for rank in ranks_of(groups) for event in read(run.folder / f"{rank}.jsonl")]
        finished = [event for event in finished if event["event"] == "finished"]
        assert [(event["step"], event["digest"]) for event in finished] == [(STEPS, undisturbed)] * 4


def test_a_coordinator_at_its_time_limit_is_requeued_and_one_that_is_cancelled_is_not(tmp_path: Path) -> None:
    with slurm(tmp_path / "slurm") as machine:
        run = Run(machine, tmp_path / "a run")
        environment = {"JAXFT_RUN": str(run.folder), "JAXFT_PORT": str(free_ports(1)[0])}
        # The limit is a minute, and Slurm warns a minute before.
        job = run.sbatch("coordinator.sbatch", "coordinator", "--time=1", **environment)
        log = machine.folder / "coordinator.out"
        run.until(lambda: log.exists() and log.read_text().count("leads as") == 2, "the second life")
        assert "coordinator stops" in log.read_text()
        machine.ask("scancel", job)
        run.until(lambda: not machine.ask("squeue", "--noheader"), "an empty queue")
        assert machine.show(job)["JobState"] == "CANCELLED"


def test_a_coordinator_that_is_killed_is_started_again_at_once_and_one_that_cannot_start_is_not(
    tmp_path: Path,
) -> None:
    """Groups wait for it for a minute, which is less than a requeued job may have to."""
    with slurm(tmp_path / "slurm") as machine:
        run = Run(machine, tmp_path / "a run")
        environment = {"JAXFT_RUN": str(run.folder), "JAXFT_PORT": str(free_ports(1)[0])}
        job = run.sbatch("coordinator.sbatch", "coordinator", **environment)
        log = machine.folder / "coordinator.out"
        run.until(lambda: log.exists() and "leads as" in log.read_text(), "the first life")
        os.kill(coordinator_of(run.folder), signal.SIGKILL)
        run.until(lambda: log.read_text().count("leads as") == 2, "the second life")
        assert "The coordinator ended with status 137, and is started again." in log.read_text()
        assert (machine.show(job)["JobState"], machine.show(job)["Restarts"]) == ("RUNNING", "0")
        # Its port is taken: by the other one.
        wrong = run.sbatch("coordinator.sbatch", "wrong", "--nodelist=n2", **environment)
        run.until(lambda: machine.show(wrong)["JobState"] == "FAILED", "the end of the wrong job")


@pytest.mark.parametrize("script", ["coordinator.sbatch", "groups.sbatch"])
def test_a_script_says_what_it_needs(script: str, tmp_path: Path) -> None:
    done = patience.run(
        ["bash", str(SCRIPTS / script)],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 1
    assert b"JAXFT_RUN: is not set. Set it to the folder" in done.stdout
