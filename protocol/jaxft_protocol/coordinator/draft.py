"""A draft of the job's next state and the effects so far, while an event is being handled.

Mutation is local and the result is pure: `machine.step` makes a Draft, changes it, and takes the job and the effects
from it. If anything raises, the original job is unchanged.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from jaxft_protocol.coordinator.job import Close, Effect, Group, GroupPhase, Holder, Job, Log, Send
from jaxft_protocol.messages import (
    Change,
    CoordinatorMessage,
    Difference,
    Drained,
    Evicted,
    GroupName,
    HistoryId,
    Incarnation,
    Member,
    Refused,
    Release,
    Waiting,
)
from jaxft_protocol.names import listed, natural_key
from jaxft_protocol.values import changed


class Draft:
    def __init__(self, job: Job, now_s: float) -> None:
        self.job = job
        self.now_s = now_s
        self.effects: list[Effect] = []

    def update(self, **changes: Any) -> None:
        self.job = changed(self.job, **changes)

    def put(self, group: Group, **changes: Any) -> Group:
        """Store `group` with `changes` and return the stored group."""
        stored = changed(group, **changes)
        self.update(groups={**self.job.groups, stored.name: stored})
        return stored

    def put_all(self, groups: Iterable[Group], **changes: Any) -> None:
        """Store all of `groups` with `changes`, at the cost of one copy of the job's groups."""
        stored = {group.name: changed(group, **changes) for group in groups}
        if stored:
            self.update(groups={**self.job.groups, **stored})

    def add(self, group: Group) -> Group:
        self.update(sessions={**self.job.sessions, group.session: group.name})
        return self.put(group)

    def remove(self, group: Group) -> None:
        job = self.job
        self.update(
            groups={name: other for name, other in job.groups.items() if name != group.name},
            sessions={session: name for session, name in job.sessions.items() if session != group.session},
        )
        # Pins end with the session: if this donor comes back, it will not send the digest that it was asked for.
        for joiner in [each for each in self.job.groups.values() if each.pinned_step is not None]:
            self.put(joiner, donors=tuple(holder for holder in joiner.donors if holder != group.holder))

    def expel(self, group: Group, reason: str, *, may_return: bool, aside: bool = False) -> None:
        """Evict `group` and end its session. The caller must update the quorum.

        `aside`: it was only away, and may come back at any time.
        """
        self.log(f"{'goes on without' if aside else 'evicts'} {group.name}: {reason}")
        drained = group.draining and may_return  # it is to end, and not to come back
        self.send(group, Drained() if drained else Evicted(reason, may_return, aside))
        self.effects.append(Close(group.session))
        self.forget(group, reason)

    def refuse(self, group: Group, reason: str, differences: tuple[Difference, ...] = ()) -> None:
        """Tell `group` why it cannot take part, and end its session. The caller must update the quorum."""
        self.log(f"refuses {group.name}: {reason}")
        self.send(group, Refused(reason, differences))
        self.effects.append(Close(group.session))
        self.forget(group, "refused")

    def forget(self, group: Group, reason: str) -> None:
        """Remove `group` from the job, and release its heal."""
        self.remove(self.release_heal(group))
        if group.phase is GroupPhase.MEMBER:
            self.note_left(group.name, reason)

    def send(self, group: Group, message: CoordinatorMessage) -> None:
        self.effects.append(Send(group.session, message))

    def log(self, text: str) -> None:
        self.effects.append(Log(f"[{self.job.name}] {text}"))

    def select(self, condition: Callable[[Group], bool]) -> list[Group]:
        """Return the groups that meet `condition`, in natural order of their names."""
        found = [group for group in self.job.groups.values() if condition(group)]
        if len(found) > 1:
            found.sort(key=lambda group: natural_key(group.name))
        return found

    def holders(self) -> list[Group]:
        """Return the connected groups that are known to hold the frontier."""
        frontier = self.job.frontier
        if frontier is None:
            return []
        holding = (GroupPhase.MEMBER, GroupPhase.READY, GroupPhase.LEAVING)
        return self.select(lambda group: group.holder in frontier.holders and group.phase in holding)

    def finish(self, why: str = "") -> None:
        """Finish the job at its frontier."""
        assert self.job.frontier is not None
        self.update(finished=self.job.frontier.step, quorum=None)
        self.log(f"finished at step {self.job.frontier.step}{why}")

    def note_state(self, group: Group) -> None:
        """Note that `group` has shown that it holds state `group.step` of this job."""
        frontier = self.job.frontier
        assert frontier is not None
        distrusted = self.job.distrusted - {group.holder}
        self.update(proven={**self.job.proven, group.name: group.incarnation}, distrusted=distrusted)
        if group.step == frontier.step:
            self.update(frontier=replace(frontier, holders=frontier.holders | {group.holder}))

    def distrust(self, name: GroupName, incarnation: Incarnation) -> None:
        """Note that this group's state, whatever its step, is not the job's, nor is the state of joiners it fed."""
        self._disown((name, incarnation))
        donor = (name, incarnation)
        fed_by_it = self.select(
            lambda other: (
                donor in other.donors and other.pinned_step is None and other.phase is not GroupPhase.MEMBER
            )
        )
        for fed in fed_by_it:
            self._disown(fed.holder)
            self.put(self.release_heal(fed), phase=GroupPhase.STALE, history=HistoryId(0))

    def _disown(self, holder: Holder) -> None:
        frontier = self.job.frontier
        assert frontier is not None
        self.update(
            distrusted=self.job.distrusted | {holder},
            frontier=replace(frontier, holders=frontier.holders - {holder}),
        )

    def note_left(self, name: GroupName, reason: str) -> None:
        """Remember for the next quorum why `name` is missing; if it left twice, the last reason."""
        others = (change for change in self.job.left if change.group != name)
        self.update(left=(*others, Change(name, reason)))

    def release_heal(self, group: Group) -> Group:
        """Let the donors of `group` release their pins for it."""
        if group.heal_id is None:
            return group
        for name, incarnation in group.donors:
            donor = self.job.groups.get(name)
            if donor is not None and donor.incarnation == incarnation:
                self.send(donor, Release(group.heal_id))
        return self.put(group, heal_id=None, donors=(), pinned_step=None, pinned={})

    def wait_for(self, reason: str) -> None:
        """Tell all groups, once, why the job is waiting; "" when it continues."""
        if reason == self.job.waiting:
            return
        self.update(waiting=reason)
        if not reason:
            return
        self.log(f"waiting: {reason}")
        held = bool(self.holders())
        messages = {fresh: Waiting(reason, held, fresh) for fresh in (False, True)}
        for group in self.job.groups.values():
            if group.phase is not GroupPhase.LEAVING:
                self.send(group, messages[group.has_fresh_state])


def names_text(groups: Sequence[Group]) -> str:
    return listed([group.name for group in groups]) or "none"


def as_member(group: Group, shards: tuple[int, ...] = ()) -> Member:
    return Member(group.name, Incarnation(group.incarnation), group.address, shards, group.weight)
