"""Groups connect, join, heal, and leave."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from jaxft_protocol.coordinator import bounds, digests, donors, founding, halting, quorums, settings, terms
from jaxft_protocol.coordinator.assign import MAX_WEIGHT
from jaxft_protocol.coordinator.draft import Draft, as_member, names_text
from jaxft_protocol.coordinator.job import Close, Group, GroupPhase, Holder, Send, SessionId
from jaxft_protocol.messages import (
    PROTOCOL_VERSION,
    Difference,
    Evicted,
    Finished,
    FrontierMoved,
    Goodbye,
    GroupName,
    HaltKind,
    Heal,
    HealFailed,
    HealId,
    Hello,
    HistoryId,
    Incarnation,
    Join,
    Leave,
    Member,
    Pin,
    Pinned,
    QuorumId,
    Ready,
    Refused,
    Release,
    Step,
    Stripe,
    Waiting,
    Welcome,
)
from jaxft_protocol.names import ENDED, LEFT
from jaxft_protocol.values import changed

MAX_NAME_LENGTH = 200
# A quorum lists every shard: this many take 200 KB.
MAX_SHARDS = 65536
# Between two heals of a group that keep failing, in units of the heartbeat timeout: the longest pause.
LONGEST_HEAL_PAUSE = 2

_DONATES = (GroupPhase.MEMBER, GroupPhase.READY, GroupPhase.LEAVING)
# Phases of groups that need the frontier, or may need it once they have joined.
_WITHOUT_FRONTIER = (GroupPhase.PRESENT, GroupPhase.STALE, GroupPhase.HEALING, GroupPhase.READY)


def hello(draft: Draft, session: SessionId, message: Hello) -> None:
    problem = _hello_problem(message)
    if problem:
        draft.effects += [Send(session, Refused(problem)), Close(session)]
        return
    if _is_late(draft.job.groups.get(message.group), message):
        draft.effects.append(Close(session))
        return
    if terms.turns_away(draft, session, message):
        return
    if draft.job.idle_since is not None:
        draft.update(idle_since=None)
    known = draft.job.groups.get(message.group)
    if known is not None and known.incarnation == message.incarnation:
        draft.effects.append(Close(known.session))  # its other end is gone, which was not noticed here
        remove(draft, known, "it lost its connection")
    elif known is not None:
        _turn_away(draft, session, message, known)
        return
    group = Group(
        message.group,
        message.incarnation,
        session,
        message.address,
        message.stream,
        came_s=draft.now_s,
        draining=(message.group, message.incarnation) in draft.job.drains,
    )
    if group.holder not in draft.job.distrusted:
        group = changed(group, step=message.step, history=message.history)
    draft.add(group)
    frontier = draft.job.frontier
    options, term = draft.job.options, draft.job.term
    welcome = Welcome(options.heartbeat_interval_ms, term=term, samples=options.samples)
    if frontier is not None:
        welcome = replace(
            welcome,
            frontier_step=frontier.step,
            frontier_quorum_id=frontier.quorum_id,
            frontier_held=bool(draft.holders()),
        )
    draft.send(group, welcome)
    draft.log(f"{group.name} is present")
    if draft.job.halted is not None and draft.job.halted.kind is HaltKind.RAISED:
        halting.stop_late(draft, group)  # already now: it may wait for this, and not join


def _is_late(known: Group | None, message: Hello) -> bool:
    """Whether its process has given this stream up, and the stream that it has opened since is already here."""
    return known is not None and known.incarnation == message.incarnation and message.stream < known.stream


def _turn_away(draft: Draft, session: SessionId, message: Hello, known: Group) -> None:
    """Tell a process to come again: its group's name is taken, by another process that may hold the only state.

    If that one is dead, its connection ends at once, or its heartbeats stop.
    """
    text = (
        f"another process takes part as {known.name!r}, at {known.address}. Each group of a job needs a unique name: "
        "another launch may run this job, or an older process of this group may still run"
    )
    if message.stream <= 1:  # not again for each stream
        draft.log(f"turns a process away: {text}")
    draft.effects += [Send(session, Evicted(text, may_return=True)), Close(session)]


def join(draft: Draft, group: Group, message: Join) -> None:
    job = draft.job
    problem = (
        _shards_problem(message) or _weight_problem(message) or bounds.join_problem(job, group.name, message)
    )
    if problem:
        refuse(draft, group, problem)
        return
    if founding.is_undone(job, message.step, message.history):
        message = replace(message, history=HistoryId(0))
    differing = settings.differences(job, message)
    if differing and not settings.overrules(draft, message):
        refuse(draft, group, settings.reason_of(job, group, differing), differing)
        return
    if differing:
        settings.give_way(draft, differing)
        job = draft.job
    if founding.gives_way_to(draft, message):
        founding.give_way(draft)
        job = draft.job
    brought = changed(group, step=message.step, history=message.history)
    if problem := founding.foreign_state(job, brought):
        refuse(draft, group, problem)
        return
    if halting.stop_late(draft, group):
        return
    if group.holder in job.distrusted:
        # A corrupt state has no history until the group has healed.
        message = replace(message, history=HistoryId(0))
    if founding.is_newer(job, message):
        founding.go_back_for_newer(draft, group, message)
    _take_in(draft, group, message)


def _take_in(draft: Draft, group: Group, message: Join) -> None:
    job = draft.job
    draft.update(
        settings=job.settings if job.settings is not None else dict(message.settings),
        total_shards=job.total_shards if job.settings is not None else message.total_shards,
        min_replicas=job.min_replicas or message.min_replicas or job.options.min_replicas,
        last_quorum_id=QuorumId(max(job.last_quorum_id, message.last_quorum_id)),
    )
    if job.first_join_s is None:
        draft.update(first_join_s=draft.now_s)
    joined = draft.put(
        group,
        step=message.step,
        digest=message.digest,
        history=message.history,
        joined_s=draft.now_s,
        spare=message.spare,
        weight=message.weight,
        members=message.members,
        phase=GroupPhase.STALE,
    )
    if _holds_frontier(draft, joined):
        draft.note_state(joined)
        # The current quorum may commit the step without it: as a member it would then lack a step.
        spare = job.quorum is not None or job.finished is not None
        draft.put(joined, phase=GroupPhase.READY if spare else GroupPhase.MEMBER)
    if job.waiting:
        draft.send(group, Waiting(job.waiting, bool(draft.holders()), joined.has_fresh_state))


def ready(draft: Draft, group: Group, message: Ready) -> None:
    if message.heal_id != group.heal_id:
        return  # of a heal that has been abandoned
    # A joiner that is already a member sends Ready again once it has the sum that it lacked.
    phase = GroupPhase.MEMBER if group.phase is GroupPhase.MEMBER else GroupPhase.READY
    caught_up = draft.put(
        group,
        phase=phase,
        step=message.step,
        digest=None,  # the known digest is of a state which it no longer holds
        history=draft.job.history,
        ready_s=draft.now_s,
        heals_failed=0,
    )
    draft.note_state(caught_up)


def heal_failed(draft: Draft, group: Group, message: HealFailed) -> None:
    if message.heal_id != group.heal_id:
        return
    draft.log(f"{group.name} could not heal: {message.reason}")
    draft.put(_give_up_heal(draft, group), **_held_now(draft, group, message))
    if group.phase is GroupPhase.MEMBER:
        draft.note_left(group.name, "it could not catch up")
    quorums.lose(draft, group.name)


def _give_up_heal(draft: Draft, group: Group) -> Group:
    """End a heal. Its donors may have died, and others can serve at once. After repeated failures, pause first.

    The pause doubles: a firewall may let no connection of this group through to a donor, for days. Each heal has the
    donors keep a state, and is in both logs.
    """
    options = draft.job.options
    pause_s = 0.0
    if group.heals_failed:
        longest_s = LONGEST_HEAL_PAUSE * options.heartbeat_timeout_s
        pause_s = min(options.vote_grace_s * 2.0 ** min(group.heals_failed - 1, 10), longest_s)
    return draft.put(
        draft.release_heal(group),
        phase=GroupPhase.STALE,
        heals_failed=group.heals_failed + 1,
        heals_again_s=draft.now_s + pause_s,
    )


def leave(draft: Draft, group: Group, message: Leave) -> None:
    """Remove `group` from the quorum; it stays as a donor while it is needed."""
    draft.log(f"{group.name} leaves")
    if group.phase in (GroupPhase.STALE, GroupPhase.HEALING):
        # It does not hold the frontier (any more), so no group needs it.
        draft.send(group, Goodbye())
        draft.effects.append(Close(group.session))
        draft.remove(draft.release_heal(group))
        return
    draft.update(drains=tuple(holder for holder in draft.job.drains if holder != group.holder))
    left = draft.put(draft.release_heal(group), phase=GroupPhase.LEAVING, draining=False)
    if group.phase is GroupPhase.MEMBER:
        draft.note_left(left.name, ENDED if message.finished else LEFT)
    if message.finished and group.phase is GroupPhase.MEMBER:
        _end(draft, group)
    last = not draft.select(quorums.is_member)
    if last and message.finished and left in draft.holders() and not _nothing_was_done(draft):
        draft.finish()
    quorums.mark_lost(draft, left.name)
    # Many groups finish at the same time: the next tick forms one quorum without all of them.
    if not message.finished:
        quorums.settle(draft)


def _end(draft: Draft, group: Group) -> None:
    """Note where a member has finished. A regular one gives up its place: no spare may take it.

    A founder that leaves before the first quorum has no place.
    """
    assert draft.job.frontier is not None
    draft.update(ended=draft.job.frontier.step)
    if group.spare:
        return
    if group.name in draft.job.held:
        held = {name: shards for name, shards in draft.job.held.items() if name != group.name}
        draft.update(places=draft.job.places - 1, held=held)


def closed(draft: Draft, group: Group, reason: str) -> None:
    if group.phase is not GroupPhase.LEAVING:
        draft.log(f"lost {group.name} ({reason})")
    remove(draft, group, reason)


def remove(draft: Draft, group: Group, reason: str) -> None:
    """Remove a group whose session is over."""
    draft.forget(group, reason)
    quorums.lose(draft, group.name)


def refuse(draft: Draft, group: Group, reason: str, differences: tuple[Difference, ...] = ()) -> None:
    draft.refuse(group, reason, differences)
    quorums.lose(draft, group.name)


def pinned(draft: Draft, donor: Group, message: Pinned) -> None:
    """Note the digest of the state that a donor keeps for a heal."""
    joiner = next((each for each in draft.job.groups.values() if each.heal_id == message.heal_id), None)
    if joiner is None or joiner.pinned_step is None or donor.holder not in joiner.donors:
        return  # of a heal that has been abandoned, or has started
    if message.digest is None:
        draft.send(donor, Release(message.heal_id))
        draft.put(joiner, donors=tuple(holder for holder in joiner.donors if holder != donor.holder))
    else:
        draft.put(joiner, pinned={**joiner.pinned, donor.holder: message.digest})


def plan_heals(draft: Draft) -> None:
    """Give donors to every group that needs the frontier; if the job has finished without a donor, tell them that."""
    for joiner in draft.select(lambda group: group.pinned_step is not None):
        _tell_donors(draft, joiner)
    # Read it only now: the digests may have evicted the member whose vote was missing, and so committed the step.
    frontier = draft.job.frontier
    if frontier is None:
        return
    stale = draft.select(lambda group: group.phase is GroupPhase.STALE and group.heals_again_s <= draft.now_s)
    able = donors.candidates(draft) if stale else []
    for group in stale:
        if not able:
            if draft.job.finished is not None:
                _tell_finished(draft, group)
            continue
        stripes = donors.chosen(draft, group, able)
        _pin(draft, draft.put(group, phase=GroupPhase.HEALING), frontier.step, stripes)
        names = names_text([donor for donor, _ in stripes])
        draft.log(f"{group.name} heals to step {frontier.step} from {names}")


def _pin(draft: Draft, joiner: Group, step: Step, stripes: list[tuple[Group, Stripe]]) -> None:
    """Let donors keep state `step`, and ask for its digest: a donor with a corrupt state must not feed a joiner."""
    heal_id = _new_heal_id(draft)
    for donor, stripe in stripes:
        draft.send(donor, Pin(heal_id, step, stripe=stripe))
    serving = [donor for donor, _ in stripes]
    holders = tuple(donor.holder for donor in serving)
    joiner = draft.put(
        joiner,
        heal_id=heal_id,
        donors=holders,
        asked=holders,
        pinned_step=step,
        pinned={},
        pinned_s=draft.now_s,
    )
    if len(serving) == 1:
        _tell_heal(draft, joiner, serving)  # there is nothing to compare
        return
    draft.send(joiner, Waiting(f"the digest of state {step} at {names_text(serving)}", held=True))


def _tell_donors(draft: Draft, joiner: Group) -> None:
    """Send a joiner its donors, once all living donors have sent their digests and a majority agrees.

    A donor sends no digest while its training thread is away. After a heartbeat timeout only the donors that have
    sent one serve; if none has, there is nothing to compare, and all serve. If half of them or more are away, they
    have `join_timeout_s`: otherwise a corrupt donor, together with the joiner that it feeds, could outvote them.
    """
    joiner = draft.job.groups.get(joiner.name, joiner)
    if joiner.pinned_step is None or joiner.name not in draft.job.groups:
        return  # the digests for another joiner have ended this heal, or the job
    asked = [donor for donor in _present(draft, joiner.donors) if donor.phase in _DONATES]
    if not asked:
        _give_up_heal(draft, joiner)
        return
    answered = [donor for donor in asked if donor.holder in joiner.pinned]
    options = draft.job.options
    few = 0 < 2 * len(answered) <= len(asked)
    most_s = max(options.heartbeat_timeout_s, options.join_timeout_s if few else 0.0)
    if len(answered) < len(asked) and draft.now_s - joiner.pinned_s <= most_s:
        return
    given = {donor.name: joiner.pinned[donor.holder] for donor in answered}
    if why := _why_not_enough(draft, joiner, given):
        draft.log(f"{joiner.name} does not heal: {why}; asks all donors")
        _give_up_heal(draft, joiner)
        return
    odd = digests.odd_ones(given)
    if odd is None:
        halting.diverge(draft, digests.listed(given))
        return
    for donor in answered:
        if donor.name in odd:
            quorums.put_out_odd(draft, donor.holder, given)
    _tell_heal(draft, joiner, [donor for donor in answered if donor.name not in odd] or asked)
    quorums.lose(draft, *odd)


def _why_not_enough(draft: Draft, joiner: Group, given: Mapping[GroupName, int]) -> str:
    """Why all donors are to be asked, of which only a few were: these differ, or no other confirms the only one."""
    if not _others_can_tell(draft, joiner):
        return ""
    if len(set(given.values())) > 1:
        return digests.listed(given)
    if len(given) == 1 and len(donors.candidates(draft)) > 1:
        return f"only {next(iter(given))} of {len(joiner.asked)} donors has sent the digest"
    return ""


def _others_can_tell(draft: Draft, joiner: Group) -> bool:
    """Whether there are donors that were not asked for their digest, because a few are enough if they agree."""
    if donors.asks_all(joiner):
        return False
    return any(donor.holder not in joiner.asked for donor in donors.candidates(draft))


def _tell_heal(draft: Draft, joiner: Group, serving: list[Group]) -> None:
    step, heal_id, frontier = joiner.pinned_step, joiner.heal_id, draft.job.frontier
    assert step is not None
    assert heal_id is not None
    assert frontier is not None
    holders = tuple(donor.holder for donor in serving)
    for donor in _present(draft, joiner.donors):
        if donor.holder not in holders:
            draft.send(donor, Release(heal_id))
    joiner = draft.put(joiner, donors=holders, pinned_step=None, pinned={})
    draft.send(joiner, Heal(heal_id, step, _as_members(serving), history=draft.job.history))
    if frontier.step != step:
        draft.send(joiner, FrontierMoved(frontier.step))


def _present(draft: Draft, holders: tuple[Holder, ...]) -> list[Group]:
    groups = draft.job.groups
    return [groups[name] for name, incarnation in holders if _is_here(groups.get(name), incarnation)]


def _is_here(group: Group | None, incarnation: Incarnation) -> bool:
    return group is not None and group.incarnation == incarnation


def plan_following(draft: Draft) -> None:
    """Let every ready group at the frontier follow the job: donors log the sums for it from now on.

    A spare that already follows gets additional donors when there are new ones. It stands by for a long time, and
    otherwise the death of its last original donor would cut it off just when it is needed.
    """
    frontier = draft.job.frontier
    if frontier is None or draft.job.quorum is None:
        return
    standing = draft.select(
        lambda group: group.phase is GroupPhase.READY and (group.heal_id is None or group.spare)
    )
    for group in standing:
        followed = draft.select(lambda other: quorums.is_member(other) and other.holder in frontier.holders)
        new = [donor for donor in followed if donor.holder not in group.donors]
        if group.step != frontier.step or not new:
            continue
        follower = draft.release_heal(group)
        _begin_following(draft, follower, frontier.step, followed)
        draft.log(f"{group.name} stands by at step {frontier.step}, follows {names_text(followed)}")


def _begin_following(draft: Draft, group: Group, step: Step, followed: list[Group]) -> None:
    """Tell donors what to log for `group`, then send `group` its donors."""
    heal_id = _new_heal_id(draft)
    for donor in followed:
        draft.send(donor, Pin(heal_id, step, log_only=True))
    draft.put(group, heal_id=heal_id, donors=tuple(donor.holder for donor in followed))
    draft.send(group, Heal(heal_id, step, _as_members(followed), log_only=True, history=draft.job.history))


def _new_heal_id(draft: Draft) -> HealId:
    heal_id = HealId(draft.job.last_heal_id + 1)
    draft.update(last_heal_id=heal_id)
    return heal_id


def _as_members(groups: list[Group]) -> tuple[Member, ...]:
    return tuple(as_member(group) for group in groups)


def _held_now(draft: Draft, group: Group, message: HealFailed) -> dict[str, object]:
    """Return the step and history after a heal that failed half-way: maybe of a newer, committed state."""
    history = message.history if message.history == draft.job.history else HistoryId(0)
    if (message.step, history) == (group.step, group.history) or group.holder in draft.job.distrusted:
        return {}
    return {"step": message.step, "history": history, "digest": None}


def finish(draft: Draft) -> None:
    """Finish the job, tell groups that have caught up, and release leaving groups that are no longer needed."""
    if _too_few_are_left(draft):
        draft.finish(": groups have ended their loop there, and too few others are left")
    job = draft.job
    if job.finished is not None:
        for group in draft.select(lambda group: _stands_at(draft, group, job.finished)):
            _tell_finished(draft, group)
    leavers = draft.select(lambda group: group.phase is GroupPhase.LEAVING and not group.draining)
    needed = _needed_by(draft) if leavers else dict[GroupName, list[Group]]()
    for group in leavers:
        if group.name in needed:
            _tell_for_whom(draft, group, needed[group.name])
            continue
        draft.send(group, Goodbye())
        draft.effects.append(Close(group.session))
        draft.remove(group)


def _tell_for_whom(draft: Draft, leaver: Group, joiners: list[Group]) -> None:
    """Tell a group that leaves, once, which joiners it stays for."""
    reason = f"{names_text(joiners)} to fetch this group's state"
    if reason != leaver.stays_for:
        draft.send(draft.put(leaver, stays_for=reason), Waiting(reason, held=True))


def _too_few_are_left(draft: Draft) -> bool:
    """Return whether the loop has ended here for some members, and the groups that are left are too few to continue.

    Not while a regular member is away: it is about to end its own loop. A member that is in a step wants to take it,
    and would wait without end. A regular group that has died may come back, and its place must still be filled; but
    groups that have finished do not come again.
    """
    job = draft.job
    if job.frontier is None or job.ended != job.frontier.step or job.orphaned_s is not None:
        return False
    if job.quorum is not None or job.finished is not None or _nothing_was_done(draft):
        return False
    staying = draft.select(lambda group: group.phase is not GroupPhase.LEAVING)
    regular = [group for group in staying if not group.spare]
    if not staying or any(group.phase is GroupPhase.MEMBER and group.away for group in regular):
        return False
    coming = max(0, job.places - len(regular))
    return len(staying) + coming < job.min_replicas


def _nothing_was_done(draft: Draft) -> bool:
    """Return whether the job has only a fresh founding. Leaving it does not finish it: others may reconnect."""
    frontier = draft.job.frontier
    return frontier is not None and frontier.founding and frontier.fresh


def _stands_at(draft: Draft, group: Group, step: Step | None) -> bool:
    if group.phase is GroupPhase.MEMBER:  # of a quorum that has ended; only a holder of the frontier counts
        return group in draft.holders()
    return group.phase is GroupPhase.READY and group.step == step


def _needed_by(draft: Draft) -> dict[GroupName, list[Group]]:
    """Return who must stay, and for whom: donors of heals, and holders of the frontier if all of them are leaving."""
    groups = draft.job.groups.values()
    needed: defaultdict[GroupName, list[Group]] = defaultdict(list)
    for group in groups:
        for name, _ in group.donors:
            needed[name].append(group)
    holders = draft.holders()
    without = [group for group in groups if group.phase in _WITHOUT_FRONTIER]
    if without and all(holder.phase is GroupPhase.LEAVING for holder in holders):
        needed.update({holder.name: without for holder in holders})
    return needed


def _tell_finished(draft: Draft, group: Group) -> None:
    assert draft.job.finished is not None
    draft.send(group, Finished(draft.job.finished))
    draft.put(draft.release_heal(group), phase=GroupPhase.LEAVING, draining=False)


def _shards_problem(message: Join) -> str:
    shards = message.total_shards
    if shards is None or 1 <= shards <= MAX_SHARDS:
        return ""
    return f'the setting shards must be "members" or a number from 1 to {MAX_SHARDS}, not {shards}'


def _weight_problem(message: Join) -> str:
    if 1 <= message.weight <= MAX_WEIGHT:
        return ""
    return f"the weight of a group is the number of its devices, from 1 to {MAX_WEIGHT}, not {message.weight}"


def _hello_problem(message: Hello) -> str:
    if message.protocol_version != PROTOCOL_VERSION:
        return (
            f"protocol version {message.protocol_version} of group {message.group!r} is not the "
            f"coordinator's {PROTOCOL_VERSION}: install the same jaxft on both"
        )
    if not message.group or len(message.group) > MAX_NAME_LENGTH:
        return f"a group needs a name of 1 to {MAX_NAME_LENGTH} characters, not {len(message.group)}"
    if (message.rank, message.ranks) != (0, 1):
        return f"rank {message.rank} of {message.ranks}: groups of several processes are not supported yet"
    return ""


def _holds_frontier(draft: Draft, group: Group) -> bool:
    frontier = draft.job.frontier
    if frontier is None or group.step != frontier.step or group.holder in draft.job.distrusted:
        return False
    if draft.job.proven.get(group.name) == group.incarnation:
        return True
    return group.digest is not None and group.digest == frontier.digest
