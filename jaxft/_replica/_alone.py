"""Runs steps without a job, with the bits of a job of any number of groups."""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxft._errors import NonFinite
from jaxft._exchange._partials import Partials
from jaxft._programs._nonfinite import find
from jaxft._programs._programs import Local
from jaxft._replica._engine import Call
from jaxft._replica._steps import LoopWatch

_log = logging.getLogger("jaxft")


class Alone:
    """The engine of a step without a manager: computes all shards itself."""

    unreturned = None  # the state is consumed, and the new one returned, without a wait in between

    def __init__(self) -> None:
        self.step = 0
        self.loop = LoopWatch()
        self.handed: Sequence[jax.Array] | None = None

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def join(self, call: Call, state: Sequence[jax.Array]) -> Sequence[jax.Array]:
        self.handed = state
        return state

    def edit(self, changes: Mapping[int, jax.Array]) -> None:
        assert self.handed is not None
        self.handed = [changes.get(index, leaf) for index, leaf in enumerate(self.handed)]

    def run(self, call: Call, state: Sequence[jax.Array]) -> tuple[Sequence[jax.Array], Any]:
        with self.loop.calling(lambda: self.step):
            means, local = self._means(call, state)
            if self._skips(call, means):
                result = state, call.programs.blank_metrics()
            else:
                result = call.programs.apply(state, means, local)
        self.step += 1
        self.handed = result[0]
        self.loop.edits_made = 0
        return result

    def _means(self, call: Call, state: Sequence[jax.Array]) -> tuple[Sequence[Any], Local]:
        """The means over all shards, and the local values of the first shard."""
        programs, count = call.programs, call.shards or 1
        means: list[Any] = []
        local: dict[int, Local] = {}
        for stage, layout in enumerate(programs.layouts):
            pieces = programs.stage_pieces[stage]
            partials = Partials(layout, count)
            made: Sequence[Any] = ()
            for shard in range(count):
                if stage == 0:
                    made, now = programs.compute(state, call.batch_for(self.step, shard), shard)
                else:
                    made, now = programs.compute_next(state, means, local[shard])
                if shard == 0 or stage + 1 < programs.stages:
                    local[shard] = now
                if count > 1:
                    partials.add(shard, pieces.split(made))
            # A single contribution stays on the device, and is not waited for.
            means += pieces.join(partials.mean_alone()) if count > 1 else made
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


def _found_in_any_process(call: Call, means: Sequence[Any]) -> str:
    """Which of the means is not finite; all processes of the program get an answer, or none."""
    found = find(call.programs.piece_specs, call.programs.split(means), call.nonfinite)
    if jax.process_count() == 1:
        return found
    (everywhere,) = np.nonzero(multihost_utils.process_allgather(np.asarray(bool(found))))
    return found or (f"a value that process {everywhere[0]} holds" if everywhere.size else "")
