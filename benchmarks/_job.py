"""A job of several groups, each a process that trains: ours under a coordinator, TorchFT's under a lighthouse.

A sleep in `batch_for` simulates the device: the host is idle meanwhile, as with a GPU, so that several groups fit on
two cores. A group that computes another group's shards sleeps longer, as it would compute longer.
"""

import contextlib
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import _peer
from benchmarks._coordinator import coordinator
from benchmarks._forks import Forks
from benchmarks._worker import ROOT, Worker, WorkerFailed, variables
from jaxft_launch.processes._ranks import free_ports

Event = dict[str, Any]
# A device's allocator keeps the memory that a step frees, so the host's must do the same here. Otherwise a large part
# of the measurement, on both sides, is the kernel's zeroing of pages.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}
EVENT_TIMEOUT_S = 60.0
LOOP = "benchmarks._loop"
END_TIMEOUT_S = 30.0


class WrongResult(Exception):
    """Groups finished with different states, or a step was skipped."""


@dataclass(frozen=True)
class Shape:
    """The training job.

    Attributes:
        step_ms: the device time of a step with all groups.
        megabytes: gradients, in MiB of float32.
        groups: how many groups the job has, spares not counted.
        shards_each: shards per group with all groups; None: one per group of the current quorum.
        leaves: the number of leaves of the gradients.
        moments: whether the state is three times as large as the gradients.
        plain: run a plain step after each step of the job.
        ranks: how many processes each group has; only for ours.
        overlap: None: the device is a sleep before the program. A number: it is a sleep within the program, a part of
            it before each leaf of the gradients, and the step is given this `overlap`; only for ours.
    """

    step_ms: float
    megabytes: float
    groups: int = 3
    shards_each: int | None = 2
    leaves: int = 4
    moments: bool = False
    plain: bool = False
    ranks: int = 1
    overlap: int | None = None

    @property
    def shard_ms(self) -> float:
        return self.step_ms / (self.shards_each or 1)


