"""Starts a coordinator and groups as real processes, and reads what they write."""

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

from tests import patience

WORKER = Path(__file__).with_name("worker.py")
DEADLINE_S = 60.0


@dataclass
class Worker:
    process: subprocess.Popen[bytes]
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
    def digest(self) -> str | None:
        return next((event["digest"] for event in self.events() if event["event"] == "finished"), None)

    def log(self) -> str:
        return self.log_path.read_text()

    def says(self, text: str) -> bool:
        return text in self.log()


@dataclass
class Cluster:
    folder: Path
    port: int = 0
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    coordinator: subprocess.Popen[bytes] | None = None
    coordinator_log: Path = Path()
    # The coordinator's host, and the words that run a command on a host, for tests with a network of their own.
    host: str = "localhost"
    within: Callable[[str], tuple[str, ...]] = lambda name: ()

    def start_coordinator(self, *flags: str, port: int = 0) -> None:
        log_path = self.folder / f"coordinator-{len(self.started)}.log"
        command = [*self.within("coordinator"), sys.executable, "-m", "jaxft_coordinator"]
        command += ["--bind", f"{self.host}:{port}", *flags]
        with log_path.open("wb") as log:
            self.coordinator = subprocess.Popen(command, stderr=log, stdout=log)
        self.started.append(self.coordinator)
        self.coordinator_log = log_path
        pattern = re.compile(r"listens on .*\(port (\d+)\)")
        self.until(lambda: pattern.search(log_path.read_text()), "the coordinator to listen")
        found = pattern.search(log_path.read_text())
        assert found is not None
        self.port = int(found.group(1))

    def start(self, group: str, *flags: str, coordinated: bool = True) -> Worker:
        stem = self.folder / f"{group}-life-{len(self.workers)}"
        events_path, log_path = stem.with_suffix(".jsonl"), stem.with_suffix(".log")
        command = [*self.within(group), sys.executable, str(WORKER)]
        command += ["--group", group, "--events", str(events_path), *flags]
        if coordinated:
            command += ["--coordinator", f"{self.host}:{self.port}"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        with log_path.open("wb") as log:
            process = subprocess.Popen(command, stderr=log, stdout=log, env=environment)
        worker = Worker(process, events_path, log_path)
        self.started.append(process)
        self.workers.append(worker)
        return worker

    def until(self, condition: Callable[[], Any], what: str) -> None:
        patience.until(condition, what, limit_s=DEADLINE_S, context=self.logs)

    def start_together(
        self, groups: tuple[str, ...], flags: Callable[[str], tuple[str, ...]]
    ) -> dict[str, Worker]:
        """Start groups that all take part from the first step on, however slowly some of them start."""
        gate = self.folder / "all-present"
        workers = {group: self.start(group, "--gate", f"start:{gate}", *flags(group)) for group in groups}
        for group in groups:
            text = f"{group} is present"
            self.until(lambda text=text: text in self.coordinator_log.read_text(), f"{group}'s Hello")
        gate.touch()
        return workers

    def until_dead(self, worker: Worker) -> None:
        self.until(lambda: worker.process.poll() is not None, f"{worker.log_path.stem} to die")
        assert worker.process.returncode == -signal.SIGKILL, worker.log()

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


def digest_alone(folder: Path, steps: int, *flags: str) -> str:
    """The digest of the same training, alone and without a failure."""
    with cluster(folder) as here:
        worker = here.start("alone", "--steps", str(steps), *flags, coordinated=False)
        here.until_finished(worker)
        assert worker.digest is not None
        return worker.digest
