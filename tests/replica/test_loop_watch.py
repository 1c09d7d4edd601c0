"""The signs of a loop that follows the job, and of a loop that counts its calls."""

import pytest

from jaxft._errors import ConfigurationError
from jaxft._replica._steps import LoopWatch

JUMP = "this group was behind and has caught up with the others"


def called(watch: LoopWatch, step: int = 7) -> None:
    with watch.calling(lambda: step):
        pass


def test_without_a_jump_no_loop_has_to_look() -> None:
    watch = LoopWatch()
    for _ in range(3):
        called(watch)


@pytest.mark.parametrize("in_call", [False, True])
def test_after_a_jump_the_loop_has_to_look(*, in_call: bool) -> None:
    watch = LoopWatch()
    called(watch)
    watch.jumped(JUMP, in_call=in_call)
    with pytest.raises(
        ConfigurationError, match=f"this group is now at step 7, because {JUMP}.*manager.steps"
    ):
        called(watch)
    assert watch.calls == 1
    watch.read()
    called(watch)


def test_after_a_jump_in_a_call_it_has_to_look_before_every_call() -> None:
    """A loop that looks now and then counts its calls, and only logs the step."""
    watch = LoopWatch()
    watch.jumped(JUMP, in_call=True)
    for _ in range(3):
        watch.read()
        called(watch)
    with pytest.raises(ConfigurationError, match="does not follow the job"):
        called(watch)


def test_a_loop_that_looks_before_every_call_is_warned_of_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """`for i in range(n)` that logs `manager.step` looks like `while manager.step < n`."""
    watch = LoopWatch()
    called(watch)
    watch.jumped(JUMP, in_call=True)
    watch.begins()
    called(watch)
    assert not caplog.messages
    watch.ends()
    for _ in range(3):
        watch.read()
        called(watch)
    (message,) = caplog.messages
    assert f"come to step 7, because {JUMP}" in message
    assert "`for i in range(n)` does, it trains further" in message
    assert "for number in manager.steps(total)" in message


def test_a_range_may_begin_where_a_join_or_a_restore_has_led() -> None:
    watch = LoopWatch()
    watch.jumped("its state was restored from a checkpoint")
    watch.read()  # range(manager.step, total)
    for _ in range(3):
        called(watch)


def test_an_iteration_calls_the_step_once_unless_it_looks_in_between() -> None:
    watch = LoopWatch()
    watch.begins()
    called(watch)
    with pytest.raises(ConfigurationError, match=r"calls the step again, at step 7: .* Call the step once"):
        called(watch)
    watch.read()  # while manager.step < ...
    called(watch)
    watch.ends()
    called(watch)


def test_an_iteration_whose_call_changed_nothing_may_call_again() -> None:
    watch = LoopWatch()
    watch.begins()
    with pytest.raises(TimeoutError), watch.calling(lambda: 7):
        raise TimeoutError
    called(watch)


def test_calls_after_the_last_iteration_are_named_once_unless_the_loop_looks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = LoopWatch()
    watch.begins()
    called(watch)
    watch.ends()
    watch.is_over()
    for _ in range(3):
        watch.read()  # while manager.step < ...
        called(watch)
    assert not caplog.messages
    for _ in range(2):
        called(watch)
    (message,) = caplog.messages
    assert "after the loop over `steps` has come to its total, at step 7: it trains a further step" in message
    watch.is_over()
    watch.begins()
    called(watch)
    watch.ends()  # left by break
    called(watch)
    assert len(caplog.messages) == 1
