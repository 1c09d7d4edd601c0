"""The first run of `compute`, ahead of a joiner's first step.

It takes longer than later ones: memory is touched for the first time, and an accelerator loads kernels and connects
the processes of a collective. In the job's step all groups would wait for that. Here it takes the time in which the
donors send.
"""

import logging

import numpy as np

from jaxft._arrays._memory import result_regions
from jaxft._replica._engine import Call
from jaxft._replica._held_state import HeldState

_log = logging.getLogger("jaxft")


def rehearse(call: Call, held: HeldState, ranks: int) -> None:
    """Start `compute` on the state that a heal is about to replace, and drop what it makes.

    Nothing happens if this process has taken a step before, or has read a checkpoint since its first call. All ranks
    of a group decide the same.

    Args:
        call: the step.
        held: the state that this group came with.
        ranks: how many processes the group has.
    """
    if held.made or held.step != held.first_step:
        return
    _log.debug("rehearse step %d", held.step)
    # The first call has asked for this batch, to know its type.
    batch = call.batch_for(held.step, 0)
    programs, leaves = call.programs, held.current
    local = programs.compute(leaves, batch)[1]
    for _ in programs.run_of(0)[1:]:
        local = programs.compute_next(leaves, (), local)[1]
    _touch_results(call, ranks)


def _touch_results(call: Call, ranks: int) -> None:
    """Have the memory for the results of an exchange ready for use: it is kept, and taken again."""
    programs = call.programs
    results = [
        region
        for number, pieces in enumerate(programs.stage_pieces)
        for span in (pieces.spans({ranks}) if ranks > 1 else (None,))
        for region in result_regions(programs.span_layout(number, span))
    ]
    for region in results:
        region.view(np.uint8).fill(0)
