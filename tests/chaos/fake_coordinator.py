"""Drives fake groups through a job, quickly and without any training.

`fake_coordinator.py PACE_S LAUNCHES` listens on a free port, and prints it. A job begins when three groups are
connected, and advances a step every PACE_S, once every group has recorded the last one (it answers each line with a
byte): as in a real job, no group is behind. While a group is missing, it advances by only one step. So that every
kill fits in on a machine of any speed, it reserves two steps for each launch that is still missing; or, if victims
die in phases of steps, it makes the ten steps for each of these launches slow.
A job named "undisturbed" waits for only three launches.
"""

import contextlib
import json
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

SHARDS = 6
GROUPS = 3
SLOW_STEP_S = 0.3


class FakeJob:
    """The state of one job."""

    def __init__(self, name: str, steps: int, launches: int, folder: str) -> None:
        self.name, self.steps, self.launches = name, steps, launches
        # Where each launch leaves a pipe of orders; "": it leaves none.
        self.folder = folder
        self.advanced_s = 0.0
        self.lock = threading.Lock()
        self.step = 0
        self.launched = 0
        self.quorum_id = 0
        self.changed_at_step = 0
        self.connected: dict[str, socket.socket] = {}
        self.unwritten: dict[str, int] = {}

    def join(self, group: str, connection: socket.socket) -> None:
        with self.lock:
            if self.step == self.steps:
                connection.close()
                return
            self.launched += 1
            self.connected[group] = connection
            self.unwritten[group] = 0
            self.note_change()
            if self.step:
                self.send(group, step_fields(self.step, [], self, attempts=0, loss=float("nan")))

    def run(self, pace_s: float) -> None:
        """Commit every step."""
        while self.step < self.steps or any(self.unwritten[group] for group in self.connected):
            time.sleep(pace_s)
            with self.lock:
                self.listen()
                if self.may_advance():
                    self.advance()
        with self.lock:
            for group in list(self.connected):
                self.send(group, {"event": "finished", "step": self.step, "digest": f"d{self.step}"})
                self.connected.pop(group).close()

    def may_advance(self) -> bool:
        if self.step == self.steps or any(self.unwritten[group] for group in self.connected):
            return False
        complete = len(self.connected) == GROUPS
        free = complete and (self.steps - self.step > self.kept_steps() or self.is_slow())
        return free or (self.step == self.changed_at_step and (complete or self.step > 0))

    def kept_steps(self) -> int:
        if not self.folder:
            return 2 * max(0, self.launches - self.launched)
        # A group that is killed at once never connects.
        pipes = Path(self.folder).glob("*.orders")
        return 10 * max(0, self.launches - len(list(pipes)))

    def is_slow(self) -> bool:
        return bool(self.folder) and time.monotonic() - self.advanced_s >= SLOW_STEP_S

    def advance(self) -> None:
        self.step += 1
        self.advanced_s = time.monotonic()
        members = sorted(self.connected)
        for index, group in enumerate(members):
            shards = list(range(index, SHARDS, len(members)))
            self.send(group, step_fields(self.step, shards, self, attempts=1, loss=10 / self.step))

    def listen(self) -> None:
        """Count the answers, and drop dead groups."""
        for group, connection in list(self.connected.items()):
            try:
                answers = len(connection.recv(4096, socket.MSG_DONTWAIT))
                alive = answers > 0
            except BlockingIOError:
                answers, alive = 0, True
            except OSError:
                answers, alive = 0, False
            self.unwritten[group] -= answers
            if not alive:
                self.connected.pop(group).close()
                self.note_change()

    def note_change(self) -> None:
        self.quorum_id += 1
        self.changed_at_step = self.step

    def send(self, group: str, fields: dict[str, Any]) -> None:
        self.unwritten[group] += 1
        with contextlib.suppress(OSError):  # it died: detected on the next read
            self.connected[group].sendall(json.dumps(fields).encode() + b"\n")


def step_fields(step: int, shards: list[int], job: FakeJob, *, attempts: int, loss: float) -> dict[str, Any]:
    return {
        "event": "step",
        "step": step,
        "loss": loss,
        "attempts": attempts,
        **{"compute_s": 0.01, "exchange_s": 0.01, "vote_s": 0.01, "apply_s": 0.01},
        "shards": shards,
        "quorum_id": job.quorum_id,
        "members": sorted(job.connected),
    }


def read_hello(connection: socket.socket) -> dict[str, Any] | None:
    """Return a group's first message. None: it was killed between its connect and that."""
    try:
        line = connection.makefile().readline()
    except OSError:
        line = ""
    if line.endswith("\n"):
        return json.loads(line)
    connection.close()
    return None


def main() -> None:
    pace_s, launches = float(sys.argv[1]), int(sys.argv[2])
    jobs: dict[str, FakeJob] = {}
    with socket.create_server(("localhost", 0)) as server:
        sys.stdout.write(f"coordinator listens on localhost:0 (port {server.getsockname()[1]})\n")
        sys.stdout.flush()
        while True:
            connection, _ = server.accept()
            hello = read_hello(connection)
            if hello is None:
                continue
            name = hello["job"]
            if name not in jobs:
                wanted = GROUPS if name == "undisturbed" else launches
                jobs[name] = FakeJob(name, hello["steps"], wanted, hello.get("folder", ""))
                threading.Thread(target=jobs[name].run, args=[pace_s], daemon=True).start()
            jobs[name].join(hello["group"], connection)


if __name__ == "__main__":
    main()
