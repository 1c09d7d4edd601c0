"""Runs steps without a job, with the bits of a job of any number of groups."""

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxft._errors import NonFinite
from jaxft._exchange._partials import Partials
from jaxft._programs._nonfinite import find
from jaxft._programs._programs import Local
from jaxft._replica._engine import Call

_log = logging.getLogger("jaxft")


class Alone:
    """The engine of a step without a manager: computes all shards itself."""

    def __init__(self) -> None:
        self.step = 0

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def run(self, call: Call, state: Sequence[jax.Array]) -> tuple[Sequence[jax.Array], Any]:
        means, local = self._means(call, state)
        if self._skips(call, means):
            result = state, call.programs.blank_metrics()
        else:
            result = call.programs.apply(state, means, local)
        self.step += 1
        return result

    def _means(self, call: Call, state: Sequence[jax.Array]) -> tuple[Sequence[Any], Local]:
        """The means over all shards, and the local values of the first shard."""
        programs, count = call.programs, call.shards or 1
        contribution, local = programs.compute(state, call.batch_for(self.step, 0))
        if count == 1:
            return contribution, local  # on the device, without waiting for them
        pieces = programs.contribution_pieces
        partials = Partials(programs.piece_layout, count)
        partials.add(0, pieces.split(contribution))
        for shard in range(1, count):
            contribution, _ = programs.compute(state, call.batch_for(self.step, shard))
            partials.add(shard, pieces.split(contribution))
        return pieces.join(partials.mean_alone()), local

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
    pieces = call.programs.contribution_pieces
    found = find(call.programs.piece_specs, pieces.split(means), call.nonfinite)
    if pieces.whole:
        return found
    (everywhere,) = np.nonzero(multihost_utils.process_allgather(np.asarray(bool(found))))
    return found or (f"a value that process {everywhere[0]} holds" if everywhere.size else "")
