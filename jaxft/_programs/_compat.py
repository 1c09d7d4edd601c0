"""The only module that uses more than JAX's public API: primitives, jaxprs, source lines.

Why it is needed: a train step is cut at `pmean` by analysing its jaxpr, and JAX makes no promises about jaxprs
(`jax.extend` is outside its compatibility policy). Everything that may change between releases is here, so that
a new JAX means checking one file. Written for and tested with JAX 0.10.2 to 0.12; `jax._src` is never imported.

What differs in that range:
- 0.10 has `Jaxpr` (open) and `ClosedJaxpr` (with its constants). From 0.11 on there is one class, a `Jaxpr`
  with attached constants; `jax.extend.core.ClosedJaxpr` is the same object. `open_jaxpr` and `close` hide it.
- `scan` describes its operands with `num_consts` and `num_carry` in 0.10, and with the tree `ft_in` later.
- `while` has no rule for dead code elimination in 0.10: `_prune_while` replaces it.
- Effects have no public classes: they are identified by the names of their classes.
"""

import os
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from jax.extend import core as jex
from jax.extend import source_info_util
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import AxisType

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Var: TypeAlias = jex.Var
Literal: TypeAlias = jex.Literal
Atom: TypeAlias = jex.Var | jex.Literal
Eqn: TypeAlias = jex.JaxprEqn
# A `Jaxpr` or a `ClosedJaxpr`: no static type fits both sides of 0.11.
AnyJaxpr: TypeAlias = Any
# Type checkers see `jax.tree_util.PyTreeDef` as a variable.
PyTreeDef: TypeAlias = Any

# Effects that are invisible outside an equation: a named axis, a Ref that exists only within it.
_HIDDEN_EFFECTS = frozenset({"NamedAxisEffect", "InternalMutableArrayEffect"})
# Frames from here are not user code: installed packages, the standard library, JAX and jaxft itself.
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_ROOTS = tuple(os.path.dirname(file) + os.sep for file in (os.__file__, jax.__file__, __file__))


def make_primitive(
    name: str,
    *,
    eagerly: Callable[..., Any],
    lowering: Callable[..., Any],
    jvp: Callable[..., Any],
) -> jex.Primitive:
    """A primitive of several operands and as many results of the same types, which commutes with vmap.

    With the operation "widened", the results are of int16.

    The three rules raise: such a primitive may only occur in a jaxpr that jaxft partitions.
    """
    primitive = jex.Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(eagerly)
    primitive.def_abstract_eval(
        lambda *avals, operation, **_: [
            aval.update(dtype=np.dtype(np.int16)) if operation == "widened" else aval for aval in avals
        ]
    )
    mlir.register_lowering(primitive, lowering)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = lambda args, dims, **params: (
        primitive.bind(*args, **params),
        dims,
    )
    return primitive


def make_source(name: str, *, eagerly: Callable[..., Any], lowering: Callable[..., Any]) -> jex.Primitive:
    """A primitive without operands that gives one int32 scalar. The two rules raise, as in `make_primitive`."""
    primitive = jex.Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(eagerly)
    primitive.def_abstract_eval(lambda: [int32_aval()])
    mlir.register_lowering(primitive, lowering)
    return primitive


def int32_aval() -> Any:
    return jax.typeof(np.int32(0))


