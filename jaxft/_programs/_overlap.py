"""Divides the program before an exchange into several, so that the first results travel while the last are computed.

Theory of operation. The gradients of a step are ready one after the other, the last layer's first. The program of a
stage is divided into *parts*. Each makes some of the contributions, about as many bytes as every other part, in the
order in which they are ready. A part is a stage (`_partition.py`) with its own exchange, that reads no means of the
parts before it. So a group starts all parts at once, and exchanges the first part's contributions while its device
computes the second part.

An equation belongs to the first part that needs it. An equation that no contribution needs belongs to the first part
that has its operands. Values for later parts are passed on, as between stages, even if they derive from the state
alone: nothing is computed twice. Every part may read the batch.

The parts have the equations of the undivided program, in the same order. So they compute the same values, as far as
XLA rounds alike on both sides of a boundary between two programs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from jaxft._errors import StepError
from jaxft._programs import _compat
from jaxft._programs._compat import Atom, Eqn, Var
from jaxft._programs._leaves import Part
from jaxft._programs._partition import Contribution, Cut, Stage
from jaxft._programs._scans import start_of

# The labels of the contributions of each stage of a step, in their order.
Labels = tuple[tuple[str, ...], ...]


def overlapped(cut: Cut, parts: int, like: Labels = ()) -> Cut:
    """Divide the program of each stage into `parts`, or into fewer if its contributions cannot be divided so.

    The contributions of a stage are put into the order in which they are ready.

    Args:
        cut: the undivided step.
        parts: into how many, at least two.
        like: how the contributions of the same step on another type of batch were divided; all must be divided alike.

    Raises:
        StepError: a program that is to be divided has a visible effect, or makes other contributions than `like`.
    """
    _refuse_effects(cut)
    if like and {label for labels in like for label in labels} != {
        label for labels in cut.labels for label in labels
    }:
        raise StepError(
            f"With overlap={parts}, the gradients of this batch come in other parts than an earlier batch's, "
            "because the step scans over its layers differently for batches of another shape. All must come in the "
            "same parts. Make the step the same program for all shapes, or leave out `overlap`."
        )
    stages: list[Stage] = []
    means: list[int] = []  # the old number of each new mean
    rest: dict[int, int] = {}  # from the old number of a passed value to the new one
    old_means = old_rest = new_rest = 0
    for stage in cut.stages:
        divided = _Divided(replace(stage, compute=_renumbered(stage.compute, means, rest)), parts, like)
        for part, passed in divided.stages(new_rest):
            stages.append(part)
            rest |= {
                old_rest + divided.exports.index(var): new_rest + at
                for at, var in enumerate(passed)
                if var in divided.exports
            }
            new_rest += len(passed)
        means += [old_means + number for number in divided.order]
        old_means += len(stage.contributions)
        old_rest += len(divided.exports)
    report = None if cut.report is None else _renumbered(cut.report, means, rest)
    return replace(cut, stages=tuple(stages), apply=_renumbered(cut.apply, means, rest), report=report)


def _refuse_effects(cut: Cut) -> None:
    """The first batch is computed more than once, to compare bits (`_same_bits.py`)."""
    if (eqn := cut.visible) is not None:
        raise StepError(
            f"The step cannot be overlapped: it has a visible effect, {eqn.primitive.name!r} "
            f"({_compat.source_line(eqn)}), and an overlapped step is computed twice at first, to compare its bits. "
            "Remove the effect (a debug print, a host callback), or leave out `overlap`."
        )


def _renumbered(part: Part, means: Sequence[int], rest: Mapping[int, int]) -> Part:
    new_of = {old: new for new, old in enumerate(means)}
    return replace(
        part,
        means=tuple(new_of[number] for number in part.means),
        rest=tuple(rest[number] for number in part.rest),
    )


class _Divided:
    """A stage whose equations and results are distributed over parts.

    Attributes:
        order: the contributions, by their numbers in the stage, in the order in which they are ready.
        exports: the values that later stages read.
    """

    def __init__(self, stage: Stage, parts: int, like: Labels) -> None:
        self._stage = stage
        outvars: Sequence[Atom] = stage.compute.jaxpr.outvars
        count = len(stage.contributions)
        self._given = outvars[:count]
        self._direct = outvars[count : count + len(stage.direct)]
        self.exports = list(outvars[count + len(stage.direct) :])
        self._eqns: Sequence[Eqn] = stage.compute.jaxpr.eqns
        self._maker = {var: number for number, eqn in enumerate(self._eqns) for var in eqn.outvars}
        self._input_of = _inputs(stage.compute)
        self._groups = self._groups_like(like) or self._groups_by_readiness(parts)
        self.order = [number for group in self._groups for number in group]
        self._part_of = self._parts_of_equations()

    def _groups_like(self, like: Labels) -> list[list[int]]:
        number_of = {made.label: number for number, made in enumerate(self._stage.contributions)}
        return [[number_of[label] for label in labels] for labels in like if labels[0] in number_of]

    def _groups_by_readiness(self, parts: int) -> list[list[int]]:
        makers = {var: eqn for eqn in self._eqns for var in eqn.outvars}
        ready = [self._made_at(start_of(atom, makers)) for atom in self._given]
        order = sorted(range(len(ready)), key=lambda number: ready[number])
        return _balanced(order, ready, list(map(_size_bytes, self._stage.contributions)), parts)

    def stages(self, known: int) -> Iterator[tuple[Stage, Sequence[Atom]]]:
        """The parts as stages, and the values that each passes on. `known`: how many values are passed already."""
        outputs = [self._outputs(number) for number in range(len(self._groups))]
        reads = [self._reads(number, made) for number, made in enumerate(outputs)]
        number_of: dict[Atom, int] = {}
        common = {self.exports[at] for at in self._stage.common}
        for number, made in enumerate(outputs):
            later = [var for read in reads[number + 1 :] for var in read if var in self._maker]
            passed = [var for var in dict.fromkeys([*self.exports, *later]) if self._place(var) == number]
            direct = tuple(
                i for i, at in zip(self._stage.direct, self._direct, strict=True) if self._place(at) == number
            )
            compute = self._part(number, [*made, *passed], reads[number], number_of)
            contributions = tuple(self._stage.contributions[at] for at in self._groups[number])
            shared = tuple(at for at, var in enumerate(passed) if var in common)
            yield Stage(compute, contributions, direct, shared), passed
            number_of |= {var: known + at for at, var in enumerate(passed)}
            known += len(passed)

    def _outputs(self, number: int) -> list[Atom]:
        """The contributions and metrics that a part makes."""
        given = [self._given[at] for at in self._groups[number]]
        return [*given, *(atom for atom in self._direct if self._place(atom) == number)]

    def _reads(self, number: int, made: Sequence[Atom]) -> dict[Var, None]:
        """The values from elsewhere that a part reads, in the order of the program."""
        eqns = self._eqns_of(number)
        atoms = [*(atom for eqn in eqns for atom in eqn.invars), *made]
        own = {var for eqn in eqns for var in eqn.outvars}
        return {atom: None for atom in atoms if _compat.is_var(atom) and atom not in own}

    def _part(
        self, number: int, made: Sequence[Atom], reads: Mapping[Var, None], number_of: Mapping[Atom, int]
    ) -> Part:
        whole = self._stage.compute
        # A result that is an input of the undivided program is an input of this part, too.
        also = [
            atom for atom in made if _compat.is_var(atom) and atom in self._input_of and atom not in reads
        ]
        found: dict[str, list[tuple[int, Var]]] = {kind: [] for kind in _KINDS}
        for var in [*reads, *also]:
            kind, index = ("rest", number_of[var]) if var in self._maker else self._input_of[var]
            found[kind].append((index, var))
        for entries in found.values():
            entries.sort(key=lambda entry: entry[0])
        indices = {kind: tuple(index for index, _ in entries) for kind, entries in found.items()}
        invars = [var for kind in _KINDS for _, var in found[kind]]
        return Part(
            jaxpr=_compat.new_jaxpr(invars, made, self._eqns_of(number)),
            consts=tuple(whole.consts[index] for index in indices["consts"]),
            state=indices["state"],
            batch=indices["batch"],
            means=indices["means"],
            rest=indices["rest"],
            zeros=tuple(whole.zeros[index] for index in indices["zeros"]),
        )

    def _eqns_of(self, number: int) -> list[Eqn]:
        return [eqn for eqn, part in zip(self._eqns, self._part_of, strict=True) if part == number]

    def _made_at(self, atom: Atom) -> int:
        return self._maker.get(atom, -1) if _compat.is_var(atom) else -1

    def _place(self, atom: Atom) -> int:
        """The part that makes a value, or is the only one to get it."""
        at = self._made_at(atom)
        return 0 if at < 0 else self._part_of[at]

    def _parts_of_equations(self) -> list[int]:
        needs: dict[Atom, int] = {}
        for part, group in reversed(list(enumerate(self._groups))):
            needs |= dict.fromkeys([self._given[number] for number in group], part)
        found: list[int | None] = []
        for eqn in reversed(self._eqns):
            known = [needs[var] for var in eqn.outvars if var in needs]
            found.append(min(known) if known else None)
            for atom in eqn.invars if known else ():
                if _compat.is_var(atom):
                    needs[atom] = min(*known, needs.get(atom, len(self._groups)))
        parts: list[int] = []
        for eqn, part in zip(self._eqns, reversed(found), strict=True):
            ready = (parts[at] for at in map(self._made_at, eqn.invars) if at >= 0)
            parts.append(max(ready, default=0) if part is None else part)
        return parts


_KINDS = ("consts", "state", "batch", "means", "rest", "zeros")  # in the order of a part's inputs


def _inputs(part: Part) -> dict[Var, tuple[str, int]]:
    """For each input of a program its kind, and its number within this kind."""
    numbers = {
        "consts": range(len(part.consts)),
        "state": part.state,
        "batch": part.batch,
        "means": part.means,
        "rest": part.rest,
        "zeros": range(len(part.zeros)),
    }
    pairs = [(kind, index) for kind in _KINDS for index in numbers[kind]]
    return dict(zip(part.jaxpr.invars, pairs, strict=True))


def _size_bytes(contribution: Contribution) -> int:
    return contribution.aval.size * contribution.aval.dtype.itemsize


def _balanced(
    order: Sequence[int], ready: Sequence[int], sizes: Sequence[int], parts: int
) -> list[list[int]]:
    """Divide a sequence into groups of about the same size. None has less than a quarter of its share."""
    total = sum(sizes)
    groups: list[list[int]] = []
    group: list[int] = []
    at, before = 0, 0
    for number in order:
        middle = before + sizes[number] / 2
        share = min(parts - 1, int(middle * parts / max(1, total)))
        apart = bool(group) and ready[group[-1]] != ready[number]
        if share > at and apart and 4 * parts * sum(map(sizes.__getitem__, group)) >= total:
            groups.append(group)
            group = []
            at = share
        group.append(number)
        before += sizes[number]
    if groups and 4 * parts * sum(map(sizes.__getitem__, group)) < total:
        group = [*groups.pop(), *group]
    return [*groups, group]
