"""Shared by the command lines of the library and the coordinator."""

import itertools
from collections.abc import Iterator, Sequence


def empty_flags(words: Sequence[str]) -> Iterator[str]:
    """The flags that have an empty value, as from a shell variable that is not set: `--state ""`, `--state=`.

    Once parsed, an empty path is the current folder, and an empty list is none.
    """
    for word, after in itertools.pairwise([*words, "-"]):
        name, equals, value = word.partition("=")
        if name.startswith("--") and not (value if equals else after):
            yield name.replace("_", "-")


def host_and_port(address: str) -> tuple[str, int]:
    """Return both parts of host:port. Raises ValueError if it is not that."""
    host, _, port = address.rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    if not port.isdecimal() or int(port) > 65535 or (":" in host and not in_brackets):
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)
