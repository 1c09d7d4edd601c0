"""Convert the cores' messages to protobuf and back.

Untrusted bytes are checked here: a received message becomes a frozen value, or a `WireError` names the problem.
"""

import math
from typing import assert_never

from google.protobuf.message import DecodeError

from jaxft_protocol import deltas
from jaxft_protocol import messages as m
from jaxft_protocol.names import one_line
from jaxft_protocol.proto import coordinator_pb2 as pb

# A group's settings are a handful of digests and short summaries.
MAX_SETTINGS = 200
MAX_TEXT_LENGTH = 10_000
MAX_ACCUSED = 10_000
# The coordinator continues counting steps, terms and ids from a group's values, and must never exceed 64 bits.
MAX_COUNT = 1 << 62
# Of a sample: a year in one step; and a training program's own numbers, such as its loss.
MAX_SECONDS = 3.2e7
MAX_VALUES = 8
MAX_VALUE_NAME_LENGTH = 64


class WireError(ValueError):
    """A message that is not part of the protocol."""


def group_to_proto(message: m.GroupMessage | m.Sample) -> pb.GroupMessage:  # noqa: C901 - one case for each message
    match message:
        case m.Vote(quorum_id, step, ok, accused, reason, digest, nonfinite, raised, shard, edit):
            vote = pb.Vote(
                quorum_id=quorum_id,
                step=step,
                ok=ok,
                accused=accused,
                reason=_shortened(reason),
                nonfinite=_shortened(nonfinite),
                raised=raised,
                shard=shard,
                edit=edit,
            )
            if digest is not None:
                vote.digest = digest
            return pb.GroupMessage(vote=vote)
        case m.Heartbeat(quorum_id, step, away, moves):
            heartbeat = pb.Heartbeat(computed_quorum_id=quorum_id, computed_step=step, away=away, moves=moves)
            return pb.GroupMessage(heartbeat=heartbeat)
        case m.Hello():
            return pb.GroupMessage(
                hello=pb.Hello(
                    protocol_version=message.protocol_version,
                    job=message.job,
                    group=message.group,
                    incarnation=message.incarnation,
                    rank=message.rank,
                    ranks=message.ranks,
                    address=message.address,
                    term=message.term,
                    step=message.step,
                    history=message.history,
                    stream=message.stream,
                )
            )
        case m.Join():
            return pb.GroupMessage(
                join=pb.Join(
                    step=message.step,
                    digest=message.digest,
                    settings=message.settings,
                    last_quorum_id=message.last_quorum_id,
                    min_replicas=message.min_replicas,
                    history=message.history,
                    spare=message.spare,
                    members=message.members,
                    total_shards=message.total_shards,
                    weight=message.weight,
                )
            )
        case m.Pinned(heal_id, digest):
            pinned = pb.Pinned(heal_id=heal_id)
            if digest is not None:
                pinned.digest = digest
            return pb.GroupMessage(pinned=pinned)
        case m.Ready(heal_id, step):
            return pb.GroupMessage(ready=pb.Ready(heal_id=heal_id, step=step))
        case m.HealFailed(heal_id, reason, step, history):
            failed = pb.HealFailed(heal_id=heal_id, reason=_shortened(reason), step=step, history=history)
            return pb.GroupMessage(heal_failed=failed)
        case m.Leave(finished):
            return pb.GroupMessage(leave=pb.Leave(finished=finished))
        case m.Drain():
            return pb.GroupMessage(drain=pb.Drain())
        case m.Sample():
            return pb.GroupMessage(sample=_sample_to_proto(message))
        case _:
            assert_never(message)


def _shortened(reason: str) -> str:
    """A text for people as the coordinator accepts it: a list of many peers may be longer."""
    return reason if len(reason) <= MAX_TEXT_LENGTH else f"{reason[: MAX_TEXT_LENGTH - 3]}..."


def group_message(data: bytes) -> pb.GroupMessage:
    """Decode a message from a group. Raises WireError if these bytes are not one."""
    try:
        return pb.GroupMessage.FromString(data)
    except DecodeError as error:
        raise WireError(
            f"{len(data)} bytes that begin with {data[:8].hex()} are not a message of this protocol"
        ) from error


def coordinator_message(data: bytes) -> pb.CoordinatorMessage:
    """Decode a message from the coordinator. Raises WireError if these bytes are not one."""
    try:
        return pb.CoordinatorMessage.FromString(data)
    except DecodeError as error:
        raise WireError(
            f"{len(data)} bytes that begin with {data[:8].hex()} are not a message of this protocol"
        ) from error


