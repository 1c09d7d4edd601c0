"""Values of single metrics, for what happens to a job."""

from typing import Any

from jaxft_coordinator.http._metrics import read
from jaxft_coordinator.shell._server import Server
from jaxft_protocol.coordinator.job import Options, PauseAsked

from tests.operate.test_happened import Watching, told_of, watching
from tests.protocol.coordinator.helpers import Desk


def value(desk: Watching, name: str, **labels: str) -> float | None:
    """The value of a metric of a desk now; None if there is no such series."""
    samples = (
        one for family in read(Server("localhost:0", Options()), desk.observer) for one in family.samples
    )
    asked = {"job": "job", **labels}
    return next((float(one.value) for one in samples if (one.name, one.labels) == (name, asked)), None)


def test_a_job_whose_groups_are_all_gone_is_idle_and_does_not_wait():
    desk = watching("a", "b")
    assert value(desk, "jaxft_idle") == 0
    desk.close("a")
    assert value(desk, "jaxft_idle") == 0
    desk.close("b")
    assert (value(desk, "jaxft_idle"), value(desk, "jaxft_waiting")) == (1, 0)
    assert value(desk, "jaxft_quorum_members") == 0


def test_a_group_that_comes_back_ends_the_idle_time():
    desk = watching("a")
    desk.commit()
    desk.close("a")
    desk.come("b", step=0, digest="other")
    assert (value(desk, "jaxft_idle"), value(desk, "jaxft_waiting")) == (0, 1)


def test_a_job_that_has_finished_is_not_idle():
    desk = watching("a", "b")
    desk.commit()
    desk.leave("a", finished=True)
    desk.leave("b", finished=True)
    assert (value(desk, "jaxft_idle"), value(desk, "jaxft_finished")) == (0, 1)


def test_a_new_job_waits_as_soon_as_a_group_has_compiled():
    """Otherwise no alert would ever fire for its missing groups."""
    desk = Watching(Desk.open(min_replicas=2).job)
    desk.hello("a")
    assert value(desk, "jaxft_waiting") == 0
    desk.come("a", incarnation=2)
    assert value(desk, "jaxft_waiting") == 1
    desk.come("b")
    assert value(desk, "jaxft_waiting") == 0


def test_what_alerts_count_begins_at_zero():
    """The first failure, loss or retry would be no increase of a series that begins with it."""
    desk = watching("a", "b")
    assert value(desk, "jaxft_job_failures_total") == 0
    for how in ("lost", "evicted", "set_aside", "left", "refused"):
        assert value(desk, "jaxft_departures_total", how=how) == 0
    for reason in ("lost a member", "failed"):
        assert value(desk, "jaxft_steps_retried_total", reason=reason) == 0


def of_groups(view: Any, name: str) -> list[Any]:
    """A field of each group in a view of a job."""
    return [each[name] for each in view["group_list"]]


def test_the_time_of_a_pause_is_not_counted():
    """Nothing is lost that spares or quicker restarts would have saved, and no alert may say so."""
    desk = watching("a", "b")
    desk.do(PauseAsked(paused=True))
    desk.now_s += 2.0
    desk.commit()
    before = told_of(desk)
    desk.now_s += 3600.0
    desk.close("b")
    after = told_of(desk)
    assert (before["state"], after["state"]) == ("paused", "paused")
    for name in ("goodput", "goodput_seconds", "badput_seconds"):
        assert after[name] == before[name]
        assert of_groups(after, name) == of_groups(before, name)
    desk.do(PauseAsked(paused=False))
    desk.now_s += 2.0
    desk.commit()
    assert value(desk, "jaxft_waiting") == 0
    assert value(desk, "jaxft_badput_seconds_total", source="INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION") == 0
    assert told_of(desk)["state"] == "training"