def open_jaxpr(jaxpr: AnyJaxpr) -> AnyJaxpr:
    """The `Jaxpr` with the equations, whether it is closed or not."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def consts_of(jaxpr: AnyJaxpr) -> Sequence[Any]:
    return getattr(jaxpr, "consts", ())


def close(jaxpr: AnyJaxpr) -> AnyJaxpr:
    """Close a jaxpr that has no constants."""
    assert not jaxpr.constvars
    return jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jex.ClosedJaxpr(jaxpr, ())


def new_jaxpr(invars: Sequence[Var], outvars: Sequence[Atom], eqns: Sequence[Eqn]) -> AnyJaxpr:
    """An open jaxpr without constants."""
    effects = set().union(*(eqn.effects for eqn in eqns))
    empty = open_jaxpr(trace(lambda: ()))  # brings the debug info that a jaxpr needs
    return empty.replace(
        constvars=[], invars=list(invars), outvars=list(outvars), eqns=list(eqns), effects=effects
    )


def as_function(jaxpr: AnyJaxpr) -> Callable[..., list[Any]]:
    """The function of a jaxpr without constants, over flat positional arguments."""
    return jex.jaxpr_as_fun(close(jaxpr))


def special(error: Exception) -> str | None:
    """What `jax_debug_nans` or `jax_debug_infs` has found in a program, if that: its class is private."""
    if type(error).__name__ != "InternalFloatingPointError":
        return None
    return {"nan": "a NaN", "inf": "an infinity"}[error.args[1]]


def trace(function: Callable[..., Any], *args: Any, axis_sizes: Sequence[tuple[str, int]] = ()) -> AnyJaxpr:
    """The closed jaxpr of a function over flat arguments, within named axes of these sizes."""
    return jax.make_jaxpr(function, axis_env=list(axis_sizes))(*args)


def is_pmapped(function: Callable[..., Any]) -> bool:
    """Whether `jax.pmap` has made a function: all of its results run the same code."""
    if not hasattr(function, "lower"):
        return False
    made = jax.pmap(lambda: None)
    return getattr(function, "__code__", type(function)) is getattr(made, "__code__", type(made))


def over_axis(eqn: Eqn, name: str) -> bool:
    """Whether an equation itself communicates over a named axis, or asks for the position on it."""
    for parameter in ("axes", "axis_name"):
        names = eqn.params.get(parameter, ())
        if name in (names if isinstance(names, tuple | list) else (names,)):
            return True
    return False


def mapped_axes(eqn: Eqn) -> Collection[str]:
    """The named axes that an equation, a shard_map, binds for its body."""
    return eqn.params.get("newly_manual_axes") or eqn.params.get("manual_axes", ())


def spec(atom: Atom) -> jax.ShapeDtypeStruct:
    """The type to trace with for a value."""
    aval: Any = atom.aval
    sharding = aval.sharding if is_explicit(aval) else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def new_var(aval: Any) -> Var:
    return jex.Var(aval)


def dtype(atom: Atom) -> Any:
    aval: Any = atom.aval
    return aval.dtype


def shape(atom: Atom) -> tuple[int, ...]:
    aval: Any = atom.aval
    return tuple(aval.shape)


def is_var(atom: Atom) -> "TypeIs[Var]":
    return not isinstance(atom, jex.Literal)


def is_jaxpr(value: Any) -> bool:
    return isinstance(value, jex.Jaxpr | jex.ClosedJaxpr)


def sub_jaxprs(eqn: Eqn) -> Iterator[AnyJaxpr]:
    """The jaxprs directly among an equation's parameters, open or closed."""
    for value in eqn.params.values():
        for entry in value if isinstance(value, tuple | list) else (value,):
            if is_jaxpr(entry):
                yield entry


def parameters(eqn: Eqn) -> dict[str, Any]:
    """The parameters of an equation; of the carried object for a high-level primitive of JAX 0.12."""
    if eqn.primitive.name != "call_hi_primitive":
        return eqn.params
    found: dict[str, Any] = {}
    for carried in eqn.params.values():
        found["type"] = type(carried).__qualname__
        for name, value in getattr(carried, "__dict__", {}).items():
            found[name] = getattr(value, "jaxpr", value)  # a value traced beforehand wraps its jaxpr
    return found


def hidden_jaxprs(eqn: Eqn) -> Iterator[AnyJaxpr]:
    """The jaxprs inside a high-level primitive, which the rest of this module does not see."""
    if eqn.primitive.name == "call_hi_primitive":
        yield from filter(is_jaxpr, parameters(eqn).values())


def has_sub_jaxprs(eqn: Eqn) -> bool:
    return any(True for _ in sub_jaxprs(eqn))


def called_jaxpr(eqn: Eqn) -> AnyJaxpr | None:
    """The open jaxpr that an equation calls once with exactly its own operands and results, if it has one."""
    found = [open_jaxpr(sub) for sub in sub_jaxprs(eqn)]
    if len(found) != 1:
        return None
    sub = found[0]
    fits = len(sub.invars) == len(eqn.invars) and len(sub.outvars) == len(eqn.outvars)
    return sub if fits else None


def scan_counts(eqn: Eqn) -> tuple[int, int]:
    """How many leading operands of a scan are constants, and how many after them are carried."""
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def ordered_effects(eqn: Eqn) -> bool:
    return any("Ordered" in type(effect).__name__ for effect in eqn.effects)


def ref_effects(eqn: Eqn) -> bool:
    """Whether an equation creates, reads or writes a Ref that other equations can see."""
    if any(_touches_ref(effect) for effect in eqn.effects):
        return True
    internal = any(type(effect).__name__ == "InternalMutableArrayEffect" for effect in eqn.effects)
    return internal and not has_sub_jaxprs(eqn)


