"""The parts of the tests: `make test` runs the guarantees and every room's values, other targets the rest.

A file that docs/guarantees.md names runs in `make test`, wherever it is.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Each part: the folders and files of its tests. A marker of that name selects it.
PARTS = {
    "launcher": ("launch", "chaos", "check", "figures", "plan"),
    "manual": ("manual", "deployment", "test_docs.py", "test_porting.py", "test_readme.py", "test_words.py"),
    "examples": ("examples", "loops", "accelerator"),
}


def named_tests(text: str) -> set[Path]:
    """Return the files and folders of tests that a page names, with their folder or without."""
    found: set[Path] = set()
    for name in re.findall(r"`(tests/[\w/.]+|test_\w+\.py)(?:::\w+)?`", text):
        found.update([ROOT / name] if name.startswith("tests/") else (ROOT / "tests").rglob(name))
    return found


def promised() -> set[Path]:
    """Return what docs/guarantees.md names."""
    return named_tests((ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8"))


def part_of(path: Path, named: set[Path]) -> str:
    """Return the part that a file of tests belongs to; "" for `make test`."""
    if path in named or not path.is_relative_to(ROOT / "tests"):
        return ""
    top = path.relative_to(ROOT / "tests").parts[0]
    return next((part for part, tops in PARTS.items() if top in tops), "")
