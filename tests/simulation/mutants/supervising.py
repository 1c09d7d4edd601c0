"""The launcher: who may leave for its own sake, who is given up, and when the coordinator is back."""

import math
from dataclasses import replace
from typing import Any

from jaxft_launch.supervise.core import group as groups
from jaxft_launch.supervise.core import keeper, launch, restarts

from ._mutant import mutant
from ._settings import supervised


@mutant(launch, "may_leave", "ail", **supervised(3))
def _a_group_counts_itself_as_another_that_holds_the_state(_may_leave: Any) -> Any:
    """All groups whose checks are critical leave at the same boundary, and the state is gone."""
    return lambda given, _group: any(each.life and each.life.committed for each in given.groups)


@mutant(groups, "signed", "ail", **supervised(2, fetch_s=8.0, storm_s=20.0))
def _a_heal_that_has_only_begun_holds_the_state(signed: Any) -> Any:
    """A group leaves while the only other one still fetches its state."""

    def mutated(given: Any, sign: Any, now_s: float) -> Any:
        after = signed(given, sign, now_s)
        return replace(after, healed=after.healed or sign.phase == "heal")

    return mutated


@mutant(keeper, "LONGEST_WAIT_S", "coordinator", **supervised(3, storm_s=30.0))
def _a_coordinator_comes_back_when_its_groups_have_given_up(_longest: Any) -> Any:
    """The wait for the next start of a coordinator doubles up to the time for which groups wait for one."""
    return 600.0


@mutant(groups, "after", "raise", "kill", **supervised(3, fetch_s=2.0, storm_s=6.0))
def _an_error_after_a_life_that_was_killed_is_the_second(after: Any) -> Any:
    """Each life without a new step counts as an error of the program, and two of them end the group."""

    def mutated(past: Any, lived: Any, **rules: Any) -> Any:
        return after(replace(past, errors=past.fruitless), replace(lived, job_lives=False), **rules)

    return mutated


@mutant(groups, "after", "kill", "crash", **supervised(3, fetch_s=2.0, storm_s=4.0))
def _a_group_is_given_up_though_the_job_lives(after: Any) -> Any:
    """A group that was killed some times from outside does not come back."""

    def mutated(past: Any, lived: Any, **rules: Any) -> Any:
        return after(past, replace(lived, job_lives=False), **rules | {"max_restarts": 1})

    return mutated


@mutant(restarts, "doubled_s", "kill", "wipe", **supervised(3, storm_s=12.0))
def _a_group_waits_for_ever(doubled: Any) -> Any:
    """The wait before the next start of a group is not bounded."""
    return lambda first_s, times, *_: math.inf if times > 1 else doubled(first_s, times, 1e3)
