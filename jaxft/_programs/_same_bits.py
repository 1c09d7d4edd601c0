"""Refuses an overlap that changes bits.

XLA fuses operations within a program. At a boundary between two programs it may round otherwise, and then a step
would have other bits than without overlap. Whether it does is seen in the first batch.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxft._errors import StepError
from jaxft._programs._compile import Program
from jaxft._programs._partition import Contribution, Cut

Computes = tuple[Cut, Sequence[Program]]
# On the host, or where other processes hold a part of it on the devices.
Values = dict[str, np.ndarray | jax.Array]


def check_same_bits(whole: Computes, divided: Computes, state: Sequence[Any], batch: Sequence[Any]) -> None:
    """Compute a shard with the undivided programs and with the divided ones, and compare their contributions.

    Raises:
        StepError: a contribution, which is named, has other bits.
    """
    wanted, found = _contributions(whole, state, batch), _contributions(divided, state, batch)
    for made in divided[0].contributions:
        if _same(_of(made, wanted), found[made.label]):
            continue
        if not _same(_of(made, _contributions(whole, state, batch)), _of(made, wanted)):
            raise StepError(
                f"The step cannot be overlapped: it is not deterministic. Computed twice by the same program, "
                f"{made.label!r} has other bits the second time. On a GPU, set XLA_FLAGS=--xla_gpu_deterministic_ops="
                "true, which groups need to have the same bits. Or leave out `overlap`."
            )
        raise StepError(
            f"The step cannot be overlapped in this way: computed by {len(divided[0].stages)} programs, "
            f"{made.label!r} has other bits than computed by {len(whole[0].stages)}, because XLA rounds otherwise at "
            "a boundary between two programs. Pass another number as `overlap` to jaxft.fault_tolerant, or leave it "
            "out."
        )


def _contributions(computes: Computes, state: Sequence[Any], batch: Sequence[Any]) -> Values:
    """The contributions of a single shard to all exchanges, by label."""
    cut, programs = computes
    means: list[jax.Array] = []
    rest: list[jax.Array | None] = []
    found: Values = {}
    for number, (stage, program) in enumerate(zip(cut.stages, programs, strict=True)):
        outputs = program(*stage.compute.inputs(state, batch=batch, means=means, rest=rest))
        count = len(stage.contributions)
        made = outputs[:count]
        for contribution, array in zip(stage.contributions, made, strict=True):
            found[contribution.label] = np.asarray(array) if array.is_fully_addressable else array
        if any(later.compute.means for later in cut.stages[number + 1 :]):
            means += made
        reads = cut.rest_read_after(number)
        passed = [*rest, *outputs[count + len(stage.direct) :]]
        rest = [array if index in reads else None for index, array in enumerate(passed)]
    return found


def _of(contribution: Contribution, values: Values) -> np.ndarray | jax.Array:
    """The same rows of the undivided step's contribution."""
    rows = contribution.rows
    if rows is None:
        return values[contribution.label]
    return values[contribution.label.removesuffix(rows.text)][rows.start : rows.stop]


def _same(one: np.ndarray | jax.Array, other: np.ndarray | jax.Array) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.asarray(one).tobytes() == np.asarray(other).tobytes()
    moved = jax.device_put(one, other.sharding)
    pairs = zip(moved.addressable_shards, other.addressable_shards, strict=True)
    return all(_same(np.asarray(mine.data), np.asarray(theirs.data)) for mine, theirs in pairs)
