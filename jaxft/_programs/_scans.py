"""Divides scans whose stacked results are exchanged, so that the first rows can leave before the last are computed.

Theory of operation. A model that scans over its layers gets the gradients of all layers from one backward scan, at
its end. Here such a scan becomes several, one after the other over consecutive rows, with the same body. Each of its
results that goes to pmean or psum goes there in as many parts, and the means of the parts are put together again.

The new scans run over the numbers of rows and take each row out of the whole operand, as JAX does it too when it
compiles a scan. So no operand is copied.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, Sharding

from jaxft._programs import _compat
from jaxft._programs._compat import Atom, Eqn, Var
from jaxft._programs._inline import Flat
from jaxft._programs._primitive import Path, pmean_p

# They change each element by itself, whatever the shape.
_BY_ELEMENT = frozenset({"convert_element_type", "copy", "copy_p", "neg", "reduce_precision", "mul", "div"})
_BY_ELEMENT |= {"max", "min", "sharding_constraint"}


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of an argument of pmean or psum."""

    shape: tuple[int, ...]  # of the whole argument
    start: int
    stop: int

    @property
    def text(self) -> str:
        return f"[{self.start}:{self.stop}]"


def divide_scans(
    flat: Flat, parts: int, exchanged: Collection[Var], is_whole: Callable[[Path, Sequence[int]], bool]
) -> None:
    """Divide each scan that makes contributions into `parts`, or into its rows if it has fewer."""
    makers = {var: eqn for eqn in flat.eqns for var in eqn.outvars}
    found = ((atom, _chain(atom, makers)) for atom in _wanted(flat, exchanged, is_whole))
    chains = {atom: chain for atom, chain in found if chain is not None}
    divided = {id(chain.scan) for chain in chains.values()}
    by_element = {id(eqn) for chain in chains.values() for eqn in chain.eqns}
    pieces: dict[Var, Sequence[Atom]] = {}  # of results of scans, and of values made of them by element
    eqns: list[Eqn] = []
    for eqn in flat.eqns:
        if id(eqn) in divided:
            eqns += _scans(eqn, parts, pieces)
        elif eqn.primitive is pmean_p:
            eqns += _exchange(eqn, {atom: pieces[atom] for atom in chains if atom in pieces})
        else:
            eqns.append(eqn)
            if id(eqn) in by_element:
                eqns += _on_pieces(eqn, pieces)
    flat.eqns = eqns


def _wanted(
    flat: Flat, exchanged: Collection[Var], is_whole: Callable[[Path, Sequence[int]], bool]
) -> list[Var]:
    """The exchanged values that may be divided by rows."""
    whole: dict[Var, bool] = {}
    for eqn in flat.eqns:
        if eqn.primitive is pmean_p and "quantize" not in eqn.params:
            for atom, var, path in zip(eqn.invars, eqn.outvars, eqn.params["paths"], strict=True):
                if var in exchanged and _compat.is_var(atom):
                    whole[atom] = whole.get(atom, True) and is_whole(path, _compat.shape(atom))
    return [atom for atom, is_in_one in whole.items() if is_in_one]


def start_of(atom: Atom, makers: Mapping[Var, Eqn]) -> Atom:
    """The value that `atom` is made from, element by element."""
    while _compat.is_var(atom) and atom in makers and (source := _source(makers[atom])) is not None:
        atom = source
    return atom


@dataclass(frozen=True)
class _Chain:
    """How a contribution comes from a scan."""

    scan: Eqn
    eqns: Sequence[Eqn] = field(default_factory=list[Eqn])


def _chain(atom: Atom, makers: Mapping[Var, Eqn]) -> _Chain | None:
    """How a value is made element by element of a stacked result of a scan that can be divided; None if it is not."""
    between: list[Eqn] = []
    while _compat.is_var(atom) and atom in makers:
        eqn = makers[atom]
        if (source := _source(eqn)) is not None:
            between.append(eqn)
            atom = source
        elif eqn.primitive.name == "scan" and _can_be_divided(eqn):
            stacked = eqn.outvars[_compat.scan_counts(eqn)[1] :]
            return _Chain(eqn, between) if atom in stacked else None
        else:
            return None
    return None


def _source(eqn: Eqn) -> Var | None:
    """The operand of an equation that changes each element of it by itself."""
    variables = [atom for atom in eqn.invars if _compat.is_var(atom)]
    numbers = [atom for atom in eqn.invars if not _compat.is_var(atom)]
    if eqn.primitive.name not in _BY_ELEMENT or len(variables) != 1 or any(map(_compat.shape, numbers)):
        return None
    shape = _compat.shape(eqn.outvars[0])
    if eqn.primitive.name == "sharding_constraint" and divides_rows(eqn.params["sharding"], shape):
        return None
    return variables[0] if _compat.shape(variables[0]) == shape else None


def divides_rows(sharding: Sharding | None, shape: Sequence[int]) -> bool:
    """Whether a device holds only some rows of an array with this sharding, if its mesh is large enough."""
    if isinstance(sharding, NamedSharding):
        return bool(sharding.spec) and sharding.spec[0] not in (None, ())
    return sharding is not None and bool(shape) and sharding.shard_shape(tuple(shape))[0] != shape[0]


