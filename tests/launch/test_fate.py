"""Which of the processes of a group is the reason for its end. Without processes."""

from dataclasses import dataclass
from typing import cast

import pytest

from jaxft_launch.processes._fate import Fate
from jaxft_launch.processes._processes import Child
from jaxft_launch.processes._statuses import Ending


@dataclass
class Ended:
    status: int | None = None

    def exit_code(self) -> int | None:
        return self.status


@pytest.mark.parametrize("aborted", [-6, 134])
@pytest.mark.parametrize(
    ("status", "reason"), [(1, (Ending.ERROR, 1)), (75, (Ending.AGAIN, 75)), (-9, (Ending.KILLED, -9))]
)
def test_a_rank_that_jax_aborts_after_another_is_not_the_reason(
    status: int, reason: tuple[Ending, int], aborted: int
) -> None:
    ranks = [Ended(), Ended()]
    fate = Fate([cast(Child, rank) for rank in ranks])
    ranks[0].status = status
    fate.watch(shared=False)
    ranks[1].status = aborted
    fate.watch(shared=False)
    assert (fate.over, fate.failed, fate.result()) == (True, 0, reason)


def test_a_rank_that_aborts_first_is_the_reason() -> None:
    ranks = [Ended(), Ended()]
    fate = Fate([cast(Child, rank) for rank in ranks])
    ranks[1].status = -6
    fate.watch(shared=False)
    ranks[0].status = 1
    fate.watch(shared=False)
    assert (fate.failed, fate.result()) == (1, (Ending.KILLED, -6))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("status", [1, -9])
def test_a_rank_that_has_lost_another_is_not_the_one_that_failed(status: int, first: int) -> None:
    """It ends within milliseconds of the other, and may be seen before it."""
    ranks = [Ended(), Ended()]
    fate = Fate([cast(Child, rank) for rank in ranks])
    ranks[first].status = 75
    fate.watch()
    assert not fate.settled
    ranks[1 - first].status = status
    fate.watch()
    assert (fate.failed, fate.settled) == (1 - first, True)
    assert fate.result()[1] == status
