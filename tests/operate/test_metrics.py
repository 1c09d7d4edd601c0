"""Values of single metrics, for what happens to a job."""

from jaxft_coordinator._server import Server
from jaxft_coordinator.http._metrics import read
from jaxft_protocol.coordinator.job import Options

from tests.operate.test_happened import Watching, watching


def value(desk: Watching, name: str, **labels: str) -> float | None:
    """What the coordinator of a desk exports now; None if it exports no such series."""
    samples = (one for each in read(Server("localhost:0", Options()), desk.observer) for one in each.samples)
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
