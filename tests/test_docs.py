"""Every file, test and page that the docs name exists."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import parts

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(ROOT.glob("*/README.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
]
# Of the repository: a path in backticks that begins in a folder of these.
PATH = re.compile(
    r"`((?:protocol|coordinator|launcher|jaxft|lane|docs|tests|examples|benchmarks|lab|deploy)/[\w./-]+)(?:::\w+)?`"
)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
PAGE = re.compile(r"\{doc\}`([\w-]+)`")
# The key under which a coordinator leads in etcd.
NO_PATH = {"jaxft/leader"}


def missing(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    yield from (path for path in PATH.findall(text) if path not in NO_PATH and not (ROOT / path).exists())
    yield from (path for path in LINK.findall(text) if not (page.parent / path).exists())
    yield from (name for name in PAGE.findall(text) if not (ROOT / "docs" / f"{name}.md").exists())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    assert list(missing(page)) == []


def test_a_path_that_does_not_exist_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`jaxft/_gone.py` [gone](gone.py) {doc}`gone` `jaxft/__init__.py` [web](https://jax.dev)")
    assert list(missing(page)) == ["jaxft/_gone.py", "gone.py", "gone"]


def test_no_guarantee_waits_for_the_long_tests() -> None:
    page = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    assert len(parts.promised()) > 30
    single = re.compile(r"`([\w/.]+\.py)::(\w+)`")
    whole = parts.named_tests(single.sub("", page))
    files = {path for path in whole if path.is_file()}
    # A test of which only some parameters are long still runs.
    long = re.compile(r"^(@pytest\.mark\.long|pytestmark = .*mark\.long)", re.MULTILINE)
    assert [path for path in sorted(files) if long.search(path.read_text(encoding="utf-8"))] == []
    for folder in whole - files:
        texts = [path.read_text(encoding="utf-8") for path in folder.glob("test_*.py")]
        assert any("mark.long" not in text for text in texts), f"all of {folder} is long"
    for name, test in single.findall(page):
        for path in parts.named_tests(f"`{name}`"):
            before, found, _ = path.read_text(encoding="utf-8").partition(f"def {test}(")
            assert not found or not long.search(before.rpartition("\n\n\n")[2]), f"{name}::{test} is long"
