"""The verdict as text for people and as JSON for programs."""

import importlib.metadata
import platform
from collections.abc import Mapping
from typing import Any, Literal

from jaxft_launch.storm._record import Kill
from jaxft_launch.storm._verdict import Verdict

VERSIONS_OF = ("jaxft", "jax", "jaxlib", "flax", "optax", "numpy")
MOST_LOST_SHOWN = 5
LABEL_WIDTH = 18


def verdict_json(verdict: Verdict, *, seed: int) -> dict[str, Any]:
    """Return the verdict as JSON: the same figures as the text."""
    return {
        "kills": len(verdict.kills),
        "steps_committed": verdict.steps_committed,
        "steps_lost": verdict.steps_lost,
        "stall_ms": [rounded(ms(outcome.stall_s), 1) for outcome in verdict.kills],
        "back_s": [rounded(outcome.back_s, 3) for outcome in verdict.kills],
        "digests_equal": verdict.digests_equal,
        "matches_undisturbed": verdict.matches_undisturbed,
        "ok": verdict.ok,
        "verdict": verdict_word(verdict),
        "seed": seed,
        "ranks_per_group": verdict.nproc,
        "victims": [outcome.kill.group for outcome in verdict.kills],
        "victim_ranks": [outcome.kill.rank for outcome in verdict.kills],
        "killed_after_step": [outcome.kill.step for outcome in verdict.kills],
        "kills_planned": verdict.planned_kills,
        "steps_planned": verdict.planned_steps,
        "lost": [{"step": lost.step, "why": lost.why} for lost in verdict.lost],
        "digests": dict(verdict.digests),
        "undisturbed_digests": dict(verdict.undisturbed_digests),
        "first_difference": verdict.first_difference,
        "s_per_step": rounded(verdict.s_per_step, 4),
        "undisturbed_s_per_step": rounded(verdict.undisturbed_s_per_step, 4),
        "problems": [*verdict.problems, *verdict.too_short],
        "too_short": list(verdict.too_short),
        "versions": versions(),
    }


def verdict_word(verdict: Verdict) -> Literal["success", "incomplete", "failed"]:
    """Return the conclusion as one word, for programs."""
    if verdict.ok:
        return "success"
    return "incomplete" if verdict.incomplete else "failed"


def verdict_text(verdict: Verdict, *, seed: int) -> str:
    """Return the verdict as aligned lines, with the conclusion first."""
    victims = ", ".join(victim_text(verdict, outcome.kill) for outcome in verdict.kills)
    stalls = [or_else(ms(outcome.stall_s), "{:.0f} ms", "forever") for outcome in verdict.kills]
    returns = [or_else(outcome.back_s, "{:.1f} s", "never") for outcome in verdict.kills]
    with_kills, without = (
        or_else(value_s, "{:.3f}", "-") for value_s in (verdict.s_per_step, verdict.undisturbed_s_per_step)
    )
    fields = {
        "kills": f"{len(verdict.kills)} of {verdict.planned_kills} ({victims or 'none'}), --seed {seed}",
        "steps committed": f"{verdict.steps_committed} of {verdict.planned_steps}",
        "steps lost": lost_text(verdict),
        "survivors stalled": ", ".join(stalls) or "-",
        "victims back in": ", ".join(returns) or "-",
        "seconds per step": f"{with_kills} with kills, {without} undisturbed",
        "final state": digests_text(verdict.digests),
        "undisturbed run": undisturbed_text(verdict),
    }
    return verdict_lines(verdict, fields)


def victim_text(verdict: Verdict, kill: Kill) -> str:
    return kill.group if verdict.nproc == 1 else f"{kill.group} rank {kill.rank}"


def verdict_lines(verdict: Verdict, fields: Mapping[str, str]) -> str:
    """Return the conclusion, then labelled texts, then other problems."""
    lines = [_conclusion(verdict)]
    lines += (f"  {label:<{LABEL_WIDTH}} {text}" for label, text in fields.items())
    lines += (f"  {'problem':<{LABEL_WIDTH}} {problem}" for problem in verdict.problems)
    lines += (f"  {'no room':<{LABEL_WIDTH}} {problem}" for problem in verdict.too_short)
    return "\n".join(lines)


def versions() -> dict[str, str | None]:
    """Return the facts that reproduce this."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in VERSIONS_OF:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _conclusion(verdict: Verdict) -> str:
    if verdict.ok:
        return "VERDICT: nothing was lost, and the result is the undisturbed run's, bit for bit."
    if verdict.incomplete:
        return f"VERDICT: INCOMPLETE. Nothing was lost, {_compared(verdict)} the job had no room for the whole plan."
    reasons = ["VERDICT: FAILED."]
    if verdict.lost:
        reasons.append("Work was lost.")
    if None in verdict.digests.values():
        reasons.append("Not every group finished.")
    elif not verdict.digests_equal:
        reasons.append("The groups did not all end with the same state.")
    elif verdict.undisturbed_digests and not verdict.matches_undisturbed:
        reasons.append("The result is not the undisturbed run's.")
    if verdict.problems or verdict.too_short:
        reasons.append("Not everything went as planned.")
    return " ".join(reasons)


def _compared(verdict: Verdict) -> str:
    """Say how far the result of an incomplete storm is the undisturbed run's."""
    if any(digest is not None for digest in verdict.digests.values()):
        return "and no bit differs from the undisturbed run's, but"
    what = "loss" if verdict.tells_losses else "state"
    return f"and no {what} of a step differs from the undisturbed run's, but no group finished, and"


def lost_text(verdict: Verdict) -> str:
    if not verdict.lost:
        return "0"
    shown = [f"step {lost.step}: {lost.why}" for lost in verdict.lost[:MOST_LOST_SHOWN]]
    if len(verdict.lost) > MOST_LOST_SHOWN:
        shown.append(f"and {len(verdict.lost) - MOST_LOST_SHOWN} more reasons")
    margin = "\n" + " " * (LABEL_WIDTH + 5)
    return f"{verdict.steps_lost}{margin}{margin.join(shown)}"


def undisturbed_text(verdict: Verdict) -> str:
    if not verdict.undisturbed_digests:
        return "did not take place"
    if verdict.matches_undisturbed:
        return "the same bits"
    text = digests_text(verdict.undisturbed_digests)
    what = "losses" if verdict.tells_losses else "states"
    if verdict.first_difference is None:
        return f"{text}; the {what} are equal at every step"
    return f"{text}; the {what} differ from step {verdict.first_difference} on"


def digests_text(digests: Mapping[str, str | None]) -> str:
    digest = next(iter(digests.values()), None)
    if digest is not None and len(set(digests.values())) == 1:
        return digest if len(digests) == 1 else f"{digest} in all {len(digests)} groups"
    return ", ".join(f"{group} {digest or 'unfinished'}" for group, digest in digests.items())


def or_else(value: float | None, form: str, otherwise: str) -> str:
    return otherwise if value is None else form.format(value)


def ms(value_s: float | None) -> float | None:
    return None if value_s is None else value_s * 1000


def rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