def group_from_proto(message: pb.GroupMessage) -> m.GroupMessage | m.Sample:  # noqa: C901 - one case for each message
    match message.WhichOneof("kind"):
        case "vote":
            return _vote(message.vote)
        case "heartbeat":
            return _heartbeat(message.heartbeat)
        case "hello":
            return _hello(message.hello)
        case "join":
            return _join(message.join)
        case "pinned":
            pinned = message.pinned
            digest = pinned.digest if pinned.HasField("digest") else None
            return m.Pinned(m.HealId(pinned.heal_id), digest)
        case "ready":
            ready = message.ready
            return m.Ready(m.HealId(ready.heal_id), m.Step(_count("step", ready.step)))
        case "heal_failed":
            failed = message.heal_failed
            reason, step = _line("reason", failed.reason), m.Step(_count("step", failed.step))
            return m.HealFailed(m.HealId(failed.heal_id), reason, step, m.HistoryId(failed.history))
        case "leave":
            return m.Leave(message.leave.finished)
        case "drain":
            return m.Drain()
        case "sample":
            return _sample(message.sample)
        case unknown:
            raise WireError(f"a message of kind {unknown!r} is not part of protocol {m.PROTOCOL_VERSION}")


def coordinator_to_proto(  # noqa: C901 - one case for each message
    message: m.CoordinatorMessage, base: m.NewQuorum | None = None
) -> pb.CoordinatorMessage:
    """Return the wire form of a message on a stream that carried the quorum `base` last."""
    match message:
        case m.Commit(quorum_id, step, following):
            commit = pb.Commit(quorum_id=quorum_id, step=step)
            if following is not None:
                commit.next.CopyFrom(deltas.to_proto(following, base))
            return pb.CoordinatorMessage(commit=commit)
        case m.NewQuorum():
            return pb.CoordinatorMessage(new_quorum=deltas.to_proto(message, base))
        case m.Welcome(interval_ms, frontier_step, frontier_quorum_id, frontier_held, term, samples):
            welcome = pb.Welcome(heartbeat_interval_ms=interval_ms, term=term, samples=samples)
            if frontier_step is not None:
                welcome.has_frontier = True
                welcome.frontier_step = frontier_step
                welcome.frontier_quorum_id = frontier_quorum_id
                welcome.frontier_held = frontier_held
            return pb.CoordinatorMessage(welcome=welcome)
        case m.Refused(reason, differences):
            listed = [pb.Difference(name=d.name, job=d.job, group=d.group) for d in differences]
            return pb.CoordinatorMessage(refused=pb.Refused(reason=reason, differences=listed))
        case m.Pin(heal_id, step, log_only, stripe):
            pin = pb.Pin(heal_id=heal_id, step=step, log_only=log_only)
            pin.stripe, pin.stripes = stripe.number, stripe.count
            return pb.CoordinatorMessage(pin=pin)
        case m.Release(heal_id):
            return pb.CoordinatorMessage(release=pb.Release(heal_id=heal_id))
        case m.Heal(heal_id, step, donors, log_only, history):
            heal = pb.Heal(heal_id=heal_id, step=step, log_only=log_only, history=history)
            heal.donors.extend(deltas.member_to_proto(donor) for donor in donors)
            return pb.CoordinatorMessage(heal=heal)
        case m.FrontierMoved(step):
            return pb.CoordinatorMessage(frontier_moved=pb.FrontierMoved(step=step))
        case m.Waiting(reason, held, fresh):
            return pb.CoordinatorMessage(waiting=pb.Waiting(reason=reason, held=held, fresh=fresh))
        case m.Finished(step):
            return pb.CoordinatorMessage(finished=pb.Finished(step=step))
        case m.Evicted(reason, may_return, aside):
            evicted = pb.Evicted(reason=reason, may_return=may_return, aside=aside)
            return pb.CoordinatorMessage(evicted=evicted)
        case m.Goodbye():
            return pb.CoordinatorMessage(goodbye=pb.Goodbye())
        case m.Drained():
            return pb.CoordinatorMessage(drained=pb.Drained())
        case m.Paused():
            return pb.CoordinatorMessage(paused=pb.Paused())
        case m.Alive():
            return pb.CoordinatorMessage(alive=pb.Alive())
        case m.AllComputed(quorum_id, step):
            return pb.CoordinatorMessage(all_computed=pb.AllComputed(quorum_id=quorum_id, step=step))
        case m.Halted(reason, kind):
            halted = pb.Halted(reason=reason, kind=pb.Halted.Kind.Name(kind))
            return pb.CoordinatorMessage(halted=halted)
        case _:
            assert_never(message)


