"""Warnings about a step, once each: random numbers that all shards share, and a state that is mostly frozen.

A key in the state is the same in all groups. Noise that `compute` draws from it is the same in every shard, so its
mean over the shards is as large as the noise of one. Folding the shard's number, or anything else of the batch, into
the key makes the draws independent. The taints show it: the drawn bits derive from the state, not from the batch.
"""

import logging
from collections.abc import Collection, Sequence

from jaxft._programs import _compat
from jaxft._programs._axis import Axis
from jaxft._programs._compat import Eqn
from jaxft._programs._compile import Spec
from jaxft._programs._leaves import Part
from jaxft._programs._partition import Cut
from jaxft._programs._taint import BATCH, STATE, Rules, Taint

_log = logging.getLogger("jaxft")

_MANY_BYTES = 64 << 20
_SHARED = (
    "All shards draw the same random numbers at {line}: the key comes from the state, and the numbers are used "
    "before jaxft.pmean or jaxft.psum. If they are noise, as in dropout, it does not average out: draw it with "
    "`jax.random.fold_in(key, jaxft.shard_index())`. If all shards must share them, as for the choice of a lax.cond "
    "around an exchange or the perturbation of evolution strategies, they are right as they are."
)
_FROZEN = (
    "{frozen_mb} of the {all_mb} MB of the state ({kept} of {leaves} leaves) come back from the step as they were. "
    "Each heal fetches them, and each checkpoint holds them. Frozen weights need not be in the state: let the step "
    'close over them (docs/porting.md, "Frozen weights").'
)
_NOT_DIVIDED = (
    "overlap={overlap} gains nothing: the gradients of this step cannot be divided into some that are ready first "
    "and some that are ready last. Gradients of a scan over layers can, if they go to jaxft.pmean as they come out "
    "of it: not sharded over the layers, and not added up in another scan, over parts of the batch. Leave out "
    "`overlap`: it compiles the step twice."
)


class Warned:
    """Warns of one step, of each thing once."""

    def __init__(self) -> None:
        self._texts: set[str] = set()

    def of_draws(self, parts: Cut, axis: Axis) -> None:
        """Warn, once for each line, of random numbers that are the same in all shards."""
        if axis.shards == 1:
            return
        for stage in parts.stages:
            for line in shared_draws(stage.compute, parts.common):
                self._warn(_SHARED.format(line=line))

    def of_frozen(self, parts: Cut, state: Sequence[Spec]) -> None:
        """Warn of a state that is for the most part never changed."""
        kept = [new for new, old in parts.forwarded.items() if new == old]
        frozen_bytes, all_bytes = _bytes([state[leaf] for leaf in kept]), _bytes(state)
        if frozen_bytes >= _MANY_BYTES and 2 * frozen_bytes >= all_bytes:
            sizes = {"frozen_mb": round(frozen_bytes / 1e6), "all_mb": round(all_bytes / 1e6)}
            self._warn(_FROZEN.format(**sizes, kept=len(kept), leaves=len(state)))

    def of_no_overlap(self, overlap: int) -> None:
        """Warn of an overlap that divides nothing."""
        self._warn(_NOT_DIVIDED.format(overlap=overlap))

    def _warn(self, text: str) -> None:
        if text not in self._texts:
            self._texts.add(text)
            _log.warning("%s", text)


def _bytes(specs: Sequence[Spec]) -> int:
    return sum(spec.size * spec.dtype.itemsize for spec in specs)


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
