"""The page with its buttons, for those who use a keyboard or a screen reader, in a real browser."""

from pathlib import Path

import pytest
from jaxft_protocol import credentials
from playwright.sync_api import Page, expect

from tests.clusters import cluster
from tests.operate import axe, browser
from tests.operate.browser import PATIENCE_MS
from tests.operate.with_buttons import at_step_4, secret_in

pytestmark = [pytest.mark.processes, pytest.mark.browser]
expect.set_options(timeout=PATIENCE_MS)
# The elements that Tab reaches, in this order, in a job of two groups.
WALK = [
    "Skip to the job",
    "toy · training",
    "Pause",
    "Filter",
    "Time line",
    "Groups",
    "Drain group-0",
    "Evict group-0",
    "Drain group-1",
    "Evict group-1",
]
# The name by which a screen reader calls the element that has the focus.
FOCUSED = """() => {
  const found = document.activeElement, by = found.getAttribute("aria-labelledby");
  if (by) return document.getElementById(by).textContent;
  if (found.labels?.length) return found.labels[0].firstChild.textContent.trim();
  return found.getAttribute("aria-label") ?? found.textContent;
}"""


def walk(page: Page, steps: int) -> list[str]:
    """Press Tab this many times; return the focused element each time."""
    names: list[str] = []
    for _ in range(steps):
        page.keyboard.press("Tab")
        names.append(page.evaluate(FOCUSED))
    return names


@pytest.mark.long
def test_the_buttons_and_their_dialog_work_without_a_mouse(tmp_path: Path) -> None:
    gate, secret = tmp_path / "gate", secret_in(tmp_path)
    with cluster(tmp_path) as here:
        web, workers = at_step_4(here, gate, credentials.job_key(secret, "toy").hex())
        with browser.page(web.url, bypass_csp=True) as (page, errors):
            expect(page.get_by_role("button", name="Evict group-1")).to_be_visible()
            expect(page.locator("#jobs")).to_contain_text("training")
            assert walk(page, len(WALK)) == WALK
            assert axe.problems(page) == []

            dialog = page.get_by_role("dialog")
            page.keyboard.press("Enter")
            expect(dialog).to_contain_text("Evict group-1?")
            assert axe.problems(page) == []
            names = [page.evaluate(FOCUSED), *walk(page, 4)]
            assert {"Reason", "Token of the job, or the operator's", "Cancel", "Evict"} <= set(names)
            assert not set(WALK) & set(names), "behind the dialog nothing may have the focus"

            page.keyboard.press("Escape")
            expect(dialog).to_be_hidden()
            assert page.evaluate(FOCUSED) == "Evict group-1"
            assert web.group("group-1")["state"] == "member"
        gate.touch()
        here.until_finished(*workers.values())
    assert errors == []
