"""The page of a job of 300 groups, in a real browser."""

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.clusters import cluster
from tests.operate import browser, many, port
from tests.operate.browser import PATIENCE_MS

pytestmark = [pytest.mark.processes, pytest.mark.browser]
expect.set_options(timeout=PATIENCE_MS)
GROUPS = 300
# Whether an element lies within the window.
SEEN = "row => { const at = row.getBoundingClientRect(); return at.top >= 0 && at.bottom <= innerHeight; }"


def test_300_groups_are_all_within_reach_on_a_desk_and_on_a_phone(tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        web = port.start(here)
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
                    row.scroll_into_view_if_needed()
                    assert row.evaluate(SEEN)

            region.evaluate("table => table.scrollTo(0, 0)")
            region.focus()
            page.keyboard.press("End")
            page.wait_for_function(f"row => ({SEEN})(row)", arg=rows.last.element_handle())

            page.get_by_label("Filter").fill(names[-1])
            expect(page.locator("#groups tr:visible")).to_have_count(1)
            expect(page.locator("#groups tr:visible th")).to_have_text(names[-1])
            step = page.locator("#facts div", has_text="Step").locator("dd")
            before = step.text_content()
            assert before is not None
            expect(step).not_to_have_text(before)  # the page goes on showing what happens
    assert errors == []
