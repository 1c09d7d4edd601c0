"""The progress of a long run of seeds in a file, so that an interrupted run continues where it was."""

import dataclasses
import functools
import hashlib
import json
import os
import platform
from collections import Counter
from pathlib import Path
from typing import Any

from .campaign import Finding, Tally

_ROOT = Path(__file__).parents[2]
# What decides how a seed ends: the three cores, the records of a coordinator's store, and the simulation itself.
_SOURCES = (
    "protocol/jaxft_protocol",
    "coordinator/jaxft_coordinator/stores",
    "launcher/jaxft_launch/supervise/core",
    "tests/simulation",
)


@functools.cache
def code() -> str:
    """Return a fingerprint of all that decides how a seed ends, as it was when the run began."""
    digest = hashlib.sha256(platform.python_version().encode())
    for folder in _SOURCES:
        for file in sorted((_ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".txt"):
                digest.update(f"{file.relative_to(_ROOT)}\0{file.stat().st_size}\0".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def load(file: Path, first: int, end: int) -> Tally:
    """Return the findings so far of the run that wrote `file`; none if there is no such file.

    Raises:
        ValueError: it is of other seeds, or of other code: its seeds say nothing of this one.
    """
    now = _what(first, end)
    if not file.exists():
        return Tally()
    read: dict[str, Any] = json.loads(file.read_text())
    was = {key: read.pop(key) for key in now}
    if was != now:
        raise ValueError(f"{file} is of {was}, and this run is of {now}: delete it, or name another file")
    findings = [Finding(**finding) for finding in read.pop("findings")]
    return Tally(findings=findings, sometimes=Counter(read.pop("sometimes")), **read)


def save(file: Path, first: int, end: int, tally: Tally) -> None:
    """Write down the findings so far; a run that ends meanwhile leaves the file of before."""
    fresh = file.with_name(f"{file.name}.new")
    found = [dataclasses.asdict(finding) for finding in tally.findings]
    plain = {field.name: getattr(tally, field.name) for field in dataclasses.fields(tally)} | {
        "findings": found
    }
    fresh.write_text(json.dumps(_what(first, end) | plain))
    os.replace(fresh, file)


def _what(first: int, end: int) -> dict[str, Any]:
    return {"code": code(), "first": first, "end": end}
