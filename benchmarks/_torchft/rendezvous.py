"""TorchFT's side: a lighthouse in one process; in another as many clients as there are groups, each in a thread.

Its clients are written in Rust, and release the interpreter's lock while they wait.
"""

import datetime
import threading
import time
from typing import Any

from torchft.coordination import LighthouseClient, LighthouseServer

from benchmarks._worker import serve

_TIMEOUT = datetime.timedelta(seconds=60)
_TIMEOUT_S = 60.0
# The stack of a thread here; a thousand threads with the usual 8 MiB would reserve 8 GiB.
_STACK_BYTES = 1 << 20


class _Group(threading.Thread):
    """One client. `go` begins a round; the last client to get its quorum ends it."""

    def __init__(self, address: str, number: int, groups: "_Groups") -> None:
        super().__init__(daemon=True)
        self.go = threading.Lock()
        self.go.acquire()
        self.quorum: Any = None
        self._client = LighthouseClient(address, _TIMEOUT)
        self._name = f"group-{number}"
        self._address = f"http://10.0.0.1:{20000 + number}"
        self._groups = groups

    def run(self) -> None:
        groups = self._groups
        while True:
            self.go.acquire()
            try:
                self.quorum = self._client.quorum(
                    replica_id=self._name,
                    timeout=_TIMEOUT,
                    address=self._address,
                    store_address=self._address,
                    step=groups.step,
                    world_size=1,
                    shrink_only=False,
                )
            except Exception as error:  # reported to the parent
                groups.errors.append(repr(error))
            groups.ended(self)


class _Groups:
    def __init__(self) -> None:
        self.step = 0
        self.errors: list[str] = []
        self._groups: list[_Group] = []
        self._quorum_id: int | None = None
        self._done: list[_Group] = []
        self._all_done = threading.Semaphore(0)
        self._server: Any = None

    def listen(self, groups: int) -> str:
        """Start to serve. It waits for all groups, and considers none dead while another benchmark's round runs."""
        self._server = LighthouseServer(
            bind="0.0.0.0:0", min_replicas=groups, join_timeout_ms=60_000, heartbeat_timeout_ms=600_000
        )
        port = str(self._server.address()).rpartition(":")[2]
        return f"http://127.0.0.1:{port}"

    def join(self, address: str, groups: int) -> float:
        began_s = time.perf_counter()
        threading.stack_size(_STACK_BYTES)
        self._groups = [_Group(address, number, self) for number in range(groups)]
        for group in self._groups:
            group.start()
        self._round()
        return time.perf_counter() - began_s

    def rounds(self, count: int) -> list[float]:
        return [self._round() for _ in range(count)]

    def ended(self, group: _Group) -> None:
        self._done.append(group)
        if len(self._done) == len(self._groups):
            self._all_done.release()

    def _round(self) -> float:
        self._done.clear()
        began_s = time.perf_counter()
        for group in self._groups:
            group.go.release()
        if not self._all_done.acquire(timeout=_TIMEOUT_S):
            raise TimeoutError(f"{len(self._done)} of {len(self._groups)} groups have their quorum")
        took_s = time.perf_counter() - began_s
        if self.errors:
            raise RuntimeError(f"{len(self.errors)} calls failed: {self.errors[0]}")
        self._check()
        self.step += 1
        return took_s

    def _check(self) -> None:
        """Check that all groups have the same quorum, of all groups."""
        ids = {group.quorum.quorum_id for group in self._groups}
        size = len(self._groups[-1].quorum.participants)
        if size != len(self._groups) or len(ids) != 1 or self._quorum_id not in (None, *ids):
            raise ValueError(f"{len(self._groups)} groups got the quorums {ids}, of {size} groups")
        (self._quorum_id,) = ids


if __name__ == "__main__":
    serve(_Groups())
