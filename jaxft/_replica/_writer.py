"""Which group writes for the job: logs, plots, evaluations, files of the user's.

It is the first member of the quorum that has committed the state, as for checkpoints. One quorum commits a state, so
of each step there is at most one writer. A group that the job has gone on without since, as while it evaluates for
long, is no longer one.
"""

import logging

from jaxft_protocol.messages import NewQuorum

_log = logging.getLogger("jaxft")


class Writer:
    def __init__(self, group: str) -> None:
        self._group = group
        self._name = ""

    @property
    def name(self) -> str:
        """The writer of the state that this group holds; "" if that is not known."""
        return self._name

    def committed(self, members: tuple[str, ...], step: int) -> None:
        """State `step` was committed by a quorum of these groups; of none, if this group has healed to it."""
        before, self._name = self._name, members[0] if members else ""
        if before == self._name or self._group not in (before, self._name):
            return
        now = "writes" if self._name == self._group else "no longer writes"
        why = {self._group: "", "": ": it has healed"}.get(self._name, f": {self._name} does")
        _log.info("[jaxft %s] %s for the job, from step %d on%s", self._group, now, step, why)

    def is_it(self, quorum: NewQuorum | None) -> bool:
        """Whether this group is the writer, and `quorum`, the one in force, still has it."""
        if self._name != self._group or quorum is None:
            return False
        return any(member.group == self._group for member in quorum.members)
