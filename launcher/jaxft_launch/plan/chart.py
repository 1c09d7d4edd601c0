"""Charts of a plan as SVG: goodput against scale and against the time between failures, with break-evens."""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jaxft_launch.plan.forecast import DROPPED, RESTART, Forecast, goodput

# jaxft, TorchFT and the limit in the benchmarks' charts, and shades of the first.
_COLOURS = {RESTART: "#718096", DROPPED: "#b7791f"}
_BLUES = ("#2b6cb0", "#4299e1", "#90cdf4")
_WIDTH, _HEIGHT, _LEFT, _TOP = 460, 250, 50, 34
_POINTS = 60


@dataclass(frozen=True, slots=True)
class _Panel:
    """`marks`: vertical lines; `dots`: measured values, as (x, y)."""

    title: str
    low: float
    high: float
    value: Callable[[str, float], float]
    marks: Sequence[tuple[str, float]] = ()
    dots: Sequence[tuple[float, float]] = ()


def chart(found: Forecast, measured: float | None = None) -> str:
    """Return an SVG of a plan; `measured`: a run's goodput, a dot in both panels."""
    job = found.job
    evens = [
        (f"{each.winner} over {each.loser}", each.time_days)
        for each in found.break_evens
        if each.time_days is not None and math.isfinite(each.time_days)
    ]
    days = job.mtbf_node_days
    panels = (
        _Panel(
            "goodput against the number of groups",
            max(1.0, job.groups / 8),
            job.groups * 8.0,
            lambda name, groups: goodput(name, replace(job, groups=max(1, round(groups)))),
            dots=[] if measured is None else [(job.groups, measured)],
        ),
        _Panel(
            "goodput against the days between failures of a node, with break-evens",
            days / 1000,
            days * 10,
            lambda name, at: goodput(name, replace(job, mtbf_node_days=at)),
            marks=evens,
            dots=[] if measured is None else [(days, measured)],
        ),
    )
    names = [each.name for each in found.outcomes]
    drawn = "".join(_panel(panel, names, place) for place, panel in enumerate(panels))
    width, height = _LEFT + _WIDTH + 190, len(panels) * (_HEIGHT + 80)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>{drawn}</svg>\n'
    )


def _panel(panel: _Panel, names: Sequence[str], place: int) -> str:
    top = place * (_HEIGHT + 80) + _TOP

    def at(x: float, y: float) -> tuple[float, float]:
        share = math.log(x / panel.low) / math.log(panel.high / panel.low)
        return _LEFT + _WIDTH * share, top + _HEIGHT * (1.0 - min(1.0, max(0.0, y)))

    parts = [_text(_LEFT, top - 12, panel.title)]
    for tenth in range(0, 11, 2):
        x, y = at(panel.low, tenth / 10)
        parts += [_line(x, y, x + _WIDTH, "#e2e8f0"), _text(10, y + 4, f"{10 * tenth} %")]
    for power in range(math.ceil(math.log10(panel.low)), math.floor(math.log10(panel.high)) + 1):
        x, y = at(10.0**power, 0.0)
        parts.append(_text(x - 8, y + 16, f"{10.0**power:g}"))
    for label, mark in panel.marks:
        if panel.low < mark < panel.high:
            x, y = at(mark, 0.0)
            line = f'x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{y:.1f}" stroke="#a0aec0" stroke-dasharray="3"'
            parts.append(f"<line {line}><title>{html.escape(label)}: {mark:.3g}</title></line>")
    for number, name in enumerate(names):
        colour = _COLOURS.get(name) or _BLUES[(number - 2) % len(_BLUES)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(x, panel.value(name, x)) for x in _xs(panel)))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(_LEFT + _WIDTH + 12, top + 14 + 16 * number, name, colour))
    for dot in panel.dots:
        x, y = at(*dot)
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#c53030"><title>measured</title></circle>'
        )
    return "".join(parts)


def _xs(panel: _Panel) -> list[float]:
    return [panel.low * (panel.high / panel.low) ** (number / _POINTS) for number in range(_POINTS + 1)]


def _text(x: float, y: float, text: str, colour: str = "#1a202c") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}">{html.escape(text)}</text>'


def _line(x: float, y: float, to_x: float, colour: str) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{y:.1f}" stroke="{colour}"/>'