def coordinator_from_proto(
    message: pb.CoordinatorMessage, base: m.NewQuorum | None = None
) -> m.CoordinatorMessage:
    """Return the coordinator's message on a stream that carried the quorum `base` last. Raises WireError."""
    try:
        return _coordinator_from_proto(message, base)
    except deltas.UnknownBase as error:
        raise WireError(str(error)) from error


def quorum_of(message: m.CoordinatorMessage) -> m.NewQuorum | None:
    """The quorum that a message carries, if any."""
    if isinstance(message, m.Commit):
        return message.next
    return message if isinstance(message, m.NewQuorum) else None


def _coordinator_from_proto(  # noqa: C901 - one case for each message
    message: pb.CoordinatorMessage, base: m.NewQuorum | None
) -> m.CoordinatorMessage:
    match message.WhichOneof("kind"):
        case "commit":
            commit = message.commit
            following = deltas.from_proto(commit.next, base) if commit.HasField("next") else None
            return m.Commit(m.QuorumId(commit.quorum_id), m.Step(commit.step), following)
        case "new_quorum":
            return deltas.from_proto(message.new_quorum, base)
        case "welcome":
            welcome = message.welcome
            frontier_step = m.Step(welcome.frontier_step) if welcome.has_frontier else None
            return m.Welcome(
                welcome.heartbeat_interval_ms,
                frontier_step,
                m.QuorumId(welcome.frontier_quorum_id),
                welcome.frontier_held,
                welcome.term,
                welcome.samples,
            )
        case "refused":
            listed = tuple(m.Difference(d.name, d.job, d.group) for d in message.refused.differences)
            return m.Refused(message.refused.reason, listed)
        case "pin":
            pin = message.pin
            return m.Pin(m.HealId(pin.heal_id), m.Step(pin.step), pin.log_only, _stripe(pin))
        case "release":
            return m.Release(m.HealId(message.release.heal_id))
        case "heal":
            heal = message.heal
            donors = tuple(deltas.member_from_proto(donor) for donor in heal.donors)
            history = m.HistoryId(heal.history)
            return m.Heal(m.HealId(heal.heal_id), m.Step(heal.step), donors, heal.log_only, history)
        case "frontier_moved":
            return m.FrontierMoved(m.Step(message.frontier_moved.step))
        case "waiting":
            return m.Waiting(message.waiting.reason, message.waiting.held, message.waiting.fresh)
        case "finished":
            return m.Finished(m.Step(message.finished.step))
        case "evicted":
            return m.Evicted(message.evicted.reason, message.evicted.may_return, message.evicted.aside)
        case "goodbye":
            return m.Goodbye()
        case "drained":
            return m.Drained()
        case "paused":
            return m.Paused()
        case "halted":
            return m.Halted(message.halted.reason, _halt_kind(message.halted.kind))
        case "alive":
            return m.Alive()
        case "all_computed":
            attempt = message.all_computed
            return m.AllComputed(m.QuorumId(attempt.quorum_id), m.Step(attempt.step))
        case unknown:
            raise WireError(f"a message of kind {unknown!r} is not part of protocol {m.PROTOCOL_VERSION}")


def _stripe(pin: pb.Pin) -> m.Stripe:
    if not pin.stripe and not pin.stripes:  # of an older coordinator, which knows no stripes
        return m.WHOLE
    if pin.stripe >= pin.stripes:
        raise WireError(f"a pin of stripe {pin.stripe} of {pin.stripes} keeps nothing")
    return m.Stripe(pin.stripe, pin.stripes)


def _heartbeat(heartbeat: pb.Heartbeat) -> m.Heartbeat:
    return m.Heartbeat(
        m.QuorumId(heartbeat.computed_quorum_id),
        m.Step(heartbeat.computed_step),
        heartbeat.away,
        heartbeat.moves,
    )


def _halt_kind(number: int) -> m.HaltKind:
    """Read a kind of halt. An unknown kind still stops the job."""
    known = {kind.value for kind in m.HaltKind}
    return m.HaltKind(number) if number in known else m.HaltKind.FAILED


