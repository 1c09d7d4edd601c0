"""Finds random numbers that are the same in all shards, although they are used before the means are taken.

A key in the state is the same in all groups. Noise that `compute` draws from it is the same in every shard, so its
mean over the shards is as large as the noise of one. Folding the shard's number, or anything else of the batch, into
the key makes the draws independent. The taints show it: the drawn bits derive from the state, not from the batch.
"""

from collections.abc import Collection, Sequence

from jaxft._programs import _compat
from jaxft._programs._compat import Eqn
from jaxft._programs._slice import Part
from jaxft._programs._taint import BATCH, STATE, Rules, Taint

_DRAWS = frozenset({"random_bits", "threefry2x32", "rng_bit_generator"})
_FROM_STATE: Taint = 2


def shared_draws(compute: Part, common: Collection[int] = ()) -> list[str]:
    """The source lines that draw the same numbers in all shards, from a key that derives from the state.

    `common`: which of the values that programs pass on are the same in all shards.
    """
    draws: list[Eqn] = []

    def see(eqn: Eqn, ins: Sequence[Taint]) -> None:
        if eqn.primitive.name in _DRAWS and all(taint == _FROM_STATE for taint in ins):
            draws.append(eqn)

    rules = Rules(see)
    inputs = [
        *(STATE for _ in compute.consts),
        *(_FROM_STATE for _ in compute.state),
        *(BATCH for _ in compute.batch),
        *(_FROM_STATE for _ in compute.means),
        *(_FROM_STATE if index in common else BATCH for index in compute.rest),
        *(STATE for _ in compute.zeros),
    ]
    of = dict(zip(compute.jaxpr.invars, inputs, strict=True))
    lines: dict[str, None] = {}
    for eqn in compute.jaxpr.eqns:
        ins = [of.get(atom, STATE) if _compat.is_var(atom) else STATE for atom in eqn.invars]
        draws.clear()
        of.update(zip(eqn.outvars, rules.results(eqn, ins), strict=True))
        if draws:
            # Not the line of the draw itself: JAX traces its random functions once for all their callers.
            lines[_compat.source_line(eqn)] = None
    return list(lines)


def warning(line: str) -> str:
    return (
        f"All shards draw the same random numbers at {line}: the key comes from the state, and the numbers are used "
        "before jaxft.pmean or jaxft.psum, so that noise does not average out. Give each shard its own key: "
        "`jax.random.fold_in(key, jaxft.shard_index())`. Ignore this if all shards are to use the same numbers."
    )
