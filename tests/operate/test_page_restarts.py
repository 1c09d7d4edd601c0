"""The page of a coordinator that was restarted, or that does not lead, in a real browser."""

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.clusters import cluster
from tests.operate import browser, port
from tests.operate.browser import PATIENCE_MS

pytestmark = [pytest.mark.processes, pytest.mark.browser, pytest.mark.long]
expect.set_options(timeout=PATIENCE_MS)


def test_a_page_that_stays_open_shows_what_happens_under_the_next_coordinator(tmp_path: Path) -> None:
    """It has forgotten the job, and counts events from 1 again."""
    flags = ("--steps", "8", "--gate", f"4:{tmp_path / 'gate'}")
    with cluster(tmp_path) as here:
        web = port.start(here)
        first = here.start("group-0", *flags)
        here.until(lambda: web.metric("jaxft_step", job="toy") == 4, "step 4")
        with browser.page(web.url) as (page, errors):
            newest = page.locator("#events li").first
            expect(newest).to_contain_text("quorum 1 from step 0")
            assert here.coordinator is not None
            for process in (first.process, here.coordinator):
                process.kill()
                process.wait()
            expect(page.locator("#link")).to_contain_text("not connected")
            errors.clear()  # that it did not reach the coordinator
            here.start_coordinator("--http", web.url.removeprefix("http://"), port=here.port)
            expect(page.locator("#link")).to_have_text("live")
            expect(page.locator("#banner")).to_contain_text("does not know this job any more")
            errors.clear()  # that the coordinator knows no such job
            here.start("group-0", *flags)
            expect(newest).to_contain_text("quorum 1 from step 0")
            expect(page.get_by_text("group-0 present")).to_have_count(1)
            expect(page.locator("#banner")).to_be_empty()
        assert errors == []


@pytest.mark.parametrize("job", ["", "#job=toy"])
def test_the_page_of_a_standby_says_who_leads(job: str, tmp_path: Path) -> None:
    state = ("--state", str(tmp_path / "state"))
    with cluster(tmp_path) as here:
        here.start_coordinator(*state)
        leader = here.port
        here.until(lambda: "leads as" in here.coordinator_log.read_text(), "one to lead")
        web = port.start(here, *state)
        here.until(lambda: "stands by" in here.coordinator_log.read_text(), "the other one to stand by")
        with browser.page(f"{web.url}/{job}") as (page, _):
            expect(page.locator("#empty")).to_have_text(
                f"This coordinator stands by, and localhost:{leader} leads: the page of that one shows its jobs."
            )
            expect(page.locator("#link")).to_have_text("live" if job else "connecting")


def test_an_address_that_names_no_job_shows_the_others(tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        web = port.start(here)
        with browser.page(f"{web.url}/#job=100%") as (page, errors):
            expect(page.locator("#about")).to_contain_text("leader")
            expect(page.locator("#empty")).to_be_visible()
        assert errors == []
