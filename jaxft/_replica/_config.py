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
from jaxft._session._network import Network

MAX_NAME_LENGTH = 200
MAX_SETTING_LENGTH = 1000
# Of the 200 settings and 64 KiB that a coordinator accepts from a group: the rest is for jaxft's own.
MAX_SETTINGS = 100
MAX_SETTINGS_BYTES = 48 << 10
# A year. No lock and no poll waits for much longer at once.
_LONGEST_TIMEOUT_S = 3.2e7
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "spare": ((bool, np.bool_), "True or False"),
    "other_meshes": ((bool, np.bool_), "True or False"),
    "network": ((Network,), "a jaxft.Network: `network=jaxft.Network(host=...)`"),
    "events": ((str, Path, type(None)), "the path of a file, a str or a pathlib.Path"),
}
_LEAST = {"step": 0, "history": 0, "min_replicas": 1, "digest_every": 1}
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
    network: Network = Network()
    events: str | Path | None = None

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
        for name, least in _LEAST.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole(name, value, least, _MOST.get(name)))
        if self.history >= 1 << 64:
            raise ConfigurationError(
                f"history is {self.history}, which is no history of a job: pass the `manager.history` that was saved "
                "with the state."
            )
        if self.checkpoints is not None and not isinstance(self.checkpoints, Checkpoints):  # pyright: ignore
            raise ConfigurationError(
                f"checkpoints is {self.checkpoints!r}. It must be a jaxft.Checkpoints, with folder and period: "
                "`checkpoints=jaxft.Checkpoints(folder, every_steps=100)`."
            )
        object.__setattr__(self, "settings", _checked_settings(self.settings))

    @property
    def compared_settings(self) -> dict[str, str]:
        """The user's settings as texts, prefixed so that they cannot collide with jaxft's."""
        return {f"settings.{name}": str(value) for name, value in self.settings.items()}


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
        if ":" in host and not host.endswith("]"):
            raise ConfigurationError(
                f"the coordinator's address {coordinator!r} must have brackets around its IPv6 address: "
                f"[{host}]:{port}"
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
            'by name: `settings={"data": batches.fingerprint}`. A group that differs in one is refused, with '
            "its name."
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
                "encoding other than this process's. Pass a digest of its bytes: "
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
