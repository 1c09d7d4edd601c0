"""The output of a launch: lines, and on a terminal also a table of its groups."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table as RichTable

# No more of a log is read in one turn, since the launcher supervises nothing meanwhile.
MOST_BYTES = 1 << 20
# No more is read at the end of its process. What lies before that is only in the log.
LAST_BYTES = 4 << 20
# More than this of a line is not shown.
LONGEST_LINE_BYTES = 16 << 10
TABLE_EVERY_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The current state of a group."""

    group: str
    state: str
    pids: tuple[int, ...]
    starts: int
    phase: str
    step: int
    phase_s: float | None


class Output(Protocol):
    """Shows a launch. `say` is for its own words, `pass_on` for a line of a program, `show` for the table."""

    def say(self, text: str) -> None: ...

    def pass_on(self, name: str, line: str) -> None: ...

    def show(self, rows: Callable[[], Sequence[Row]]) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def make_output(stream: IO[str]) -> Output:
    """Return lines, and on a terminal a table below them."""
    return Table(stream) if stream.isatty() else Lines(stream)


class PlainLines:
    """Lines, for files and pipes: each begins with a name and the seconds since the start.

    What these do not take, such as a full disk, is lost: a run does not end for its log.
    """

    def __init__(self, stream: IO[str], *, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._name = name
        self._clock = clock
        self._began_s = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write("")

    def say(self, text: str) -> None:
        head = f"[{self._name}] {stamp(self._clock() - self._began_s)}  "
        self._write("".join(f"{head}{line}".rstrip() + "\n" for line in text.splitlines()))

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(text)
            self._stream.flush()


class Lines(PlainLines):
    """Lines only, for files and pipes."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(stream, name="jaxft launch")

    def pass_on(self, name: str, line: str) -> None:
        self._write(f"[{name}] {line}\n")

    def show(self, rows: Callable[[], Sequence[Row]]) -> None:
        pass


class Table:
    """Lines, and below them a table that is updated in place."""

    def __init__(self, stream: IO[str]) -> None:
        self._console = Console(file=stream, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._began_s = time.monotonic()
        self._drawn_s = float("-inf")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        for line in text.splitlines():
            self._print(f"{stamp(time.monotonic() - self._began_s)}  {line}", style="bold")

    def pass_on(self, name: str, line: str) -> None:
        self._print(f"[{name}] {line}")

    def show(self, rows: Callable[[], Sequence[Row]]) -> None:
        if time.monotonic() - self._drawn_s >= TABLE_EVERY_S:
            self._drawn_s = time.monotonic()
            self._live.update(table_of(rows()), refresh=True)

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(text, markup=False, soft_wrap=True, style=style)


def table_of(rows: Sequence[Row]) -> RichTable:
    """Return the rich table of the groups."""
    table = RichTable(box=box.SIMPLE_HEAD)
    for heading in ("group", "state", "phase"):
        table.add_column(heading, no_wrap=True)
    for heading in ("for", "step", "starts", "pids"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.group,
            row.state,
            row.phase or "-",
            "-" if row.phase_s is None else f"{row.phase_s:.0f} s",
            str(row.step) if row.step else "-",
            str(row.starts),
            " ".join(map(str, row.pids)) or "-",
            style={"runs": "green", "done": "bold green", "given up": "bold red"}.get(row.state, "yellow"),
        )
    return table


def stamp(seconds: float) -> str:
    """Return a duration for the start of a line."""
    return f"{seconds:6.1f} s"


class LogTail:
    """Reads the new lines of a log file. Of a line that is drawn again and again, its last state is shown."""

    def __init__(self, path: Path, start_bytes: int = 0) -> None:
        """`start_bytes`: where new bytes begin."""
        self._path = path
        self._offset_bytes = start_bytes
        self._part = b""  # of a line without its end
        self._left_out_bytes = 0  # of that line

    def lines(self, *, last: bool = False) -> list[str]:
        """Return the whole new lines; with `last`, also one without an end."""
        lines = self._skip() if last else []
        *whole, part = self._read(LAST_BYTES if last else MOST_BYTES).split(b"\n")
        for text in whole:
            self._add(text)
            lines.append(self._taken())
        self._add(part)
        if last and self._part:
            lines.append(self._taken())
        return lines

    def _add(self, text: bytes) -> None:
        self._part += text
        if len(self._part) > LONGEST_LINE_BYTES:
            self._left_out_bytes += len(self._part) - LONGEST_LINE_BYTES
            self._part = self._part[:LONGEST_LINE_BYTES]

    def _taken(self) -> str:
        text = self._part.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        more = f" ... ({self._left_out_bytes} more bytes are in the log)" if self._left_out_bytes else ""
        self._part, self._left_out_bytes = b"", 0
        return text + more

    def _skip(self) -> list[str]:
        """Leave out all but the last new bytes; return a line about that."""
        left_out_bytes = self._size_bytes() - self._offset_bytes - LAST_BYTES
        if left_out_bytes <= 0:
            return []
        self._offset_bytes += left_out_bytes
        self._part, self._left_out_bytes = b"", 0
        return [f"... ({left_out_bytes} bytes are left out here, and are in {self._path.name})"]

    def _size_bytes(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return self._offset_bytes

    def _read(self, most_bytes: int) -> bytes:
        """Return the new bytes. A log that cannot be read now, as on a file server that is away, is read later."""
        size_bytes = self._size_bytes()
        if size_bytes < self._offset_bytes:  # as `copytruncate` of logrotate does it
            self._offset_bytes, self._part = 0, b""
        if size_bytes == self._offset_bytes:
            return b""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset_bytes)
                new = file.read(most_bytes)
        except OSError:
            return b""
        self._offset_bytes += len(new)
        return new
