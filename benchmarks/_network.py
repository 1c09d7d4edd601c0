"""Hosts in the kernel: a network namespace for each, joined by a bridge, with a cap on what each may send.

Needs root, `ip` and `tc` (iproute2). Nothing of it is seen outside, and nothing gets out.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

# The hosts see nobody but each other, so any network will do.
_NETWORK = "10.214.7"
_TIMEOUT_S = 30.0
_BURST = "256kb"
_LATENCY = "50ms"


class Hosts:
    """Made by `hosts`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._prefix = f"jaxft-bench-{os.getpid()}-"
        self._made: list[str] = []

    def address(self, name: str) -> str:
        return f"{_NETWORK}.{1 + self._names.index(name)}"

    def within(self, name: str) -> tuple[str, ...]:
        """The words that run a command on a host."""
        return ("ip", "netns", "exec", self._prefix + name)

    def cap(self, name: str, megabits: float) -> None:
        """Let a host send only so many Mbit/s."""
        shaper = f"tc qdisc replace dev eth0 root tbf rate {megabits}mbit burst {_BURST} latency {_LATENCY}"
        _run(*self.within(name), *shaper.split())

    def make(self) -> None:
        switch = self._new("switch")
        _run(*f"ip -n {switch} link add bridge0 type bridge".split())
        _run(*f"ip -n {switch} link set bridge0 up".split())
        for number, name in enumerate(self._names):
            own = self._new(name)
            port = f"port{number}"
            _run(*f"ip -n {switch} link add {port} type veth peer name eth0 netns {own}".split())
            _run(*f"ip -n {switch} link set {port} master bridge0 up".split())
            _run(*f"ip -n {own} addr add {self.address(name)}/24 dev eth0".split())
            _run(*f"ip -n {own} link set eth0 up".split())
            _run(*f"ip -n {own} link set lo up".split())

    def remove(self) -> None:
        for name in reversed(self._made):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                _run("ip", "netns", "delete", name)

    def _new(self, name: str) -> str:
        _run("ip", "netns", "add", self._prefix + name)
        self._made.append(self._prefix + name)
        return self._prefix + name


@contextlib.contextmanager
def hosts(names: Sequence[str]) -> Iterator[Hosts]:
    """Make hosts, and remove them at the end. Raises OSError or CalledProcessError where it is not allowed."""
    made = Hosts(names)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def available() -> bool:
    """Whether such hosts can be made here."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    try:
        with hosts(("a",)) as made:
            made.cap("a", 10)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
