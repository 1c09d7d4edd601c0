"""Which coordinator speaks last: terms, and what one does that meets a higher one than its own.

Groups follow no coordinator of a lower term than the highest that they have met, and say that one in their Hello.

*With a store* terms grow in the store. A coordinator that meets a higher one has been replaced and has not noticed
yet: it answers with its own term, the group hangs up and finds the other one.

*Without a store* a term begins with the clock, which may be behind that of the coordinator before. So terms are
learned, for each job by itself: the first group that comes in this life of the coordinator raises the job's term
above all that it has met. A later group may bring a higher one:

* nothing has been founded yet: the term is raised, and those who are there already are sent away for a moment, so
  that all are welcomed under it;
* the job has been founded here: then either the groups come late to a coordinator that has just started, or this one
  was replaced while it stood still, and the other one leads. It turns them away at first, so that they find the other
  one. Where they keep coming for `heartbeat_timeout_s`, there is none: the job begins again under a higher term with
  what its groups bring, as after any restart without a memory.

A job never takes over the term of another job: what a group says of its own term concerns that job only.
"""

from jaxft_protocol.coordinator.draft import Turn
from jaxft_protocol.coordinator.job import Close, Job, Send, SessionId
from jaxft_protocol.messages import Evicted, Hello, Welcome

# A group dials its coordinators in turn, one a second: so it comes back to each of ten at the latest after this.
LONGEST_ROUND_S = 10.0


def turns_away(turn: Turn, session: SessionId, message: Hello) -> bool:
    """Settle the term under which a group is welcomed; return True if it has been sent to another coordinator."""
    job = turn.job
    if not job.term:
        learns = not job.options.durable and message.term and message.term >= job.options.term
        turn.update(term=message.term + 1 if learns else job.options.term)
    if message.term <= turn.job.term:
        return False
    if not job.options.durable and (job.frontier is None or _is_outdone(turn)):
        _begin_again(turn, message)
        return False
    _turn_away(turn, session, message)
    return True


def _is_outdone(turn: Turn) -> bool:
    """Whether groups of a higher term have kept coming for long enough: no coordinator leads them."""
    since_s = _outdone_since_s(turn)
    return turn.now_s - since_s >= turn.job.options.heartbeat_timeout_s


def _outdone_since_s(turn: Turn) -> float:
    """Since when they have come. After a pause they had found another one."""
    first_s, last_s = turn.job.outdone_s or (turn.now_s, turn.now_s)
    pause_s = max(turn.job.options.heartbeat_timeout_s, LONGEST_ROUND_S)
    return turn.now_s if turn.now_s - last_s > pause_s else first_s


def _turn_away(turn: Turn, session: SessionId, message: Hello) -> None:
    job, since_s = turn.job, _outdone_since_s(turn)
    if since_s == turn.now_s:
        turn.report(
            f"turns {message.group} away: it has met a coordinator of term {message.term}, and this one has term "
            f"{job.term} and remembers another course of the job"
        )
    turn.update(outdone_s=(since_s, turn.now_s))
    welcome = Welcome(job.options.heartbeat_interval_ms, term=job.term)
    turn.effects += [Send(session, welcome), Close(session)]


def _begin_again(turn: Turn, message: Hello) -> None:
    """Forget all but the ids that were given out, and let all come again under a higher term."""
    job = turn.job
    reason = f"group {message.group!r} has met a coordinator of term {message.term}, above term {job.term}"
    turn.report(f"begins again under term {message.term + 1}: {reason}")
    for group in job.groups.values():
        turn.send(group, Evicted(f"the coordinator begins the job again: {reason}", may_return=True))
        turn.effects.append(Close(group.session))
    turn.job = Job(
        job.name,
        job.options,
        term=message.term + 1,
        last_quorum_id=job.last_quorum_id,
        last_heal_id=job.last_heal_id,
        last_tick_s=job.last_tick_s,
    )
