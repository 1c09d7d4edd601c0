"""What `jaxft doctor` says of one thing that it has looked at."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One result: whether it is fine, what was found, and what to do if it is not."""

    level: Literal["ok", "warn", "fail"]
    text: str
    advice: str = ""


def ok(text: str) -> Finding:
    return Finding("ok", text)


def warn(text: str, advice: str) -> Finding:
    return Finding("warn", text, advice)


def fail(text: str, advice: str) -> Finding:
    return Finding("fail", text, advice)
