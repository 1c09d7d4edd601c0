"""What the person in front of it sees: a live table on a terminal, plain lines otherwise."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Protocol, Self

from jaxft._launch._checks import LaunchError

# A plain progress line stands at every so many committed steps, unless another measure is asked for.
PLAIN_EVERY_STEPS = 10
LIVE_EVERY_S = 0.125


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """A group as it stands."""

    group: str
    pid: int
    launches: int
    state: str
    step: int = 0
    loss: float | None = None
    shards: tuple[int, ...] = ()
    step_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A run as it stands."""

    title: str
    step: int
    planned_steps: int
    loss: float | None
    participating: int
    quorum_id: int | None
    kills: int
    planned_kills: int
    rows: tuple[GroupRow, ...]


class Display(Protocol):
    """Shows a run. `say` adds a line that stays; `show` brings what is shown of the run up to date."""

    def say(self, text: str) -> None: ...

    def show(self, view: View) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def make_display(stream: IO[str], *, name: str, every_steps: int = PLAIN_EVERY_STEPS) -> Display:
    """Return the display that suits the stream. `name` stands at the head of plain lines, and of
    the steps only one in `every_steps` gets such a line.

    Raises:
        LaunchError: it is a terminal, and rich is not installed.
    """
    return (
        LiveDisplay(stream) if stream.isatty() else PlainDisplay(stream, name=name, every_steps=every_steps)
    )


class PlainDisplay:
    """Lines, for files and pipes: each begins with the seconds since the start, and nothing is repeated."""

    def __init__(
        self,
        stream: IO[str],
        *,
        name: str,
        every_steps: int = PLAIN_EVERY_STEPS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._name = name
        self._every_steps = every_steps
        self._clock = clock
        self._began_s = clock()
        self._last: tuple[str, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.flush()

    def say(self, text: str) -> None:
        for line in text.splitlines():
            self._stream.write(
                f"[{self._name}] {stamp(self._clock() - self._began_s)}  {line}".rstrip() + "\n"
            )
        self._stream.flush()

    def show(self, view: View) -> None:
        mark = (view.title, view.step // self._every_steps)
        if view.step > 0 and mark != self._last:
            self._last = mark
            self.say(progress_line(view))


class LiveDisplay:
    """A table that renews itself in place, and above it the lines that stay."""

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        try:
            from rich.console import Console
            from rich.live import Live
        except ImportError as error:
            raise LaunchError(
                'The live table needs rich. Run: pip install "jaxft[llama3]" (or pipe the output through cat)'
            ) from error
        self._console = Console(file=stream, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._clock = clock
        self._began_s = clock()
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
            self._console.print(
                f"{stamp(self._clock() - self._began_s)}  {line}", markup=False, soft_wrap=True
            )

    def show(self, view: View) -> None:
        now_s = self._clock()
        if now_s - self._drawn_s >= LIVE_EVERY_S:
            self._drawn_s = now_s
            self._live.update(make_table(view, elapsed_s=now_s - self._began_s), refresh=True)


def make_table(view: View, *, elapsed_s: float) -> Any:
    """Return the rich table of a run."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=f"{view.title}   step {view.step}/{view.planned_steps}   kills {view.kills}/{view.planned_kills}",
        caption=f"{stamp(elapsed_s).strip()}   groups taking part {view.participating}/{len(view.rows)}",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
    )
    for heading in ("group", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("pid", "launches", "step", "loss", "s/step"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("shards", no_wrap=True)
    for row in view.rows:
        table.add_row(
            row.group,
            row.state,
            str(row.pid),
            str(row.launches),
            str(row.step) if row.step else "-",
            "-" if row.loss is None else f"{row.loss:.4f}",
            "-" if row.step_s is None else f"{row.step_s:.2f}",
            " ".join(str(shard) for shard in row.shards) or "-",
            style={"training": "green", "finished": "bold green"}.get(row.state, "yellow"),
        )
    return table


def progress_line(view: View) -> str:
    """Return the plain line of a step: the same fields at the same columns."""
    width = len(str(view.planned_steps))
    loss = "      -" if view.loss is None else f"{view.loss:7.4f}"
    quorum = "-" if view.quorum_id is None else view.quorum_id
    return (
        f"step {view.step:>{width}}/{view.planned_steps}  loss {loss}"
        f"  groups {view.participating}/{len(view.rows)}  quorum {quorum:>3}"
    )


def stamp(seconds: float) -> str:
    """Return a duration for the head of a line."""
    return f"{seconds:6.1f} s"
