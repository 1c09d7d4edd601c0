"""A live table on a terminal; elsewhere the plain lines of `jaxft chaos`."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import IO, Any, Self

from jaxft_launch.processes._checks import LaunchError
from jaxft_launch.storm._display import PLAIN_EVERY_STEPS, Display, PlainDisplay, View, stamp

LIVE_EVERY_S = 0.125


def make_display(stream: IO[str], *, name: str, every_steps: int = PLAIN_EVERY_STEPS) -> Display:
    """Return the display for the stream. Plain lines start with `name`, and only one step in
    `every_steps` gets a line.

    Raises:
        LaunchError: it is a terminal, and rich is not installed.
    """
    return (
        LiveDisplay(stream) if stream.isatty() else PlainDisplay(stream, name=name, every_steps=every_steps)
    )


class LiveDisplay:
    """A table that is updated in place, below the permanent lines."""

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        try:
            from rich.console import Console
            from rich.live import Live
        except ImportError as error:
            raise LaunchError(
                'The live table needs rich. Run: pip install -e ".[llama3]" (or pipe the output through cat)'
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
