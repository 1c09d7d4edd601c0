"""Whether a job has enough steps for its faults, in the words of `jaxft chaos` before the storm."""

import math


def few_steps_text(steps: int, *, own_s: float, most_pace_s: float, lasts_s: float) -> str:
    """Return a warning if the steps, as long as they can be made, are over before the faults; otherwise "".

    `own_s` is what a step takes undisturbed, and `most_pace_s` by how much it may be made longer.
    """
    longest_s = own_s + most_pace_s
    if steps * longest_s >= lasts_s:
        return ""
    return (
        f"{steps} steps are few for {lasts_s:.0f} s of faults, since each takes {own_s:.1f} s and is made "
        f"{most_pace_s:g} s longer at most: a victim may return too late. Give the program "
        f"{math.ceil(lasts_s / longest_s)} steps or more, or pass fewer --kills"
    )


def slowed_text(steps: int, *, own_s: float, most_pace_s: float, lasts_s: float, to_the_end: bool) -> str:
    """Return for what the steps are slowed down; "" if they need not be, or if even that is not enough."""
    if not steps * own_s < lasts_s <= steps * (own_s + most_pace_s):
        return ""
    what = "this lasts" if to_the_end else "the faults have"
    return f"; steps are slowed down so that {what} {lasts_s:.0f} s"
