"""The page's drawing of a job whose state the test has written, in a real browser."""

from importlib.resources import files
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.operate import browser
from tests.operate.browser import PATIENCE_MS

pytestmark = pytest.mark.browser
expect.set_options(timeout=PATIENCE_MS)
NO_STREAM = """window.EventSource = class extends EventTarget {
  constructor() { super(); setTimeout(() => this.onopen()); }
  close() {}
}"""
NOW_S = 1_795_000_000.0


def group(number: int, **fields: Any) -> dict[str, Any]:
    known = {"group": f"group-{number}", "state": "member", "since": NOW_S - 60, "losses": 0, "goodput": 0.9}
    return {**known, **fields}


GROUPS = [
    group(0, state="gone", ended=True, reason="drained"),
    group(1, state="gone", ended=False, reason="its connection closed", losses=1),
    group(2, state="ready", spare=True, goodput=0.0),
    *(group(number) for number in range(3, 40)),
]
JOB = {
    **{"job": "toy", "state": "training", "step": 60, "quorum_id": 3, "members": 37, "places": 39},
    **{"groups": {"member": 37, "gone": 2, "ready": 1}, "steps_per_s": 1.0, "goodput": 0.9, "paused": False},
    **{"waiting": "", "halted": "", "values": {"loss": 0.01}, "steps_retried": {}, "badput_seconds": {}},
    "group_list": GROUPS,
    "points": [{"t": NOW_S - 60 + t, "steps_per_s": 1.0, "loss": 10.0 / 1.12**t} for t in range(61)],
    "events": [
        {"seq": 1, "t": NOW_S - 60, "event": "group_present", "group": "group-0"},
        {"seq": 2, "t": NOW_S - 30, "event": "group_left", "group": "group-0", "reason": "drained"},
        {"seq": 3, "t": NOW_S - 20, "event": "group_lost", "group": "group-1", "reason": "closed"},
    ],
}
ANSWERS = {
    "coordinator": {
        **{"role": "leader", "leader": "", "term": 1, "groups": 39, "version": "0", "actions": False},
        "time": NOW_S,
    },
    "jobs": {"jobs": [JOB]},
    "jobs/toy": JOB,
}


def answer(route: Route) -> None:
    name = route.request.url.partition("http://page/")[2]
    if name.startswith("api/v1/"):
        route.fulfill(json=ANSWERS[name.removeprefix("api/v1/")])
        return
    path = files("jaxft_coordinator.http").joinpath("page", name or "index.html")
    kinds = {"js": "text/javascript", "css": "text/css"}
    kind = kinds.get(name.rpartition(".")[2], "text/html")
    route.fulfill(body=path.read_text(), content_type=kind)


def draw(page: Page) -> None:
    page.add_init_script(NO_STREAM)
    page.route("http://page/**", answer)
    page.goto("http://page/")
    expect(page.locator("#groups tr")).to_have_count(len(GROUPS))


def test_what_is_drawn_says_what_matters() -> None:
    with browser.page("about:blank", viewport={"width": 1280, "height": 900}) as (page, errors):
        draw(page)
        drained, lost, spare = (
            page.get_by_role("row", name=f"group-{number}", exact=False).first for number in (0, 1, 2)
        )
        expect(drained.locator(".dot")).to_have_class("dot s-left")
        expect(drained).to_contain_text("has left")
        expect(drained.locator("rect.s-gone")).to_have_count(0)
        expect(lost.locator(".dot")).to_have_class("dot s-gone")
        expect(spare.locator("td").nth(4)).to_have_text("")
        expect(page.locator("#value-figure .axis").first).to_have_text("10.0 (log scale)")
        expect(page.locator("#value-figure .axis").nth(1)).to_have_text("0.0111")
        expect(page.locator("#value-figure .axis").nth(2)).to_have_text("60 s ago")
        expect(page.locator("#events li.heavy")).to_contain_text("group-1 lost: closed")
        expect(page.locator("#events li.light")).to_have_count(1)
        squares = page.get_by_role("img", name="40 groups: ")
        expect(squares.locator("i")).to_have_count(40)
        expect(squares).to_have_accessible_name("40 groups: 1 has left, 1 gone, 1 stands by, 37 takes part")
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    assert errors == []
