"""Terms: which coordinator is current, and the answer of a coordinator to a group that has met a higher term.

A group ignores coordinators with a lower term than the highest it has met, and sends that term in its Hello.

*With a store*, the store counts the terms. A coordinator that learns of a higher term has been replaced without
noticing. It answers with its own term, so the group closes the stream and finds the other coordinator. Only a store
that was emptied or restored under a clock that is behind has no such other one; the log has the advice then.

*Without a store*, a term is taken from the clock, which may be behind the previous coordinator's. So terms are
learned, separately for each job: the first group in this life of the coordinator raises the job's term above the
highest it has met. A later group may bring a higher one:

* nothing has been founded yet: the term is raised, and connected groups are sent away for a moment, so that all are
  welcomed under the new term;
* the job has been founded here: either the groups come late to a coordinator that has just started, or this one was
  replaced while it was suspended, and the other one leads. It turns them away at first, so that they find the other
  one. If they keep coming for `heartbeat_timeout_s`, there is none. The job then begins again under a higher term
  with the states of its groups, as after any restart without a store.

A job never takes over the term of another job: the term that a group reports concerns its own job only.
"""

from jaxft_protocol.coordinator.draft import Draft
from jaxft_protocol.coordinator.job import Close, Job, Send, SessionId
from jaxft_protocol.messages import Evicted, Hello, Welcome

# A group dials its coordinators in turn, one per second, so with ten it comes back to each one within this time.
LONGEST_ROUND_S = 10.0


def turns_away(draft: Draft, session: SessionId, message: Hello) -> bool:
    """Choose the term under which a group is welcomed; return True if it was sent to another coordinator."""
    job = draft.job
    if not job.term:
        learns = not job.options.durable and message.term and message.term >= job.options.term
        draft.update(term=message.term + 1 if learns else job.options.term)
    if message.term <= draft.job.term:
        return False
    if not job.options.durable and (job.frontier is None or _is_outdone(draft)):
        _begin_again(draft, message)
        return False
    _turn_away(draft, session, message)
    return True


def _is_outdone(draft: Draft) -> bool:
    """Return whether groups of a higher term have come long enough to prove that no other coordinator leads them."""
    since_s = _outdone_since_s(draft)
    return draft.now_s - since_s >= draft.job.options.heartbeat_timeout_s


def _outdone_since_s(draft: Draft) -> float:
    """Return since when they keep coming. A longer pause means that they found another coordinator."""
    first_s, last_s = draft.job.outdone_s or (draft.now_s, draft.now_s)
    pause_s = max(draft.job.options.heartbeat_timeout_s, LONGEST_ROUND_S)
    return draft.now_s if draft.now_s - last_s > pause_s else first_s


def _turn_away(draft: Draft, session: SessionId, message: Hello) -> None:
    job, since_s = draft.job, _outdone_since_s(draft)
    if since_s == draft.now_s:
        why = "and other decisions for the job"
        if job.options.durable:
            why = (
                "from its store. If no other coordinator leads, this store was emptied or restored, and the clock of "
                "this machine is behind: set it right, and restart this coordinator"
            )
        draft.log(
            f"turns {message.group} away: it has met a coordinator of term {message.term}, and this one has term "
            f"{job.term} {why}"
        )
    draft.update(outdone_s=(since_s, draft.now_s))
    welcome = Welcome(job.options.heartbeat_interval_ms, term=job.term)
    draft.effects += [Send(session, welcome), Close(session)]


def _begin_again(draft: Draft, message: Hello) -> None:
    """Forget everything but the ids that were used, and let all groups reconnect under a higher term."""
    job = draft.job
    reason = f"group {message.group!r} has met a coordinator of term {message.term}, above term {job.term}"
    draft.log(f"begins again under term {message.term + 1}: {reason}")
    for group in job.groups.values():
        draft.send(group, Evicted(f"the coordinator begins the job again: {reason}", may_return=True))
        draft.effects.append(Close(group.session))
    draft.job = Job(
        job.name,
        job.options,
        term=message.term + 1,
        last_quorum_id=job.last_quorum_id,
        last_heal_id=job.last_heal_id,
        last_tick_s=job.last_tick_s,
    )
