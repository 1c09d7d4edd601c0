"""Moves every `pmean`, `psum` and `shard_index` of a traced step to the top level, where the step can be cut."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxft._errors import StepError
from jaxft._programs import _compat
from jaxft._programs._axis import NO_AXIS, Axis, translated, written_with_sums
from jaxft._programs._closed_over import is_large
from jaxft._programs._compat import AnyJaxpr, Atom, Eqn, Var
from jaxft._programs._primitive import pmean_p, shard_index_p

# Primitives that only call a jaxpr. Any other primitive around a pmean changes whether or how often it runs.
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "eval_jaxpr"})


@dataclass
class Flat:
    """A step as one list of equations, with every pmean and psum at the top level.

    Its last input is the number of the shard. Constants are variables of it, whose values are in `consts`.
    """

    invars: list[Var]
    outvars: list[Atom] = field(default_factory=list)
    eqns: list[Eqn] = field(default_factory=list)
    consts: dict[Var, Any] = field(default_factory=dict)


def inline(closed: AnyJaxpr, axis: Axis = NO_AXIS, *, all_calls: bool = False) -> Flat:
    """Inline the nested calls that contain a pmean, psum or shard_index; with `all_calls`, also all that only call.

    Raises:
        StepError: one of these is inside a primitive that does more than call (scan, cond, remat, ...), the step
            uses another collective over `axis`, or it has effects that cannot be split over several programs.
    """
    jaxpr = _compat.open_jaxpr(closed)
    flat = Flat(invars=[*jaxpr.invars, _compat.new_var(_compat.int32_aval())])
    flat.consts.update(zip(jaxpr.constvars, _compat.consts_of(closed), strict=True))
    flat.outvars = _Inliner(flat, axis, all_calls).body(jaxpr, {}, rename=False)
    return flat


class _Inliner:
    def __init__(self, flat: Flat, axis: Axis, all_calls: bool) -> None:
        self._flat = flat
        self._axis = axis
        self._all_calls = all_calls
        self._has_marker: dict[tuple[int, Axis], bool] = {}

    def body(self, jaxpr: AnyJaxpr, env: dict[Var, Atom], *, rename: bool) -> list[Atom]:
        """Append a body's equations. Since a body may be called twice, its variables may need new names."""
        for eqn in translated(jaxpr, self._axis):
            if eqn.primitive is shard_index_p:
                env[eqn.outvars[0]] = self._flat.invars[-1]
                continue
            invars = [_read(env, atom) for atom in eqn.invars]
            if (written := written_with_sums(eqn, self._axis)) is not None:
                sums = _compat.open_jaxpr(written)
                results = self.body(sums, dict(zip(sums.invars, invars, strict=True)), rename=True)
                env.update(zip(eqn.outvars, results, strict=True))
                continue
            if eqn.primitive is not pmean_p and (self._opens(eqn) or self._contains_marker(eqn, self._axis)):
                self._call(eqn, invars, env)
                continue
            _check_effects(eqn)
            outvars = eqn.outvars
            if rename:
                outvars = [_compat.new_var(var.aval) for var in eqn.outvars]
                env.update(zip(eqn.outvars, outvars, strict=True))
            self._flat.eqns.append(eqn.replace(invars=invars, outvars=outvars))
        return [_read(env, atom) for atom in jaxpr.outvars]

    def _opens(self, eqn: Eqn) -> bool:
        """Whether to inline an equation just to see inside; not where a Ref lives, which must stay within it.

        One that closes over a large array is inlined: the array becomes an input of the programs.
        """
        if not (self._all_calls or _closes_over_large(eqn)) or eqn.primitive.name not in _CALLS:
            return False
        sub = _compat.called_jaxpr(eqn)
        return sub is not None and not _compat.uses_refs(sub)

    def _call(self, eqn: Eqn, invars: Sequence[Atom], env: dict[Var, Atom]) -> None:
        sub = _compat.called_jaxpr(eqn)
        if eqn.primitive.name not in _CALLS or sub is None:
            raise StepError(_inside(eqn, *self._marker(eqn, self._axis)))
        closed = next(_compat.sub_jaxprs(eqn))
        inner: dict[Var, Atom] = {}
        for var, value in zip(sub.constvars, _compat.consts_of(closed), strict=True):
            fresh = _compat.new_var(var.aval)
            inner[var] = fresh
            self._flat.consts[fresh] = value
        constrained = self._constrain(invars, eqn.params.get("in_shardings"))
        inner.update(zip(sub.invars, constrained, strict=True))
        results = self.body(sub, inner, rename=True)
        results = self._constrain(results, eqn.params.get("out_shardings"))
        env.update(zip(eqn.outvars, results, strict=True))

    def _constrain(self, atoms: Sequence[Atom], shardings: Sequence[Any] | None) -> list[Atom]:
        """Keep the shardings that an inlined `jax.jit` requested, as constraints."""
        result = list(atoms)
        for index, sharding in enumerate(shardings or ()):
            aval: Any = result[index].aval
            if not isinstance(sharding, jax.sharding.Sharding) or _compat.is_explicit(aval):
                continue  # not requested, or already part of the type
            typed = _compat.spec(result[index])
            made = _compat.trace(lambda x, s=sharding: jax.lax.with_sharding_constraint(x, s), typed)
            body = _compat.open_jaxpr(made)
            result[index] = self.body(body, {body.invars[0]: atoms[index]}, rename=True)[0]
        return result

    def _contains_marker(self, eqn: Eqn, axis: Axis) -> bool:
        inner = axis.within(eqn)
        return any(self._jaxpr_has_marker(_compat.open_jaxpr(sub), inner) for sub in _compat.sub_jaxprs(eqn))

    def _jaxpr_has_marker(self, jaxpr: AnyJaxpr, axis: Axis) -> bool:
        known = self._has_marker.get((id(jaxpr), axis))
        if known is None:
            known = any(axis.marks(eqn) or self._contains_marker(eqn, axis) for eqn in jaxpr.eqns)
            self._has_marker[id(jaxpr), axis] = known
        return known

    def _marker(self, eqn: Eqn, axis: Axis) -> tuple[str, str]:
        """The first pmean, psum or shard_index inside an equation, and its source line."""
        inside = axis.within(eqn)
        for sub in _compat.sub_jaxprs(eqn):
            for inner in _compat.open_jaxpr(sub).eqns:
                if inside.marks(inner):
                    return inside.name_of(inner), _compat.source_line(inner, eqn)
                if self._contains_marker(inner, inside):
                    return self._marker(inner, inside)
        raise AssertionError("called for an equation without a pmean, psum or shard_index")


