"""A donor, or the joiner, is killed in the middle of a heal: again and again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.clusters import digest_alone
from tests.faults.trial import STEPS, Trial, figures, trial

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]

# A state of 5 MB over links that carry 3 MB a second: a heal from two donors takes almost a second.
WIDTH = ("--width", "25000")
LINK_BYTES_PER_S = 3e6
MANY, MANY_STEPS = 10, 1000


@contextmanager
def slow_links_into(job: Trial, joiner: str) -> Iterator[None]:
    """Slow a joiner's fetch down; not for long, or it would never catch up with the others."""
    pairs = job.network.around(joiner, out=False)
    job.network.cap(pairs, LINK_BYTES_PER_S)
    yield
    job.network.cap(pairs, None)


def until_it_heals(job: Trial, group: str) -> None:
    worker = job.workers[group]
    job.here.until(lambda: worker.logged("heals to step"), f"{group} to heal")


def is_in_the_middle(job: Trial, joiner: str) -> bool:
    """Whether a heal that was under way has not come to its end: nothing has been replayed or trained since."""
    return not job.workers[joiner].steps()


def kill_donors(job: Trial, times: int) -> int:
    """Kill a joiner's donor while it heals, so that the donor is the next joiner; return how often it was in time."""
    in_the_middle = 0
    joiner, donor, other = job.workers
    job.kill(joiner)
    for _ in range(times):
        with slow_links_into(job, joiner):
            job.start(joiner)
            until_it_heals(job, joiner)
            job.kill(donor)
            in_the_middle += is_in_the_middle(job, joiner)
        job.until_back(joiner)
        joiner, donor, other = donor, other, joiner
    job.start(joiner)
    job.until_back(joiner)
    return in_the_middle


def kill_joiners(job: Trial, times: int) -> int:
    """Kill a group each time when it heals; return how often it was in time."""
    in_the_middle = 0
    job.kill("group-1")
    for _ in range(times):
        with slow_links_into(job, "group-1"):
            job.start("group-1")
            until_it_heals(job, "group-1")
            job.kill("group-1")
        in_the_middle += is_in_the_middle(job, "group-1")
    job.start("group-1")
    job.until_back("group-1")
    return in_the_middle


@pytest.mark.storm
def test_a_donor_killed_in_a_heal_changes_nothing(tmp_path: Path) -> None:
    with trial(tmp_path, *WIDTH) as job:
        job.kill("group-0")
        with slow_links_into(job, "group-0"):
            job.start("group-0")
            until_it_heals(job, "group-0")
            job.kill("group-1")
            assert is_in_the_middle(job, "group-0")
        job.until_back("group-0")
        assert job.workers["group-0"].logged("Dropped donor group-1")
        assert job.workers["group-0"].logged("no donor is left that keeps"), "the other one had trained on"
        job.former.append(job.workers.pop("group-1"))
        job.finish(digest_alone(STEPS, *WIDTH))


@pytest.mark.storm
@pytest.mark.parametrize("kill", [kill_donors, kill_joiners])
def test_ten_times_in_a_row(kill: Callable[[Trial, int], int], tmp_path: Path) -> None:
    with trial(tmp_path, *WIDTH, steps=MANY_STEPS) as job:
        in_the_middle = kill(job, MANY)
        figures.info("%s: %d of %d in the middle of a heal", kill.__name__, in_the_middle, MANY)
        assert in_the_middle >= MANY // 2
        for group in job.workers:
            job.until_back(group)
        job.finish(digest_alone(MANY_STEPS, *WIDTH))
