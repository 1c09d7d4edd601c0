"""Partitions a traced train step at its pmean and psum into programs with closed types.

Theory of operation. The step is one list of equations (`_inline`), and for every value we know whether it
derives from the batch, from a mean, from both or from the state alone (`_taint`). That decides where it is
computed ("means" are the results of the exchange, including those of psum):

    program   runs                          reads                  makes
    compute   once for each shard           state, batch           contributions, metrics of the batch, rest
    apply     once the job has committed    state, means           new state, metrics of state and means
    report    before apply, if needed       state, means, rest     metrics of batch *and* means

A value that derives from the state alone (a PRNG split, a schedule) is computed in each program that needs it
and never passed between programs, so `apply` is a function of only the state and the means. A group that joins
replays it on the logged means without having seen a batch. This is why a new state that derives from the batch is
refused here, and why `report` is a separate program: whether a group had a shard to compute cannot change the bits
of its state, because `apply` is the same executable either way.

Invariants:
- Every visible effect (a debug print, a host callback) happens in exactly one of the programs.
- New leaves come out of `apply` in the state's order, with those whose old array is donated first: JAX pairs
  donated inputs with outputs of equal type in order, and any other pairing makes XLA copy (measured: 201 ms
  instead of 52 ms, and 1.7 times the parameters in temporaries).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxft._arrays._layout import Operation
from jaxft._errors import StepError
from jaxft._programs import _compat
from jaxft._programs._compat import AnyJaxpr, Atom, Var
from jaxft._programs._inline import inline
from jaxft._programs._primitive import Path, call_name, pmean_p
from jaxft._programs._slice import Analysed, Kind, Part, gather
from jaxft._programs._taint import BATCH, BOTH, MEAN, STATE, analyse


@dataclass(frozen=True)
class Contribution:
    """One exchanged value: its abstract value, and its path in the argument of pmean or psum."""

    aval: Any
    path: Path
    label: str
    operation: Operation


@dataclass(frozen=True)
class Cut:
    """A partitioned step. The indices count leaves of the state or of the metrics."""

    compute: Part  # makes the contributions, then the metrics of `direct`, then what `report` reads as rest
    apply: Part  # makes the new leaves of `made`, then the metrics of `applied`
    report: Part | None  # makes the metrics of `reported`
    contributions: tuple[Contribution, ...]
    made: tuple[int, ...]  # in the order in which apply makes them
    donated: tuple[int, ...]  # the first of `made`: apply may consume their old arrays
    forwarded: dict[int, int]  # from a new leaf to the old leaf that it equals
    direct: tuple[int, ...]
    applied: tuple[int, ...]
    reported: tuple[int, ...]
    metrics: tuple[Any, ...]  # abstract values
    consts: tuple[Any, ...]  # what the step closes over, of all programs


def cut(
    closed: AnyJaxpr,
    state_labels: Sequence[str],
    batch_labels: Sequence[str],
    may_forward: Callable[[int, int], bool],
) -> Cut:
    """Partition a step that was traced over flat leaves of state and batch.

    Args:
        closed: the jaxpr; its first inputs and its first outputs are the leaves of the state.
        state_labels: the paths of the state's leaves, for messages.
        batch_labels: the same for the batch.
        may_forward: whether the old leaf `i` may be reused unchanged as the new leaf `j`.

    Raises:
        StepError: the step has no pmean or psum that matters, has one where it cannot be cut, or has a new state
            that derives from the batch other than through them.
    """
    flat = inline(closed)
    count = len(state_labels)
    taints = analyse(flat, flat.invars[count:])
    step = Analysed(
        flat, taints, state=flat.invars[:count], batch=flat.invars[count:], alias=dict(taints.alias)
    )
    contributions = _collect(step)
    new_state = [step.resolve(atom) for atom in flat.outvars[:count]]
    metrics = [step.resolve(atom) for atom in flat.outvars[count:]]
    _check_state(step, new_state, state_labels, batch_labels)

    forwarded = _forwarded(step.state, new_state, may_forward)
    kept = set(forwarded.values())
    made = sorted((i for i in range(count) if i not in forwarded), key=lambda i: i in kept)
    donated = [i for i in made if i not in kept]
    taint_of = [taints.taint(atom) for atom in metrics]
    direct, reported = (tuple(i for i, t in enumerate(taint_of) if t == kind) for kind in (BATCH, BOTH))
    applied = tuple(i for i, t in enumerate(taint_of) if t in (STATE, MEAN))

    apply = gather(step, Kind.APPLY, [new_state[i] for i in made] + [metrics[i] for i in applied], donated)
    # Before compute, because it determines what compute must make for it.
    report = gather(step, Kind.REPORT, [metrics[i] for i in reported])
    compute = gather(step, Kind.COMPUTE, [*step.operands, *(metrics[i] for i in direct), *step.rest])
    return Cut(
        compute=compute,
        apply=apply,
        report=report if report.jaxpr.eqns else None,
        contributions=contributions,
        made=tuple(made),
        donated=tuple(donated),
        forwarded=forwarded,
        direct=direct,
        applied=applied,
        reported=reported,
        metrics=tuple(atom.aval for atom in metrics),
        consts=tuple(flat.consts.values()),
    )


def _collect(step: Analysed) -> tuple[Contribution, ...]:
    """Find the values to exchange, each once per operation, and where the results enter."""
    calls = [eqn for eqn in step.flat.eqns if eqn.primitive is pmean_p]
    if not calls:
        raise StepError(
            "The step has no jaxft.pmean and no jaxft.psum, so the groups would train independently. Average the "
            "gradients after jax.grad and before the optimizer: `grads, loss = jaxft.pmean((grads, loss))`."
        )
    found: list[Contribution] = []
    result_of: dict[tuple[Var, Operation], Var] = {}
    for number, eqn in enumerate(calls):
        operation: Operation = eqn.params["operation"]
        name = f"p{operation}#{number}" if len(calls) > 1 else f"p{operation}"
        for var, path, label in zip(eqn.outvars, eqn.params["paths"], eqn.params["labels"], strict=True):
            if var not in step.taints.exchanged:
                continue
            operand = step.resolve(step.taints.exchanged[var])
            assert _compat.is_var(operand)
            if (operand, operation) in result_of:
                step.alias[var] = result_of[operand, operation]
                continue
            result_of[operand, operation] = var
            step.operands.append(operand)
            step.means.append(var)
            found.append(Contribution(operand.aval, path, name + label, operation))
    if not found:
        raise StepError(
            f"No argument of {call_name(calls[0])} depends on the batch "
            f"({_compat.source_line(calls[0])}): every group would compute the same, and there is nothing to "
            "average. Make the loss depend on the step's second argument."
        )
    return tuple(found)


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


def _check_state(
    step: Analysed, new_state: Sequence[Atom], state_labels: Sequence[str], batch_labels: Sequence[str]
) -> None:
    leaks = [i for i, atom in enumerate(new_state) if step.taints.taint(atom) & BATCH]
    if not leaks:
        return
    maker = {var: eqn for eqn in step.flat.eqns for var in eqn.outvars}
    batch = dict(zip(step.batch, batch_labels, strict=True))
    atom = new_state[leaks[0]]
    assert _compat.is_var(atom)
    if atom in batch:
        source = f"it is the leaf {batch[atom] or 'itself'} of the batch"
    else:
        source = f"computed at {_compat.source_line(maker[atom])}"
    more = f" So do others, such as {state_labels[leaks[1]]} ({len(leaks)} in all)." if len(leaks) > 1 else ""
    raise StepError(
        f"The new state's leaf {state_labels[leaks[0]] or 'state'} derives from the batch (or from a host "
        f"callback) without passing through jaxft.pmean or jaxft.psum: {source}.{more} Each group sees a different "
        "batch, so their states would diverge, and a group that joins could not replay the step. Wrap the values "
        "it is computed from in jaxft.pmean(...) or jaxft.psum(...), or return it among the metrics."
    )
