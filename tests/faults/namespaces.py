"""A network of our own, in the kernel: a switch, and a namespace for each host, with rules for what gets through.

The switch is a bridge in a separate namespace, so that nothing of this is to be seen outside, and nothing gets out.
What must not get through is dropped there, as if a cable or a port of the switch were broken: the hosts notice
nothing but silence.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

from tests import patience

MISSING = "needs ip (iproute2) and nft (nftables), and the right to make network namespaces"
# The hosts see only each other, so any network will do.
NETWORK = (10, 213, 7)
COMMAND_TIMEOUT_S = 30.0


class Switch:
    """The hosts, by name, and the rules between them."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = tuple(hosts)
        self._prefix = f"jaxft-{os.getpid()}-"
        self._made: list[str] = []

    def address(self, host: str) -> str:
        return ".".join(map(str, (*NETWORK, 1 + self.hosts.index(host))))

    def namespace(self, host: str) -> str:
        """The name by which `ip netns` knows a host."""
        return self._prefix + host

    def within(self, host: str) -> tuple[str, ...]:
        """The words that run a command on a host."""
        return ("ip", "netns", "exec", self.namespace(host))

    def make(self) -> None:
        self._new("switch")
        self._run(*f"ip -n {self._prefix}switch link add bridge type bridge".split())
        self._run(*f"ip -n {self._prefix}switch link set bridge up".split())
        for host in self.hosts:
            self._new(host)
            self._connect(host)
            self._run(*f"ip -n {self.namespace(host)} link set lo up".split())
        self._nft("add table bridge rules")
        self._nft("add chain bridge rules forward { type filter hook forward priority 0; }")

    def _connect(self, host: str) -> None:
        switch, own, port = self._prefix + "switch", self.namespace(host), self._port(host)
        self._run(*f"ip -n {switch} link add {port} type veth peer name eth0 netns {own}".split())
        self._run(*f"ip -n {switch} link set {port} master bridge up".split())
        self._run(*f"ip -n {own} addr add {self.address(host)}/24 dev eth0".split())
        self._run(*f"ip -n {own} link set eth0 up".split())

    def remove(self) -> None:
        """Remove everything. Processes that still run on a host keep it alive, unseen, until they end."""
        for name in reversed(self._made):
            with contextlib.suppress(subprocess.CalledProcessError):
                self._run("ip", "netns", "delete", name)

    def _port(self, host: str) -> str:
        return f"port{self.hosts.index(host)}"

    def cut(self, source: str, target: str) -> None:
        """Drop everything from one host to another."""
        self._nft(f"add rule bridge rules forward {self._between(source, target)} drop")

    def lose(self, percent: int) -> None:
        """Drop this percentage of all packets."""
        self._nft(f"add rule bridge rules forward numgen random mod 100 < {percent} drop")

    def cap(self, host: str, bits_per_s: int) -> None:
        """Let a host receive only so much."""
        tbf = f"tc qdisc add dev {self._port(host)} root tbf rate {bits_per_s}bit burst 32kb latency 100ms"
        self._run(*self.within("switch"), *tbf.split())

    def uncap(self, host: str) -> None:
        """Let a host receive as much as before."""
        self._run(*self.within("switch"), *f"tc qdisc del dev {self._port(host)} root".split())

    def cap_sending(self, host: str, bits_per_s: int) -> None:
        """Let a host send only so much."""
        tbf = f"tc qdisc add dev eth0 root tbf rate {bits_per_s}bit burst 256kb latency 50ms"
        self._run(*self.within(host), *tbf.split())

    def cut_off(self, host: str, *others: str) -> None:
        """Drop everything between a host and others; without any named, between it and all others."""
        for other in others or set(self.hosts) - {host}:
            self.cut(host, other)
            self.cut(other, host)

    def restore(self) -> None:
        """Lift every rule but the caps."""
        self._nft("flush chain bridge rules forward")

    def _between(self, source: str, target: str) -> str:
        ports = (self.hosts.index(source), self.hosts.index(target))
        return 'iifname "port{}" oifname "port{}"'.format(*ports)

    def _new(self, host: str) -> None:
        self._run("ip", "netns", "add", self._prefix + host)
        self._made.append(self._prefix + host)

    def _nft(self, rule: str) -> None:
        self._run(*self.within("switch"), "nft", rule)

    def _run(self, *command: str) -> bytes:
        return patience.run(command, check=True, capture_output=True, limit_s=COMMAND_TIMEOUT_S).stdout


@contextlib.contextmanager
def switch(hosts: Sequence[str]) -> Iterator[Switch]:
    made = Switch(hosts)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def available() -> bool:
    """Whether such a network can be made here."""
    if shutil.which("ip") is None or shutil.which("nft") is None:
        return False
    try:
        with switch(("a", "b")) as made:
            made.cut("a", "b")
            made.lose(5)
            made.cap("a", 10**7)
    except (OSError, subprocess.SubprocessError):
        return False
    return True
