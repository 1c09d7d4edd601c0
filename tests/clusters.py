"""Starts a coordinator and groups as real processes, and reads their output."""

import fcntl
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxft_launch.processes._ranks import free_ports
from tests import patience
from tests.forks import Script
from tests.shared import compiled, shared

ROOT = Path(__file__).parents[1]
WORKER = ROOT / "tests" / "processes" / "worker.py"
DEADLINE_S = 60.0
ALONE_STEPS = 120
# With flags there are fewer: some widen the model, and few tests have the same ones.
FLAGGED_STEPS = 20
# The job begins as soon as all groups that are present have joined, instead of waiting for one heartbeat timeout for
# groups that may hold a newer state: here none comes.
AT_ONCE = ("--founding-wait-ms", "0")


@dataclass
class Worker:
    process: subprocess.Popen[bytes] | Script
    events_path: Path
    log_path: Path

    def events(self) -> list[dict[str, Any]]:
        if not self.events_path.exists():
            return []
        lines = self.events_path.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def steps(self) -> list[dict[str, Any]]:
        return [event for event in self.events() if event["event"] == "step"]

    @property
    def step(self) -> int:
        """The newest step that it has recorded. There may be fewer events: a call that heals takes several steps."""
        return max((event["step"] for event in self.steps()), default=0)

    @property
    def digest(self) -> str | None:
        return next((event["digest"] for event in self.events() if event["event"] == "finished"), None)

    def log(self) -> str:
        return self.log_path.read_text()

    def logged(self, text: str) -> bool:
        return text in self.log()


