"""Starts members as real processes, and reads their output."""

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import patience

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 60.0


@dataclass
class Process:
    process: subprocess.Popen[str]
    log: Path
    lines: "queue.Queue[dict[str, Any] | None]" = field(default_factory=lambda: queue.Queue(0))
    heard: list[dict[str, Any]] = field(default_factory=list)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self, *events: str) -> dict[str, Any]:
        """The next of these events; others are passed over."""
        while True:
            found = patience.get(self.lines, "its next word")
            assert found is not None, f"it ended before {events}; its log: {self.log.read_text()}"
            self.heard.append(found)
            if found["event"] in events:
                return found

    def ask(self, line: str, *events: str) -> dict[str, Any]:
        self.tell(line)
        return self.hear(*events)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> list[int]:
        """Kill it with SIGKILL; return every step that it ever acknowledged."""
        self.process.kill()
        return self.end()

    def end(self) -> list[int]:
        """Wait for its end; return every step that it ever acknowledged."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        patience.wait(self.process)
        while (found := patience.get(self.lines, "its next word")) is not None:
            self.heard.append(found)
        self.lines.put(None)
        return self.acknowledged

    @property
    def acknowledged(self) -> list[int]:
        return [event["step"] for event in self.heard if event["event"] == "acknowledged"]

    def listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # A killed process may leave half a line, which acknowledges nothing.
            if line.endswith("\n"):
                self.lines.put(json.loads(line))
        self.lines.put(None)


@contextlib.contextmanager
def members(folder: Path) -> Iterator["Members"]:
    started = Members(folder)
    try:
        yield started
    finally:
        for process in started.all:
            process.process.kill()
            patience.wait(process.process)
            for stream in (process.process.stdin, process.process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()


@dataclass
class Members:
    folder: Path
    all: list[Process] = field(default_factory=list)

    def start(self, address: str, *, before: tuple[str, ...] = (), **store: Any) -> Process:
        """Start a process, which begins to open its store. `before` are words to put before the command."""
        log = self.folder / f"member-{len(self.all)}.log"
        options = {key: str(value) if isinstance(value, Path) else value for key, value in store.items()}
        command = [*before, sys.executable, "-m", "tests.stores.member", json.dumps(options), address]
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        found = Process(process, log)
        threading.Thread(target=found.listen, daemon=True).start()
        self.all.append(found)
        return found
