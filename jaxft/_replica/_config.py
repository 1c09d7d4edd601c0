"""The settings of a group and its job, validated once."""

import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxft_protocol.coordinator.bounds import settings_bytes
from jaxft_protocol.names import unclear
from jaxft_protocol.wire import MAX_COUNT

from jaxft._base._numbers import check_positive, whole
from jaxft._checkpoints import Checkpoints
from jaxft._errors import ConfigurationError
from jaxft._session._credentials import TLS
from jaxft._transport._addresses import given_address, own_address
from jaxft._transport._endpoints import MAX_THREADS, Endpoint, usual_threads

MAX_NAME_LENGTH = 200
MAX_SETTING_LENGTH = 1000
# Of the 200 settings and 64 KiB that a coordinator accepts from a group: the rest is for those of jaxft itself.
MAX_SETTINGS = 100
MAX_SETTINGS_BYTES = 48 << 10
# A year. No lock and no poll waits for much longer at once.
_LONGEST_TIMEOUT_S = 3.2e7
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "spare": ((bool, np.bool_), "True or False"),
    "other_meshes": ((bool, np.bool_), "True or False"),
    "token": ((str, type(None)), "a str, the token that `jaxft-coordinator token` has printed for the job"),
    "tls": ((TLS, type(None)), "a jaxft.TLS, which names the files: `tls=jaxft.TLS(ca=...)`"),
    "events": ((str, Path, type(None)), "the path of a file, a str or a pathlib.Path"),
}
_LEAST = {"step": 0, "history": 0, "min_replicas": 1, "digest_every": 1, "exchange_threads": 1}
_MOST = {"step": MAX_COUNT, "min_replicas": 2**32 - 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """The arguments of `jaxft.Manager`, which documents them.

    Raises:
        ConfigurationError: an argument is not valid.
    """

    coordinator: str
    group: str
    job: str = "default"
    step: int = 0
    history: int = 0
    failure_timeout_s: float = 60.0
    min_replicas: int | None = None
    settings: Mapping[str, str | float] = field(default_factory=dict[str, str | float])
    checkpoints: Checkpoints | None = None
    spare: bool = False
    other_meshes: bool = False
    digest_every: int | None = None
    host: str | None = None
    port: int | str | None = None
    exchange_threads: int | None = None
    token: str | None = field(default=None, repr=False)  # must not appear in tracebacks and logs
    tls: TLS | None = None
    events: str | Path | None = None
    tracer: Any = None

    def __post_init__(self) -> None:
        _check_address(self.coordinator)
        _check_name("group", self.group)
        _check_name("job", self.job)
        check_positive("failure_timeout_s", self.failure_timeout_s)
        object.__setattr__(self, "failure_timeout_s", min(self.failure_timeout_s, _LONGEST_TIMEOUT_S))
        for name, (kinds, what) in _KINDS.items():
            if not isinstance(getattr(self, name), kinds):
                raise ConfigurationError(
                    f"{name} must be {what}, not a {type(getattr(self, name)).__name__}."
                )
        if self.tracer is not None and not hasattr(self.tracer, "start_span"):
            raise ConfigurationError(
                "tracer must be a tracer of OpenTelemetry, such as `opentelemetry.trace.get_tracer(__name__)`, not a "
                f"{type(self.tracer).__name__}."
            )
        for name, least in _LEAST.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole(name, value, least, _MOST.get(name)))
        if self.history >= 1 << 64:
            raise ConfigurationError(
                f"history is {self.history}, which is no history of a job: pass the `manager.history` that was saved "
                "with the state."
            )
        _check_host(self.host)
        _ports_of(self.port)
        if self.exchange_threads is not None and self.exchange_threads > MAX_THREADS:
            raise ConfigurationError(
                f"exchange_threads is {self.exchange_threads}, but an exchange has at most {MAX_THREADS}: each has "
                "its own connection to every other group."
            )
        if self.checkpoints is not None and not isinstance(self.checkpoints, Checkpoints):  # pyright: ignore
            raise ConfigurationError(
                f"checkpoints is {self.checkpoints!r}. It is a jaxft.Checkpoints, which says where and how often to "
                "save: `checkpoints=jaxft.Checkpoints(folder, every_steps=100)`."
            )
        object.__setattr__(self, "settings", _checked_settings(self.settings))

    @property
    def compared_settings(self) -> dict[str, str]:
        """The user's settings as texts, prefixed so that they cannot collide with jaxft's."""
        return {f"settings.{name}": str(value) for name, value in self.settings.items()}

    @property
    def gives_host(self) -> bool:
        """Whether the user has said where the other groups reach this process."""
        return bool(self.host)

    @property
    def ports(self) -> range:
        """Where this process may listen; port 0 stands for any that is free."""
        return _ports_of(self.port)

    def endpoint(self, port: int, *, limit_s: float) -> Endpoint:
        """Where the other groups reach this process, which listens on `port`.

        Waits at most `limit_s` for what `host` names to have an address, or for a route to the coordinator.

        Raises:
            ConfigurationError: `host` leads to no address.
            CoordinatorUnreachable: this machine has found no route to it in that time.
        """
        host, forwarded = _host_and_port(self.host) if self.host else ("", "")
        ip = given_address(host, limit_s) if host else own_address(self.coordinator, limit_s)
        return Endpoint(f"{ip}:{forwarded or port}", self.exchange_threads or usual_threads())


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


