"""A bit flips on the wire, where TCP's checksum has missed it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.trial import STEPS, figures, trial

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

DAMAGED = "arrived damaged: its digest is not the one it was sent with"


def test_what_arrives_damaged_in_a_heal_is_fetched_again(tmp_path: Path, undisturbed: str) -> None:
    with trial(tmp_path) as job:
        # From one of two donors: the other makes up for it.
        job.network.damage(job.network.around("group-1", out=False), times=1)
        job.kill("group-1")
        job.start("group-1")
        job.until_back("group-1")
        assert job.network.damaged == 1
        assert job.workers["group-1"].log().count(DAMAGED) == 1
        assert not job.workers["group-1"].says("no donor is left")
        # From both: the heal fails, by name, and another one begins.
        job.network.damage(job.network.around("group-1", out=False), times=2)
        job.kill("group-1")
        job.start("group-1")
        job.until_back("group-1")
        figures.info("damaged %d pieces of heals", job.network.damaged)
        assert job.workers["group-1"].says(DAMAGED)
        job.finish(undisturbed)


@pytest.mark.xfail(strict=True, reason="frames of an exchange carry no checksum: all take the same wrong sum")
def test_what_arrives_damaged_in_an_exchange_changes_nothing(
    tmp_path: Path, undisturbed_of: Callable[..., str]
) -> None:
    width = ("--width", "2000")
    with trial(tmp_path, *width) as job:
        pairs = [(a, b) for a in job.workers for b in job.workers if a != b]
        job.network.damage(pairs, times=1, kind="exchange")
        job.here.until(lambda: job.network.damaged == 1, "a piece of an exchange to be damaged")
        job.finish(undisturbed_of(STEPS, *width))
