"""What the training thread must refuse, whatever order the session's words arrive in."""

from typing import Any, cast

import jax.numpy as jnp
import pytest
from jaxft_protocol.messages import HealId, NewQuorum, QuorumId, Step
from jaxft_protocol.replica.state import Attempt, Replay

from jaxft._replica._runner import Runner


def runner_at(step: int) -> Runner:
    nothing = cast(Any, None)
    runner = Runner(
        nothing,
        nothing,
        nothing,
        nothing,
        failure_timeout_s=1.0,
        step=step,
        min_replicas=None,
        settings={},
        spare=False,
        other_meshes=False,
        digest_every=1,
        checkpoints=None,
    )
    runner._fetcher = cast(Any, object())  # anything fetched from it would raise
    return runner


def test_a_step_that_was_replayed_is_not_replayed_again() -> None:
    # The directive is renewed when the frontier moves, which may be before the last Replayed has been heard.
    runner = runner_at(step=3)
    nothing = cast(Any, None)
    assert runner._replay(Replay(HealId(1), Step(2), Step(5)), nothing, nothing) is None
    assert runner.step == 3


def test_an_attempt_at_another_step_than_the_one_in_hand_is_a_fault() -> None:
    runner = runner_at(step=3)
    nothing = cast(Any, None)
    attempt = Attempt(NewQuorum(QuorumId(1), Step(2), 1, ()), Step(2))
    with pytest.raises(AssertionError, match="asked for step 2 while holding state 3"):
        runner._attempt(nothing, nothing, nothing, nothing, attempt.quorum, attempt.step)


def test_a_last_state_that_other_code_has_consumed_is_left_out_with_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # It must not raise: the group would not say that it leaves.
    runner = runner_at(step=3)
    runner._state = jnp.ones(3)
    runner._state.delete()
    runner.save_last()
    assert "was consumed by other code" in caplog.text
