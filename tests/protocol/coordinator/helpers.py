"""Drive a job of the pure machine by group name: `desk.vote("a")` returns the machine's effects."""

import zlib
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jaxft_protocol import messages as m
from jaxft_protocol.coordinator import job as j
from jaxft_protocol.coordinator import machine

M = TypeVar("M")


def digest_of(state: str) -> int | None:
    """The digest of a state with this name; None for "", whose digest could not be taken."""
    return zlib.crc32(state.encode()) if state else None


@dataclass(frozen=True)
class Done:
    """What one event led to, by group name, also for groups that are gone."""

    effects: tuple[j.Effect, ...]
    names: dict[j.SessionId, str]

    @property
    def sent(self) -> list[tuple[str, m.CoordinatorMessage]]:
        return [(self.names[e.session], e.message) for e in self.effects if isinstance(e, j.Send)]

    def to(self, name: str) -> list[m.CoordinatorMessage]:
        return [message for receiver, message in self.sent if receiver == name]

    def only(self, kind: type[M]) -> dict[str, M]:
        """The messages of one kind, at most one for each receiver."""
        found = [(receiver, message) for receiver, message in self.sent if isinstance(message, kind)]
        assert len(dict(found)) == len(found)
        return dict(found)

    @property
    def closed(self) -> list[str]:
        return [self.names[effect.session] for effect in self.effects if isinstance(effect, j.Close)]

    @property
    def reports(self) -> list[str]:
        return [effect.text for effect in self.effects if isinstance(effect, j.Log)]


@dataclass
class Desk:
    """One job and the sessions that its groups have open."""

    job: j.Job
    now_s: float = 0.0
    sessions: dict[str, j.SessionId] = field(default_factory=dict)
    names: dict[j.SessionId, str] = field(default_factory=dict)
    heard_s: dict[j.SessionId, float] = field(default_factory=dict)
    # Donors send the digest of a pinned state as soon as they are asked for it.
    tells_digests: bool = True

    @classmethod
    def open(cls, name: str = "job", **options: float) -> "Desk":
        options = {"founding_wait_s": 0.0, **options}
        return cls(j.Job(name, j.Options(**options)))  # pyright: ignore[reportArgumentType]

    def do(self, event: j.Event) -> Done:
        if isinstance(event, j.Received):
            self.heard_s[event.session] = self.now_s
        elif isinstance(event, j.Tick):
            event = j.Tick(self.heard_s, event.unix_s)
        self.job, effects = machine.step(self.job, event, self.now_s)
        done = Done(effects, dict(self.names))
        if not self.tells_digests:
            return done
        for effect in effects:
            match effect:
                case j.Send(session, m.Pin(heal_id, _, log_only=False)) if session in self.job.sessions:
                    more = self.do(j.Received(session, m.Pinned(heal_id, 7)))
                    done = Done((*done.effects, *more.effects), done.names)
                case _:
                    pass
        return done

    def say(self, name: str, message: m.GroupMessage) -> Done:
        return self.do(j.Received(self.sessions[name], message))

    def hello(self, name: str, incarnation: int = 1, **fields: object) -> Done:
        """Open a session and send Hello. An earlier session of that name stays as it is.

        If that is of another process, the new session is called "new" with this name.
        """
        session = j.SessionId(len(self.names) + 1)
        known = self.job.groups.get(m.GroupName(name))
        called = name if known is None or known.incarnation == incarnation else f"new {name}"
        if called in self.sessions:
            self.names[self.sessions[called]] = f"old {called}"
        self.sessions[called] = session
        self.names[session] = called
        hello = m.Hello(self.job.name, m.GroupName(name), m.Incarnation(incarnation), f"{name}:1", **fields)  # pyright: ignore[reportArgumentType]
        return self.say(called, hello)

    def join(
        self, name: str, step: int = 0, digest: str = "d", shards: int | None = 6, **fields: object
    ) -> Done:
        join = m.Join(m.Step(step), digest_of(digest), total_shards=shards, **fields)  # pyright: ignore[reportArgumentType]
        return self.say(name, join)

    def come(
        self, name: str, step: int = 0, digest: str = "d", incarnation: int = 1, **fields: object
    ) -> Done:
        """Send Hello and Join, of a next process after the end of the last; return what followed from the Join."""
        known = self.job.groups.get(m.GroupName(name))
        if known is not None and known.incarnation != incarnation:
            self.close(name)
        self.hello(name, incarnation)
        return self.join(name, step, digest, **fields)

    def vote(
        self,
        name: str,
        *,
        quorum_id: int | None = None,
        step: int | None = None,
        digest: int | None = None,
        nonfinite: str = "",
        edit: int = 0,
    ) -> Done:
        fields: Any = {"digest": digest, "nonfinite": nonfinite, "edit": edit}
        return self.say(name, m.Vote(self._quorum_id(quorum_id), self._step(step), ok=True, **fields))

    def votes(self, **digests: int | None) -> Done:
        """Let each of these vote ok, with the digest of its state; return the effects of the last vote."""
        return [self.vote(name, digest=digest) for name, digest in digests.items()][-1]

    def fail(self, name: str, *accused: str, reason: str = "connection reset") -> Done:
        names = tuple(m.GroupName(peer) for peer in accused)
        return self.say(
            name, m.Vote(self._quorum_id(None), self._step(None), ok=False, accused=names, reason=reason)
        )

    def commit(self) -> Done:
        """Let every member vote ok; return the effects of the last vote."""
        return [self.vote(member.group) for member in self.quorum.members][-1]

    def computed(self, *names: str, moves: bool = False) -> Done:
        """Let each of these report with a heartbeat that it has computed; return the effects of the last report."""
        heartbeat = m.Heartbeat(self.quorum.quorum_id, self.step, moves=moves)
        return [self.say(name, heartbeat) for name in names][-1]

    def pinned(self, donor: str, joiner: str, digest: int | None = 7) -> Done:
        """Let a donor send the digest of the state that it keeps for `joiner`."""
        heal_id = self.group(joiner).heal_id
        assert heal_id is not None
        return self.say(donor, m.Pinned(heal_id, digest))

    def ready(self, name: str, step: int | None = None) -> Done:
        heal_id = self.group(name).heal_id
        assert heal_id is not None
        return self.say(name, m.Ready(heal_id, self._step(step)))

    def heal_failed(self, name: str, step: int = 0) -> Done:
        """The group holds state `step` of the job, or at 0 a fresh one, unless it was ready with the job's."""
        heal_id = self.group(name).heal_id
        assert heal_id is not None
        history = self.job.history if step or self.group(name).history else m.HistoryId(0)
        return self.say(name, m.HealFailed(heal_id, "no donor answers", m.Step(step), history))

    def leave(self, name: str, *, finished: bool = False) -> Done:
        return self.say(name, m.Leave(finished))

    def close(self, name: str, reason: str = "its connection closed") -> Done:
        return self.do(j.SessionClosed(self.sessions[name], reason))

    def tick(
        self,
        after_s: float = 0.1,
        silent: tuple[str, ...] = (),
        away: tuple[str, ...] = (),
        moving: tuple[str, ...] = (),
    ) -> Done:
        """Let a tick pass; every group but the `silent` sends a heartbeat just before it."""
        self.now_s += after_s
        for name in self.job.groups:
            if name not in silent:
                self.say(name, m.Heartbeat(away=name in away, moves=name in moving))
        return self.do(j.Tick())

    def wait(
        self,
        seconds: float,
        silent: tuple[str, ...] = (),
        away: tuple[str, ...] = (),
        moving: tuple[str, ...] = (),
    ) -> list[Done]:
        """Let ticks of 0.1 s pass for `seconds`, or of 0.5 s for a minute and more."""
        tick_s = 0.1 if seconds < 60.0 else 0.5
        return [self.tick(tick_s, silent, away, moving) for _ in range(round(seconds / tick_s))]

    def group(self, name: str) -> j.Group:
        return self.job.groups[m.GroupName(name)]

    @property
    def quorum(self) -> m.NewQuorum:
        assert self.job.quorum is not None
        return self.job.quorum

    @property
    def step(self) -> m.Step:
        assert self.job.frontier is not None
        return self.job.frontier.step

    def _quorum_id(self, quorum_id: int | None) -> m.QuorumId:
        return self.quorum.quorum_id if quorum_id is None else m.QuorumId(quorum_id)

    def _step(self, step: int | None) -> m.Step:
        return self.step if step is None else m.Step(step)


