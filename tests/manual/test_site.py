"""The manual as a site: it builds without a warning, which links that lead nowhere are, and tables are tables."""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import jaxft
import jaxft.data
from tests import patience
from tests.test_docs import PAGES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)


def undescribed(text: str, module: str, names: Iterable[str]) -> list[str]:
    """The public names of a module that a page of the reference leaves out."""
    return [name for name in names if not name.startswith("_") and f'id="{module}.{name}"' not in text]


def long_cells(text: str, most_words: int) -> list[str]:
    """The cells of a page's tables with more words: the reader of a table compares, and does not read."""
    rows = [line for line in FENCED.sub("", text).splitlines() if line.startswith("|")]
    cells = [cell.strip() for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    return [cell for cell in cells if len(cell.split()) > most_words]


@pytest.mark.long
@pytest.mark.processes
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = patience.run(
        [*command, "-d", tmp_path / "doctrees", DOCS, site], capture_output=True, text=True, limit_s=100.0
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.stem for path in DOCS.glob("*.md")}
    assert pages <= {path.stem for path in site.glob("*.html")}
    reference, data = ((site / f"{name}.html").read_text() for name in ("reference", "data"))
    assert undescribed(reference, "jaxft", set(jaxft.__all__) - {"data"}) == []
    assert undescribed(data, "jaxft.data", jaxft.data.__all__) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_cells_of_tables_are_short(page: Path) -> None:
    most_words = 30 if page.name == "protocol.md" else 40
    assert long_cells(page.read_text(encoding="utf-8"), most_words) == []


def test_a_long_cell_is_found() -> None:
    assert long_cells("| a b c | `d \\| e` f |\n```\n| a b c d e |\n```\na b c d e", 3) == ["`d \\| e` f"]


def test_a_name_without_a_description_is_found() -> None:
    assert undescribed('<dt id="jaxft.a">', "jaxft", ["a", "b", "__version__"]) == ["b"]