def _closes_over_large(eqn: Eqn) -> bool:
    """Whether this call, or one that it makes, closes over an array that is to be an input of the programs."""
    if eqn.primitive.name not in _CALLS:
        return False
    return any(
        any(map(is_large, _compat.consts_of(sub)))
        or any(map(_closes_over_large, _compat.open_jaxpr(sub).eqns))
        for sub in _compat.sub_jaxprs(eqn)
    )


def _read(env: dict[Var, Atom], atom: Atom) -> Atom:
    return env.get(atom, atom) if _compat.is_var(atom) else atom


def _inside(eqn: Eqn, call: str, line: str) -> str:
    if "index" in call:
        return (
            f"{call} is inside {eqn.primitive.name!r} ({line}). Move the call out of it: call it first, at the top "
            "level of the step, and use its result inside (a plain nested jax.jit is fine)."
        )
    return (
        f"{call} is inside {eqn.primitive.name!r} ({line}). The step is cut where groups exchange, and a "
        f"{eqn.primitive.name!r} cannot be cut in two. Move the call out of it: accumulate first, then exchange "
        "the result once, at the top level of the step (a plain nested jax.jit is fine)."
    )


def _check_effects(eqn: Eqn) -> None:
    if not eqn.effects:
        return
    line = _compat.source_line(eqn)
    if _compat.ref_effects(eqn):
        raise StepError(
            f"The step reads or writes a mutable array, a jax Ref ({line}). A write cannot be undone if the job "
            "does not commit the step, and a group that joins could not replay it. Pass the value through the "
            "state instead; a Ref that exists only inside a nested jax.jit is fine."
        )
    if _compat.ordered_effects(eqn):
        raise StepError(
            f"The step has an ordered effect, {eqn.primitive.name!r} ({line}). The step becomes two programs with "
            "an exchange between them, so the order of effects cannot be kept. Use ordered=False, or call the "
            "host between steps."
        )
