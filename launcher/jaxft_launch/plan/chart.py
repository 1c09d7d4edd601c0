"""A chart of a plan as SVG: goodput against scale and against the time between failures, with break-evens."""

import math
from collections.abc import Callable
from dataclasses import replace
from html import escape

from jaxft_launch.plan.forecast import DROPPED, RESTART, Forecast, goodput

# As the benchmarks' charts draw jaxft, TorchFT and the limit.
_COLOURS = {RESTART: "#718096", DROPPED: "#b7791f"}
_BLUES = ("#2b6cb0", "#4299e1", "#90cdf4")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BELOW = 460, 250, 50, 34, 80
_POINTS = 60


def chart(found: Forecast, measured: float | None = None) -> str:
    """Return an SVG of a plan; `measured`: a run's goodput, a dot in both panels."""
    job, names = found.job, [each.name for each in found.outcomes]
    evens = {f"{each.winner} over {each.loser}": each.time_days for each in found.break_evens}
    marks = {name: days for name, days in evens.items() if days is not None and math.isfinite(days)}
    days = job.mtbf_node_days
    scale = _Panel(0, max(1.0, job.groups / 8), job.groups * 8.0)
    rate = _Panel(_HEIGHT + _BELOW, days / 1000, days * 10)
    dots = [] if measured is None else [scale.dot(job.groups, measured), rate.dot(days, measured)]
    drawn = (
        scale.axes("goodput against the number of groups")
        + scale.lines(names, lambda name, x: goodput(name, replace(job, groups=max(1, round(x))))),
        rate.axes("goodput against the days between failures of a node", marks)
        + rate.lines(names, lambda name, x: goodput(name, replace(job, mtbf_node_days=x))),
    )
    size = f'width="{_LEFT + _WIDTH + 190}" height="{2 * (_HEIGHT + _BELOW)}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join((*drawn, *dots))}</svg>\n'
    )


class _Panel:
    """Lines over a logarithmic axis."""

    def __init__(self, top: float, low: float, high: float) -> None:
        self.top, self.low, self.high = top + _TOP, low, high

    def at(self, x: float, y: float) -> tuple[float, float]:
        share = math.log(x / self.low) / math.log(self.high / self.low)
        return round(_LEFT + _WIDTH * share, 1), round(self.top + _HEIGHT * (1.0 - min(1.0, max(0.0, y))), 1)

    def axes(self, title: str, marks: dict[str, float] | None = None) -> str:
        parts = [_text(_LEFT, self.top - 12, title)]
        for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
            x, y = self.at(self.low, share)
            parts += [_line(x, y, x + _WIDTH, y, 'stroke="#e2e8f0"'), _text(10, y + 4, f"{share:.0%}")]
        for power in range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1):
            x, y = self.at(10.0**power, 0.0)
            parts.append(_text(x - 8, y + 16, f"{10.0**power:g}"))
        for name, days in (marks or {}).items():
            if self.low < days < self.high:
                x, y = self.at(days, 0.0)
                label = f"<title>{escape(name)}: {days:.3g} days</title>"
                parts.append(_line(x, self.top, x, y, 'stroke="#a0aec0" stroke-dasharray="3"', label))
        return "".join(parts)

    def lines(self, names: list[str], value: Callable[[str, float], float]) -> str:
        parts: list[str] = []
        xs = [self.low * (self.high / self.low) ** (number / _POINTS) for number in range(_POINTS + 1)]
        for number, name in enumerate(names):
            colour = _COLOURS.get(name) or _BLUES[(number - 2) % len(_BLUES)]
            points = " ".join(f"{x},{y}" for x, y in (self.at(x, value(name, x)) for x in xs))
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
            parts.append(_text(_LEFT + _WIDTH + 12, self.top + 14 + 16 * number, name, colour))
        return "".join(parts)

    def dot(self, x: float, y: float) -> str:
        x, y = self.at(x, y)
        return f'<circle cx="{x}" cy="{y}" r="4" fill="#c53030"><title>measured</title></circle>'


def _text(x: float, y: float, text: str, colour: str = "#1a202c") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}">{escape(text)}</text>'


def _line(x: float, y: float, to_x: float, to_y: float, style: str, label: str = "") -> str:
    return f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" {style}>{label}</line>'
