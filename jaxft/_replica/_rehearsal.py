"""The first run of `compute`, ahead of a joiner's first step.

It takes longer than later ones: memory is touched for the first time, and an accelerator loads kernels and connects
the processes of a collective. In the job's step all groups would wait for that. Here it takes the time in which the
donors send.
"""

import logging

import numpy as np

from jaxft._arrays._memory import result_regions
from jaxft._base._calls import reporting
from jaxft._ranks._ranks import Directing, Ranks
from jaxft._replica._call import Call
from jaxft._replica._held_state import HeldState
from jaxft.data._batch_functions import example_of

_log = logging.getLogger("jaxft")


class Rehearsal:
    """One rehearsal, with this process's first heal. All ranks of a group make the same decisions."""

    def __init__(self, session: Directing, ranks: Ranks, held: HeldState) -> None:
        self._session = session
        self._ranks = ranks
        self._held = held
        self._due = True

    def start(self, call: Call) -> None:
        """Start `compute` on the state that this group came with, and drop the results.

        Nothing happens if this process has taken a step, has read a checkpoint since its first call, or if it would
        show that the step runs once more. An exception ends the rehearsal alone, with a warning. In a group of
        several processes it is raised, since the others may wait for this process in a collective.
        """
        held, self._due, due = self._held, False, self._due
        if not due or held.made or held.step != held.first_step or call.programs.cut.visible is not None:
            return
        _log.debug("rehearse step %d", held.step)
        try:
            self._compute(call)
        except Exception:
            if self._ranks.size > 1:
                raise
            _log.warning("The step could not be rehearsed; the heal continues.", exc_info=True)

    def _compute(self, call: Call) -> None:
        programs, leaves = call.programs, self._held.current
        with reporting(self._session.got_on):
            # The first call has asked for this batch, to know its type.
            batch = example_of(call.batch_for)(self._held.step, 0)
        made, local = programs.compute(leaves, batch)
        for stage in programs.stages.run_of(0):
            if stage and programs.stages.begins(stage):
                made, local = programs.compute_next(leaves, (), local)
            call.made(stage, programs.stages.stage_pieces[stage].split(programs.stages.bucket(stage, made)))

    def touch_results(self, call: Call) -> None:
        """Write once to the memory that the results of an exchange will take. Call it before the first state is held.

        The memory is kept, and taken by the next results of the same size.
        """
        if self._held.made:
            return
        layouts = call.programs.stages.layouts_with(self._ranks.size)
        results = [region for layout in layouts for region in result_regions(layout)]
        for region in results:
            region.view(np.uint8).fill(0)
