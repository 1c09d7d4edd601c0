"""axe-core, which checks a page for those who use a keyboard or a screen reader."""

from pathlib import Path

import axe_playwright_python
from playwright.sync_api import Page


def problems(page: Page) -> list[tuple[str, list[str]]]:
    """What axe finds wrong with a page as it is now, with the elements. The page needs `bypass_csp`."""
    source = next(Path(axe_playwright_python.__path__[0]).rglob("axe.min.js")).read_text()
    page.evaluate(source)
    found = page.evaluate("axe.run()")
    assert len(found["passes"]) > 15, "axe has looked at too little"
    return [(each["id"], [node["html"] for node in each["nodes"]]) for each in found["violations"]]
