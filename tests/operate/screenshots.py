"""Make the pictures of the docs, with a real browser: `python -m tests.operate.screenshots`, about three minutes."""

import tempfile
from pathlib import Path

from jaxft_protocol import credentials
from playwright.sync_api import Page

from tests import shared
from tests.clusters import Cluster, Worker, cluster
from tests.operate import browser, many, port
from tests.operate.with_buttons import secret_in

FOLDER = Path(__file__).parents[2] / "docs" / "operate"
GROUPS = tuple(f"group-{number}" for number in range(5))
# Which groups die in the storm, one after the other; groups in a tuple die together.
STORM = (("group-1",), ("group-3", "group-4"), ("group-1",), ("group-0",), ("group-2", "group-3"))
WIDE = {"viewport": {"width": 1280, "height": 1050}}
MANY = 300
RETURN_MS = 120_000


def of_small_job(folder: Path) -> None:
    """A job with buttons: quiet, and in a storm in which groups die and come back, on a desk and on a phone."""
    token = credentials.job_key(secret_in(folder), "toy").hex()
    flags = ("--steps", "1000000", "--pace", "0.05", "--show", "--token", token)
    with cluster(folder) as here:
        secret = str(folder / "secret")
        web = port.start(here, "--token-file", secret, "--http-actions", "--heartbeat-timeout-ms", "4000")
        lives = here.start_together(GROUPS, lambda _name: flags)
        here.until(lambda: (web.metric("jaxft_step", job="toy") or 0) > 100, "step 100")
        with browser.page(web.url, **WIDE, color_scheme="light") as (page, _):
            _until_all_take_part(page)
            page.select_option("#span", "120")
            page.wait_for_timeout(45_000)  # so that there is a curve to see
            page.screenshot(path=FOLDER / "quiet.png")
            for names in STORM[:-1]:
                _kill_and_restart(here, page, lives, names, flags)
                _until_all_take_part(page)
                page.wait_for_timeout(4000)
            _kill_and_restart(here, page, lives, STORM[-1], flags)  # the picture shows the last of them gone
            page.emulate_media(color_scheme="dark")
            page.screenshot(path=FOLDER / "storm.png")
            _until_all_take_part(page)
            page.set_viewport_size({"width": 390, "height": 1500})
            page.wait_for_timeout(6000)  # the number of groups at the top is asked for every 5 s
            page.screenshot(path=FOLDER / "phone.png")


def _kill_and_restart(
    here: Cluster, page: Page, lives: dict[str, Worker], names: tuple[str, ...], flags: tuple[str, ...]
) -> None:
    for name in names:
        lives[name].process.kill()
    for name in names:
        page.wait_for_selector(f"#groups tr:has(th:text-is('{name}')) .dot.s-gone", timeout=RETURN_MS)
        lives[name] = here.start(name, *flags)


def _until_all_take_part(page: Page) -> None:
    page.wait_for_selector(f"#groups .dot.s-member >> nth={len(GROUPS) - 1}", timeout=RETURN_MS)


def of_many_groups(folder: Path) -> None:
    """300 groups that are simulated by one process, with a real stream each."""
    with cluster(folder) as here:
        web = port.start(here)
        with (
            many.voting(here, MANY),
            browser.page(web.url, **WIDE, color_scheme="light") as (page, _),
        ):
            page.wait_for_selector(f"#groups tr:nth-child({MANY})")
            page.select_option("#span", "120")
            page.wait_for_timeout(15_000)
            page.evaluate("document.querySelector('#groups-title').scrollIntoView()")
            page.screenshot(path=FOLDER / "many.png")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    shared.make()
    try:
        for make in (of_small_job, of_many_groups):
            with tempfile.TemporaryDirectory() as name:
                make(Path(name))
    finally:
        shared.remove()
