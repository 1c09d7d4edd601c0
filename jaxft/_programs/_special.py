"""What `jax_debug_nans` and `jax_debug_infs` find in a step, said as `jax.jit` says it: with operation and line.

`jax.jit` calls its function again without compiling it, and so finds the operation. A program that was compiled ahead
of time raises an exception that JAX keeps to itself and that names only the program
(https://docs.jax.dev/en/latest/debugging/flags.html).
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxft._programs import _compat
from jaxft._programs._compat import AnyJaxpr, Atom, Eqn, Var
from jaxft._programs._slice import Part

Test: TypeAlias = Callable[[Any], jax.Array]

_NAMES = {"nan": "a NaN", "inf": "an infinity"}
_IS: dict[str, Test] = {"nan": jnp.isnan, "inf": jnp.isinf}


def explained(found: str, name: str, part: Part, inputs: Sequence[Any]) -> FloatingPointError:
    """Return the error for what a program has made.

    Args:
        found: by JAX, among the results: "nan" or "inf".
        name: of the program.
        part: the program.
        inputs: what it was called with; if it has consumed some of them, it cannot run again.
    """
    return FloatingPointError(
        f"The step's program `{name}` makes {_NAMES[found]}: {_where(found, part, inputs)}. jax_debug_{found}s is "
        "set, so the step ends here."
    )


def _where(found: str, part: Part, inputs: Sequence[Any]) -> str:
    if any(isinstance(each, jax.Array) and each.is_deleted() for each in inputs):
        return "it has consumed its state, so it cannot run again operation by operation"
    zeros = map(_compat.zeros_like_aval, part.zeros)
    try:
        with jax.debug_nans(False), jax.debug_infs(False):
            eqn, _ = _run(_IS[found], part.jaxpr, [*part.consts, *inputs, *zeros])
    except Exception as error:
        return f"running it again operation by operation failed ({type(error).__name__}: {error})"
    if eqn is None:
        return (
            "run again operation by operation it makes none, so an input is one, or the optimizations make it"
        )
    return f"`{eqn.primitive.name}` at {_compat.source_line(eqn)}"


def _run(is_special: Test, jaxpr: AnyJaxpr, inputs: Sequence[Any]) -> tuple[Eqn | None, list[Any]]:
    """Run a jaxpr operation by operation; return the first that makes a special value, or the results."""
    opened = _compat.open_jaxpr(jaxpr)
    known: dict[Var, Any] = dict(zip(opened.constvars, _compat.consts_of(jaxpr), strict=True))
    known.update(zip(opened.invars, inputs, strict=True))

    def value(atom: Atom) -> Any:
        return known[atom] if _compat.is_var(atom) else atom.val

    for eqn in opened.eqns:
        given = [value(atom) for atom in eqn.invars]
        results = _compat.evaluated(eqn, given)
        if any(jnp.issubdtype(each.dtype, jnp.inexact) and is_special(each).any() for each in results):
            return _within(is_special, eqn, given) or eqn, []
        known.update(zip(eqn.outvars, results, strict=True))
    return None, [value(atom) for atom in opened.outvars]


def _within(is_special: Test, eqn: Eqn, given: Sequence[Any]) -> Eqn | None:
    """Return the operation within an equation that makes a special value, as far as that can be found."""
    if eqn.primitive.name == "scan":
        return _in_scan(is_special, eqn, given)
    called = _compat.called_jaxpr(eqn)
    if called is None or any(
        _compat.shape(var) != jnp.shape(one) for var, one in zip(called.invars, given, strict=True)
    ):
        return None
    return _run(is_special, next(_compat.sub_jaxprs(eqn)), given)[0]


def _in_scan(is_special: Test, eqn: Eqn, given: Sequence[Any]) -> Eqn | None:
    constants, carried = _compat.scan_counts(eqn)
    start = constants + carried
    fixed, carry, rows = given[:constants], given[constants:start], given[start:]
    order = range(eqn.params["length"])
    for at in reversed(order) if eqn.params["reverse"] else order:
        found, results = _run(is_special, eqn.params["jaxpr"], [*fixed, *carry, *(each[at] for each in rows)])
        if found is not None:
            return found
        carry = results[:carried]
    return None