@dataclass(frozen=True)
class Ours:
    """jaxft with its default settings.

    Attributes:
        cache: the folder of JAX's compilation cache; None: nothing is cached.
        exact: its groups must take the same steps and finish in the same state; otherwise this is only noted.
    """

    cache: Path | None = None
    package: str = "_ours"
    python: Path = Path(sys.executable)
    exact: bool = True

    @contextlib.contextmanager
    def rendezvous(self, _shape: Shape) -> Iterator[str]:
        with coordinator() as found:
            yield found.address

    def environment(self) -> dict[str, str]:
        if self.cache is None:
            return {"JAX_ENABLE_COMPILATION_CACHE": "false"}
        return {
            "JAX_COMPILATION_CACHE_DIR": str(self.cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    def options(self, shape: Shape, *, spare: bool) -> list[dict[str, Any]]:
        """Of each process of a group."""
        shards = None if shape.shards_each is None else shape.shards_each * shape.groups
        options = {"shard_ms": shape.shard_ms, "shards": shards, "spare": spare, "overlap": shape.overlap}
        if shape.ranks == 1:
            return [options]
        (port,) = free_ports(1)
        return [{**options, "world": (rank, shape.ranks, port)} for rank in range(shape.ranks)]


@dataclass(frozen=True)
class TorchFT:
    """TorchFT over gloo, by default with its default timeouts."""

    heartbeat_timeout_ms: int = 5000
    join_timeout_ms: int = 100
    quorum_tick_ms: int = 100
    group_timeout_s: float = 60.0
    package: str = "_torchft"
    python: Path = Path()
    exact: bool = False

    @contextlib.contextmanager
    def rendezvous(self, shape: Shape) -> Iterator[str]:
        lighthouse = Worker("benchmarks._torchft.lighthouse", python=self.python)
        try:
            yield lighthouse.ask(
                "start",
                min_replicas=min(2, shape.groups),
                heartbeat_timeout_ms=self.heartbeat_timeout_ms,
                join_timeout_ms=self.join_timeout_ms,
                quorum_tick_ms=self.quorum_tick_ms,
            )
        finally:
            lighthouse.kill()

    def environment(self) -> dict[str, str]:
        return {"TORCH_CPP_LOG_LEVEL": "FATAL", "GLOG_minloglevel": "3", "RUST_LOG": "off"}

    def options(self, shape: Shape, *, spare: bool) -> list[dict[str, Any]]:
        assert not spare, "TorchFT's spares are another thing"
        assert shape.ranks == 1
        least = min(2, shape.groups)
        return [{"step_ms": shape.step_ms, "min_replicas": least, "group_timeout_s": self.group_timeout_s}]


Side = Ours | TorchFT
# At its fastest: heartbeats of 1 s, ticks of 10 ms, operations of 5 s at most.
BEST = TorchFT(1000, 100, 10, 5.0)
# The same with a second for groups to join a quorum, so that no group drops out because it was late once.
STEADY = TorchFT(1000, 1000, 10, 5.0)


def torchft(settings: TorchFT = TorchFT()) -> TorchFT | None:
    """TorchFT with these settings; None if it is not available."""
    python = _peer.python()
    return None if python is None else replace(settings, python=python)


T = TypeVar("T")


def of_peer(side: TorchFT | None, measure: Callable[[TorchFT], T]) -> T | None:
    """TorchFT's measurement; None if it is not available, or did not continue."""
    try:
        return None if side is None else measure(side)
    except WorkerFailed as error:
        print(f"TorchFT did not continue: {error}", file=sys.stderr)
        return None


class Group(Worker):
    """One incarnation of a group: a new process, or one forked after all imports.

    Attributes:
        followers: its further processes, whose events are not read.
    """

    def __init__(self, side: Side, forks: Forks | None = None) -> None:
        self.followers: list[Group] = []
        if forks is None:
            super().__init__(LOOP, side.package, python=side.python, env={**ALLOCATOR, **side.environment()})
        else:
            self.follow(f"{LOOP} {side.package}", forks.fork(), forks.log)

    def tell(self, command: str, **arguments: Any) -> None:
        for worker in self.followers:
            worker.tell(command, **arguments)
        super().tell(command, **arguments)

    def kill(self) -> None:
        super().kill()
        for worker in self.followers:
            worker.kill()

    def keep_to(self, core: int) -> None:
        """Run all threads of its process, now and later, on one core."""
        for thread in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread.name), {core})

    def until(self, accept: Callable[[Event], bool], timeout_s: float = EVENT_TIMEOUT_S) -> Event:
        """Skip to the first event of this kind. Raises WorkerFailed."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            event = self.hear(max(0.0, deadline_s - time.monotonic()))
            if accept(event):
                return event

    def event(self, name: str, timeout_s: float = EVENT_TIMEOUT_S) -> Event:
        return self.until(lambda event: event["event"] == name, timeout_s)

    def commit(self, accept: Callable[[Event], bool] = lambda _: True, since_s: float = -math.inf) -> Event:
        """Skip to the first commit of this kind, after a time."""
        return self.until(
            lambda event: event["event"] == "commit" and event["at_s"] > since_s and accept(event)
        )

    def commits(self, count: int) -> list[Event]:
        """The next commits, as they arrive."""
        return [self.commit() for _ in range(count)]

    def contribution(self) -> Event:
        """The next commit to which this group contributes."""
        return self.commit(lambda step: bool(step["shards"]))


class Job:
    """Groups of one job. Use as a context manager: no process outlives it."""

    def __init__(self, side: Side, shape: Shape, *, forked: bool = True) -> None:
        self.side = side
        self.shape = shape
        self.groups: dict[str, Group] = {}
        self.cores: dict[str, int] = {}  # the only core that a group may use, by its name
        self._ready: list[tuple[str, Group]] = []
        self._drained: list[Group] = []
        self._forked = forked
        self._forks: Forks | None = None
        self._stack = contextlib.ExitStack()
        self._address = ""

    def __enter__(self) -> "Job":
        self._address = self._stack.enter_context(self.side.rendezvous(self.shape))
        if self._forked:
            side = self.side
            env = variables({**ALLOCATOR, **side.environment()})
            self._forks = Forks(LOOP, side.package, python=side.python, env=env, cwd=ROOT)
            self._stack.callback(self._forks.close)
        self._stack.callback(self._kill_all)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def names(self) -> list[str]:
        return [f"group-{number}" for number in range(self.shape.groups)]

    def start(self) -> None:
        """Start all groups, and wait until all of them take part."""
        self.prepare(*self.names)
        for name in self.names:
            self.enter(name)
        for group in self.groups.values():
            self.whole(group)

    def whole(self, group: Group) -> Event:
        """Skip to a commit of all groups to which this group contributed."""
        return group.commit(lambda step: step["members"] == self.shape.groups and bool(step["shards"]))

    def launch(self, name: str, *, spare: bool = False, address: str = "") -> Group:
        """Start a process that creates its state at once, and joins the job later, with `enter`.

        With `address` it joins the job of another coordinator.
        """
        shape = self.shape
        processes: list[Group] = []
        for options in self.side.options(shape, spare=spare):
            process = Group(self.side, self._forks)
            processes.append(process)
            process.tell(
                "make",
                address=address or self._address,
                group=name,
                megabytes=shape.megabytes,
                leaves=shape.leaves,
                moments=shape.moments,
                plain=shape.plain,
                **options,
            )
        group, *group.followers = processes
        self._ready.append((name, group))
        return group

    def prepare(self, *names: str, spare: bool = False) -> None:
        """Start incarnations ahead: interpreter, imports and first state are ready when this returns."""
        started = [self.launch(name, spare=spare) for name in names]
        for name, group in zip(names, started, strict=True):
            group.event("made")
            if name in self.cores:
                group.keep_to(self.cores[name])

    def enter(self, name: str) -> Group:
        """Let a prepared incarnation join the job."""
        place = next(i for i, (other, _) in enumerate(self._ready) if other == name)
        _, group = self._ready.pop(place)
        group.tell("enter")
        self.groups[name] = group
        return group

    @contextlib.contextmanager
    def unrelated(self) -> Iterator[Group]:
        """A group of a separate job on the same machine, which competes with the others for its resources."""
        with self.side.rendezvous(self.shape) as address:
            group = self.launch("unrelated", address=address)
            try:
                group.event("made")
                group.tell("enter")
                yield group
            finally:
                self._ready.remove(("unrelated", group))
                group.kill()

    def kill(self, name: str) -> float:
        """SIGKILL; return when."""
        group = self.groups.pop(name)
        killed_s = time.monotonic()
        group.kill()
        return killed_s

    def drain(self, name: str) -> float:
        """SIGTERM, after which the group leaves at the end of its step; return when."""
        group = self.groups.pop(name)
        self._drained.append(group)
        drained_s = time.monotonic()
        os.kill(group.pid, signal.SIGTERM)
        return drained_s

    def finish(self) -> None:
        """Stop all groups at one step, and compare their states bit for bit.

        Raises:
            WrongResult: they differ. For the peer this is only logged, because its groups may differ by design.
        """
        try:
            ends = self._ends()
        except WorkerFailed:
            if self.side.exact:
                raise
            print("TorchFT's groups did not finish at the same step", file=sys.stderr)
            return
        if len({(end["step"], end["digest"]) for end in ends}) == 1:
            return
        if self.side.exact:
            raise WrongResult(f"the groups finished with different states: {ends}")
        print(f"TorchFT's groups finished with different states: {ends}", file=sys.stderr)

    def _ends(self) -> list[Event]:
        groups = list(self.groups.values())
        now_s = time.monotonic()
        newest = max(group.commit(since_s=now_s)["step"] for group in groups)
        ahead = 5 + int(500 / max(self.shape.step_ms, 20.0))
        for group in groups:
            group.tell("stop", step=newest + ahead)
        return [group.event("end", END_TIMEOUT_S) for group in groups]

    def _kill_all(self) -> None:
        for group in (*self.groups.values(), *(group for _, group in self._ready), *self._drained):
            group.kill()


@contextlib.contextmanager
def cached() -> Iterator[Ours]:
    """jaxft with a compilation cache that only this benchmark uses."""
    with tempfile.TemporaryDirectory(prefix="jaxft-bench-") as folder:
        yield Ours(cache=Path(folder))