def _can_be_divided(eqn: Eqn) -> bool:
    body = next(_compat.sub_jaxprs(eqn))
    return eqn.params["length"] > 1 and not _compat.consts_of(body) and not eqn.effects


def _scans(eqn: Eqn, parts: int, pieces: dict[Var, Sequence[Atom]]) -> list[Eqn]:
    """The equations of the scans that replace a scan; `pieces` gets the rows of its stacked results."""
    length, reverse = eqn.params["length"], eqn.params["reverse"]
    consts, carried = _compat.scan_counts(eqn)
    count = min(parts, length)
    bounds = [length * number // count for number in range(count + 1)]
    rows = list(itertools.pairwise(bounds))
    carry: Sequence[Atom] = eqn.invars[consts : consts + carried]
    stacked: dict[int, Sequence[Var]] = {}
    eqns: list[Eqn] = []
    order = [*reversed(range(count))] if reverse else [*range(count)]
    for number in order:
        inputs = [*eqn.invars[:consts], *carry, *eqn.invars[consts + carried :]]
        made = _compat.trace(_over_rows(eqn, *rows[number]), *(atom.aval for atom in inputs))
        last = number == order[-1]
        results = [
            eqn.outvars[at] if last and at < carried else _compat.new_var(aval)
            for at, aval in enumerate(_compat.output_avals(made))
        ]
        eqns += _compat.named_eqns(made, inputs, results)
        carry, stacked[number] = results[:carried], results[carried:]
    for at, var in enumerate(eqn.outvars[carried:]):
        pieces[var] = [stacked[number][at] for number in range(count)]
        eqns += _joined(pieces[var], var)
    return eqns


def _over_rows(eqn: Eqn, start: int, stop: int) -> Callable[..., list[Any]]:
    """A scan over some of its rows, as a function of its operands."""
    consts, carried = _compat.scan_counts(eqn)
    body = _compat.as_function(_compat.open_jaxpr(next(_compat.sub_jaxprs(eqn))))

    def run(*operands: Any) -> list[Any]:
        fixed, init, stacked = (
            operands[:consts],
            operands[consts : consts + carried],
            operands[consts + carried :],
        )

        def turn(carry: list[Any], row: jax.Array) -> tuple[list[Any], list[Any]]:
            found = body(
                *fixed, *carry, *(lax.dynamic_index_in_dim(rows, row, keepdims=False) for rows in stacked)
            )
            return found[:carried], found[carried:]

        numbers = jnp.arange(start, stop, dtype=jnp.int32)
        carry, made = lax.scan(
            turn, list(init), numbers, reverse=eqn.params["reverse"], unroll=eqn.params["unroll"]
        )
        return _own([*carry, *made], operands)

    return run


def _own(results: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """Results as separate values: a scan may return its operands, such as a carry."""
    seen = set(map(id, operands))
    found: list[Any] = []
    for result in results:
        found.append(lax.optimization_barrier(result) if id(result) in seen else result)
        seen.add(id(result))
    return found


def _on_pieces(eqn: Eqn, pieces: dict[Var, Sequence[Atom]]) -> list[Eqn]:
    """The same equation for each piece of its operand."""
    source = _source(eqn)
    assert source is not None
    (result,) = eqn.outvars
    made: list[Eqn] = []
    for piece in pieces[source]:
        out = _compat.new_var(_compat.with_shape(result.aval, _compat.shape(piece)))
        made.append(
            eqn.replace(invars=[piece if atom is source else atom for atom in eqn.invars], outvars=[out])
        )
    pieces[result] = [each.outvars[0] for each in made]
    return made


def _exchange(eqn: Eqn, pieces: Mapping[Var, Sequence[Atom]]) -> list[Eqn]:
    """A pmean or psum of the pieces, where there are any, and what puts the means together."""
    invars: list[Atom] = []
    outvars: list[Var] = []
    described: list[tuple[Path, str, Rows | None]] = []
    after: list[Eqn] = []
    for atom, var, path, label in zip(
        eqn.invars, eqn.outvars, eqn.params["paths"], eqn.params["labels"], strict=True
    ):
        parts = pieces.get(atom) if _compat.is_var(atom) else None
        if parts is None:
            invars.append(atom)
            outvars.append(var)
            described.append((path, label, None))
            continue
        means = [_compat.new_var(part.aval) for part in parts]
        start = 0
        for part, mean in zip(parts, means, strict=True):
            invars.append(part)
            outvars.append(mean)
            rows = Rows(_compat.shape(var), start, start + _compat.shape(part)[0])
            described.append((path, label + rows.text, rows))
            start = rows.stop
        after += _joined(means, var)
    paths, labels, rows = zip(*described, strict=True)
    params = {**eqn.params, "paths": paths, "labels": labels, "rows": rows}
    return [eqn.replace(invars=invars, outvars=outvars, params=params), *after]


def _joined(pieces: Sequence[Atom], result: Var) -> list[Eqn]:
    """Put rows together. Behind a barrier, so that what reads the result is fused as if it had never been divided."""

    def join(*parts: jax.Array) -> list[jax.Array]:
        return [lax.optimization_barrier(lax.concatenate(parts, 0))]

    return _compat.named_eqns(_compat.trace(join, *(piece.aval for piece in pieces)), pieces, [result])
