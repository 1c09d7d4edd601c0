"""Partitions a traced train step at its pmean and psum into programs with closed types.

Theory of operation. The step is one list of equations (`_inline`), and for every value we know whether it derives
from the batch, and how many exchanges come before it (`_taint`). That decides where it is computed ("means" are the
results of an exchange, sums included):

    program    runs                          reads                        makes
    compute    once for each shard           state, batch                 contributions, metrics of the batch, rest
    compute k  once for each shard, after    state, means so far, rest    the same
               exchange k - 1
    apply      once the job has committed    state, all means             new state, metrics of state and means
    report     before apply, if needed       state, all means, rest       metrics of the batch *and* of all means

Most steps have one exchange, and so no `compute k`. A step has more if it averages values that derive both from the
batch and from earlier means: SAM (gradients at a point that the mean gradient gives), a generator that is trained
against the new discriminator, statistics over all shards in a forward pass. A *stage* is the program between two
exchanges. There is one vote and one commit, after the last exchange. So only these programs and their callers
(`_attempt.py`, `_alone.py`) know of stages. For all others a step has one list of contributions, and of means, in the
order of the exchanges; a joiner replays apply on all means of a step.

Values for later programs on the same shard ("rest") are kept, not computed again: a stage of a step that
synchronises its statistics begins in the middle of the forward pass.

A value that derives from the state alone (a PRNG split, a schedule) is computed in each program that needs it. A
value that `compute` makes of the means is passed to later ones (`_taint.py`), and never to `apply`, which is a
function of only the state and the means. A group that joins replays it on the logged means without having seen a
batch. This is why a new state that derives from the batch is refused here, and why `report` is a separate program:
whether a group had a shard to compute cannot change the bits of its state, because `apply` is the same executable
either way.

Invariants:
- Every visible effect (a debug print, a host callback) happens in exactly one of the programs.
- New leaves come out of `apply` in the state's order, first the leaves whose old array is donated: JAX pairs
  donated inputs with outputs of equal type in order, and any other pairing makes XLA copy (measured: 201 ms
  instead of 52 ms, and 1.7 times the parameters in temporaries).
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxft._arrays._layout import Operation
from jaxft._errors import StepError
from jaxft._programs import _compat
from jaxft._programs._axis import NO_AXIS, Axis
from jaxft._programs._compat import AnyJaxpr, Atom, Eqn, Var
from jaxft._programs._inline import inline
from jaxft._programs._leaves import Part
from jaxft._programs._primitive import Path, call_name, pmean_p
from jaxft._programs._quantise import expand, is_quantised
from jaxft._programs._scans import Rows, divide_scans
from jaxft._programs._slice import Analysed, Gathered, Kind
from jaxft._programs._taint import BATCH, analyse, common


@dataclass(frozen=True)
class Contribution:
    """One exchanged value: its abstract value, and its path in the argument of pmean or psum."""

    aval: Any
    path: Path
    label: str
    operation: Operation
    rows: Rows | None = None  # if it is only some rows of an argument


@dataclass(frozen=True)
class Stage:
    """The program before an exchange, and its contributions."""

    compute: Part  # makes the contributions, then the metrics of `direct`, then the rest of later programs
    contributions: tuple[Contribution, ...]
    direct: tuple[int, ...]
    common: tuple[int, ...] = ()  # the rest that is the same for all shards (`_taint.py`)


@dataclass(frozen=True)
class Cut:
    """A partitioned step. The indices count leaves of the state or of the metrics."""

    stages: tuple[Stage, ...]
    apply: Part  # makes the new leaves of `made`, then the metrics of `applied`
    report: Part | None  # makes the metrics of `reported`
    made: tuple[int, ...]  # in the order in which apply makes them
    donated: tuple[int, ...]  # the first of `made`: apply may consume their old arrays
    forwarded: dict[int, int]  # from a new leaf to the old leaf that it equals
    applied: tuple[int, ...]
    reported: tuple[int, ...]
    constants: dict[int, Any]  # metrics that no program makes, such as the batch's number of rows
    metrics: tuple[Any, ...]  # abstract values
    batch_leaves: int
    consts: tuple[Any, ...]  # the closed-over values of all programs

    @property
    def depends_on_shard(self) -> bool:
        """Whether compute reads the number of the shard, which follows the leaves of the batch."""
        return any(self.batch_leaves in stage.compute.batch for stage in self.stages)

    @property
    def programs(self) -> list[Part]:
        """All programs that lead to the new state: compute of each stage, and apply."""
        return [*(stage.compute for stage in self.stages), self.apply]

    @property
    def visible(self) -> Eqn | None:
        """The first equation of `compute` that shows if it runs once more: a debug print, a host callback."""
        equations = (eqn for stage in self.stages for eqn in stage.compute.jaxpr.eqns)
        return next(filter(_compat.visible_effects, equations), None)

    @property
    def contributions(self) -> tuple[Contribution, ...]:
        """The contributions to all exchanges."""
        return tuple(itertools.chain.from_iterable(stage.contributions for stage in self.stages))

    @property
    def labels(self) -> tuple[tuple[str, ...], ...]:
        """The names of the contributions of each stage."""
        return tuple(tuple(made.label for made in stage.contributions) for stage in self.stages)

    @functools.cached_property
    def common(self) -> frozenset[int]:
        """Which of the passed values are the same for all shards."""
        found: set[int] = set()
        passed = 0
        for stage in self.stages:
            found |= {passed + at for at in stage.common}
            passed += len(stage.compute.output_avals) - len(stage.contributions) - len(stage.direct)
        return frozenset(found)

    def rest_read_after(self, number: int) -> frozenset[int]:
        """Which of the passed values a program after this stage reads."""
        reads = {index for stage in self.stages[number + 1 :] for index in stage.compute.rest}
        return frozenset(reads if self.report is None else reads | set(self.report.rest))

    @functools.cached_property
    def direct(self) -> tuple[int, ...]:
        """The metrics that the stages make."""
        return tuple(index for stage in self.stages for index in stage.direct)


class Division(NamedTuple):
    """Into how many programs each `compute` is divided, and which contributions no device holds only rows of."""

    parts: int
    is_whole: Callable[[Path, Sequence[int]], bool]


def cut(
    closed: AnyJaxpr,
    labels: tuple[Sequence[str], Sequence[str]],
    may_forward: Callable[[int, int], bool],
    axis: Axis = NO_AXIS,
    division: Division | None = None,
) -> Cut:
    """Partition a step that was traced over flat leaves of state and batch.

    Args:
        closed: the jaxpr; its first inputs and its first outputs are the leaves of the state.
        labels: the paths of the leaves of the state and of the batch, for messages.
        may_forward: whether the old leaf `i` may be reused unchanged as the new leaf `j`.
        axis: the axis of the shards.
        division: how each `compute` is to be divided, if into several programs (`_overlap.py`).

    Raises:
        StepError: the step has no pmean or psum that matters, has one where it cannot be cut, or has a new state
            that derives from the batch other than through them.
    """
    state_labels, batch_labels = labels
    flat = inline(closed, axis, all_calls=division is not None)
    if division is not None:
        exchanged = analyse(
            replace(flat, eqns=[*flat.eqns]), flat.invars[len(state_labels) :], axis.shards
        ).exchanged
        divide_scans(flat, division.parts, exchanged, division.is_whole)
    count = len(state_labels)
    if any(map(is_quantised, flat.eqns)):
        exchanged = analyse(replace(flat, eqns=[*flat.eqns]), flat.invars[count:], axis.shards).exchanged
        expand(flat, exchanged, axis.shards)
    taints = analyse(flat, flat.invars[count:], axis.shards)
    step = Analysed(
        flat, taints, state=flat.invars[:count], batch=flat.invars[count:], alias=dict(taints.alias)
    )
    contributions = _collect(step)
    step.common = common(flat, taints)
    new_state = [step.resolve(atom) for atom in flat.outvars[:count]]
    metrics = [step.resolve(atom) for atom in flat.outvars[count:]]
    _check_state(step, new_state, state_labels, batch_labels)

    forwarded = _forwarded(step.state, new_state, may_forward)
    kept = set(forwarded.values())
    made = sorted((i for i in range(count) if i not in forwarded), key=lambda i: i in kept)
    donated = [i for i in made if i not in kept]
    of_batch = [bool(taints.taint(atom) & BATCH) for atom in metrics]
    # Not made by `apply`, which is the same for batches of all shapes.
    constants = {i: atom.val for i, atom in enumerate(metrics) if not _compat.is_var(atom)}
    applied = tuple(i for i, is_of_batch in enumerate(of_batch) if not is_of_batch and i not in constants)
    # The metrics of a shard, by stage. Metrics after the last exchange are reported.
    local = [
        tuple(i for i, atom in enumerate(metrics) if of_batch[i] and step.stage(atom) == stage)
        for stage in range(len(contributions) + 1)
    ]

    last = len(contributions)
    results = [new_state[i] for i in made] + [metrics[i] for i in applied]
    apply = Gathered(step, Kind(last, per_shard=False), results, donated)
    report = Gathered(step, Kind(last, per_shard=True), [metrics[i] for i in local[last]])
    computes: list[Gathered] = []
    for stage in reversed(range(last)):
        operands = [operand for operand, _ in contributions[stage]]
        results = [*operands, *(metrics[i] for i in local[stage]), *step.rest_of(stage)]
        computes.insert(0, Gathered(step, Kind(stage, per_shard=True), results))
    reporting = report.part()
    return Cut(
        stages=tuple(
            Stage(
                gathered.part(),
                tuple(contribution for _, contribution in contributions[stage]),
                local[stage],
                tuple(at for at, var in enumerate(step.rest_of(stage)) if var in step.common),
            )
            for stage, gathered in enumerate(computes)
        ),
        apply=apply.part(),
        report=reporting if reporting.jaxpr.eqns else None,
        made=tuple(made),
        donated=tuple(donated),
        forwarded=forwarded,
        applied=applied,
        reported=local[last],
        constants=constants,
        metrics=tuple(atom.aval for atom in metrics),
        batch_leaves=len(batch_labels),
        consts=tuple(flat.consts.values()),
    )


def _collect(step: Analysed) -> list[list[tuple[Var, Contribution]]]:
    """Find the values of each exchange, each once per operation, and where the results enter."""
    calls = [eqn for eqn in step.flat.eqns if eqn.primitive is pmean_p]
    if not calls:
        raise StepError(
            "The step has no jaxft.pmean and no jaxft.psum, so the groups would train independently. Average the "
            "gradients after jax.grad and before the optimizer: `grads, loss = jaxft.pmean((grads, loss))`."
        )
    found: dict[int, list[tuple[Var, Contribution]]] = {}
    means: dict[int, list[Var]] = {}
    result_of: dict[tuple[Var, Operation], Var] = {}
    for number, eqn in enumerate(calls):
        operation: Operation = eqn.params["operation"]
        name = call_name(eqn).removeprefix("jaxft.") + (f"#{number}" if len(calls) > 1 else "")
        given = eqn.params["paths"], eqn.params["labels"], eqn.params.get("rows", [None] * len(eqn.outvars))
        for var, path, label, rows in zip(eqn.outvars, *given, strict=True):
            if var not in step.taints.exchanged:
                continue
            operand = step.resolve(step.taints.exchanged[var])
            assert _compat.is_var(operand)
            if (operand, operation) in result_of:
                step.alias[var] = result_of[operand, operation]
                continue
            result_of[operand, operation] = var
            stage = step.stage(operand)
            means.setdefault(stage, []).append(var)
            contribution = Contribution(operand.aval, path, name + label, operation, rows)
            found.setdefault(stage, []).append((operand, contribution))
    if not found:
        raise StepError(
            f"No argument of {call_name(calls[0])} depends on the batch "
            f"({_compat.source_line(calls[0])}): every group would compute the same, and there is nothing to "
            "average. Make the loss depend on the step's second argument."
        )
    step.means = [var for stage in sorted(means) for var in means[stage]]
    return [found[stage] for stage in range(len(found))]


def _forwarded(
    state: Sequence[Var], new_state: Sequence[Atom], may_forward: Callable[[int, int], bool]
) -> dict[int, int]:
    index_of = {var: i for i, var in enumerate(state)}
    found: dict[int, int] = {}
    for j, atom in enumerate(new_state):
        i = index_of.get(atom) if _compat.is_var(atom) else None
        if i is not None and may_forward(i, j):
            found[j] = i
    return found


def _may_be_key(atom: Atom) -> bool:
    """Whether a value is a key, or keys, or has the type of the raw ones of `jax.random.PRNGKey`."""
    dtype = _compat.dtype(atom)
    raw = dtype == jnp.uint32 and _compat.shape(atom)[-1:] in ((2,), (4,))
    return raw or jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _check_state(
    step: Analysed, new_state: Sequence[Atom], state_labels: Sequence[str], batch_labels: Sequence[str]
) -> None:
    leaks = [i for i, atom in enumerate(new_state) if step.taints.taint(atom) & BATCH]
    if not leaks:
        return
    maker = {var: eqn for eqn in step.flat.eqns for var in eqn.outvars}
    batch = dict(zip(step.batch[:-1], batch_labels, strict=True))
    atom = new_state[leaks[0]]
    assert _compat.is_var(atom)
    if atom is step.batch[-1]:
        source = "it is the number of the shard"
    elif atom in batch:
        source = f"it is the leaf {batch[atom] or 'itself'} of the batch"
    else:
        source = f"computed at {_compat.source_line(maker[atom])}"
    more = f" So do others, such as {state_labels[leaks[1]]} ({len(leaks)} in all)." if len(leaks) > 1 else ""
    remedy = (
        "Wrap the values it is computed from in jaxft.pmean(...) or jaxft.psum(...), or return it among the "
        "metrics."
    )
    if _may_be_key(atom):
        remedy = (
            "A key has no mean: split it first, fold the number of the shard into the part that is used "
            "(`jax.random.fold_in(used, jaxft.shard_index())`), and return the other part."
        )
    raise StepError(
        f"The new state's leaf {state_labels[leaks[0]] or 'state'} derives from the batch (or from the number of the "
        f"shard, or a host callback) without passing through jaxft.pmean or jaxft.psum: {source}.{more} Each group "
        "sees a different batch, so their states would diverge, and a group that joins could not replay the step. "
        f"{remedy}"
    )
