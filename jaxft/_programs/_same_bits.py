"""Refuses an overlap that changes bits.

XLA fuses what one program contains. A boundary between two programs can make it add the terms of a reduction in
another order, and then a step would have other bits than without overlap. Whether it does is seen in the first batch.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxft._errors import StepError
from jaxft._programs._compile import Program
from jaxft._programs._partition import Cut


def check_same_bits(
    whole: tuple[Cut, Sequence[Program]],
    divided: tuple[Cut, Sequence[Program]],
    state: Sequence[Any],
    batch: Sequence[Any],
) -> None:
    """Compute a shard with the undivided programs and with the divided ones, and compare what is exchanged.

    Raises:
        StepError: a contribution has other bits. It names it.
    """
    wanted = _contributions(*whole, state, batch)
    found = _contributions(*divided, state, batch)
    for one in divided[0].contributions:
        label = one.label if one.rows is None else one.label.removesuffix(one.rows.text)
        rows = wanted[label] if one.rows is None else wanted[label][one.rows.start : one.rows.stop]
        if not _same(jax.device_put(rows, found[one.label].sharding), found[one.label]):
            parts, stages = len(divided[0].stages), len(whole[0].stages)
            raise StepError(
                f"The step cannot be overlapped in this way: computed by {parts} programs, {one.label!r} has other "
                f"bits than computed by {stages}, because XLA adds up in another order at a boundary between two "
                "programs. Pass another number as `overlap` to jaxft.fault_tolerant, or leave it out."
            )


def _contributions(
    cut: Cut, computes: Sequence[Program], state: Sequence[Any], batch: Sequence[Any]
) -> dict[str, jax.Array]:
    """What a shard alone contributes to all exchanges, by its label."""
    means: list[jax.Array] = []
    rest: list[jax.Array] = []
    for stage, program in zip(cut.stages, computes, strict=True):
        outputs = program(*stage.compute.inputs(state, batch=batch, means=means, rest=rest))
        count = len(stage.contributions)
        means += outputs[:count]
        rest += outputs[count + len(stage.direct) :]
    return dict(zip([one.label for one in cut.contributions], means, strict=True))


def _same(one: jax.Array, other: jax.Array) -> bool:
    pairs = zip(one.addressable_shards, other.addressable_shards, strict=True)
    return all(_bytes(mine.data) == _bytes(theirs.data) for mine, theirs in pairs)


def _bytes(array: jax.Array) -> bytes:
    return np.asarray(array).tobytes()
