"""Directives that the training thread must refuse, in whatever order they arrive."""

import dataclasses
from typing import Any, cast

import jax.numpy as jnp
import pytest
from jaxft_protocol.messages import GroupName, HealId, Incarnation, NewQuorum, QuorumId, Step
from jaxft_protocol.replica.state import Attempt, Identity, Over, Replay

from jaxft._errors import JobFinished
from jaxft._ranks._ranks import OneRank
from jaxft._replica._attempt import Attempts
from jaxft._replica._catch_up import CatchUp
from jaxft._replica._config import GroupConfig
from jaxft._replica._finite import FiniteCheck
from jaxft._replica._held_state import HeldState
from jaxft._replica._runner import Runner
from jaxft._replica._saving import Saving
from jaxft._report import Record

CONFIG = GroupConfig(coordinator="c:1", group="group-1", job="job", failure_timeout_s=1.0)
NOTHING = cast(Any, None)


class NoSession:
    """Any use of it, or of a donor, raises."""

    key = None


def held_at(step: int) -> HeldState:
    return HeldState(NOTHING, NOTHING, OneRank(), step, digest_every=1)


def test_a_group_announces_that_it_waits_before_it_does(caplog: pytest.LogCaptureFixture) -> None:
    """Its supervisor would otherwise take the wait for a part of the last phase, which has a deadline."""
    told: list[str] = []

    class Session(NoSession):
        def wait(self, seen: int) -> tuple[int, Over]:
            told.extend(record.message for record in caplog.records)
            return seen + 1, Over(Step(5))

    caplog.set_level("DEBUG", logger="jaxft")
    identity = Identity("job", GroupName("group-1"), Incarnation(1), "127.0.0.1:1", "c:1")
    config = dataclasses.replace(CONFIG, step=5)
    runner = Runner(config, identity, cast(Any, Session()), OneRank(), NOTHING, cast(Any, NoSession()))
    with pytest.raises(JobFinished):
        runner._follow_directives(NOTHING, Record(), joins=False)
    assert told == ["wait step 5"]


def test_a_step_that_was_replayed_is_not_replayed_again() -> None:
    # A moved frontier renews the directive, possibly before the last Replayed has arrived.
    held = held_at(step=3)
    identity = Identity("job", GroupName("group-1"), Incarnation(1), "127.0.0.1:1", "c:1")
    catch_up = CatchUp(
        CONFIG, identity, NOTHING, OneRank(), cast(Any, NoSession()), held, FiniteCheck("group-1")
    )
    record = Record()
    assert not catch_up.replay(Replay(cast(Any, HealId(1)), Step(2), Step(5)), NOTHING, record)
    assert held.step == 3
    assert record == Record()


def test_an_attempt_at_another_step_than_the_one_in_hand_is_a_fault() -> None:
    attempts = Attempts(CONFIG, NOTHING, OneRank(), NOTHING, held_at(step=3), FiniteCheck("group-1"))
    attempt = Attempt(NewQuorum(QuorumId(1), Step(2), 1, ()), Step(2))
    with pytest.raises(AssertionError, match="asked for step 2 while holding state 3"):
        attempts.attempt(NOTHING, attempt.quorum, attempt.step, Record())


def test_a_last_state_that_other_code_has_consumed_is_left_out_with_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # It must not raise: otherwise the group would not announce that it leaves.
    held = held_at(step=3)
    held.leaves, held.made = [jnp.ones(3)], True
    held.leaves[0].delete()
    Saving(CONFIG, NOTHING, OneRank(), held).save_last(NOTHING, ("group-1",))
    assert "other code consumed it" in caplog.text