def is_ref(atom: Atom) -> bool:
    """Whether a variable is a Ref."""
    return type(atom.aval).__name__ == "AbstractRef"


def uses_refs(jaxpr: AnyJaxpr) -> bool:
    """Whether a jaxpr, or a jaxpr inside it, makes, reads or writes a Ref."""
    eqns = open_jaxpr(jaxpr).eqns
    return any(ref_effects(eqn) or any(map(uses_refs, sub_jaxprs(eqn))) for eqn in eqns)


def visible_effects(eqn: Eqn) -> bool:
    """Whether it shows if an equation runs twice, or never: debug prints and callbacks."""
    return any(map(_visible, eqn.effects))


def _visible(effect: Any) -> bool:
    return type(effect).__name__ not in _HIDDEN_EFFECTS and not _touches_ref(effect)


def _touches_ref(effect: Any) -> bool:
    return any(cls.__name__ == "RefEffect" for cls in type(effect).__mro__)


def prune(eqn: Eqn, used: Sequence[bool], *, keep_effects: bool) -> Eqn | None:
    """Reduce an equation to the results that are used, and to the operands that they need.

    Args:
        eqn: an equation with sub-jaxprs, such as scan, cond or a nested jit.
        used: which of its results are needed.
        keep_effects: False removes debug prints and callbacks first.

    Returns:
        The reduced equation over a subset of the operands and the same result variables, or None if nothing
        is left.
    """
    if not keep_effects and visible_effects(eqn):
        eqn = _without_effects(eqn, {})
    if eqn.primitive.name == "while" and eqn.primitive not in partial_eval.dce_rules:
        return _prune_while(eqn, used)
    invars = list(dict.fromkeys(atom for atom in eqn.invars if is_var(atom)))
    outvars = [var for var, wanted in zip(eqn.outvars, used, strict=True) if wanted]
    reduced, _ = partial_eval.dce_jaxpr(new_jaxpr(invars, outvars, [eqn]), [True] * len(outvars))
    assert len(reduced.eqns) <= 1
    return reduced.eqns[0] if reduced.eqns else None


def _prune_while(eqn: Eqn, used: Sequence[bool]) -> Eqn:
    """Reduce a while loop to the carried values that are used, and to all that these or the condition need.

    This is needed for correctness too: dropped values may be zeros, and with zeros an inner loop might not terminate.
    """
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    for_cond, for_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    _, by_cond = partial_eval.dce_jaxpr(open_jaxpr(cond), [True])
    needed = [one or other for one, other in zip(used, by_cond[for_cond:], strict=True)]
    while True:
        _, by_body = partial_eval.dce_jaxpr(open_jaxpr(body), needed)
        grown = [one or other for one, other in zip(needed, by_body[for_body:], strict=True)]
        if grown == needed:
            break
        needed = grown
    new_cond, kept_cond = partial_eval.dce_jaxpr(open_jaxpr(cond), [True], [False] * for_cond + needed)
    new_body, kept_body = partial_eval.dce_jaxpr(open_jaxpr(body), needed, [False] * for_body + needed)
    kept = [*kept_cond[:for_cond], *kept_body[:for_body], *needed]
    params = {
        "cond_jaxpr": jex.ClosedJaxpr(new_cond, consts_of(cond)),
        "body_jaxpr": jex.ClosedJaxpr(new_body, consts_of(body)),
        "cond_nconsts": sum(kept_cond[:for_cond]),
        "body_nconsts": sum(kept_body[:for_body]),
    }
    return eqn.replace(
        invars=[atom for atom, keep in zip(eqn.invars, kept, strict=True) if keep],
        outvars=[var for var, keep in zip(eqn.outvars, needed, strict=True) if keep],
        params=dict(eqn.params, **params),
    )


def _without_effects(eqn: Eqn, done: dict[int, AnyJaxpr]) -> Eqn:
    params = {name: _strip(value, done) for name, value in eqn.params.items()}
    return eqn.replace(params=params, effects={effect for effect in eqn.effects if not _visible(effect)})


def _strip(value: Any, done: dict[int, AnyJaxpr]) -> Any:
    """A parameter without the visible effects of its jaxprs."""
    if isinstance(value, tuple) and any(is_jaxpr(entry) for entry in value):
        entries = [_strip(entry, done) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)
    if not is_jaxpr(value):
        return value
    jaxpr: AnyJaxpr = value
    if not any(map(_visible, jaxpr.effects)):
        return value
    if id(value) not in done:
        done[id(value)] = _strip_jaxpr(value, done)
    return done[id(value)]


