"""A large quorum on one machine: all members connected to all, beside rows and columns.

    python -m lab.rows
    python -m lab.rows --members 64 --kilobytes 64 --rounds 10

Each member is a process without JAX, with connections over loopback. Both ways exchange the same contributions in
turns, and their bits are compared. Then what one of 1,000 groups would need, which follows from the plans alone.
`docs/performance.md` says what follows.
"""

import itertools
import multiprocessing
import multiprocessing.connection
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tyro

from jaxft._arrays._layout import Layout, LeafSpec
from jaxft._arrays._memory import result_regions
from jaxft._exchange import _grid
from jaxft._exchange._grid_links import AnyLinks, exchange_over, open_links
from jaxft._exchange._lane import Task
from jaxft._exchange._mesh import Peer
from jaxft._exchange._partials import Partials
from jaxft._exchange._patience import Patience
from jaxft._transport._listener import Abort, Listener
from lab._needs import needs

TIMEOUT_S = 120.0
# From how many members on there are rows.
WAYS = {"all to all": 1 << 30, "rows": 4}


@dataclass(frozen=True)
class Arguments:
    """Exchange among many members in both ways."""

    members: tuple[int, ...] = (16, 32, 48, 64)
    """Numbers of members."""
    kilobytes: tuple[int, ...] = (4, 64, 1024, 16384)
    """Sizes of a contribution, in float32."""
    rounds: int = 6
    """Rounds that count, after one that does not."""
    groups: int = 1000
    """For how many groups to work out the needs of one of them."""
    gradients_mb: int = 250
    """Of its contribution, in bfloat16."""


class Member:
    """One member, in a process that takes orders over a pipe."""

    def __init__(self, me: int) -> None:
        self._me = me
        self._listener = Listener(
            host="127.0.0.1", job="lab", group=f"group-{me}", incarnation=1, on_heal=None
        )
        self._links: dict[str, AnyLinks] = {}
        self._step = 0

    def port(self) -> int:
        return self._listener.port

    def open(self, way: str, ports: Sequence[int]) -> float:
        """Connect; returns CPU seconds."""
        _grid.LEAST_MEMBERS = WAYS[way]
        peers = [Peer(f"group-{n}", 1, f"127.0.0.1:{port}", (n,)) for n, port in enumerate(ports)]
        began_s = time.process_time()
        self._links[way] = open_links(
            self._listener,
            job="lab",
            quorum_id=1 + len(self._links),
            me=f"group-{self._me}",
            members=peers,
            abort=Abort(),
            patience=Patience(TIMEOUT_S),
        )
        return time.process_time() - began_s

    def prepare(self, members: int, size: int) -> None:
        self._layout = Layout.of([LeafSpec("x", (size,), "float32")])
        self._partials = Partials(self._layout, members)
        values = np.random.default_rng(self._me).standard_normal(size, np.float32)
        self._partials.add(self._me, [values])

    def exchange(self, way: str) -> tuple[float, int]:
        """Returns CPU seconds, and a hash of the result, which is compared within this process alone."""
        self._step += 1
        result = result_regions(self._layout)
        began_s = time.process_time()
        task = Task(self._layout, self._step, self._partials, result)
        exchange_over(
            self._links[way], task, self._partials.shards, lambda later_s: Patience(TIMEOUT_S + later_s)
        )
        return time.process_time() - began_s, hash(result[0].tobytes())

    def close(self) -> None:
        for links in self._links.values():
            links.close()
        self._listener.close()


def _serve(me: int, pipe: "multiprocessing.connection.Connection") -> None:
    member = Member(me)
    while True:
        command, arguments = pipe.recv()
        pipe.send(getattr(member, command)(*arguments))
        if command == "close":
            return


class Crowd:
    """All members."""

    def __init__(self, count: int) -> None:
        fork = multiprocessing.get_context("fork")
        pairs = [fork.Pipe() for _ in range(count)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            fork.Process(target=_serve, args=(me, theirs), daemon=True)
            for me, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()

    def ask(self, command: str, *arguments: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((command, arguments))
        found: list[Any] = []
        for me, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT_S):
                raise TimeoutError(
                    f"Member {me} of {len(self._pipes)} has not answered {command!r} in {TIMEOUT_S:g} s."
                )
            found.append(pipe.recv())
        return found

    def close(self) -> None:
        self.ask("close")
        for process in self._processes:
            process.join(TIMEOUT_S)


def _timed(call: Callable[[], list[Any]]) -> tuple[float, list[Any]]:
    began_s = time.monotonic()
    found = call()
    return 1e3 * (time.monotonic() - began_s), found


def measure(count: int, kilobytes: Sequence[int], rounds: int) -> None:
    """Print a row of the table for each size."""
    crowd = Crowd(count)
    try:
        ports = crowd.ask("port")
        opened = {way: _timed(lambda way=way: crowd.ask("open", way, ports)) for way in WAYS}
        _row(
            count,
            "connect",
            {way: [took] for way, (took, _) in opened.items()},
            {way: [1e3 * sum(cpu)] for way, (_, cpu) in opened.items()},
        )
        for size_kb in kilobytes:
            crowd.ask("prepare", count, size_kb << 8)
            wall: dict[str, list[float]] = {way: [] for way in WAYS}
            cpu: dict[str, list[float]] = {way: [] for way in WAYS}
            hashes: set[tuple[int, ...]] = set()
            for round_, way in itertools.product(range(rounds + 1), WAYS):
                took, answers = _timed(lambda way=way: crowd.ask("exchange", way))
                hashes.add(tuple(each for _, each in answers))
                if round_:
                    wall[way].append(took)
                    cpu[way].append(1e3 * sum(spent for spent, _ in answers))
            if len(hashes) != 1:
                raise AssertionError(f"{count} members, {size_kb} KB: the two ways hold different bits")
            _row(count, f"{size_kb} KB", wall, cpu)
    finally:
        crowd.close()


def _row(count: int, what: str, wall: dict[str, list[float]], cpu: dict[str, list[float]]) -> None:
    cells: list[str] = []
    for unit in (wall, cpu):
        all_to_all, rows = (statistics.median(unit[way]) for way in WAYS)
        cells.append(f"{all_to_all:.3g} / {rows:.3g} = {all_to_all / rows:.2f}")
    print(f"| {count} | {what} | {cells[0]} | {cells[1]} |", flush=True)


def main(arguments: Arguments) -> None:
    print("| members | contribution | wall, all to all / rows, ms | CPU, all to all / rows, ms |")
    print("| ---: | --- | ---: | ---: |")
    for count in arguments.members:
        measure(count, arguments.kilobytes, arguments.rounds)
    print(f"\nOne of {arguments.groups} groups, {arguments.gradients_mb} MB of bfloat16:\n")
    print("| | connections | frames sent | scratch memory | senders at once | on the way at once |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for way, each in needs(arguments.groups, arguments.gradients_mb).items():
        print(
            f"| {way} | {each.connections} | {each.frames} | {each.scratch_mb:.0f} MB | {each.senders} "
            f"| {each.waiting_mb:.0f} MB |"
        )


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
