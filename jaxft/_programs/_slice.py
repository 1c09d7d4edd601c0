"""Slices one program out of a step: the equations that its results need, and nothing else.

A program is built backwards from its results. An equation with sub-jaxprs of which only some results are wanted (a
scan that carries a PRNG key and gradients) is reduced to these. If it still names an operand that this program cannot
have, the taints prove that no wanted result depends on it (the reduction is coarser than the analysis), and
zeros replace it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxft._programs import _compat
from jaxft._programs._compat import Atom, Eqn, Var
from jaxft._programs._inline import Flat
from jaxft._programs._leaves import Part
from jaxft._programs._primitive import pmean_p
from jaxft._programs._taint import BATCH, STATE, Taint, Taints, stage_of


@dataclass(frozen=True)
class Kind:
    """Which program of the partitioned step.

    Attributes:
        stage: how many exchanges come before it.
        per_shard: whether it runs on one shard and computes what derives from its batch, in this stage; otherwise it
            computes what derives from state and means alone.
    """

    stage: int
    per_shard: bool

    def computes(self, taint: Taint) -> bool:
        """Whether the program may compute a value. A value without BATCH is computed wherever it is needed."""
        if taint & BATCH:
            return self.per_shard and stage_of(taint) == self.stage
        return stage_of(taint) <= self.stage

    def reads(self, made_in: int) -> bool:
        """Whether the program may read a value that a stage has made for the same shard."""
        return self.per_shard and made_in < self.stage

    def runs_effects(self, taint: Taint) -> bool:
        """Whether the program runs the visible effects of an equation: exactly one does."""
        return bool(taint & BATCH) == self.per_shard and (not self.per_shard or self.computes(taint))


@dataclass
class Analysed:
    """A flat step with its taints, and the variables that one program passes to another."""

    flat: Flat
    taints: Taints
    state: list[Var]
    batch: list[Var]
    means: list[Var] = field(default_factory=list)  # the results of the exchanges, in their order
    # Values that may be passed to later programs though they do not derive from the batch, and the stages that make
    # them. Shards have them in common.
    common: dict[Var, int] = field(default_factory=dict)
    # The values that each stage makes for later programs on the same shard, an ordered set. Complete once all
    # programs are gathered.
    rest: dict[int, dict[Var, None]] = field(default_factory=dict)
    alias: dict[Var, Atom] = field(default_factory=dict)

    def resolve(self, atom: Atom) -> Atom:
        """The value that an alias stands for, such as the operand of a pmean that is the identity; else the atom."""
        while _compat.is_var(atom) and atom in self.alias:
            atom = self.alias[atom]
        return atom

    def stage(self, atom: Atom) -> int:
        """The stage whose program makes a value, unless each program that needs it does."""
        if _compat.is_var(atom) and atom in self.common:
            return self.common[atom]
        return stage_of(self.taints.taint(atom))

    def rest_of(self, stage: int) -> list[Var]:
        """The values that a stage makes for later programs, which must have been gathered."""
        return list(self.rest.get(stage, ()))


class Gathered:
    """The equations of one program. Programs of later stages must be gathered first: their reads must be known."""

    def __init__(
        self, step: Analysed, kind: Kind, outvars: Sequence[Atom], donated: Sequence[int] = ()
    ) -> None:
        """Gather what makes `outvars`. The program has the donated leaves as inputs even if it does not read them."""
        self._step = step
        self._kind = kind
        self._outvars = outvars
        self._also = {step.state[i] for i in donated}
        self._eqns: list[Eqn] = []  # last one first
        self._needed: set[Var] = {atom for atom in outvars if _compat.is_var(atom)}
        self._rest: set[Var] = set()  # made by an earlier program
        self._zeros: dict[Var, Var] = {}
        for eqn in reversed(step.flat.eqns):
            if eqn.primitive is not pmean_p:
                self._visit(eqn)

    def part(self) -> Part:
        """The program. Only once all programs are gathered."""
        step, needed = self._step, self._needed
        rest = [var for stage in range(self._kind.stage) for var in step.rest_of(stage)]
        kinds = {
            "state": (step.state, needed | self._also),
            "batch": (step.batch if self._kind.stage == 0 else [], needed),
            "means": (step.means, needed),
            "rest": (rest, self._rest),
        }
        indices = {
            name: [i for i, var in enumerate(variables) if var in wanted]
            for name, (variables, wanted) in kinds.items()
        }
        inputs = [kinds[name][0][i] for name, found in indices.items() for i in found]
        consts = [var for var in step.flat.consts if var in needed]
        invars = [*consts, *inputs, *self._zeros.values()]
        made = {var for eqn in self._eqns for var in eqn.outvars}
        assert made.isdisjoint(invars), "an equation hides an input"
        return Part(
            jaxpr=_compat.new_jaxpr(invars, self._outvars, self._eqns[::-1]),
            consts=tuple(step.flat.consts[var] for var in consts),
            zeros=tuple(var.aval for var in self._zeros.values()),
            **{name: tuple(found) for name, found in indices.items()},
        )

    def _visit(self, eqn: Eqn) -> None:
        used = [var in self._needed for var in eqn.outvars]
        has_effects = _compat.visible_effects(eqn)
        keeps_effects = has_effects and self._kind.runs_effects(self._effect_taint(eqn))
        if not any(used) and not keeps_effects:
            return
        wanted = BATCH if keeps_effects else STATE
        for var, is_used in zip(eqn.outvars, used, strict=True):
            wanted |= self._step.taints.taint(var) if is_used else STATE
        reduced: Eqn | None = eqn
        if _compat.has_sub_jaxprs(eqn) and (not all(used) or has_effects != keeps_effects):
            reduced = _compat.prune(eqn, used, keep_effects=keeps_effects)
        if reduced is not None:
            invars = [self._operand(atom, wanted) for atom in reduced.invars]
            # A result that is not needed may be made of zeros here, and be an input from an earlier program.
            outvars = [var if var in self._needed else _compat.new_var(var.aval) for var in reduced.outvars]
            self._eqns.append(reduced.replace(invars=invars, outvars=outvars))

    def _operand(self, atom: Atom, wanted: Taint) -> Atom:
        atom = self._step.resolve(atom)
        if not _compat.is_var(atom):
            return atom
        taint = self._step.taints.taint(atom)
        if self._is_passed(atom, wanted):
            self._step.rest.setdefault(self._step.stage(atom), {})[atom] = None
            self._rest.add(atom)
            return atom
        if self._kind.computes(taint):
            self._needed.add(atom)
            return atom
        if atom not in self._zeros:
            self._zeros[atom] = _compat.new_var(atom.aval)
        return self._zeros[atom]

    def _is_passed(self, atom: Var, wanted: Taint) -> bool:
        """Whether an earlier program makes a value for this one, which needs it for results with this taint."""
        step = self._step
        may_be = wanted & BATCH if step.taints.taint(atom) & BATCH else atom in step.common
        return bool(may_be) and self._kind.reads(step.stage(atom))

    def _effect_taint(self, eqn: Eqn) -> Taint:
        taint = STATE
        for atom in (*eqn.invars, *eqn.outvars):
            taint |= self._step.taints.taint(atom)
        return taint
