"""The network settings of a group: where it listens, and its proofs of identity."""

import os
from dataclasses import dataclass, field, replace
from typing import Any

from jaxft._base._numbers import whole
from jaxft._errors import ConfigurationError
from jaxft._session._credentials import TLS
from jaxft._transport._addresses import given_address, own_address
from jaxft._transport._endpoints import MAX_THREADS, Endpoint, usual_threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """How a group is reached, and how it and the coordinator prove themselves to each other.

    Args:
        host: the address at which the other groups reach this one; by default the environment variable
            JAXFT_HOST, or else the address from which this machine reaches the coordinator. Or the name of a network
            interface, such as "ib0". As `host:port` where a forwarder stands between.
        port: the port at which this group listens, or a range such as "29600-29631", of which each process takes a
            free one, for firewalls; by default any free port.
        threads: how many threads this process offers for a large exchange, each with a connection to every other
            group; by default one for every 4 cores, 4 at most. An exchange uses as many as all groups offer, and no
            more than one for each 4 MiB; the bits do not depend on it.
        token: the key of this job, as `jaxft-coordinator token` prints it, where the coordinator asks for one; by
            default the environment variable JAXFT_TOKEN. With a token, this group talks only to a coordinator
            and to groups that know it too. See docs/security.md.
        tls: certificates for the stream to the coordinator; by default the files that the environment variables
            JAXFT_TLS_CA, JAXFT_TLS_CERT and JAXFT_TLS_KEY name. Without either, it is not encrypted.

    Raises:
        ConfigurationError: a setting cannot be right.

    Example:
        >>> import jaxft
        >>> network = jaxft.Network(host="ib0", port="29600-29631")
        >>> manager = jaxft.Manager("localhost:29510", group="group-0", network=network)
    """

    host: str | None = None
    port: int | str | None = None
    threads: int | None = None
    token: str | None = field(default=None, repr=False)  # must not appear in tracebacks and logs
    tls: TLS | None = None

    def __post_init__(self) -> None:
        _check_host(self.host)
        _ports_of(self.port)
        if self.threads is not None:
            object.__setattr__(self, "threads", whole("threads", self.threads, 1))
            if self.threads > MAX_THREADS:
                raise ConfigurationError(
                    f"threads is {self.threads}, but an exchange has at most {MAX_THREADS}: each has its own "
                    "connection to every other group."
                )
        if not isinstance(self.token, str | None):
            raise ConfigurationError(
                "token must be a str, the token that `jaxft-coordinator token` has printed for the job, not a "
                f"{type(self.token).__name__}."
            )
        if not isinstance(self.tls, TLS | None):
            raise ConfigurationError(
                "tls must be a jaxft.TLS, which names the files: `tls=jaxft.TLS(ca=...)`, not a "
                f"{type(self.tls).__name__}."
            )

    def completed(self) -> "Network":
        """Return the same with the environment's host in place of a missing one."""
        return replace(self, host=self.host or os.environ.get("JAXFT_HOST"))

    @property
    def ports(self) -> range:
        """Where this process may listen; port 0 stands for any that is free."""
        return _ports_of(self.port)

    def endpoint(self, port: int, coordinator: str, *, limit_s: float) -> Endpoint:
        """Where the other groups reach this process, which listens on `port`.

        Waits at most `limit_s` for what `host` names to have an address, or for a route to the coordinator.

        Raises:
            ConfigurationError: `host` leads to no address.
            CoordinatorUnreachable: this machine has found no route to it in that time.
        """
        host, forwarded = _host_and_port(self.host) if self.host else ("", "")
        ip = given_address(host, limit_s) if host else own_address(coordinator, limit_s)
        return Endpoint(f"{ip}:{forwarded or port}", self.threads or usual_threads())


def _check_host(host: Any) -> None:
    if host is None or (isinstance(host, str) and _is_host(host)):
        return
    several = isinstance(host, str) and "," in host
    raise ConfigurationError(
        f"host must be one address, network interface or host name, not {host!r:.200}"
        + (": for several network cards run one process for each, or bond them." if several else "")
    )


def _is_host(text: str) -> bool:
    try:
        text.encode("idna")  # as a name server is asked
    except UnicodeError:
        return False
    return text.isprintable() and not any(mark in text for mark in "*+, ")


def _host_and_port(host: str) -> tuple[str, str]:
    """Divide "host:port"; the port is "" if there is none. The colons of "::1" do not separate a port."""
    name, colon, port = host.rpartition(":")
    if colon and port.isdigit() and (":" not in name or name.endswith("]")):
        return name, port
    return host, ""


def _ports_of(port: Any) -> range:
    text = port if isinstance(port, str) else str(port or 0)
    first, last = text.split("-", 1) if "-" in text else (text, text)
    digits = all(each.isascii() and each.isdigit() and len(each) <= 5 for each in (first, last))
    if isinstance(port, bool) or not digits or not int(first) <= int(last) <= 65535:
        raise ConfigurationError(
            f"port must be a port of up to 65535 at which this group listens, or a range of them, such as "
            f'"29600-29631" for up to 32 processes of one machine, not {port!r:.200}'
        )
    return range(int(first), int(last) + 1)
