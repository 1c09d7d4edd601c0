"""Refs that live within a step: equations that touch a Ref become a nested `jax.jit`, which hides it.

A step becomes several programs, and no program can pass a Ref to another. So all that is done with a Ref, from
`jax.new_ref` to its last use, must lie between two exchanges. Equations that do not lie on a way from one use to
another stay outside, before or after.
"""

from collections.abc import Sequence

import jax

from jaxft._errors import StepError
from jaxft._programs import _compat
from jaxft._programs._compat import Atom, Eqn, Var
from jaxft._programs._primitive import pmean_p


def contained(eqns: Sequence[Eqn], results: Sequence[Atom]) -> list[Eqn]:
    """The same equations, where each Ref lives within one.

    Raises:
        StepError: a Ref was made outside of the step, or is used on both sides of an exchange.
    """
    eqns = list(eqns)
    while (first := next((at for at, eqn in enumerate(eqns) if _compat.ref_effects(eqn)), None)) is not None:
        before = _before(eqns)
        inside = _inside(eqns, _uses(eqns, first), before)
        mask = sum(1 << at for at in inside)
        rest = [at for at in range(len(eqns)) if at not in inside]
        later = [at for at in rest if before[at] & mask]
        outside = [*(atom for at in rest for atom in eqns[at].invars), *results]
        call = _call([eqns[at] for at in inside], {atom for atom in outside if _compat.is_var(atom)})
        eqns = [*(eqns[at] for at in rest if at not in later), *call, *(eqns[at] for at in later)]
    return eqns


def _refs(eqn: Eqn) -> set[Var]:
    return {atom for atom in (*eqn.invars, *eqn.outvars) if _compat.is_var(atom) and _compat.is_ref(atom)}


def _uses(eqns: Sequence[Eqn], first: int) -> set[int]:
    """The equations that touch the Refs of the first, and other Refs that these touch."""
    refs, uses = _refs(eqns[first]), {first}
    while True:
        grown = {at for at, eqn in enumerate(eqns) if refs & _refs(eqn)}
        if grown <= uses:
            return uses
        uses |= grown
        refs |= {ref for at in grown for ref in _refs(eqns[at])}


def _before(eqns: Sequence[Eqn]) -> list[int]:
    """For each equation, as bits, all that must precede it: makers of its operands, and earlier uses of its Refs."""
    found: list[int] = []
    last: dict[Var, int] = {}  # of each value or Ref, the last equation that made or touched it
    for at, eqn in enumerate(eqns):
        needs = {last[atom] for atom in eqn.invars if _compat.is_var(atom) and atom in last}
        found.append(sum(1 << earlier for earlier in needs))
        for earlier in needs:
            found[at] |= found[earlier]
        last |= dict.fromkeys((*eqn.outvars, *_refs(eqn)), at)
    return found


def _inside(eqns: Sequence[Eqn], uses: set[int], before: Sequence[int]) -> list[int]:
    """The uses, and all equations on a way from one use to another."""
    mask, needed = sum(1 << at for at in uses), 0
    for at in uses:
        needed |= before[at]
    found = [at for at in range(len(eqns)) if at in uses or (before[at] & mask and needed >> at & 1)]
    made = {var for at in found for var in eqns[at].outvars}
    across = any(eqns[at].primitive is pmean_p for at in found)
    for at in found:
        if across or not _refs(eqns[at]) <= made:
            raise StepError(
                f"The step reads or writes a mutable array, a jax Ref ({_compat.source_line(eqns[at])}), that "
                f"{'is used before and after an exchange' if across else 'was made outside of it'}. A write cannot "
                "be undone if the job does not commit the step, and a group that joins could not replay it. Pass the "
                "value through the state instead; a Ref that is made in the step, and used on one side of "
                "jaxft.pmean alone, is fine."
            )
    return found


def _call(eqns: Sequence[Eqn], wanted: set[Var]) -> list[Eqn]:
    """One call of these equations."""
    made = {var for eqn in eqns for var in eqn.outvars}
    reads = list(dict.fromkeys(atom for eqn in eqns for atom in eqn.invars if _compat.is_var(atom)))
    reads = [var for var in reads if var not in made]
    results = [var for eqn in eqns for var in eqn.outvars if var in wanted]
    function = _compat.as_function(_compat.new_jaxpr(reads, results, eqns))
    traced = _compat.trace(jax.jit(lambda *given: function(*given)), *(var.aval for var in reads))
    call = _compat.named_eqns(traced, reads, results)
    return [eqn.replace(source_info=eqns[0].source_info) for eqn in call]