def _hello(hello: pb.Hello) -> m.Hello:
    return m.Hello(
        _text("job", hello.job),
        m.GroupName(_text("group", hello.group)),
        m.Incarnation(hello.incarnation),
        hello.address,  # the coordinator has a limit for it
        hello.rank,
        hello.ranks,
        hello.protocol_version,
        _count("term", hello.term),
        m.Step(_count("step", hello.step)),
        m.HistoryId(hello.history),
        _count("stream", hello.stream),
    )


def _join(join: pb.Join) -> m.Join:
    if len(join.settings) > MAX_SETTINGS:
        raise WireError(f"{len(join.settings)} settings exceed the maximum of {MAX_SETTINGS}")
    settings = {_text("setting", name): _text(name, value) for name, value in join.settings.items()}
    return m.Join(
        m.Step(_count("step", join.step)),
        join.digest if join.HasField("digest") else None,
        settings,
        m.QuorumId(_count("last_quorum_id", join.last_quorum_id)),
        join.min_replicas,
        m.HistoryId(join.history),
        join.spare,
        join.members,
        join.total_shards if join.HasField("total_shards") else None,
        join.weight or 1,
    )


def _vote(vote: pb.Vote) -> m.Vote:
    if len(vote.accused) > MAX_ACCUSED:
        raise WireError(f"{len(vote.accused)} accused groups exceed the maximum of {MAX_ACCUSED}")
    if vote.ok and vote.raised:
        raise WireError("a vote is ok and reports an exception")
    accused = tuple(m.GroupName(_text("accused", name)) for name in vote.accused)
    return m.Vote(
        m.QuorumId(vote.quorum_id),
        m.Step(vote.step),
        vote.ok,
        accused,
        _line("reason", vote.reason),
        vote.digest if vote.HasField("digest") else None,
        _line("nonfinite", vote.nonfinite),
        vote.raised,
        vote.shard if vote.HasField("shard") else None,
        vote.edit,
    )


def _sample_to_proto(sample: m.Sample) -> pb.Sample:
    return pb.Sample(
        step=sample.step,
        steps=sample.steps,
        attempts=sample.attempts,
        shards=sample.shards,
        shards_again=sample.shards_again,
        compute_s=sample.compute_s,
        exchange_s=sample.exchange_s,
        vote_s=sample.vote_s,
        apply_s=sample.apply_s,
        heals=sample.heals,
        heal_s=sample.heal_s,
        heal_bytes=sample.heal_bytes,
        values=sample.values,
    )


def _sample(sample: pb.Sample) -> m.Sample:
    if len(sample.values) > MAX_VALUES:
        raise WireError(f"a sample of {len(sample.values)} values exceeds the maximum of {MAX_VALUES}")
    if any(len(name) > MAX_VALUE_NAME_LENGTH or not name.isprintable() for name in sample.values):
        raise WireError(
            f"the name of a value in a sample must have at most {MAX_VALUE_NAME_LENGTH} printable characters"
        )
    return m.Sample(
        m.Step(_count("step", sample.step)),
        sample.steps,
        sample.attempts,
        sample.shards,
        sample.shards_again,
        _seconds("compute_s", sample.compute_s),
        _seconds("exchange_s", sample.exchange_s),
        _seconds("vote_s", sample.vote_s),
        _seconds("apply_s", sample.apply_s),
        sample.heals,
        _seconds("heal_s", sample.heal_s),
        _count("heal_bytes", sample.heal_bytes),
        {name: value for name, value in sample.values.items() if math.isfinite(value)},
    )


def _seconds(name: str, value: float) -> float:
    if not 0.0 <= value <= MAX_SECONDS:
        raise WireError(f"{name} is {value!r}, not a number of seconds from 0 to {MAX_SECONDS:g}")
    return value


def _text(name: str, value: str) -> str:
    if len(value) > MAX_TEXT_LENGTH:
        raise WireError(
            f"{name[:40]!r} has {len(value)} characters, which exceeds the maximum of {MAX_TEXT_LENGTH}"
        )
    return value


def _line(name: str, value: str) -> str:
    """Read a text that logs and terminals show."""
    return one_line(_text(name, value))[:MAX_TEXT_LENGTH]  # escaped signs become longer


def _count(name: str, value: int) -> int:
    if value > MAX_COUNT:
        raise WireError(f"{name} {value} exceeds the maximum of {MAX_COUNT}")
    return value
