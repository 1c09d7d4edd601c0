"""A rank's line about its program outside of the step, while another waits for it there."""

from typing import Any

import pytest
from jaxft_protocol.values import SLOW_WAIT_S

from jaxft._programs import _compile
from jaxft._ranks._outside import Outside

CALL = "def call(ask):\n    return ask()\n"


def logged(program: str, *, in_step: bool = False) -> str:
    """The line about a thread in a function of a file with this name."""
    names: dict[str, Any] = {}
    exec(compile(CALL, program, "exec"), names)
    outside = Outside()
    with outside.in_step(now=in_step):
        return names["call"](lambda: outside.to_say("rank 0", SLOW_WAIT_S))


def test_a_rank_that_compiles_the_step_says_only_that() -> None:
    """It has not got into the step yet, and its program has done nothing wrong."""
    assert logged(_compile.__file__) == "compiles the step, and rank 0 has waited for it in the step for 5 s."


def test_a_rank_whose_program_does_something_else_says_where_it_stands() -> None:
    text = logged("/somewhere/train.py")
    assert text.startswith(
        "has been outside of the step for 0 s, and rank 0 has waited for it in the step for 5 s."
    )
    assert "Its program stands at " in text
    assert "/somewhere/train.py:2 in call" in text
    assert text.endswith("every rank must run the same number of steps.")


def test_a_rank_in_the_step_says_nothing() -> None:
    assert logged("/somewhere/train.py", in_step=True) == ""


def test_it_says_so_again_after_twice_the_time() -> None:
    outside = Outside()
    waits_s = [SLOW_WAIT_S - 1, SLOW_WAIT_S, SLOW_WAIT_S + 1, 2 * SLOW_WAIT_S, 3 * SLOW_WAIT_S]
    assert [bool(outside.to_say("rank 1", wait_s)) for wait_s in waits_s] == [False, True, False, True, False]


@pytest.mark.parametrize("wait_s", [0.0, SLOW_WAIT_S / 2])
def test_a_short_wait_begins_anew(wait_s: float) -> None:
    outside = Outside()
    assert outside.to_say("rank 1", SLOW_WAIT_S)
    assert not outside.to_say("rank 1", wait_s)
    assert outside.to_say("rank 1", SLOW_WAIT_S)
