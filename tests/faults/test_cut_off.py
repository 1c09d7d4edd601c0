"""Links that carry nothing, or die: around one group, both ways or one way, and between two healthy groups."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.trial import FAILURE_S, Trial, figures, slack_s, trial

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

# Two attempts may wait for an answer on a dead link, each for the whole of the failure timeout.
MOST_S = 2 * FAILURE_S


def cut(
    job: Trial, victim: str, pairs: tuple[tuple[str, str], ...], until: Callable[[], None], name: str
) -> None:
    """Cut links `until` something has happened, restore them, and check how long everything took."""
    with job.fault(victim) as heard:
        job.network.cut(pairs)
        until()
        job.network.repair(pairs)
    standstill_s, again_s = job.standstill_s(heard()), job.again_s(heard(), victim)
    figures.info("%s: stood still %.2f s, back after %.2f s", name, standstill_s, again_s)
    assert standstill_s < MOST_S + slack_s()
    assert again_s < FAILURE_S + slack_s()


def cut_around(job: Trial, victim: str, *, into: bool = True, out: bool = True) -> None:
    """Cut a group off until it has been evicted and the others have gone on."""

    def the_others_go_on() -> None:
        # The coordinator evicts it, or it notices first that it receives nothing and closes its connection.
        job.here.until(lambda: job.coordinator_says(f"lost {victim} ("), f"the quorum without {victim}")
        for group in job.workers.keys() - {victim}:
            job.until_step(group, 3)

    pairs = job.network.around(victim, into=into, out=out)
    cut(job, victim, pairs, the_others_go_on, f"cut off, into it {into}, out of it {out}")


@pytest.mark.storm
def test_a_group_that_is_cut_off_is_put_out_and_comes_back(tmp_path: Path, undisturbed: str) -> None:
    with trial(tmp_path) as job:
        cut_around(job, "group-1")
        assert job.coordinator_says("lost group-1 (no heartbeat for")
        assert job.workers["group-1"].steps()[-1]["quorum_id"] >= 3
        job.finish(undisturbed)


@pytest.mark.storm
@pytest.mark.parametrize(("into", "out"), [(True, False), (False, True)])
def test_a_cut_in_one_direction(*, into: bool, out: bool, tmp_path: Path, undisturbed: str) -> None:
    with trial(tmp_path) as job:
        cut_around(job, "group-0", into=into, out=out)
        job.finish(undisturbed)


@pytest.mark.storm
def test_a_dead_link_between_two_healthy_groups(tmp_path: Path, undisturbed: str) -> None:
    """A dead link costs an attempt; a link that carries nothing costs a group its place, and the job continues."""
    both = (("group-0", "group-1"), ("group-1", "group-0"))
    with trial(tmp_path) as job:
        with job.fault("group-0", "group-1") as heard:
            assert job.network.reset("group-0", "group-1") > 0
        figures.info("link died: stood still %.2f s", job.standstill_s(heard()))
        assert job.standstill_s(heard()) < slack_s()

        def one_is_out() -> None:
            job.here.until(
                lambda: job.coordinator_says("evicts group-0") or job.coordinator_says("evicts group-1"),
                "either group to be evicted",
            )
            job.until_step("group-2", 3)

        cut(job, "group-0", both, one_is_out, "link carries nothing")
        for group in ("group-0", "group-1"):
            job.until_back(group)
        job.finish(undisturbed)
