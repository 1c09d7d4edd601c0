"""The page of a real coordinator with real groups, in a real browser."""

from importlib.resources import files
from pathlib import Path

import pytest
from jaxft_protocol import credentials
from playwright.sync_api import Page, expect

from tests.clusters import cluster
from tests.operate import axe, browser, port, with_buttons
from tests.operate.browser import PATIENCE_MS

pytestmark = [pytest.mark.processes, pytest.mark.browser]
expect.set_options(timeout=PATIENCE_MS)


@pytest.mark.long
def test_a_group_is_killed_while_the_page_is_open_and_the_page_shows_it(tmp_path: Path) -> None:
    gate, go = tmp_path / "gate", tmp_path / "go"
    flags = ("--steps", "40", "--gate", f"10:{gate}", "--gate", f"30:{go}", "--show")
    with cluster(tmp_path) as here:
        web = port.start(here)
        workers = here.start_together(("group-0", "group-1", "group-2"), lambda _name: flags)
        here.until(lambda: web.metric("jaxft_step", job="toy") == 10, "step 10")
        with browser.page(web.url) as (page, errors):
            expect(page.get_by_role("heading", name="toy")).to_be_visible()
            row = page.get_by_role("row", name="group-1")
            expect(row).to_contain_text("takes part")
            page.evaluate("window.loadedOnce = true")
            workers["group-1"].process.kill()
            expect(row).to_contain_text("gone")
            expect(row).to_contain_text("its connection closed")
            expect(page.locator("#events")).to_contain_text("group-1 lost: its connection closed")
            expect(page.locator("#facts")).to_contain_text("2 of 3 places")
            back = here.start("group-1", *flags)
            expect(page.locator("#events")).to_contain_text("group-1 heals to step 10")
            # Not before: it could enter no more once the others stand at the second gate.
            expect(row).to_contain_text("stands by")
            gate.touch()
            expect(row).to_contain_text("takes part")
            expect(row.locator("rect.s-gone")).to_have_count(1)
            go.touch()
            expect(page.locator("#facts")).to_contain_text("finished")
            expect(page.locator("#value-name")).to_have_text("loss")
            assert page.evaluate("window.loadedOnce") is True
            assert page.locator("#events li").count() > 10
        here.until_finished(back, workers["group-0"], workers["group-2"])
    assert errors == []


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_screen_reader_finds_its_way(tmp_path: Path, scheme: str) -> None:
    gate = tmp_path / "gate"
    with cluster(tmp_path) as here:
        web = port.start(here)
        workers = here.start_together(
            ("group-0", "group-1"), lambda _name: ("--steps", "8", "--gate", f"4:{gate}", "--show")
        )
        with browser.page(web.url, color_scheme=scheme, bypass_csp=True) as (page, errors):
            expect(page.get_by_role("row", name="group-1")).to_contain_text("takes part")
            assert axe.problems(page) == []
            page.select_option("#span", "120")
            expect(page.get_by_role("columnheader", name="Time line")).to_contain_text("2 minutes ago")
            expect(page.locator("#lost div", has_text="retried steps").locator("dd")).to_have_text("0 s")
            page.set_viewport_size({"width": 360, "height": 740})  # a phone
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
            page.keyboard.press("Tab")
            assert page.evaluate("document.activeElement.textContent") == "Skip to the job"
        gate.touch()
        here.until_finished(*workers.values())
    assert errors == []


def _press(page: Page, button: str, confirm: str, token: str) -> None:
    """Press a button that asks for the token, and confirm."""
    page.get_by_role("button", name=button).click()
    page.get_by_label("Token").fill(token)
    expect(page.locator("#do")).to_have_text(confirm)
    page.locator("#do").click()
    expect(page.get_by_role("dialog")).to_be_hidden()


@pytest.mark.long
def test_an_operator_evicts_a_group_with_the_token_only(tmp_path: Path) -> None:
    gate, secret = tmp_path / "gate", with_buttons.secret_in(tmp_path)
    token = credentials.job_key(secret, "toy").hex()
    with cluster(tmp_path) as here:
        web, workers = with_buttons.at_step_4(here, gate, token)
        with browser.page(web.url) as (page, errors):
            page.get_by_role("button", name="Evict group-1").click()
            page.get_by_label("Token").fill("wrong")
            page.get_by_label("Reason").fill("bad memory")
            page.locator("#do").click()
            expect(page.locator("#outcome")).to_contain_text(
                "neither the token of job 'toy' nor the operator's"
            )
            page.get_by_label("Token").fill(token)
            page.locator("#do").click()
            expect(page.get_by_role("dialog")).to_be_hidden()
            expect(page.get_by_role("row", name="group-1")).to_contain_text(
                "an operator evicted it: bad memory"
            )
            _press(page, "Pause", "Pause", token)
            _press(page, "Resume", "Resume", token)
            expect(page.get_by_role("button", name="Pause")).to_be_visible()
        gate.touch()
        here.until(lambda: workers["group-1"].process.poll() is not None, "group-1 to end")
        assert workers["group-1"].logged("an operator evicted it: bad memory")
        here.until_finished(workers["group-0"])
        log = here.coordinator_log.read_text()
    assert [text for text in errors if "401" not in text] == []
    assert "without a valid token, asks to evict group 'group-1' of job 'toy' ('bad memory'): 401" in log
    assert "with the job's token, asks to evict group 'group-1' of job 'toy' ('bad memory'): 200" in log
    assert token not in log


def test_the_page_needs_nothing_from_elsewhere() -> None:
    for name in ("index.html", "page.js", "page.css"):
        text = files("jaxft_coordinator.http").joinpath("page", name).read_text()
        assert "//" not in text.replace("http://www.w3.org/2000/svg", "").replace("// ", "").replace(
            "/ /", ""
        )
        assert "innerHTML" not in text
