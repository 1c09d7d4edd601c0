"""Whether every group can repeat a step, whatever the batch was from which its means came."""

from collections import Counter
from collections.abc import Sequence

from jaxft._arrays._layout import LeafSpec
from jaxft._errors import StepError
from jaxft._programs._programs import Programs


def check_repeatable(built: Programs, reference: Programs) -> None:
    """Refuse programs whose means another group could not apply with the `reference`, those of an earlier call.

    A group that joins replays the means of a step through the only `apply` that it knows.

    Raises:
        StepError: they exchange other values, or have another `apply`.
    """
    same_apply = built.executables.apply_key == reference.executables.apply_key
    if built.contribution == reference.contribution and same_apply:
        return
    raise StepError(
        "What the step averages, or what it does with the means, depends on the batch's structure, shape or "
        "placement or on a static argument: it differs from that of an earlier call"
        f"{_other_values(built, reference)}. Every group must be able to repeat a step from the state and the means "
        "alone, whatever they came from. Do what depends on the batch (such as dividing by its size) before "
        "jaxft.pmean or psum, and keep static arguments to what happens before it."
    )


def _other_values(built: Programs, reference: Programs) -> str:
    """Which values only one of two calls exchanges, as a part of a message."""
    now, before = Counter(built.contribution), Counter(reference.contribution)
    told = [
        f"{call} exchanges {_values(list(more.elements()))}, which {other} does not"
        for call, other, more in (
            ("this one", "that one", now - before),
            ("that one", "this one", before - now),
        )
        if more
    ]
    if not told:
        return ""
    return (
        f" ({'; '.join(told)}; a value that is the same in all shards, such as jnp.zeros(()), is not exchanged: to "
        "exchange it like one of the batch, let it derive from the batch, as `0 * loss` does)"
    )


def _values(specs: Sequence[LeafSpec]) -> str:
    """The types of the first values, with their places in what the step exchanges."""
    first = [f"{spec.dtype}{list(spec.shape)} {spec.path}".rstrip() for spec in specs[:3]]
    return ", ".join(first) + (f" and {len(specs) - 3} more" if specs[3:] else "")
