"""The manual as a site: it builds without a warning, headings that are linked to exist, and tables are tables."""

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
ANCHORED = re.compile(r"\]\(([^)\s:]*)#([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)


def headings(text: str) -> set[str]:
    """The anchors that GitHub and MyST make of a page's headings."""
    titles = re.findall(r"^#+ +(.+?) *$", FENCED.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def lost_anchors(page: Path) -> list[str]:
    """The links of a page of the repository to headings that do not exist."""
    text = page.read_text(encoding="utf-8")
    found = []
    for name, anchor in ANCHORED.findall(FENCED.sub("", text)):
        target = page.parent / name if name else page
        labels = re.findall(r"^\(([\w-]+)\)=$", target.read_text(encoding="utf-8"), re.M)
        if target.suffix == ".md" and anchor not in {*headings(target.read_text(encoding="utf-8")), *labels}:
            found.append(f"{name}#{anchor}")
    return found


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
def test_every_heading_that_a_page_links_to_exists(page: Path) -> None:
    assert lost_anchors(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_cells_of_tables_are_short(page: Path) -> None:
    most_words = 30 if page.name == "protocol.md" else 40
    assert long_cells(page.read_text(encoding="utf-8"), most_words) == []


def test_a_long_cell_is_found() -> None:
    assert long_cells("| a b c | `d \\| e` f |\n```\n| a b c d e |\n```\na b c d e", 3) == ["`d \\| e` f"]


def test_lost_headings_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "# A `b`, c\n\n[1](#a-b-c) [2](#gone) [3](b.md#of-b) [4](b.md#c) [5](b.md#d)\n"
    )
    (tmp_path / "b.md").write_text("# B\n\n## Of b\n\n(d)=\n```sh\n# c\n```\n")
    assert lost_anchors(tmp_path / "a.md") == ["#gone", "b.md#c"]


def test_a_name_without_a_description_is_found() -> None:
    assert undescribed('<dt id="jaxft.a">', "jaxft", ["a", "b", "__version__"]) == ["b"]
