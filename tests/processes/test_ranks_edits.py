"""Edits in groups of several processes: of leaves that are spread over them, and the same in every rank."""

from pathlib import Path

import pytest

from tests.clusters import cluster
from tests.processes.ranks import digest_of, start_ranks

LOOPS = Path(__file__).with_name("loops.py")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


@pytest.mark.long
def test_groups_of_several_processes_edit_what_is_spread_over_them(tmp_path: Path) -> None:
    flags = ("--steps", "12", "--edit", "5", "--edit", "8", "--copy")
    expected = digest_of(tmp_path, 2, *flags, script=LOOPS)
    begun = tmp_path / "begun"
    with cluster(tmp_path) as here:
        here.start_coordinator()
        donor = start_ranks(here, "group-0", 2, (*flags, "--gate", f"7:{begun}"), script=LOOPS)
        here.until(lambda: donor.leader.step >= 6, "an edit to be committed")
        joiner = start_ranks(here, "group-1", 2, (*flags, "--gate", f"7:{begun}"), script=LOOPS)
        here.until(lambda: joiner.leader.logged("heals to step"), "the other group to heal")
        begun.touch()
        here.until_finished(*donor.ranks, *joiner.ranks)
        assert {worker.digest for worker in (*donor.ranks, *joiner.ranks)} == {expected}


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_edits_alone_ends_its_group_and_both_edits_are_named(rank: int, tmp_path: Path) -> None:
    with cluster(tmp_path) as here:
        here.start_coordinator()
        group = start_ranks(here, "group-0", 2, (), own={rank: ("--edit", "5")}, script=LOOPS)
        for worker in group.ranks:
            here.until(lambda worker=worker: worker.process.poll() is not None, "both ranks to end")
        logged = group.ranks[1].log()
        assert "rank 1 is at 'exchange" in logged, logged
        assert "'exchange after an edit of the leaves number [0, 1, 3, 4]'" in logged
        assert group.leader.step == 5, "no step was committed with that edit"