def _check_address(coordinator: str) -> None:
    if not isinstance(coordinator, str):  # pyright: ignore
        raise ConfigurationError(
            f'the coordinator\'s address must be a str, "host:port", not {coordinator!r}'
        )
    for address in coordinator.split(","):
        host, colon, port = address.strip().rpartition(":")
        if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
            raise ConfigurationError(
                f"the coordinator's address must be host:port, or several separated by commas, not "
                f"{coordinator!r}"
            )
        if ":" in host and not host.endswith("]"):
            raise ConfigurationError(
                f"the coordinator's address {coordinator!r} must have brackets around its IPv6 address: "
                f"[{host}]:{port}"
            )
        if "/" in host:
            raise ConfigurationError(
                f"the coordinator's address must be host:port, without a scheme or a path: {host.rpartition('/')[2]}:"
                f"{port}, not {coordinator!r}"
            )


def _check_name(what: str, name: str) -> None:
    if not isinstance(name, str) or not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise ConfigurationError(
            f"{what} must be a name of 1 to {MAX_NAME_LENGTH} printable characters, not {name!r}"
        )
    if problem := unclear(name):
        raise ConfigurationError(f"{what} {problem}")


def _text(value: Any) -> Any:
    """A number as a text, which is the same in all groups; anything else as it is."""
    return str(value) if isinstance(value, numbers.Real) else value


def _checked_settings(settings: Mapping[str, str | float]) -> dict[str, str]:
    """Return the settings as texts.

    Raises:
        ConfigurationError: they are not texts and numbers by name, or one is too long.
    """
    if not isinstance(settings, Mapping):  # pyright: ignore
        raise ConfigurationError(
            f"settings is {settings!r:.60}, a {type(settings).__name__}, but it must be a dict of texts and numbers "
            'by name: `settings={"data": batches.fingerprint}`. A group that differs in one is refused, and '
            "told which."
        )
    settings = {name: _text(value) for name, value in settings.items()}
    for name, value in settings.items():
        texts = isinstance(name, str) and isinstance(value, str)  # pyright: ignore
        if not texts or len(name) + len(value) > MAX_SETTING_LENGTH:
            raise ConfigurationError(
                f"settings must be texts of at most {MAX_SETTING_LENGTH} characters, such as a digest, or numbers, "
                f"not {name!r}: {value!r:.100}"
            )
        if not _is_unicode(name + value):
            raise ConfigurationError(
                f"settings has {name!r}: {value!r:.100}, which is not Unicode: as a file name or an argument in an "
                "encoding other than that of this process. Pass a digest of its bytes: "
                "`hashlib.sha256(os.fsencode(value)).hexdigest()`."
            )
    if len(settings) > MAX_SETTINGS or settings_bytes(settings) > MAX_SETTINGS_BYTES:
        raise ConfigurationError(
            f"settings has {len(settings)} texts of {settings_bytes(settings)} bytes in all, but it may have at most "
            f"{MAX_SETTINGS}, of {MAX_SETTINGS_BYTES} bytes. Join some of them, and pass a digest of the result."
        )
    return dict(settings)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
