"""The page of a job of 300 groups, in a real browser."""

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect

from tests import patience
from tests.clusters import cluster
from tests.operate import browser, many, port
from tests.operate.browser import PATIENCE_MS

pytestmark = [pytest.mark.processes, pytest.mark.browser]
expect.set_options(timeout=PATIENCE_MS)
GROUPS = 300
# One process speaks for all groups: on a busy machine it may be late with the heartbeats of some.
HEARTBEAT_TIMEOUT_MS = 30_000
# Whether a row lies within the window, and within its table's part of it.
SEEN = """row => {
  const at = row.getBoundingClientRect(), region = row.closest("[role=region]").getBoundingClientRect();
  return at.top >= Math.max(0, region.top) && at.bottom <= Math.min(innerHeight, region.bottom);
}"""


@pytest.mark.long
def test_300_groups_are_all_within_reach_on_a_desk_and_on_a_phone(tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        web = port.start(here, "--heartbeat-timeout-ms", str(HEARTBEAT_TIMEOUT_MS))
        with many.voting(here, GROUPS), browser.page(web.url) as (page, errors):
            rows = page.locator("#groups tr")
            expect(rows).to_have_count(GROUPS)
            expect(page.locator("#facts")).to_contain_text(f"{GROUPS} of {GROUPS} places")
            names = page.locator("#groups th").all_text_contents()
            assert len(set(names)) == GROUPS
            assert set(names) == {each["group"] for each in web.json("/api/v1/jobs/rendezvous")["group_list"]}
            for width in (1280, 360):
                page.set_viewport_size({"width": width, "height": 740})
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                region = page.get_by_role("region", name="Groups")
                assert region.evaluate("table => table.scrollWidth <= table.clientWidth"), width
                for row in (rows.first, rows.nth(GROUPS // 2), rows.last):
                    comes_into_view(row, row.scroll_into_view_if_needed)

            region.evaluate("table => table.scrollTo(0, 0)")

            def to_the_end() -> None:
                region.press("End")  # a region that is at its end scrolls the page to the page's end
                region.scroll_into_view_if_needed()

            comes_into_view(rows.last, to_the_end)

            page.get_by_label("Filter").fill(names[-1])
            expect(page.locator("#groups tr:visible")).to_have_count(1)
            expect(page.locator("#groups tr:visible th")).to_have_text(names[-1])
            step = page.locator("#facts div", has_text="Step").locator("dd")
            before = step.text_content()
            assert before is not None
            expect(step).not_to_have_text(before)  # the page goes on showing what happens
    assert errors == []


def comes_into_view(row: Locator, scroll: Callable[[], None]) -> None:
    """By what a reader does, who does it again where the page has moved on meanwhile."""

    def scrolled() -> bool:
        scroll()
        return row.evaluate(SEEN)

    patience.until(scrolled, "a row to come into view")
