"""The manual as a site: it builds without a warning, and the links within it and beside it lead somewhere."""

import html.parser
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import jaxft
import jaxft.data
from tests import patience
from tests.test_docs import PAGES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ANCHORED = re.compile(r"\]\(([^)\s:]*)#([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)


class Page(html.parser.HTMLParser):
    """The links of a page, and what others can link to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.anchors |= {each for each in (named.get("id"), named.get("name")) if each}
        self.links |= {each for each in (named.get("href"), named.get("src")) if each}


def broken(site: Path) -> list[str]:
    """The links from page to page and within pages that lead nowhere."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = pages[target].anchors if target in pages else set[str]()
            if not target.exists() or (target in pages and parts.fragment not in {"", *anchors}):
                found.append(f"{path.relative_to(site)}: {link}")
    return found


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
    anchors = Page(text).anchors
    return [name for name in names if not name.startswith("_") and f"{module}.{name}" not in anchors]


@pytest.mark.long
@pytest.mark.processes
def test_the_site_builds_without_a_warning_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = patience.run(
        [*command, "-d", tmp_path / "doctrees", DOCS, site], capture_output=True, text=True, limit_s=100.0
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert broken(site) == []
    pages = {path.stem for path in DOCS.glob("*.md")}
    assert pages <= {path.stem for path in site.glob("*.html")}
    reference, data = ((site / f"{name}.html").read_text() for name in ("reference", "data"))
    assert undescribed(reference, "jaxft", set(jaxft.__all__) - {"data"}) == []
    assert undescribed(data, "jaxft.data", jaxft.data.__all__) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_heading_that_a_page_links_to_exists(page: Path) -> None:
    assert lost_anchors(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="here"></h1><a href="#here">1</a><a href="b.html#there">2</a><a href="b.html#gone">3</a>'
        '<a href="#gone">4</a><img src="no.png"><a href="https://jax.dev/#x">5</a><a href="b.html">6</a>'
    )
    (tmp_path / "b.html").write_text('<p id="there"></p><a href="c.html">7</a>')
    assert broken(tmp_path) == ["a.html: #gone", "a.html: b.html#gone", "a.html: no.png", "b.html: c.html"]


def test_lost_headings_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "# A `b`, c\n\n[1](#a-b-c) [2](#gone) [3](b.md#of-b) [4](b.md#c) [5](b.md#d)\n"
    )
    (tmp_path / "b.md").write_text("# B\n\n## Of b\n\n(d)=\n```sh\n# c\n```\n")
    assert lost_anchors(tmp_path / "a.md") == ["#gone", "b.md#c"]


def test_a_name_without_a_description_is_found() -> None:
    assert undescribed('<dt id="jaxft.a">', "jaxft", ["a", "b", "__version__"]) == ["b"]
