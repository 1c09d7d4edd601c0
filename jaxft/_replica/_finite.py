"""Checks whether means are finite, and logs those that are not."""

import logging
from collections.abc import Sequence
from typing import Any

from jaxft._programs._nonfinite import find
from jaxft._replica._engine import Call

_log = logging.getLogger("jaxft")


class FiniteCheck:
    def __init__(self, group: str) -> None:
        self._group = group
        self._warned = False

    def look(self, call: Call, means: Sequence[Any], step: int) -> str:
        """Which of the means is not finite, if the policy checks it: the same text in every group."""
        found = find(call.programs.piece_specs, means, call.nonfinite)
        if found and call.nonfinite == "skip":
            _log.warning("[jaxft %s] step %d changes nothing: %s", self._group, step, found)
        elif found and not self._warned:
            self._warned = True
            _log.warning(
                '[jaxft %s] the means of step %d are not finite: %s (nonfinite="%s"; logged once)',
                *(self._group, step, found, call.nonfinite),
            )
        return found
