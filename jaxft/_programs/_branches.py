"""Bodies of the control flow in a step: branches of a cond are divided, bodies of a loop get the number of the shard.

A cond cannot be cut in two, but each of its branches can. So it becomes a cond for the equations of a branch before
each exchange, which makes zeros if another branch is taken; the exchange itself, which takes place in every step,
since all steps of all groups must exchange the same values; and one for what follows in each branch, which makes the
results.

A loop in which a step asks for the number of the shard becomes the same loop, whose bodies take it as an operand.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from jaxft._programs import _compat
from jaxft._programs._compat import AnyJaxpr, Atom, Eqn, Var
from jaxft._programs._primitive import pmean_p


@dataclass(frozen=True)
class Segment:
    """Equations of a branch between two exchanges.

    `exchange` follows them: None after the last ones, which make the results of the branch.
    """

    eqns: Sequence[Eqn]
    results: Sequence[Atom]
    exchange: Eqn | None

    @property
    def reads(self) -> list[Var]:
        """The values that are made elsewhere, in order."""
        made = {var for eqn in self.eqns for var in eqn.outvars}
        atoms = (*(atom for eqn in self.eqns for atom in eqn.invars), *self.results)
        return list(dict.fromkeys(atom for atom in atoms if _compat.is_var(atom) and atom not in made))

    @property
    def is_empty(self) -> bool:
        """Whether leaving it out changes nothing."""
        return not self.results and not any(eqn.effects for eqn in self.eqns)

    def function(self) -> Callable[..., list[Any]]:
        """The results as a function of `reads`."""
        return _compat.as_function(_compat.new_jaxpr(self.reads, self.results, self.eqns))


def segments_of(eqns: Sequence[Eqn], results: Sequence[Atom]) -> list[Segment]:
    """Divide the equations of a branch at each exchange."""
    cuts = [at for at, eqn in enumerate(eqns) if eqn.primitive is pmean_p]
    segments: list[Segment] = []
    within = {var for eqn in eqns for var in eqn.outvars}
    needed = {*filter(_compat.is_var, results)}
    segments.append(Segment(eqns[cuts[-1] + 1 if cuts else 0 :], results, None))
    for number in reversed(range(len(cuts))):
        after = segments[-1]
        at, begin = cuts[number], cuts[number - 1] + 1 if number else 0
        needed |= {*after.reads, *filter(_compat.is_var, eqns[at].invars)}
        # A value that is exchanged as it enters the branch is zero, too, if another branch is taken.
        given = (atom for atom in eqns[at].invars if _compat.is_var(atom) and atom not in within)
        made = (var for eqn in eqns[begin:at] for var in eqn.outvars)
        found = dict.fromkeys((*(var for var in made if var in needed), *given))
        segments.append(Segment(eqns[begin:at], list(found), eqns[at]))
    return segments[::-1]


def switch(segments: Sequence[Segment | None]) -> Callable[..., list[jax.Array]]:
    """A function that runs the chosen segment; zeros of the same types where there is none.

    Its arguments are the number of the segment, then the `reads` of each segment, one after the other.
    """

    of = [atom.aval for atom in next(filter(None, segments)).results]

    def run(choice: jax.Array, *given: jax.Array) -> list[jax.Array]:
        branches: list[Callable[..., list[Any]]] = []
        start = 0
        for segment in segments:
            stop = start + (0 if segment is None else len(segment.reads))
            branches.append(_over(segment, of, start, stop))
            start = stop
        return lax.switch(choice, branches, *given)

    return run


def _over(segment: Segment | None, of: Sequence[Any], start: int, stop: int) -> Callable[..., list[Any]]:
    if segment is None:
        return lambda *_: list(map(_compat.zeros_like_aval, of))
    function = segment.function()
    return lambda *given: function(*given[start:stop])


# The bodies of each loop, by the name of their parameter.
LOOPS: Mapping[str, Sequence[str]] = {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr")}


def given_more(eqn: Eqn, bodies: Sequence[AnyJaxpr]) -> Callable[..., list[jax.Array]]:
    """A loop as a function of its operands and then of more values, which each of these bodies takes at its end."""
    functions = list(map(_compat.as_function, bodies))
    return (_scan if eqn.primitive.name == "scan" else _while)(eqn, *functions)


def _scan(eqn: Eqn, body: Callable[..., list[Any]]) -> Callable[..., list[jax.Array]]:
    consts, carried = _compat.scan_counts(eqn)
    count = len(eqn.invars)

    def run(*given: jax.Array) -> list[jax.Array]:
        fixed, more = given[:consts], given[count:]

        def turn(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            found = body(*fixed, *carry, *rows, *more)
            return found[:carried], found[carried:]

        start, rows = list(given[consts : consts + carried]), list(given[consts + carried : count])
        same = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        carry, made = lax.scan(turn, start, rows, **same)
        return [*carry, *made]

    return run


def _while(
    eqn: Eqn, condition: Callable[..., list[Any]], body: Callable[..., list[Any]]
) -> Callable[..., list[jax.Array]]:
    first, count = eqn.params["cond_nconsts"], len(eqn.invars)
    fixed = first + eqn.params["body_nconsts"]

    def run(*given: jax.Array) -> list[jax.Array]:
        more = given[count:]
        return lax.while_loop(
            lambda carry: condition(*given[:first], *carry, *more)[0],
            lambda carry: body(*given[first:fixed], *carry, *more),
            list(given[fixed:count]),
        )

    return run
