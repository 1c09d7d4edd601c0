"""What each value of a step derives from: the batch, the results of which exchanges, both, or the state alone.

Theory of operation. A taint is a set of facts, kept as bits:

- BATCH: derives from the batch, or from a host callback, without a pmean or psum in between. Groups hold
  different values, and a group that joins later cannot recompute them.
- One bit for each exchange of the step: derives from a mean or sum of that exchange, so it exists only after it.

A value with none of them derives from the state (and from constants): every group can compute it, at any time.

The *stage* of a value is the number of exchanges that come before it: one more than the last exchange that it derives
from. A pmean or psum of a value with BATCH is exchanged as soon as it can be, in exchange number `stage`; its result
has the bit of that exchange alone. For a value without BATCH, a pmean is the identity; a psum is that value times the
number of shards, if that is known (without `shards` it changes with the quorum).

Taints flow forward, one equation at a time, result by result through nested calls, custom derivatives, remat,
cond, scan and while (the two loops by iterating to a fixed point; taints only grow, so this terminates). Each
result of an unknown kind of equation gets the union of the operands' taints: that may refuse a valid step, but
never accepts an invalid one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxft._arrays._layout import Operation
from jaxft._errors import StepError
from jaxft._programs import _compat
from jaxft._programs._compat import AnyJaxpr, Atom, Eqn, Var
from jaxft._programs._inline import Choice, Flat
from jaxft._programs._primitive import check_dtype, pmean_p

Taint = int
STATE: Taint = 0
BATCH: Taint = 1
_FIRST_MEAN: Taint = 2

# Their results come from outside the program, so groups may see different ones.
_FROM_OUTSIDE = frozenset({"io_callback", "pure_callback", "buffer_callback", "infeed", "rng_uniform"})
# Each result depends only on the operand at the same position.
_PAIRWISE = frozenset({"optimization_barrier", "psum", "psum_invariant", "pmax", "pmin", "pvary"})
# The called jaxpr decides what each result depends on.
_CALLS = frozenset(
    {
        "jit", "pjit", "closed_call", "core_call", "eval_jaxpr",
        "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr",
        "remat", "remat2", "checkpoint", "shard_map", "composite",
    }
)  # fmt: skip


def stage_of(taint: Taint) -> int:
    """The number of exchanges that come before a value with this taint."""
    return (taint // _FIRST_MEAN).bit_length()


@dataclass
class Taints:
    """The taints of all variables of a flat step, and what each of its pmeans and psums is."""

    of: dict[Var, Taint]
    # From the result of a pmean or psum to its operand: where it is exchanged, and where it is the identity.
    exchanged: dict[Var, Var]
    alias: dict[Var, Atom]

    def taint(self, atom: Atom) -> Taint:
        return self.of.get(atom, STATE) if _compat.is_var(atom) else STATE


def analyse(flat: Flat, batch: Sequence[Var], shards: int | None = None) -> Taints:
    """Find what every value of a flat step derives from.

    Each psum of a value that does not depend on the batch is replaced in `flat` by a multiplication.

    Raises:
        StepError: a pmean or psum of a dtype that it does not accept, or in a cond whose branch derives from the
            batch, so that shards may take different branches; a psum of a value that does not depend on the batch, if
            `shards` is None.
    """
    taints = Taints(of=dict.fromkeys(batch, BATCH), exchanged={}, alias={})
    rules = Rules()
    eqns: list[Eqn] = []
    for eqn in flat.eqns:
        eqns.append(eqn)
        ins = [taints.taint(atom) for atom in eqn.invars]
        if eqn.primitive is pmean_p:
            eqns += _mark(eqn, ins, taints, shards)
            continue
        taints.of.update(zip(eqn.outvars, rules.results(eqn, ins), strict=True))
    flat.eqns = eqns
    for choice in flat.choices:
        if taints.taint(choice.atom) & BATCH:
            raise StepError(_different_branches(choice))
    return taints


def _different_branches(choice: Choice) -> str:
    return (
        f"{choice.call} is inside a 'cond' ({choice.line}), and which branch is taken derives from the batch (or "
        "from the number of the shard, or a host callback). Shards may take different branches, so that some "
        "exchange and others do not. Let the choice derive from the state or from means; or let each branch "
        "return the values to exchange, or zeros, and exchange the result outside."
    )


def _mark(eqn: Eqn, ins: Sequence[Taint], taints: Taints, shards: int | None) -> Sequence[Eqn]:
    """Note the source of each result of a pmean or psum; return equations for results that need no exchange."""
    more: list[Eqn] = []
    operation: Operation = eqn.params["operation"]
    for var, atom, taint, label in zip(eqn.outvars, eqn.invars, ins, eqn.params["labels"], strict=True):
        if operation == "sum" and not taint & BATCH and shards is None:
            raise StepError(
                f"jaxft.psum was given a leaf that does not depend on the batch, {label or 'its whole argument'} "
                f"({_compat.source_line(eqn)}). It is the same in all shards, so its sum is the leaf times the "
                "number of shards, which changes with the quorum. Pass shards= to jaxft.fault_tolerant, or compute "
                "the leaf from the batch: a count as `jnp.sum(batch.weight)`, for instance, rather than from a shape."
            )
        if taint & BATCH:
            assert _compat.is_var(atom)
            check_dtype(_compat.dtype(atom), operation, label, f" ({_compat.source_line(eqn)})")
            taints.exchanged[var] = atom
            taints.of[var] = _FIRST_MEAN << stage_of(taint)
            continue
        taints.of[var] = taint
        if operation in ("mean", "max") or shards == 1:
            taints.alias[var] = atom
        else:
            assert shards is not None
            more += _compat.scaled_eqns(atom, var, shards)
    return more


class Rules:
    """How taints pass through one equation. A jaxpr is analysed once per combination of input taints."""

    def __init__(self, see: Callable[[Eqn, Sequence[Taint]], None] = lambda *_: None) -> None:
        self._see = see
        self._known: dict[tuple[int, tuple[Taint, ...]], tuple[Taint, ...]] = {}
        self._alive: list[AnyJaxpr] = []  # keeps the objects alive, so that their ids stay unique
        self._rules: dict[str, Callable[[Eqn, list[Taint]], Sequence[Taint]]] = {
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
        }

    def results(self, eqn: Eqn, ins: list[Taint]) -> Sequence[Taint]:
        """The taints of an equation's results, given its operands' taints."""
        self._see(eqn, ins)
        name = eqn.primitive.name
        if name in self._rules:
            return self._rules[name](eqn, ins)
        if _from_outside(eqn):
            return [_union(ins) | BATCH] * len(eqn.outvars)
        if name in _PAIRWISE and len(ins) == len(eqn.outvars):
            return ins
        sub = _compat.called_jaxpr(eqn) if name in _CALLS else None
        if sub is not None:
            return self._body(sub, ins)
        # An unknown equation that contains a callback is tainted by it.
        outside = BATCH if self._contains_outside(eqn) else STATE
        return [_union(ins) | outside] * len(eqn.outvars)

    def _body(self, jaxpr: AnyJaxpr, ins: Sequence[Taint]) -> Sequence[Taint]:
        key = (id(jaxpr), tuple(ins))
        if key not in self._known:
            self._alive.append(jaxpr)
            self._known[key] = self._walk(jaxpr, ins)
        return self._known[key]

    def _walk(self, jaxpr: AnyJaxpr, ins: Sequence[Taint]) -> tuple[Taint, ...]:
        of: dict[Var, Taint] = dict(zip(jaxpr.invars, ins, strict=True))
        if any(map(_compat.ref_effects, jaxpr.eqns)):
            # Values can pass through a Ref unseen: any input may reach any output.
            outside = BATCH if self._reaches_outside(jaxpr) else STATE
            return (_union(ins) | outside,) * len(jaxpr.outvars)
        for eqn in jaxpr.eqns:
            inner = [of.get(atom, STATE) if _compat.is_var(atom) else STATE for atom in eqn.invars]
            of.update(zip(eqn.outvars, self.results(eqn, inner), strict=True))
        return tuple(of.get(atom, STATE) if _compat.is_var(atom) else STATE for atom in jaxpr.outvars)

    def _reaches_outside(self, jaxpr: AnyJaxpr) -> bool:
        eqns = _compat.open_jaxpr(jaxpr).eqns
        return any(_from_outside(eqn) or self._contains_outside(eqn) for eqn in eqns)

    def _contains_outside(self, eqn: Eqn) -> bool:
        inner = (*_compat.sub_jaxprs(eqn), *_compat.hidden_jaxprs(eqn))
        return any(map(self._reaches_outside, inner))

    def _scan(self, eqn: Eqn, ins: list[Taint]) -> Sequence[Taint]:
        body = _compat.open_jaxpr(next(_compat.sub_jaxprs(eqn)))
        consts, carried = _compat.scan_counts(eqn)
        carry = ins[consts : consts + carried]
        while True:
            outs = self._body(body, [*ins[:consts], *carry, *ins[consts + carried :]])
            grown = [old | new for old, new in zip(carry, outs[:carried], strict=True)]
            if grown == carry:
                return [*carry, *outs[carried:]]
            carry = grown

    def _while(self, eqn: Eqn, ins: list[Taint]) -> Sequence[Taint]:
        cond, body = (_compat.open_jaxpr(eqn.params[name]) for name in ("cond_jaxpr", "body_jaxpr"))
        for_cond, for_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        cond_consts, body_consts = ins[:for_cond], ins[for_cond : for_cond + for_body]
        carry = ins[for_cond + for_body :]
        while True:
            # Everything that the body changes depends on how often it runs.
            turns = _union(self._body(cond, [*cond_consts, *carry]))
            outs = self._body(body, [*body_consts, *carry])
            changed = [out is not var for out, var in zip(body.outvars, body.invars[for_body:], strict=True)]
            grown = [
                old | new | (turns if changes else STATE)
                for old, new, changes in zip(carry, outs, changed, strict=True)
            ]
            if grown == carry:
                return carry
            carry = grown

    def _cond(self, eqn: Eqn, ins: list[Taint]) -> Sequence[Taint]:
        choice, operands = ins[0], ins[1:]
        branches = [self._body(_compat.open_jaxpr(branch), operands) for branch in eqn.params["branches"]]
        return [choice | _union(outs) for outs in zip(*branches, strict=True)]


def _from_outside(eqn: Eqn) -> bool:
    """Whether an equation reads outside data: by name, or by having results and a side effect (FFI calls)."""
    if eqn.primitive.name in _FROM_OUTSIDE:
        return True
    return bool(eqn.outvars) and not _compat.has_sub_jaxprs(eqn) and _compat.visible_effects(eqn)


def _union(taints: Sequence[Taint]) -> Taint:
    result = STATE
    for taint in taints:
        result |= taint
    return result


# Of what derives from the state alone, only such are passed: numbers and keys, no masks.
_SMALL_BYTES = 1024


def common(flat: Flat, taints: Taints) -> dict[Var, int]:
    """The values that programs may pass on although they do not derive from the batch, and the stage that makes each.

    What derives from the state alone is computed in each program that needs it: a key that is split, a mask, a
    schedule. It fuses with what reads it, and takes no memory between two programs. What derives from means could be
    treated alike, and `apply` has to make it from nothing but the state and the means. But where each exchange is
    followed by an update of the weights (epochs and minibatches of PPO), the k-th program would repeat k updates:
    programs that grow, and that all differ. So what earlier programs have made of means is passed on, and with it the
    numbers that go along (the count of an optimizer, a key), so that the programs of all rounds between the second
    and the last are the same, and are compiled once. A value that is larger than its operands (a mean that is
    broadcast to the shape of an activation) is computed again instead. All shards have the same, and a group keeps
    one copy.

    A value of the state alone belongs to the stage in which it stands in the step, after the exchanges before it.
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
