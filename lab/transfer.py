"""What `jax.experimental.transfer` would be as the way of a heal: how it fails, and how fast it is.

    python -m lab.transfer

Donor and joiner are processes of JAX's CPU backend. First each fault, in fresh processes; then both ways move the
same states in alternating order, and the result of each is checked. `docs/performance.md` says what follows.
"""

import os
import signal
import socket
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tyro

from benchmarks._state import sizes, sums, values
from benchmarks._worker import Worker, WorkerFailed, workers

TIMEOUT_S = 2.0  # what a pull is given
SMALL = [1 << 20]


@dataclass(frozen=True)
class Arguments:
    """Fail in all known ways, and move states of some sizes."""

    megabytes: tuple[float, ...] = (64, 256)
    """Sizes of the state."""
    leaves: int = 150
    """Leaves of the state."""
    rounds: int = 7
    """Rounds that count, after one that does not."""
    patience_s: float = 10.0
    """For how long a process may take no notice of a fault, or of its timeout of 2 s."""


@dataclass
class Ends:
    """A donor that offers one leaf, and a joiner."""

    donor: Worker
    joiner: Worker
    address: str
    sums: list[int]  # of the donor's leaf
    patience_s: float

    def pull(self, number: int = 1, sizes: list[int] = SMALL, dtype: str = "float32") -> str:
        """What a pull comes to."""
        told = {"address": self.address, "number": number, "sizes": sizes, "dtype": dtype}
        try:
            pulled = self.joiner.ask("pull", self.patience_s, patience_s=TIMEOUT_S, **told)
        except WorkerFailed as error:
            return _outcome(error)
        return "ends well" if pulled["sums"] == self.sums else "ends well, with other values"


def main(arguments: Arguments) -> None:
    print("| fault | outcome |\n| --- | --- |")
    for fault, happens in FAULTS.items():
        with _ends(arguments.patience_s) as ends:
            print(f"| {fault} | {happens(ends)} |")
    print("\n| state | transfer | heal | heal / transfer |\n| --- | --- | --- | --- |")
    for megabytes in arguments.megabytes:
        leaves = sizes(megabytes, arguments.leaves)
        transfer_s, heal_s = compare(leaves, arguments.rounds)
        print(
            f"| {megabytes:g} MB | {1e3 * transfer_s:.0f} ms | {1e3 * heal_s:.0f} ms "
            f"| {heal_s / transfer_s:.2f} |",
        )


# ---- faults ----


def four_zero_bytes(ends: Ends) -> str:
    """From a program that only connects."""
    host, port = ends.address.rsplit(":", 1)
    with socket.create_connection((host.strip("[]"), int(port))) as sock:
        sock.sendall(bytes(4))
        try:
            ends.donor.hear(ends.patience_s)
        except WorkerFailed as error:
            return f"the donor {_outcome(error)}" if "died" in str(error) else "the donor lives on"
        raise AssertionError("it was not asked for anything")


def stopped_donor(ends: Ends) -> str:
    os.kill(ends.donor.pid, signal.SIGSTOP)
    return ends.pull()


def dead_donor(ends: Ends) -> str:
    ends.donor.kill()
    return ends.pull()


FAULTS: dict[str, Callable[[Ends], str]] = {
    "none": lambda ends: ends.pull(),
    "four zero bytes from any program": four_zero_bytes,
    "a stopped donor": stopped_donor,
    "a dead donor": dead_donor,
    "an offer that the donor does not know": lambda ends: ends.pull(number=99),
    "the joiner expects int32 for float32": lambda ends: ends.pull(dtype="int32"),
    "the joiner expects twice the elements": lambda ends: ends.pull(sizes=[2 * SMALL[0]]),
    "the joiner expects half of the elements": lambda ends: ends.pull(sizes=[SMALL[0] // 2]),
}


def _outcome(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    if "has not answered" in lines[0]:
        return f"hangs, whatever its timeout of {TIMEOUT_S:g} s says"
    if "died with status" in lines[0]:
        return "dies with status " + lines[0].split("status ")[1].split(":")[0]
    return f"raises {lines[-1].split(':')[0].split('.')[-1]}"


@contextmanager
def _ends(patience_s: float) -> Iterator[Ends]:
    with workers(Worker("lab._transfer_end"), Worker("lab._transfer_end")) as (donor, joiner):
        address = donor.ask("make", sizes=SMALL, seed=0)
        donor.ask("offer", number=1)
        joiner.ask("make", sizes=[16], seed=1)
        yield Ends(donor, joiner, address, sums(values(SMALL, 0)), patience_s)


# ---- figures ----


def compare(leaves: list[int], rounds: int) -> tuple[float, float]:
    """The median seconds of a pull, and of a heal."""
    found: dict[str, list[float]] = {"transfer": [], "heal": []}
    with workers(Worker("lab._transfer_end"), Worker("lab._transfer_end")) as (donor, joiner):
        address = donor.ask("make", sizes=leaves, seed=0)
        held = donor.ask("hold", sizes=leaves, seed=0, host="127.0.0.1", number=0)

        def transfer(number: int) -> dict[str, Any]:
            donor.ask("offer", number=number)
            told = {"address": address, "number": number, "sizes": leaves, "dtype": "float32"}
            return joiner.ask("pull", patience_s=60.0, **told)

        def heal(number: int) -> dict[str, Any]:
            donor.ask("pin")
            return joiner.ask("heal", addresses=held["addresses"][:1], sizes=leaves, token=False)

        ways = {"transfer": transfer, "heal": heal}
        for number in range(1 + rounds):
            for name in ways if number % 2 else reversed(ways):
                one = ways[name](number)
                if one["sums"] != held["sums"]:
                    raise SystemExit(f"{name} moved other values than the donor holds")
                if number:
                    found[name].append(one["seconds"])
    return statistics.median(found["transfer"]), statistics.median(found["heal"])


if __name__ == "__main__":
    main(tyro.cli(Arguments, prog="python -m lab.transfer", description=__doc__))
