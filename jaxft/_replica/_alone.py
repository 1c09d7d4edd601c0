"""Runs steps without a job, with the bits of a job of any number of groups."""

import contextlib
import logging
import operator
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxft._arrays._layout import LeafSpec
from jaxft._base._calls import ctrl_c_later
from jaxft._errors import NonFinite
from jaxft._exchange._partials import Partials
from jaxft._programs._programs import Local
from jaxft._replica._call import Call, OneStep, find
from jaxft._replica._steps import LoopWatch

_log = logging.getLogger("jaxft")

# All of this process, to find the step that made a given state.
_living: "weakref.WeakSet[Alone]" = weakref.WeakSet()
_lock = threading.Lock()


class Alone:
    """The engine of a step without a manager: computes all shards itself."""

    def __init__(self) -> None:
        self.step = 0
        self.loop = LoopWatch()
        self.handed: Sequence[jax.Array] | None = None
        self._first: OneStep | None = None
        self._changes_state = False

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def join(self, call: Call, state: Sequence[jax.Array]) -> Sequence[jax.Array]:
        self._check_same(call, state)
        self.handed = state
        return state

    def edit(self, changes: Mapping[int, jax.Array]) -> None:
        assert self.handed is not None
        self.handed = [changes.get(index, leaf) for index, leaf in enumerate(self.handed)]

    def run(self, call: Call, state: Sequence[jax.Array]) -> tuple[Sequence[jax.Array], Any]:
        self._check_same(call, state)
        with self.loop.calling(lambda: self.step):
            means, local = self._means(call, state)
            skips = self._skips(call, means)
            with ctrl_c_later():  # it would be raised once the state is consumed, and drop the new one
                if skips:
                    result = state, call.programs.blank_metrics()
                else:
                    result = call.programs.apply(state, means, local)
                self.step += 1
                self.handed = result[0]
                self.loop.edits_made = 0
        return result

    def _check_same(self, call: Call, state: Sequence[jax.Array]) -> None:
        """Check, in the first call, that no other step has made this state: a Manager would refuse the second.

        Later calls are of the same step: a `Step` checks what may differ.
        """
        if self._first is not None:
            return
        now = OneStep.of(call)
        with _lock:
            others = list(_living)
        for other in others:
            if other._first is not None and other._made(state):
                other._first.check(
                    now,
                    run="made this state",
                    instead="For another run, begin with a copy: `state = jax.tree.map(jax.numpy.copy, state)`.",
                )
        self._first, self._changes_state = now, bool(call.programs.cut.made)
        with _lock:
            _living.add(self)

    def _made(self, state: Sequence[jax.Array]) -> bool:
        """Whether a step of this engine has made these leaves."""
        leaves = self.handed or ()
        made = self.step > 0 and self._changes_state
        return made and len(leaves) == len(state) and all(map(operator.is_, leaves, state))

    def _means(self, call: Call, state: Sequence[jax.Array]) -> tuple[Sequence[Any], Local]:
        """The means over all shards, and the local values of the first shard."""
        programs, count = call.programs, call.shards or 1
        means: list[Any] = []
        local: dict[int, Local] = {}
        for run in programs.stages.runs:
            partials = {
                stage: Partials(programs.stages.layouts[stage], count, call.sums(stage)) for stage in run
            }
            made: list[Any] = []
            for shard in range(count):
                made.clear()
                contribution: list[jax.Array] = []
                for stage in run:
                    if stage == 0:
                        batch = call.batch_for(self.step, shard)
                        contribution, local[shard] = programs.compute(state, batch, shard)
                    elif programs.stages.begins(stage):
                        contribution, local[shard] = programs.compute_next(state, means, local[shard])
                    made.append(programs.stages.bucket(stage, contribution))
                local[shard] = local[shard].sharing([local[0]])
                if shard > 0 and run.stop == programs.stages.count:
                    del local[shard]
                for stage, contribution in zip(run if count > 1 else (), made, strict=False):
                    partials[stage].add(shard, programs.stages.stage_pieces[stage].split(contribution))
            for stage, contribution in zip(run, made, strict=True):
                # A single contribution stays on the device, and is not waited for.
                pieces = programs.stages.stage_pieces[stage]
                means += (
                    pieces.join(partials[stage].mean_alone())
                    if count > 1
                    else _as_results(contribution, programs.stages.specs[stage])
                )
        return means, local[0]

    def _skips(self, call: Call, means: Sequence[Any]) -> bool:
        # A warning alone is not worth copying the means to the host.
        if call.nonfinite not in ("raise", "skip"):
            return False
        found = _found_in_any_process(call, means)
        if found and call.nonfinite == "raise":
            raise NonFinite(
                f"The means of step {self.step} are not finite: {found}. The step was not "
                "applied. Check the learning rate and the data of that step."
            )
        if found:
            _log.warning("step %d changes nothing: %s", self.step, found)
        return bool(found)


def _as_results(contribution: Sequence[jax.Array], specs: Sequence[LeafSpec]) -> list[jax.Array]:
    """The contribution of a single shard, in the dtypes of results."""
    return [
        one if spec.result_dtype == spec.dtype else one.astype(spec.result_dtype)
        for one, spec in zip(contribution, specs, strict=True)
    ]


def _found_in_any_process(call: Call, means: Sequence[Any]) -> str:
    """Which of the means is not finite; all processes of the program get an answer, or none."""
    found = find(call.programs.stages.piece_specs, call.programs.stages.split(means), call.nonfinite)
    if jax.process_count() == 1:
        return found
    (everywhere,) = np.nonzero(multihost_utils.process_allgather(np.asarray(bool(found))))
    return found or (f"a value that process {everywhere[0]} holds" if everywhere.size else "")
