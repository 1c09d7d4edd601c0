"""Faults of a real network, in namespaces of the kernel: each group, and the coordinator, is a separate host."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.clusters import digest_alone
from tests.faults.namespaces import MISSING, Switch, available, switch
from tests.faults.trial import FAILURE_S, GROUPS, STEPS, Trial, figures, slack_s, trial_over

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

# Two attempts may wait for an answer on a dead link, each for the whole of the failure timeout.
MOST_S = 2 * FAILURE_S


@pytest.fixture(scope="module", autouse=True)
def needs_namespaces() -> None:
    if not available():
        pytest.skip(MISSING)


@contextmanager
def job_on(folder: Path, *flags: str) -> Iterator[tuple[Trial, Switch]]:
    with switch(("coordinator", *GROUPS)) as net, trial_over(net, folder, *flags) as job:
        yield job, net


def broken(job: Trial, net: Switch, victim: str, cuts: list[tuple[str, str]], name: str) -> None:
    """Make cuts until the quorum continues without a group, restore the network, and check how long everything
    took."""
    lost = job.here.coordinator_log.read_text().count("lost ")
    with job.fault(victim) as heard:
        for source, target in cuts:
            net.cut(source, target)
        job.here.until(lambda: job.here.coordinator_log.read_text().count("lost ") > lost, "a smaller quorum")
        job.until_step("group-2", 3)
        net.restore()
    standstill_s, again_s = job.standstill_s(heard()), job.again_s(heard(), victim)
    figures.info("%s: stood still %.2f s, back after %.2f s", name, standstill_s, again_s)
    assert standstill_s < MOST_S + slack_s()
    assert again_s < FAILURE_S + slack_s()


def around(net: Switch, host: str, *, into: bool, out: bool) -> list[tuple[str, str]]:
    others = [other for other in net.hosts if other != host]
    return [(o, host) for o in others if into] + [(host, o) for o in others if out]


@pytest.mark.long
def test_a_host_without_a_cable(tmp_path: Path, undisturbed: str) -> None:
    with job_on(tmp_path) as (job, net):
        broken(job, net, "group-1", around(net, "group-1", into=True, out=True), "cable pulled")
        job.finish(undisturbed)


@pytest.mark.storm
@pytest.mark.parametrize(("into", "out"), [(True, False), (False, True)])
def test_a_cable_that_carries_one_way(*, into: bool, out: bool, tmp_path: Path, undisturbed: str) -> None:
    with job_on(tmp_path) as (job, net):
        name = "hears nothing" if into else "is not heard"
        broken(job, net, "group-1", around(net, "group-1", into=into, out=out), name)
        job.finish(undisturbed)


@pytest.mark.storm
def test_a_link_between_two_healthy_groups(tmp_path: Path, undisturbed: str) -> None:
    with job_on(tmp_path) as (job, net):
        cuts = [("group-0", "group-1"), ("group-1", "group-0")]
        broken(job, net, "group-1", cuts, "link between two cut")
        job.until_back("group-0")
        job.finish(undisturbed)


@pytest.mark.storm
def test_one_packet_in_twenty_is_lost(tmp_path: Path, undisturbed: str) -> None:
    with job_on(tmp_path) as (job, net):
        net.lose(5)
        before = len(job.workers["group-0"].steps())
        with job.fault("coordinator") as heard:
            job.until_step("group-0", 30)
        figures.info(
            "5 %% loss: %.2f s a step, longest pause %.2f s",
            heard().seconds / (len(job.workers["group-0"].steps()) - before),
            job.standstill_s(heard()),
        )
        assert not job.coordinator_says("evicts")
        job.finish(undisturbed)


@pytest.mark.storm
def test_a_narrow_cable(tmp_path: Path) -> None:
    """One group receives only 10 Mbit/s: it exchanges, dies, and heals through that."""
    width = ("--width", "1000")
    with job_on(tmp_path, *width) as (job, net):
        net.cap("group-1", 10_000_000)
        job.until_step("group-1", 5)
        job.kill("group-1")
        job.start("group-1")
        job.until_back("group-1")
        assert not job.coordinator_says("evicts")
        job.finish(digest_alone(STEPS, *width))
