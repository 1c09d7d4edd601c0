"""Runs `jaxft launch` as a process, and reads its events."""

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests import patience
from tests.forks import Script

HERE = Path(__file__).parent
FAKE = (sys.executable, "-S", str(HERE / "fake_rank.py"), "{folder}")
# No process of these tests dials it.
NOWHERE = ("--coordinator", "localhost:1")
# `jaxft` whose groups wait for a second for missing devices.
IMPATIENT = "tests.launch.impatient"


@dataclass
class Launch:
    """A launch that runs, or has ended."""

    process: Script
    folder: Path
    out: Path

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """The events so far, or those with a name."""
        file = self.folder / "events.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        found = [json.loads(line) for line in lines]
        return [event for event in found if name in ("", event["event"])]

    def until(self, name: str, count: int = 1) -> dict[str, Any]:
        """Wait for the COUNT-th event with a name."""
        patience.until(
            lambda: len(self.events(name)) >= count or self.process.poll() is not None,
            f"{count} events {name}",
            context=self.text,
        )
        assert len(self.events(name)) >= count, self.text()
        return self.events(name)[count - 1]

    def pids(self, group: str = "group-0") -> list[int]:
        """The processes of the first life of a group, by rank.

        Its event is written after they were started, so their effects may be seen before it.
        """

        def started() -> list[list[int]]:
            return [event["pids"] for event in self.events("group_started") if event["group"] == group]

        return patience.until(started, f"the start of {group}", context=self.text)[0]

    def status(self) -> int:
        """Wait for the end."""
        patience.until(lambda: self.process.poll() is not None, "the launch to end", context=self.text)
        return self.process.wait()

    def text(self) -> str:
        return self.out.read_text()

    def file(self, name: str) -> Path:
        return self.folder / name

    def until_file(self, name: str) -> None:
        patience.until(self.file(name).exists, f"the file {name}", context=self.text)


def launch_command(folder: Path, *words: str, program: tuple[str, ...]) -> list[str]:
    """`jaxft launch WORDS -- PROGRAM` in a fresh interpreter."""
    return [sys.executable, "-m", "jaxft_launch", *_words(folder, *words, program=program)]


def _words(folder: Path, *words: str, program: tuple[str, ...]) -> tuple[str, ...]:
    return ("launch", "--folder", str(folder), *words, "--", *program)


@contextlib.contextmanager
def launch(
    folder: Path,
    *words: str,
    program: tuple[str, ...],
    module: str = "jaxft_launch",
    **environment: str,
) -> Iterator[Launch]:
    """Start `jaxft launch WORDS -- PROGRAM`; end it when the block ends. `module`: another `jaxft`."""
    out = folder.with_name(f"{folder.name}.out")
    arguments = _words(folder, *words, program=program)
    process = Script(module, arguments, out, folder=HERE.parents[1], variables=environment)
    try:
        yield Launch(process, folder, out)
    finally:
        process.kill()  # all that it started ends with it
        process.wait()


@contextlib.contextmanager
def fakes(
    folder: Path, *words: str, lives: tuple[str, ...], environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Launch]:
    """Launch groups of `fake_rank.py`."""
    with launch(folder, *NOWHERE, *words, program=(*FAKE, *lives), **environment) as running:
        yield running


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