@dataclass
class Cluster:
    folder: Path
    port: int = 0
    started: list[subprocess.Popen[bytes] | Script] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    coordinator: Script | None = None
    coordinator_log: Path = Path()
    # The coordinator's host, and the network namespace of a host by its name, for tests in separate networks.
    host: str = "localhost"
    namespace: Callable[[str], str] = lambda _name: ""
    # Of groups in fresh interpreters.
    environment: dict[str, str] = field(default_factory=lambda: {"JAX_PLATFORMS": "cpu"})

    def start_coordinator(
        self, *flags: str, port: int = 0, program: Path | str = "jaxft_coordinator"
    ) -> None:
        """Start a coordinator; with `port`, where another one has been: only then groups may bring a state to it."""
        if not port and "--founding-wait-ms" not in flags:
            flags = (*AT_ONCE, *flags)
        log_path = self.folder / f"coordinator-{len(self.started)}.log"
        # A port that the kernel gave out could be taken while a test starts its coordinator again.
        port = port or free_ports(1)[0]
        arguments = ("--bind", f"{self.host}:{port}", *flags)
        namespace = self.namespace("coordinator")
        self.coordinator = Script(program, arguments, log_path, namespace=namespace)
        self.started.append(self.coordinator)
        self.coordinator_log = log_path
        pattern = re.compile(r"listens on .*\(port (\d+)\)")
        self.until(lambda: pattern.search(log_path.read_text()), "the coordinator to listen")
        found = pattern.search(log_path.read_text())
        assert found is not None
        self.port = int(found.group(1))

    def start(
        self,
        group: str,
        *flags: str,
        coordinated: bool = True,
        script: Path = WORKER,
        fresh: bool = False,
        host: str = "",
    ) -> Worker:
        """Start a group, or a process of it.

        Args:
            fresh: in a new interpreter, with another hash seed, where everything is compiled again: slower. Not on a
                separate host.
            host: where, if hosts have separate networks; by default on the one with the group's name.
        """
        stem = self.folder / f"{group}-life-{len(self.workers)}"
        events_path, log_path = stem.with_suffix(".jsonl"), stem.with_suffix(".log")
        arguments = ["--group", group, "--events", str(events_path), *flags]
        if coordinated:
            arguments += ["--coordinator", f"{self.host}:{self.port}"]
        if fresh:
            command = (sys.executable, str(script), *arguments)
            process = started_fresh(command, log_path, **self.environment)
        else:
            namespace = self.namespace(host or group)
            process = Script(
                script, arguments, log_path, namespace=namespace, jax_platforms="cpu", **compiled()
            )
        worker = Worker(process, events_path, log_path)
        self.started.append(process)
        self.workers.append(worker)
        return worker

    def until(self, condition: Callable[[], Any], what: str) -> None:
        patience.until(condition, what, limit_s=DEADLINE_S, context=self.logs)

    def start_together(
        self, groups: tuple[str, ...], flags: Callable[[str], tuple[str, ...]], *, fresh: bool = False
    ) -> dict[str, Worker]:
        """Start groups that all take part from the first step on, however slowly some of them start."""
        workers = {group: self.start(group, *self.together, *flags(group), fresh=fresh) for group in groups}
        self.begin_once_present(*groups)
        return workers

    @property
    def together(self) -> tuple[str, str]:
        """Flags of groups that wait for `begin_once_present` when they are connected, before they join."""
        return "--gate", f"start:{self.folder / 'all-present'}"

    def begin_once_present(self, *groups: str) -> None:
        """Let them join when all are connected. Otherwise one may found the job alone, and die with its state."""
        for group in groups:
            text = f"{group} is present"
            self.until(lambda text=text: text in self.coordinator_log.read_text(), f"{group}'s Hello")
        (self.folder / "all-present").touch()

    def until_dead(self, worker: Worker) -> None:
        self.until(lambda: worker.process.poll() is not None, f"{worker.log_path.stem} to die")
        assert worker.process.returncode == -signal.SIGKILL, worker.log()

    def until_lost(self, *groups: str) -> None:
        """Wait until the coordinator knows that processes are dead: new processes must not count on them."""

        def is_lost(group: str) -> bool:
            log = self.coordinator_log.read_text()
            return max(map(log.rfind, (f"lost {group} (", f"evicts {group}:"))) > log.rfind(
                f"{group} is present"
            )

        for group in groups:
            self.until(lambda group=group: is_lost(group), f"the coordinator to know that {group} is dead")

    def until_finished(self, *workers: Worker) -> None:
        for worker in workers:
            name = worker.log_path.stem
            self.until(lambda worker=worker: worker.process.poll() is not None, f"{name} to finish")
            assert worker.process.returncode == 0, (
                f"{name} ended with {worker.process.returncode}\n{self.logs()}"
            )

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log"))
        )

    def stop(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    made = Cluster(folder)
    try:
        yield made
    finally:
        made.stop()


def started_fresh(command: tuple[str, ...], log_path: Path, **variables: str) -> subprocess.Popen[bytes]:
    with log_path.open("wb") as log:
        environment = os.environ | (variables or {"JAX_PLATFORMS": "cpu"})
        return subprocess.Popen(command, cwd=ROOT, stderr=log, stdout=log, env=environment)


def digest_alone(steps: int, *flags: str) -> str:
    """The digest of the same training after `steps` steps, alone and without a failure.

    One run serves all tests that are content with `ALONE_STEPS`, or, with the same flags, with `FLAGGED_STEPS`. The
    one without flags runs in a fresh interpreter and compiles everything itself: if groups agree with it, sharing
    compiled programs changes no bit.
    """
    length = max(steps, FLAGGED_STEPS if flags else ALONE_STEPS)
    folder = shared("alone") / hashlib.sha256(repr((length, flags)).encode()).hexdigest()
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = folder / "digests"
        if not known.exists():
            known.write_text(json.dumps(_digests_alone(folder, length, *flags)))
        return json.loads(known.read_text())[steps - 1]


def _digests_alone(folder: Path, steps: int, *flags: str) -> list[str]:
    with cluster(folder) as here:
        fresh = not flags
        worker = here.start("alone", "--steps", str(steps), *flags, coordinated=False, fresh=fresh)
        here.until_finished(worker)
        return [event["digest"] for event in worker.events()]
