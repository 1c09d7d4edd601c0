"""One loop: where its source comes from, and the lines of ours that change it.

A file in `edits/` holds a header, `name: value` on each line, and two lists of edits, after the lines `== sizes` and
`== jaxft`. The header names a repository, a commit and a path; or a package of PyPI, what else it needs, and the path
in it. Sizes make the loop short enough for a CPU, or replace what needs a download; they do not count. An edit names
lines of the original and holds only our lines, as an ed script does:

    12c          replace line 12 (or 12,14c) by the lines that follow, up to a single dot
    12a          add the lines that follow, up to a single dot, after line 12
    12,14d       delete lines
    12,14>2      indent lines by two spaces; does not count, as in `diff -w`
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

EDITS = Path(__file__).with_name("edits")
_COMMAND = re.compile(r"(\d+)(?:,(\d+))?([acd>])(\d*)")


@dataclass(frozen=True)
class Edit:
    """A change of the lines `first` to `last`, counted from 1."""

    first: int
    last: int
    kind: str
    lines: tuple[str, ...] = ()
    spaces: int = 0

    @property
    def removed(self) -> int:
        return self.last - self.first + 1 if self.kind in "cd" else 0


@dataclass(frozen=True)
class Loop:
    name: str
    header: dict[str, str]
    sizes: tuple[Edit, ...]
    ours: tuple[Edit, ...]

    @property
    def added(self) -> int:
        """The lines that we add or put in place of others. Blank lines, and indented ones, do not count."""
        return sum(bool(line.strip()) for edit in self.ours for line in edit.lines)

    @property
    def removed(self) -> int:
        """Lines of the original that were replaced or deleted."""
        return sum(edit.removed for edit in self.ours)

    @property
    def goal(self) -> int:
        return int(self.header.get("goal", "10"))

    @property
    def package(self) -> str | None:
        """The package of PyPI that the loop is a module of, as `name==version`; None if it is in a repository."""
        return self.header.get("package")

    @property
    def url(self) -> str:
        """Where to read the original."""
        if self.package is not None:
            return f"https://pypi.org/project/{self.package.replace('==', '/')}/"
        return f"https://github.com/{self.header['repo']}/blob/{self.header['commit']}/{self.header['path']}"

    def paths(self) -> tuple[str, ...]:
        """The paths of the loop and of the modules that it imports from its repository or package."""
        return (self.header["path"], *self.header.get("also", "").split())

    def edited(self, source: str) -> str:
        """Return the loop, on jaxft, from its source."""
        return "\n".join(apply((*self.sizes, *self.ours), source.split("\n")))


def loops() -> list[Loop]:
    return [read_loop(path) for path in sorted(EDITS.glob("*.edits"))]


def read_loop(path: Path) -> Loop:
    head, sizes, ours = re.split(r"^== (?:sizes|jaxft)$\n", path.read_text(), flags=re.MULTILINE)
    header = dict(line.split(": ", 1) for line in head.splitlines() if line)
    return Loop(path.stem, header, tuple(parse(sizes)), tuple(parse(ours)))


def parse(script: str) -> Iterator[Edit]:
    """Yield the edits of a script.

    Raises:
        ValueError: for a line that is no command, or lines without the dot that ends them.
    """
    rest = iter(script.splitlines())
    for line in rest:
        if not line:
            continue
        found = _COMMAND.fullmatch(line)
        if found is None:
            raise ValueError(f"{line!r} is no command of an edit script")
        first, last, kind, spaces = found.groups()
        lines: list[str] = []
        if kind in "ac":
            for line in rest:
                if line == ".":
                    break
                lines.append(line)
            else:
                raise ValueError(f"no dot ends the lines of {found.group()!r}")
        yield Edit(int(first), int(last or first), kind, tuple(lines), int(spaces or 0))


def apply(edits: Sequence[Edit], lines: list[str]) -> list[str]:
    """Return the lines with all edits made. Their numbers refer to the original."""
    lines = list(lines)
    for edit in edits:
        if not edit.last <= len(lines):
            raise ValueError(f"there is no line {edit.last}: the source has {len(lines)}")
    # Indent first, while every line is where the numbers say; then from the end to the beginning.
    for edit in edits:
        if edit.kind == ">":
            for number in range(edit.first - 1, edit.last):
                lines[number] = " " * edit.spaces + lines[number] if lines[number] else ""
    for edit in sorted((edit for edit in edits if edit.kind != ">"), key=lambda edit: -edit.first):
        begin = edit.first if edit.kind == "a" else edit.first - 1
        lines[begin : edit.last] = edit.lines
    return lines


def python_of(source: str, path: str) -> str:
    """Return a source as a Python file: of a notebook its code, without commands of the shell."""
    if not path.endswith(".ipynb"):
        return source
    cells = ["".join(cell["source"]) for cell in json.loads(source)["cells"] if cell["cell_type"] == "code"]
    code = "\n\n".join(cell.rstrip("\n") for cell in cells if cell)
    return re.sub(r"^([ \t]*)([!%])", r"\1# \2", code, flags=re.MULTILINE) + "\n"
