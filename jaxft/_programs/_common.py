"""What programs of a step pass on although it does not derive from the batch.

Theory of operation. What derives from the state alone is computed in each program that needs it: a key that is split,
a mask, a schedule. It fuses with what reads it, and takes no memory between two programs. What derives from means
could be treated alike, and `apply` has to make it from nothing but the state and the means. But where each exchange
is followed by an update of the weights (epochs and minibatches of PPO), the k-th program would repeat k updates:
programs that grow, and that all differ. So what the programs before have made of means is passed on, and with it the
numbers that go along (the count of an optimizer, a key), so that the programs of all rounds between the second and
the last are the same, and are compiled once.

Such values are *common*: all shards of a group have the same, and the group keeps one copy.

What is larger than that which it is made of (a mean that is broadcast to the shape of an activation) is computed
again instead.
"""

from typing import Any

from jaxft._programs import _compat
from jaxft._programs._compat import Atom, Var
from jaxft._programs._inline import Flat
from jaxft._programs._primitive import pmean_p
from jaxft._programs._taint import BATCH, Taints, stage_of

# Of what derives from the state alone, only such are passed: numbers and keys, no masks.
_SMALL_BYTES = 1024


def common(flat: Flat, taints: Taints) -> dict[Var, int]:
    """The values that may be passed, and for each the stage whose program makes it.

    What derives from the state alone belongs to the stage in which it stands in the step: after so many exchanges.
    """
    found: dict[Var, int] = {}
    now = 0
    for eqn in flat.eqns:
        if eqn.primitive is pmean_p:
            now = max([now, *(stage_of(taints.taint(var)) for var in eqn.outvars if var in taints.exchanged)])
            continue
        made_of_bytes = sum(map(_size_bytes, filter(_has_size, filter(_compat.is_var, eqn.invars))))
        for var in filter(_has_size, eqn.outvars):
            taint, size_bytes = taints.taint(var), _size_bytes(var)
            stage = stage_of(taint) or (now if size_bytes <= _SMALL_BYTES else 0)
            if stage and not taint & BATCH and size_bytes <= made_of_bytes:
                found[var] = stage
    return found


def _has_size(atom: Atom) -> bool:
    """Whether it is an array: not a token, for instance."""
    return hasattr(atom.aval, "size") and hasattr(atom.aval, "dtype")


def _size_bytes(atom: Atom) -> int:
    aval: Any = atom.aval
    return aval.size * aval.dtype.itemsize
