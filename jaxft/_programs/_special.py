"""What `jax_debug_nans` and `jax_debug_infs` find in a step, said as `jax.jit` says it: with operation and line.

`jax.jit` calls its function again without compiling it, and so finds the operation. A program that was compiled ahead
of time raises an exception that JAX keeps to itself and that names only the program
(https://docs.jax.dev/en/latest/debugging/flags.html).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxft._programs import _compat
from jaxft._programs._compat import AnyJaxpr, Atom, Eqn, Var
from jaxft._programs._slice import Part

Test: TypeAlias = Callable[[Any], jax.Array]

_NOTHING = contextlib.nullcontext()
_NAMES = {"nan": "a NaN", "inf": "an infinity"}
_IS: dict[str, Test] = {"nan": jnp.isnan, "inf": jnp.isinf}


def looks_for_special() -> contextlib.AbstractContextManager[None]:
    """A context in which programs look at their results if `jax_debug_nans` or `jax_debug_infs` is set.

    After the end of a `with jax.debug_nans(...)` anywhere in this thread, which JAX's own functions contain, programs
    no longer look, although the option is set for the whole process (JAX 0.10 to 0.12). A new context looks again.
    """
    nans, infs = jax.config.jax_debug_nans, jax.config.jax_debug_infs  # type: ignore[attr-defined]
    if not (nans or infs):
        return _NOTHING
    return _looking(nans, infs)


@contextlib.contextmanager
def _looking(nans: bool, infs: bool) -> Iterator[None]:
    with jax.debug_nans(nans), jax.debug_infs(infs):
        yield


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
    if any(isinstance(each, jax.Array) and not each.is_fully_addressable for each in inputs):
        return "it belongs to several processes, so one alone cannot run it again operation by operation"
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
    line = _compat.source_line(eqn)
    return f"`{eqn.primitive.name}`{f' at {line}' if line else ''}"


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
            return _within(is_special, eqn, given), []
        known.update(zip(eqn.outvars, results, strict=True))
    return None, [value(atom) for atom in opened.outvars]


def _within(is_special: Test, eqn: Eqn, given: Sequence[Any]) -> Eqn:
    """Return the operation within an equation that makes a special value, or else the equation."""
    try:
        return _called(is_special, eqn, given) or eqn
    except Exception:  # what is within may need the axes of a mesh, for one
        return eqn


def _called(is_special: Test, eqn: Eqn, given: Sequence[Any]) -> Eqn | None:
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
