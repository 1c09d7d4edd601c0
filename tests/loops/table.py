"""The table in docs/porting.md: one row for each loop."""

from pathlib import Path

from tests.loops.loop import Loop
from tests.loops.run import Outcome

PAGE = Path(__file__).parents[2] / "docs" / "porting.md"
BEGIN, END = "<!-- loops: begin -->\n", "<!-- loops: end -->\n"
HEAD = "| loop | source | lines | kills | steps | bits |\n| --- | --- | --- | --- | --- | --- |\n"


def row(loop: Loop, outcome: Outcome) -> str:
    source = f"[{loop.package or loop.header['path'].rsplit('/', 1)[-1]}]({loop.url})"
    bits = "the same" if outcome.same_bits else "**other**"
    cells = (
        loop.header["title"],
        source,
        f"+{loop.added} -{loop.removed}",
        outcome.kills,
        outcome.steps,
        bits,
    )
    return f"| {' | '.join(map(str, cells))} |"


def rows(text: str) -> dict[str, str]:
    """Return the rows of the table in the page's text, by their first cell."""
    inside = text.split(BEGIN)[1].split(END)[0]
    found = [line for line in inside.removeprefix(HEAD).splitlines() if line]
    return {line.split(" | ")[0].removeprefix("| "): line for line in found}


def write_table(new: dict[str, str], page: Path = PAGE) -> None:
    """Write these rows into the page, and leave the others as they are."""
    text = page.read_text()
    kept = rows(text) | rows(BEGIN + HEAD + "\n".join(new.values()) + "\n" + END)
    lines = "\n".join(kept[name] for name in sorted(kept))
    before, rest = text.split(BEGIN)
    page.write_text(f"{before}{BEGIN}{HEAD}{lines}\n{END}{rest.split(END)[1]}")