def _strip_jaxpr(jaxpr: AnyJaxpr, done: dict[int, AnyJaxpr]) -> AnyJaxpr:
    eqns: list[Eqn] = []
    for eqn in jaxpr.eqns:
        if not visible_effects(eqn):
            eqns.append(eqn)
        elif has_sub_jaxprs(eqn):
            eqns.append(_without_effects(eqn, done))
        else:
            # A callback whose result is not needed here; dead code reads it, and needs a value.
            eqns += zeros_eqns(eqn.outvars)
    effects = {effect for effect in jaxpr.effects if not _visible(effect)}
    stripped = open_jaxpr(jaxpr).replace(eqns=eqns, effects=effects)
    if isinstance(jaxpr, jex.ClosedJaxpr) and not isinstance(stripped, jex.ClosedJaxpr):
        return jex.ClosedJaxpr(stripped, consts_of(jaxpr))
    return stripped


def zeros_eqns(variables: Sequence[Var]) -> list[Eqn]:
    """Equations that set variables to zeros."""
    eqns: list[Eqn] = []
    for var in variables:
        eqns += named_eqns(trace(lambda var=var: zeros_like_aval(var.aval)), [], [var])
    return eqns


def scaled_eqns(atom: Atom, result: Var, factor: int) -> list[Eqn]:
    """Equations that set a variable to a value times a number, rounded once."""
    aval: Any = atom.aval
    wide = np.float32 if aval.dtype.itemsize < 4 else aval.dtype
    made = trace(lambda x: (x.astype(wide) * factor).astype(aval.dtype), aval)
    return named_eqns(made, [atom], [result])


def named_eqns(made: AnyJaxpr, inputs: Sequence[Atom], results: Sequence[Var]) -> list[Eqn]:
    """The equations of a function without constants, from these inputs to these variables.

    Each result must be made by an equation.
    """
    jaxpr = open_jaxpr(made)
    assert not jaxpr.constvars
    assert len({*jaxpr.invars, *jaxpr.outvars}) == len(jaxpr.invars) + len(jaxpr.outvars)
    names: dict[Var, Atom] = dict(zip(jaxpr.invars, inputs, strict=True))
    names.update(zip(jaxpr.outvars, results, strict=True))
    eqns: list[Eqn] = []
    for eqn in jaxpr.eqns:
        invars = [names[atom] if is_var(atom) else atom for atom in eqn.invars]
        outvars = [names.setdefault(out, new_var(out.aval)) for out in eqn.outvars]
        eqns.append(eqn.replace(invars=invars, outvars=outvars))
    return eqns


def output_avals(jaxpr: AnyJaxpr) -> list[Any]:
    return [atom.aval for atom in open_jaxpr(jaxpr).outvars]


def with_shape(aval: Any, shape: Sequence[int]) -> Any:
    """The same abstract value with another shape."""
    return aval.update(shape=tuple(shape))


def zeros_like_aval(aval: Any) -> jax.Array:
    """Zeros of an abstract value's shape, dtype (PRNG keys included) and, on explicit axes, sharding."""
    sharding = aval.sharding if is_explicit(aval) else None
    return jax.lax.full(aval.shape, 0, aval.dtype, sharding=sharding)


def is_explicit(aval: Any) -> bool:
    """Whether a value's sharding is part of its type: its mesh has explicit axes."""
    return AxisType.Explicit in aval.sharding.mesh.axis_types


def lies_nowhere(aval: Any) -> bool:
    """Whether a value is on no mesh, such as a function of numpy arrays alone."""
    return aval.sharding.mesh.empty


def source_line(*eqns: Eqn) -> str:
    """Where the user wrote an equation: the innermost frame outside installed packages.

    Takes the first of several equations that has such a frame: some are traced separately from the code around them.
    """
    found = next(filter(None, map(_user_line, eqns)), None)
    return found or source_info_util.summarize(eqns[0].source_info)


def _user_line(eqn: Eqn) -> str | None:
    for frame in getattr(eqn.source_info.traceback, "frames", None) or ():
        if _is_user_code(frame.file_name):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return None


def raising_line(error: BaseException) -> str | None:
    """The innermost line of user code that an exception came through."""
    frames = traceback.extract_tb(error.__traceback__)
    user = [frame for frame in frames if _is_user_code(frame.filename)]
    return f"{user[-1].filename}:{user[-1].lineno} ({user[-1].name})" if user else None


def _is_user_code(file_name: str) -> bool:
    return not file_name.startswith(_ROOTS) and not any(part in file_name for part in _PACKAGES)
