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
from jaxft._transport._endpoints import MAX_THREADS, Endpoint, endpoint_of
from jaxft._transport._own_address import own_address

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
        _check_hosts(self.host)
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
        return bool(_hosts(self.host))

    def endpoint(self, port: int, *, limit_s: float) -> Endpoint:
        """Where the other groups reach this process, which listens on `port`.

        Waits for a route to the coordinator, at most `limit_s`, if no `host` was given.

        Raises:
            CoordinatorUnreachable: this machine has found no route to it in that time.
        """
        hosts = _hosts(self.host) or [own_address(self.coordinator, limit_s)]
        return endpoint_of(hosts, port, self.exchange_threads)


def _hosts(host: str | None) -> list[str]:
    return [each.strip() for each in host.split(",") if each.strip()] if host else []


def _check_hosts(host: Any) -> None:
    hosts = _hosts(host) if host is None or isinstance(host, str) else [""]
    if len(hosts) > MAX_THREADS or not all(map(_is_host, hosts)):
        raise ConfigurationError(
            "host must be a host name or an address, or several separated by commas, one for each network interface "
            f"and at most {MAX_THREADS}, not {host!r:.200}"
        )


def _is_host(text: str) -> bool:
    try:
        text.encode("idna")  # as the other groups will, to ask for its address
    except UnicodeError:
        return False
    return bool(text) and text.isprintable() and not any(mark in text for mark in "*+ ")


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
