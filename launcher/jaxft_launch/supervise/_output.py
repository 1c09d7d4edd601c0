"""What a launch shows: lines, and on a terminal also a table of its groups."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

from jaxft_launch.storm._display import PlainLines, stamp

# No more of a log is read in one turn, since the launcher supervises nothing meanwhile.
MOST_BYTES = 1 << 20
# No more is read at the end of its process. What lies before that is only in the log.
LAST_BYTES = 4 << 20
# More than this of a line is not shown.
LONGEST_LINE_BYTES = 16 << 10
# How often a line is shown that is drawn again and again.
DRAWN_EVERY_S = 5.0
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
    """Return lines and a table for a terminal if rich is installed, and else lines."""
    if not stream.isatty():
        return Lines(stream)
    try:
        return Table(stream)
    except ImportError:
        lines = Lines(stream)
        lines.say('For a live table of the groups, run: pip install "jaxft[launch]"')
        return lines


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
        from rich.console import Console
        from rich.live import Live

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


def table_of(rows: Sequence[Row]) -> Any:
    """Return the rich table of the groups."""
    from rich import box
    from rich.table import Table as RichTable

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


class LogTail:
    """Reads the new lines of a log file.

    A progress bar draws its line again and again, each time after a carriage return. Of these, one is shown every few
    seconds, and the last.
    """

    def __init__(
        self, path: Path, start_bytes: int = 0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`start_bytes`: where what is new begins."""
        self._path = path
        self._offset_bytes = start_bytes
        self._clock = clock
        self._line = _Line()
        # A carriage return came last: it belongs to a line end, or the line is drawn again.
        self._returned = False
        self._drawn: _Line | None = None  # as the line was before it was drawn again; None if that was shown
        self._shown_s = float("-inf")

    def lines(self, *, last: bool = False) -> list[str]:
        """Return the whole new lines; with `last`, also one without an end."""
        lines = self._skip() if last else []
        *whole, part = self._read(LAST_BYTES if last else MOST_BYTES).split(b"\n")
        for text in whole:
            self._add(text)
            lines.append(self._line.text())
            self._begin()
        self._add(part)
        if last and (self._line.head or self._drawn):
            lines.append(self._line.text() if self._line.head else str(self._drawn and self._drawn.text()))
            self._begin()
        elif self._drawn and self._clock() - self._shown_s >= DRAWN_EVERY_S:
            lines.append(self._drawn.text())
            self._drawn, self._shown_s = None, self._clock()
        return lines

    def _begin(self) -> None:
        self._line, self._returned, self._drawn = _Line(), False, None

    def _add(self, text: bytes) -> None:
        """Add to the line, or draw it again."""
        if not text:
            return
        if self._returned:
            text = b"\r" + text
        self._returned = text.endswith(b"\r")
        before, returned, newest = text.rstrip(b"\r").rpartition(b"\r")
        if returned:
            _, earlier, drawn = before.rpartition(b"\r")
            line = _Line() if earlier else self._line
            line.add(drawn)
            self._drawn = line if line.head else self._drawn
            self._line = _Line()
        self._line.add(newest)

    def _skip(self) -> list[str]:
        """Leave out all but the last of what is new; return a line that says so."""
        left_out_bytes = self._size_bytes() - self._offset_bytes - LAST_BYTES
        if left_out_bytes <= 0:
            return []
        self._offset_bytes += left_out_bytes
        self._begin()
        return [f"... ({left_out_bytes} bytes are left out here, and are in {self._path.name})"]

    def _size_bytes(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return self._offset_bytes

    def _read(self, most_bytes: int) -> bytes:
        """Return what is new. A log that cannot be read now, as on a file server that is away, is read later."""
        size_bytes = self._size_bytes()
        if size_bytes < self._offset_bytes:  # as `copytruncate` of logrotate does it
            self._offset_bytes = 0
            self._begin()
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


class _Line:
    """A line of a log so far, up to a limit."""

    def __init__(self) -> None:
        self.head = b""
        self._left_out_bytes = 0

    def add(self, text: bytes) -> None:
        fits = text[: LONGEST_LINE_BYTES - len(self.head)]
        self.head += fits
        self._left_out_bytes += len(text) - len(fits)

    def text(self) -> str:
        more = f" ... ({self._left_out_bytes} more bytes are in the log)" if self._left_out_bytes else ""
        return self.head.decode(errors="replace") + more
