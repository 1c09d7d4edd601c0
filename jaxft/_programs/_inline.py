"""Moves every `pmean`, `psum` and `shard_index` of a traced step to the top level, where the step can be cut."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxft._errors import StepError
from jaxft._programs import _compat
from jaxft._programs._axis import NO_AXIS, Axis, translated, written_with_sums
from jaxft._programs._branches import LOOPS, Segment, given_more, segments_of, switch
from jaxft._programs._closed_over import is_large
from jaxft._programs._compat import AnyJaxpr, Atom, Eqn, Var
from jaxft._programs._primitive import pmean_p, shard_index_p
from jaxft._programs._refs import contained

# Primitives that only call a jaxpr. Of the others around a pmean, a scan is written out, and a cond divided; the rest
# changes whether or how often it runs.
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "eval_jaxpr"})
# Primitives that call a jaxpr, and say how it is differentiated. A traced step is differentiated no more.
_RULES = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})
# And how much of it is computed again. With an exchange inside, it becomes parts of several programs, and a value
# that its author wanted computed again is passed on only where a later program needs it.
_REMATS = frozenset({"checkpoint", "remat2"})
# The most rounds of all scans of a step together. Each round becomes a separate program, and `apply` repeats all
# rounds from the means.
MOST_ROUNDS = 64


@dataclass(frozen=True)
class Choice:
    """The value that selects the branch of a cond with an exchange; the call of that exchange, and its line."""

    atom: Atom
    call: str
    line: str


@dataclass
class Flat:
    """A step as one list of equations, with every pmean and psum at the top level.

    Its last input is the number of the shard. Constants are variables of it, whose values are in `consts`.
    """

    invars: list[Var]
    outvars: list[Atom] = field(default_factory=list)
    eqns: list[Eqn] = field(default_factory=list)
    consts: dict[Var, Any] = field(default_factory=dict)
    choices: list[Choice] = field(default_factory=list)


def inline(closed: AnyJaxpr, axis: Axis = NO_AXIS, *, all_calls: bool = False) -> Flat:
    """Inline the nested calls that contain a pmean, psum or shard_index; with `all_calls`, also all that only call.

    A scan that contains a pmean or psum is written out, round by round; a cond is divided. A loop or a
    `jax.checkpoint` that contains only a shard_index stays, and gets it as an operand.

    Raises:
        StepError: a marker is inside a primitive that does more than call (a pmean in a while or in a scan of many
            rounds, ...), the step uses another collective over `axis`, or it has effects that cannot be split
            over several programs.
    """
    jaxpr = _compat.open_jaxpr(closed)
    flat = Flat(invars=[*jaxpr.invars, _compat.new_var(_compat.int32_aval())])
    flat.consts.update(zip(jaxpr.constvars, _compat.consts_of(closed), strict=True))
    flat.outvars = _Inliner(flat, axis, all_calls=all_calls).body(jaxpr, {}, rename=False)
    flat.eqns = contained(flat.eqns, flat.outvars)
    return flat


class _Inliner:
    def __init__(self, flat: Flat, axis: Axis, *, all_calls: bool) -> None:
        self._flat = flat
        self._axis = axis
        self._all_calls = all_calls
        # By identity; the jaxpr is kept, so that no other jaxpr gets its number.
        self._has_marker: dict[tuple[int, Axis, bool], tuple[AnyJaxpr, bool]] = {}
        self._rounds = 0  # of scans, that are written out
        self._rows: dict[Var, Sequence[Atom]] = {}  # of the stacked results of such a scan

    def body(self, jaxpr: AnyJaxpr, env: dict[Var, Atom], *, rename: bool) -> list[Atom]:
        """Append a body's equations. Since a body may be called twice, its variables may need new names."""
        for eqn in translated(jaxpr, self._axis):
            if eqn.primitive is shard_index_p:
                env[eqn.outvars[0]] = self._flat.invars[-1]
                continue
            invars = [_read(env, atom) for atom in eqn.invars]
            if (written := written_with_sums(eqn, self._axis)) is not None:
                env.update(zip(eqn.outvars, self._in_place_of(eqn, written, invars), strict=True))
                continue
            if eqn.primitive is not pmean_p and (self._opens(eqn) or self._contains_marker(eqn, self._axis)):
                env.update(zip(eqn.outvars, self._call(eqn, invars), strict=True))
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

        A call that closes over a large array is inlined: the array becomes an input of the programs.
        """
        if not (self._all_calls or _closes_over_large(eqn)) or eqn.primitive.name not in _CALLS:
            return False
        sub = _compat.called_jaxpr(eqn)
        return sub is not None and not _compat.uses_refs(sub)

    def _call(self, eqn: Eqn, invars: Sequence[Atom]) -> list[Atom]:
        """Append an equation that contains a marker, or that `_opens`; return its results."""
        name, exchanges = eqn.primitive.name, self._contains_marker(eqn, self._axis, exchange=True)
        if name == "scan" and exchanges:
            return self._unrolled(eqn, invars)
        if name in LOOPS and not exchanges:
            return self._looped(eqn, invars)
        if name in _REMATS and not exchanges:
            return self._rematerialised(eqn, invars)
        # The branches of `lax.platform_dependent` are no choice of the step: only one can be compiled.
        if name == "cond" and not eqn.params.get("branches_platforms"):
            return self._branched(eqn, invars)
        sub = _compat.called_jaxpr(eqn)
        if name not in _CALLS | _RULES | _REMATS or sub is None:
            raise StepError(_inside(eqn, *self._marker(eqn, self._axis)))
        inner = self._consts_of(next(_compat.sub_jaxprs(eqn)))
        constrained = self._constrain(invars, eqn.params.get("in_shardings"), eqn)
        inner.update(zip(sub.invars, constrained, strict=True))
        results = self.body(sub, inner, rename=True)
        return self._constrain(results, eqn.params.get("out_shardings"), eqn)

    def _rematerialised(self, eqn: Eqn, invars: Sequence[Atom]) -> list[Atom]:
        """Append a `jax.checkpoint` whose body takes the number of the shard as an operand; return its results."""
        sub = _compat.called_jaxpr(eqn)
        assert sub is not None
        body = inline(sub, self._axis)
        self._flat.consts.update(body.consts)
        jaxpr = _compat.new_jaxpr([*body.invars, *body.consts], body.outvars, body.eqns)
        params = {**eqn.params, "jaxpr": jaxpr}
        if isinstance(eqn.params["prevent_cse"], tuple):  # one for each operand
            params["prevent_cse"] = (*eqn.params["prevent_cse"], *[False] * (1 + len(body.consts)))
        invars = [*invars, self._flat.invars[-1], *body.consts]
        outvars = [_compat.new_var(var.aval) for var in eqn.outvars]
        self._flat.eqns.append(
            eqn.replace(invars=invars, outvars=outvars, params=params, effects=jaxpr.effects)
        )
        return list(outvars)

    def _looped(self, eqn: Eqn, invars: Sequence[Atom]) -> list[Atom]:
        """Append a loop whose bodies take the number of the shard as an operand; return its results."""
        bodies = [inline(eqn.params[name], self._axis) for name in LOOPS[eqn.primitive.name]]
        consts = {var: value for body in bodies for var, value in body.consts.items()}
        self._flat.consts.update(consts)
        taking = [_compat.new_jaxpr([*body.invars, *consts], body.outvars, body.eqns) for body in bodies]
        more = self._flat.invars[-1], *consts
        return self._all_traced(given_more(eqn, taking), *invars, *more, of=eqn)

    def _branched(self, eqn: Eqn, invars: Sequence[Atom]) -> list[Atom]:
        """Divide a cond; return its results."""
        choice, *operands = invars
        if self._contains_marker(eqn, self._axis, exchange=True):
            self._flat.choices.append(Choice(choice, *self._marker(eqn, self._axis, exchange=True)))
        count = len(eqn.params["branches"])
        ends = [self._up_to_last(eqn, number, choice, operands) for number in range(count)]
        return self._switch(choice, ends, of=eqn)

    def _up_to_last(
        self, eqn: Eqn, number: int, choice: Atom, operands: Sequence[Atom]
    ) -> tuple[Segment, dict[Var, Atom]]:
        """Append a branch of a cond up to its last exchange; return the rest, and the values of its variables."""
        closed = eqn.params["branches"][number]
        branch, env = _compat.open_jaxpr(closed), self._consts_of(closed)
        body = Flat(invars=[*branch.invars, self._flat.invars[-1]])
        inner = _Inliner(body, self._axis, all_calls=self._all_calls)
        inner._rounds = self._rounds
        results = inner.body(branch, env, rename=True)
        body.eqns = contained(body.eqns, results)
        self._rounds = inner._rounds
        self._flat.consts.update(body.consts)
        named: dict[Var, Atom] = dict(zip(branch.invars, operands, strict=True))
        *before, last = segments_of(body.eqns, results)
        for segment in before:
            alone = [
                (segment, named) if other == number else None for other in range(len(eqn.params["branches"]))
            ]
            if not segment.is_empty:
                made = self._switch(choice, alone, of=eqn)
                pairs = zip(segment.results, made, strict=True)
                named |= {var: result for var, result in pairs if _compat.is_var(var)}
            exchange = segment.exchange
            assert exchange is not None
            means = [_compat.new_var(var.aval) for var in exchange.outvars]
            given = [_read(named, atom) for atom in exchange.invars]
            self._flat.eqns.append(exchange.replace(invars=given, outvars=means))
            named.update(zip(exchange.outvars, means, strict=True))
        self._flat.choices += [replace(inner, atom=_read(named, inner.atom)) for inner in body.choices]
        return last, named

    def _switch(
        self, choice: Atom, branches: Sequence[tuple[Segment, Mapping[Var, Atom]] | None], *, of: Eqn
    ) -> list[Atom]:
        """Append a cond of segments, each with the values of its variables; return its results."""
        given = [_read(env, var) for segment, env in filter(None, branches) for var in segment.reads]
        run = switch([None if branch is None else branch[0] for branch in branches])
        return self._all_traced(run, choice, *given, of=of)

    def _consts_of(self, closed: AnyJaxpr) -> dict[Var, Atom]:
        """New variables for the constants of a body."""
        found: dict[Var, Atom] = {}
        for var, value in zip(_compat.open_jaxpr(closed).constvars, _compat.consts_of(closed), strict=True):
            fresh = _compat.new_var(var.aval)
            found[var] = fresh
            self._flat.consts[fresh] = value
        return found

    def _unrolled(self, eqn: Eqn, invars: Sequence[Atom]) -> list[Atom]:
        """Write out the rounds of a scan; return its results.

        Raises:
            StepError: the step has too many.
        """
        length, closed = eqn.params["length"], eqn.params["jaxpr"]
        body, consts = _compat.open_jaxpr(closed), self._consts_of(closed)
        fixed, carried = _compat.scan_counts(eqn)
        carry, rows = list(invars[fixed : fixed + carried]), invars[fixed + carried :]
        made: list[Sequence[Atom]] = [()] * length
        for number in reversed(range(length)) if eqn.params["reverse"] else range(length):
            before = self._rounds
            taken = [self._row(row, number, eqn) for row in rows]
            given = zip(body.invars, [*invars[:fixed], *carry, *taken], strict=True)
            results = self.body(body, {**consts, **dict(given)}, rename=True)
            carry, made[number] = results[:carried], results[carried:]
            self._rounds += self._rounds == before  # otherwise the rounds of an inner scan exchange
            if self._rounds > MOST_ROUNDS:
                raise StepError(_too_many(*self._marker(eqn, self._axis, exchange=True)))
        stacked = [
            self._traced(_stacked, *column, of=eqn)
            if column
            else self._traced(lambda of=var.aval: _compat.zeros_like_aval(of), of=eqn)
            for var, *column in zip(eqn.outvars[carried:], *made, strict=True)
        ]
        for atom, *column in zip(stacked, *made, strict=True):
            if _compat.is_var(atom):
                self._rows[atom] = column
        return [*carry, *stacked]

    def _row(self, rows: Atom, number: int, eqn: Eqn) -> Atom:
        """A row of an operand of a scan. The results of an earlier scan are not stacked for it."""
        if _compat.is_var(rows) and rows in self._rows:
            return self._rows[rows][number]
        return self._traced(lambda x: lax.index_in_dim(x, number, keepdims=False), rows, of=eqn)

    def _traced(self, function: Callable[..., jax.Array], *atoms: Atom, of: Eqn) -> Atom:
        """As `_all_traced`, for a function with one result."""
        return self._all_traced(lambda *given: [function(*given)], *atoms, of=of)[0]

    def _all_traced(self, function: Callable[..., list[jax.Array]], *atoms: Atom, of: Eqn) -> list[Atom]:
        """Append the equations of a function of values, as if they stood where `of` does; return its results."""
        return self._in_place_of(of, _compat.trace(function, *map(_compat.spec, atoms)), atoms)

    def _in_place_of(self, of: Eqn, closed: AnyJaxpr, atoms: Sequence[Atom]) -> list[Atom]:
        """Append the equations of a jaxpr, as if they stood where `of` does; return its results."""
        body, first = _compat.open_jaxpr(closed), len(self._flat.eqns)
        results = self.body(body, dict(zip(body.invars, atoms, strict=True)), rename=True)
        made = [eqn.replace(source_info=of.source_info) for eqn in self._flat.eqns[first:]]
        self._flat.eqns[first:] = made
        return results

    def _constrain(self, atoms: Sequence[Atom], shardings: Sequence[Any] | None, eqn: Eqn) -> list[Atom]:
        """Keep the shardings that an inlined `jax.jit` requested, as constraints."""
        result = list(atoms)
        for index, sharding in enumerate(shardings or ()):
            aval: Any = result[index].aval
            if not isinstance(sharding, jax.sharding.Sharding) or _compat.is_explicit(aval):
                continue  # not requested, or already part of the type
            result[index] = self._traced(
                lambda x, s=sharding: lax.with_sharding_constraint(x, s), result[index], of=eqn
            )
        return result

    def _contains_marker(self, eqn: Eqn, axis: Axis, *, exchange: bool = False) -> bool:
        """Whether a pmean, psum or shard_index is inside an equation; with `exchange`, a pmean or psum."""
        inner = axis.within(eqn)
        subs = map(_compat.open_jaxpr, _compat.sub_jaxprs(eqn))
        return any(self._jaxpr_has_marker(sub, inner, exchange=exchange) for sub in subs)

    def _jaxpr_has_marker(self, jaxpr: AnyJaxpr, axis: Axis, *, exchange: bool) -> bool:
        known = self._has_marker.get((id(jaxpr), axis, exchange))
        if known is None:
            found = any(
                _marks(axis, eqn, exchange=exchange) or self._contains_marker(eqn, axis, exchange=exchange)
                for eqn in jaxpr.eqns
            )
            known = self._has_marker[id(jaxpr), axis, exchange] = jaxpr, found
        return known[1]

    def _marker(self, eqn: Eqn, axis: Axis, *, exchange: bool = False) -> tuple[str, str]:
        """The first marker inside an equation, as `_contains_marker` knows them, and its source line."""
        inside = axis.within(eqn)
        for sub in _compat.sub_jaxprs(eqn):
            for inner in _compat.open_jaxpr(sub).eqns:
                if _marks(inside, inner, exchange=exchange):
                    return inside.name_of(inner), _compat.source_line(inner, eqn)
                if self._contains_marker(inner, inside, exchange=exchange):
                    return self._marker(inner, inside, exchange=exchange)
        raise AssertionError("called for an equation without such a marker")


def _marks(axis: Axis, eqn: Eqn, *, exchange: bool) -> bool:
    return axis.marks(eqn) and not (exchange and "index" in eqn.primitive.name)


def _stacked(*rows: jax.Array) -> jax.Array:
    return jnp.stack(rows)


def _closes_over_large(eqn: Eqn) -> bool:
    """Whether this call, or a call inside it, closes over an array that is to be an input of the programs."""
    if eqn.primitive.name not in _CALLS:
        return False
    return any(
        any(map(is_large, _compat.consts_of(sub)))
        or any(map(_closes_over_large, _compat.open_jaxpr(sub).eqns))
        for sub in _compat.sub_jaxprs(eqn)
    )


def _read(env: Mapping[Var, Atom], atom: Atom) -> Atom:
    return env.get(atom, atom) if _compat.is_var(atom) else atom


def _inside(eqn: Eqn, call: str, line: str) -> str:
    if "index" in call:
        return (
            f"{call} is inside {eqn.primitive.name!r} ({line}). Move the call out of it: call it first, at the top "
            "level of the step, and use its result inside (a plain nested jax.jit is fine)."
        )
    name = eqn.primitive.name
    loops = " Or use a lax.scan or a lax.fori_loop with fixed bounds, which is written out."
    return (
        f"{call} is inside {name!r} ({line}). The step is cut where groups exchange, and a {name!r} cannot be cut "
        "in two. Move the call out of it: accumulate first, then exchange the result once, at the top level of the "
        f"step (a plain nested jax.jit is fine).{loops if name == 'while' else ''}"
    )


def _too_many(call: str, line: str) -> str:
    return (
        f"{call} is inside a 'scan' ({line}), and the scans of the step have more than {MOST_ROUNDS} rounds with an "
        "exchange. Each becomes a separate program, and the means of all of them are kept until the step is applied. "
        "Accumulate in the loop, and exchange the result once after it, or make fewer rounds a step."
    )


def _check_effects(eqn: Eqn) -> None:
    if _compat.ordered_effects(eqn):
        raise StepError(
            f"The step has an ordered effect, {eqn.primitive.name!r} ({_compat.source_line(eqn)}). The step becomes "
            "two programs with an exchange between them, so the order of effects cannot be kept. Use ordered=False, "
            "or call the host between steps."
        )
