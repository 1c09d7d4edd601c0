"""Loops in which a step asks for the number of the shard: the same loops, whose bodies are given it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from jaxft._programs import _compat
from jaxft._programs._compat import AnyJaxpr, Eqn

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