def running(*names: str, shards: int | None = 6, **options: float) -> Desk:
    """A job of `names`, founded together at step 0, in its first quorum."""
    desk = Desk.open(**{"min_replicas": 1, **options})
    for name in names:
        desk.hello(name)
    for name in names:
        desk.join(name, shards=shards)
    assert members(desk) == list(names)
    return desk


def orphaned(*names: str, steps: int = 3, shards: int | None = 6, **options: float) -> Desk:
    """A job of `names` that all died at once after some steps."""
    desk = running(*names, shards=shards, **options)
    for _ in range(steps):
        desk.commit()
    for name in names:
        desk.close(name)
    return desk


def healing(desk: Desk, name: str, incarnation: int = 1) -> m.HealId:
    """Let a group without the frontier come; return its heal."""
    heals = desk.come(name, digest="fresh", incarnation=incarnation).only(m.Heal)
    return heals[name].heal_id


def members(desk: Desk) -> list[str]:
    return [member.group for member in desk.quorum.members]


def shards(quorum: m.NewQuorum) -> dict[str, tuple[int, ...]]:
    return {member.group: member.shards for member in quorum.members}


def tried_again(done: Done) -> m.NewQuorum | None:
    """Return the quorum under which the step is retried, if it is; all its members must have received it."""
    quorums = done.only(m.NewQuorum)
    assert not done.only(m.Commit)
    if not quorums:
        return None
    (quorum,) = set(quorums.values())
    assert sorted(quorums) == sorted(member.group for member in quorum.members)
    return quorum


def committed(done: Done) -> list[str]:
    """Return the groups that received the commit."""
    return sorted(done.only(m.Commit))
