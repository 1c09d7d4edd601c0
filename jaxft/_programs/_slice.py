"""Slices one program out of a step: the equations that its results need, and nothing else.

A program is built backwards from its results. An equation with sub-jaxprs of which only some results are wanted (a
scan that carries a PRNG key beside the gradients) is reduced to those. If it still names an operand that this program
cannot have, the taints prove that no wanted result depends on it (the reduction is coarser than the analysis), and
zeros replace it.
"""

import functools
import operator
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from jaxft._programs import _compat
from jaxft._programs._compat import AnyJaxpr, Atom, Eqn, Var
from jaxft._programs._inline import Flat
from jaxft._programs._primitive import pmean_p
from jaxft._programs._taint import BATCH, BOTH, MEAN, STATE, Taint, Taints

Picker = Callable[[Sequence[Any]], Sequence[Any]]


def picker(indices: Sequence[int]) -> Picker:
    """A function that picks these entries of a sequence; in C if there are several."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda entries: [entries[index] for index in indices]


class Kind(Enum):
    """A program of the partitioned step: the taints it computes, and those whose visible effects it runs."""

    COMPUTE = ({STATE, BATCH}, {BATCH})
    APPLY = ({STATE, MEAN}, {STATE, MEAN})
    REPORT = ({STATE, MEAN, BOTH}, {BOTH})

    def __init__(self, computes: set[Taint], effects: set[Taint]) -> None:
        self.computes = computes
        self.effects = effects


@dataclass(frozen=True)
class Part:
    """One program: a jaxpr over constants, then the inputs of each kind that it reads, then zeros.

    `state`, `batch`, `means` and `rest` are the indices of the leaves that it reads, by kind.
    """

    jaxpr: AnyJaxpr
    consts: tuple[Any, ...]
    state: tuple[int, ...]
    batch: tuple[int, ...]
    means: tuple[int, ...]
    rest: tuple[int, ...]
    zeros: tuple[Any, ...]  # their abstract values

    def inputs(
        self,
        state: Sequence[Any],
        batch: Sequence[Any] = (),
        means: Sequence[Any] = (),
        rest: Sequence[Any] = (),
    ) -> tuple[Any, ...]:
        """The program's inputs, in order."""
        pick_state, pick_batch, pick_means, pick_rest = self._pickers
        return (*pick_state(state), *pick_batch(batch), *pick_means(means), *pick_rest(rest))

    @functools.cached_property
    def _pickers(self) -> tuple[Picker, ...]:
        return tuple(map(picker, (self.state, self.batch, self.means, self.rest)))

    @property
    def output_avals(self) -> list[Any]:
        return [atom.aval for atom in self.jaxpr.outvars]

    def function(self) -> Callable[..., list[Any]]:
        """The program as a function of flat positional inputs: its leaves of state, batch, means and rest."""
        call = _compat.as_function(self.jaxpr)

        def program(*inputs: Any) -> list[Any]:
            return call(*self.consts, *inputs, *map(_compat.zeros_like_aval, self.zeros))

        return program


@dataclass
class Analysed:
    """A flat step with its taints, and the variables that one program passes to another."""

    flat: Flat
    taints: Taints
    state: list[Var]
    batch: list[Var]
    operands: list[Var] = field(default_factory=list)  # the contributed values, each once
    means: list[Var] = field(default_factory=list)  # the results of pmean and psum for them
    rest: list[Var] = field(default_factory=list)  # what compute makes for report; set when report is built
    alias: dict[Var, Atom] = field(default_factory=dict)

    def resolve(self, atom: Atom) -> Atom:
        """The operand of a pmean that is the identity; any other value itself."""
        while _compat.is_var(atom) and atom in self.alias:
            atom = self.alias[atom]
        return atom


def gather(step: Analysed, kind: Kind, outvars: Sequence[Atom], donated: Sequence[int] = ()) -> Part:
    """Build the program of a kind that makes `outvars`. It has the donated leaves as inputs even if unused."""
    gatherer = _Gatherer(step, kind)
    gatherer.run(outvars)
    needed = gatherer.needed
    if kind is Kind.REPORT:
        step.rest = list(gatherer.rest)
    also = {step.state[i] for i in donated}
    groups = {
        "state": _present(step.state, needed | also),
        "batch": _present(step.batch, needed),
        "means": _present(step.means, needed),
        "rest": _present(step.rest, gatherer.rest),
    }
    consts = [var for var in step.flat.consts if var in needed]
    inputs = [getattr(step, name)[i] for name, indices in groups.items() for i in indices]
    jaxpr = _compat.new_jaxpr([*consts, *inputs, *gatherer.zeros.values()], outvars, gatherer.eqns[::-1])
    return Part(
        jaxpr=jaxpr,
        consts=tuple(step.flat.consts[var] for var in consts),
        zeros=tuple(var.aval for var in gatherer.zeros.values()),
        **{name: tuple(indices) for name, indices in groups.items()},
    )


def _present(variables: Sequence[Var], needed: Container[Var]) -> list[int]:
    return [i for i, var in enumerate(variables) if var in needed]


class _Gatherer:
    def __init__(self, step: Analysed, kind: Kind) -> None:
        self._step = step
        self._kind = kind
        self.eqns: list[Eqn] = []  # last one first
        self.needed: set[Var] = set()
        self.rest: dict[Var, None] = {}  # an ordered set
        self.zeros: dict[Var, Var] = {}

    def run(self, outvars: Sequence[Atom]) -> None:
        self.needed.update(atom for atom in outvars if _compat.is_var(atom))
        for eqn in reversed(self._step.flat.eqns):
            if eqn.primitive is not pmean_p:
                self._visit(eqn)

    def _visit(self, eqn: Eqn) -> None:
        used = [var in self.needed for var in eqn.outvars]
        has_effects = _compat.visible_effects(eqn)
        keeps_effects = has_effects and self._effect_taint(eqn) in self._kind.effects
        if not any(used) and not keeps_effects:
            return
        wanted = BOTH if keeps_effects else STATE
        for var, is_used in zip(eqn.outvars, used, strict=True):
            wanted |= self._step.taints.taint(var) if is_used else STATE
        reduced: Eqn | None = eqn
        if _compat.has_sub_jaxprs(eqn) and (not all(used) or has_effects != keeps_effects):
            reduced = _compat.prune(eqn, used, keep_effects=keeps_effects)
        if reduced is not None:
            invars = [self._operand(atom, wanted) for atom in reduced.invars]
            self.eqns.append(reduced.replace(invars=invars))

    def _operand(self, atom: Atom, wanted: Taint) -> Atom:
        atom = self._step.resolve(atom)
        if not _compat.is_var(atom):
            return atom
        taint = self._step.taints.taint(atom)
        if taint in self._kind.computes:
            self.needed.add(atom)
            return atom
        if self._kind is Kind.REPORT and wanted & BATCH:
            self.rest[atom] = None
            return atom
        if atom not in self.zeros:
            self.zeros[atom] = _compat.new_var(atom.aval)
        return self.zeros[atom]

    def _effect_taint(self, eqn: Eqn) -> Taint:
        taint = STATE
        for atom in (*eqn.invars, *eqn.outvars):
            taint |= self._step.taints.taint(atom)
        return taint
