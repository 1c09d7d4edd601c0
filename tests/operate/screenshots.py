"""Make the screenshots of docs/operate.md, with a real browser: `python -m tests.operate.screenshots`."""

import tempfile
import threading
from pathlib import Path

from benchmarks._worker import Worker, workers
from tests import shared
from tests.clusters import cluster
from tests.operate import browser, port

FOLDER = Path(__file__).parents[2] / "docs" / "operate"
GROUPS = ("group-0", "group-1", "group-2")
WIDE = {"viewport": {"width": 1200, "height": 1050}}


def of_small_job(folder: Path) -> None:
    """A quiet job, and one of whose groups one was killed and came back."""
    flags = ("--steps", "100000", "--pace", "0.05", "--show")
    with cluster(folder) as here:
        web = port.start(here, "--heartbeat-timeout-ms", "2000")
        workers_ = here.start_together(GROUPS, lambda name: flags)
        here.until(lambda: (web.metric("jaxft_step", job="toy") or 0) > 100, "step 100")
        with browser.page(web.url, **WIDE, color_scheme="light") as (page, _):
            page.wait_for_selector("tbody tr:nth-child(3)")
            page.wait_for_timeout(5000)
            page.select_option("#span", "120")
            page.wait_for_timeout(1500)
            page.screenshot(path=FOLDER / "quiet.png")
            workers_["group-1"].process.kill()
            page.wait_for_timeout(4000)
            here.start("group-1", *flags)
            page.wait_for_selector("tbody tr:nth-child(2) .s-member >> nth=1", timeout=60_000)
            page.wait_for_timeout(4000)
            page.emulate_media(color_scheme="dark")
            page.screenshot(path=FOLDER / "killed.png")
            page.set_viewport_size({"width": 390, "height": 844})
            page.screenshot(path=FOLDER / "phone.png")


def of_many_groups(folder: Path) -> None:
    """300 groups that are simulated by one process, with a real stream each."""
    with cluster(folder) as here, workers(Worker("benchmarks._ours.rendezvous")) as (groups,):
        web = port.start(here)
        groups.ask("join", 120.0, address=f"localhost:{here.port}", groups=300)
        ends = threading.Event()

        def vote() -> None:
            while not ends.is_set():
                groups.ask("rounds", 120.0, count=20)

        voting = threading.Thread(target=vote)
        voting.start()
        with browser.page(web.url, **WIDE, color_scheme="light") as (page, _):
            page.wait_for_selector("tbody tr:nth-child(300)")
            page.select_option("#span", "120")
            page.wait_for_timeout(3000)
            page.evaluate("document.querySelector('#groups-title').scrollIntoView()")
            page.screenshot(path=FOLDER / "many.png")
        ends.set()
        voting.join()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    shared.make()
    try:
        for make in (of_small_job, of_many_groups):
            with tempfile.TemporaryDirectory() as name:
                make(Path(name))
    finally:
        shared.remove()
