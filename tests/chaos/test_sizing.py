"""The words of `jaxft chaos` about the number of steps."""

from jaxft_launch.storm.chaos import few_steps_text, slowed_text


def said(steps: int, own_s: float, *, lasts_s: float = 80.0, to_the_end: bool = False) -> tuple[str, str]:
    times = {"own_s": own_s, "most_pace_s": 2.0, "lasts_s": lasts_s}
    return few_steps_text(steps, **times), slowed_text(steps, **times, to_the_end=to_the_end)


def test_quick_steps_that_are_few_are_told_once_and_not_said_to_fill_the_time() -> None:
    few, slowed = said(10, 0.5)
    assert few == (
        "10 steps are few for 80 s of faults, since each takes 0.5 s and is made 2 s longer at most: a victim may "
        "return too late. Give the program 32 steps or more, or pass fewer --kills"
    )
    assert slowed == ""
    assert said(32, 0.5)[0] == ""


def test_steps_that_are_long_of_themselves_need_no_pace() -> None:
    assert said(10, 8.0) == ("", "")


def test_steps_in_between_are_slowed_down() -> None:
    assert said(100, 0.5) == ("", "; steps are slowed down so that the faults have 80 s")
    assert said(100, 0.5, to_the_end=True) == ("", "; steps are slowed down so that this lasts 80 s")
