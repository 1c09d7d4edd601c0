"""Turn results into pages of the manual: a table in Markdown and a plot for each benchmark.

python -m benchmarks all --json bench-results/all.json
python -m benchmarks.report bench-results/all.json docs/performance
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._result import figure

Json = dict[str, Any]
_COLOURS = {"ours": "#2b6cb0", "peer": "#b7791f", "limit": "#718096"}
_NAMES = {"ours": "jaxft", "peer": "TorchFT 0.2.0", "limit": "limit"}
MOST_BARS = 16


def main(arguments: Sequence[str] | None = None) -> int:
    source, folder = map(Path, sys.argv[1:] if arguments is None else arguments)
    found = json.loads(source.read_text(encoding="utf-8"))
    results: list[Json] = found if isinstance(found, list) else [found]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tables.md").write_text(tables(results), encoding="utf-8")
    for result in results:
        plot(result, folder / f"{result['name']}.svg")
    return 0


def tables(results: Sequence[Json]) -> str:
    """All results as Markdown: first the missed goals, then each benchmark with its plot and rows."""
    missed = [(result["name"], row) for result in results for row in result["rows"] if row["met"] is False]
    parts = [_machine(results[0]["machine"])]
    if missed:
        lines = [f"* `{name}`, {row['case']}: {_figures(row)}; goal {row['goal']}" for name, row in missed]
        parts.append("\n".join(["**Goals that were not reached:**", "", *lines]))
    for result in results:
        notes = "".join(f"\n\n{note}" for note in result["notes"])
        parts.append(
            f"### {result['name']}\n\n![{result['name']}]({result['name']}.svg)\n\n{_table(result['rows'])}{notes}"
        )
    return "\n\n".join(parts) + "\n"


def plot(result: Json, path: Path) -> None:
    """Bars for the rows with a comparison, or for all if there are none; on a logarithmic scale."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "jaxft"  # the same figures give the same file
    from matplotlib import pyplot

    compared = [row for row in result["rows"] if row["peer"] is not None or row["limit"] is not None]
    rows = (compared or result["rows"])[:MOST_BARS]
    ways = [way for way in _NAMES if any(row[way] for row in rows)]
    figure, axes = pyplot.subplots(figsize=(9, 1.0 + 0.22 * len(rows) * len(ways)))
    for number, way in enumerate(ways):
        at = [index + (number - (len(ways) - 1) / 2) * 0.8 / len(ways) for index in range(len(rows))]
        values = [row[way] or 0.0 for row in rows]
        axes.barh(at, values, height=0.75 / len(ways), color=_COLOURS[way], label=_NAMES[way])
    axes.set_yticks(range(len(rows)), [f"{row['case']}, {row['unit']}" for row in rows])
    axes.invert_yaxis()
    if all(row[way] is None or row[way] > 0 for row in rows for way in ways):
        axes.set_xscale("log")
    axes.set_title(f"{result['name']}: less is better", loc="left")
    axes.legend(loc="best")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _machine(machine: Json) -> str:
    versions = ", ".join(
        f"{name} {machine[name]}" for name in ("python", "jax", "numpy", "grpcio") if machine[name]
    )
    return (
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, Linux {machine['kernel']}; "
        f"{versions}."
    )


def _table(rows: Sequence[Json]) -> str:
    head = ["case", "unit", "jaxft", "TorchFT", "limit", "of TorchFT", "of limit", "spread", "goal"]
    lines = [head, ["---", "---", *["---:"] * 6, "---"]]
    for row in rows:
        goal = {True: f"{row['goal']}: reached", False: f"**{row['goal']}: missed**", None: row["goal"]}
        spread = "" if row["spread"] is None else f"{row['spread']:.0%}"
        lines.append(
            [
                row["case"],
                row["unit"],
                *(figure(row[way]) for way in _NAMES),
                *(figure(row[f"ratio_to_{way}"]) for way in ("peer", "limit")),
                spread,
                goal[row["met"]],
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _figures(row: Json) -> str:
    parts = [f"{_NAMES[way]} {figure(row[way])} {row['unit']}" for way in _NAMES if row[way] is not None]
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
