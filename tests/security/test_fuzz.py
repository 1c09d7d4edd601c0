"""Bytes from unknown clients in every parser: a value comes out, or the one error that the parser promises."""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jaxft_coordinator.stores import records
from jaxft_protocol import credentials, wire
from jaxft_protocol import messages as m
from jaxft_protocol.coordinator import machine
from jaxft_protocol.coordinator.job import (
    Job,
    Options,
    Persist,
    Received,
    Send,
    SessionClosed,
    SessionId,
    Tick,
)
from jaxft_protocol.credentials import CredentialsError, JobKey
from jaxft_protocol.proto import coordinator_pb2 as pb

from jaxft._arrays._leaf_types import LeafType
from jaxft._checkpoints._manifest import Damaged, Manifest, checksum
from jaxft._exchange import _frames
from jaxft._heal._frames import REPLY_BYTES, REQUEST_BYTES, BadFrame, Reply, Request, read_manifest
from jaxft._transport import _handshake
from jaxft._transport._handshake import BadRequest
from jaxft._transport._listener import ConnectionRequest, Listener, dial
from tests import patience
from tests.security.unknown_clients import raw_request, read_all

many = settings(max_examples=150, deadline=None)
some = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

names = st.sampled_from(["a", "b", "c", "", "group-10"]) | st.text(max_size=20)
u64 = st.sampled_from([0, 1, 2, 3, 7, 2**32, 2**62, 2**62 + 1, 2**63, 2**64 - 1]) | st.integers(0, 9)
u32 = st.sampled_from([0, 1, 2, 5, 2**32 - 1])
maps = st.dictionaries(names, names | st.sampled_from(["2", "members", "0", "65537", "9" * 30]), max_size=4)


def of(kind: type, **parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A proto with some of its fields set."""
    return st.fixed_dictionaries({}, optional=parts).map(lambda found: kind(**found))


group_messages = st.one_of(
    of(
        pb.Hello,
        protocol_version=st.sampled_from([0, 1, 2]),
        job=st.just("job") | names,
        group=names,
        incarnation=u64,
        rank=u32,
        ranks=u32,
        address=names,
        proof=st.binary(max_size=40),
        nonce=st.binary(max_size=40),
    ).map(lambda hello: pb.GroupMessage(hello=hello)),
    of(
        pb.Join,
        step=u64,
        digest=u64,
        settings=maps,
        total_shards=st.sampled_from([0, 2, 4, 65537, 2**64 - 1]),
        last_quorum_id=u64,
        min_replicas=u32,
        history=u64,
        spare=st.booleans(),
    ).map(lambda join: pb.GroupMessage(join=join)),
    of(pb.Ready, heal_id=u64, step=u64).map(lambda ready: pb.GroupMessage(ready=ready)),
    of(
        pb.Vote,
        quorum_id=u64,
        step=u64,
        ok=st.booleans(),
        accused=st.lists(names, max_size=4),
        reason=names,
        digest=u64,
    ).map(lambda vote: pb.GroupMessage(vote=vote)),
    of(pb.Heartbeat, computed_quorum_id=u64, computed_step=u64).map(lambda it: pb.GroupMessage(heartbeat=it)),
    of(pb.HealFailed, heal_id=u64, reason=names, step=u64).map(lambda it: pb.GroupMessage(heal_failed=it)),
    st.builds(
        lambda group, incarnation: pb.GroupMessage(
            hello=pb.Hello(protocol_version=2, job="job", group=group, incarnation=incarnation, ranks=1)
        ),
        names,
        u64,
    ),
    of(pb.Leave, finished=st.booleans()).map(lambda leave: pb.GroupMessage(leave=leave)),
    st.just(pb.GroupMessage()),
)


# Nothing wrong with these but their numbers: so others come further.
likely_joins = st.builds(
    lambda step, quorum_id: pb.GroupMessage(
        join=pb.Join(step=step, digest=0xD1, total_shards=4, last_quorum_id=quorum_id)
    ),
    u64,
    u64,
)


# ---- the control plane ----


@many
@given(st.binary(max_size=300))
def test_any_bytes_from_a_group(data: bytes) -> None:
    try:
        wire.group_from_proto(pb.GroupMessage.FromString(data))
    except (DecodeError, wire.WireError):
        return


@many
@given(st.binary(max_size=300))
def test_any_bytes_from_a_coordinator(data: bytes) -> None:
    try:
        wire.coordinator_from_proto(pb.CoordinatorMessage.FromString(data))
    except (DecodeError, wire.WireError):
        return


@many
@given(group_messages, st.data())
def test_a_group_message_with_damage(message: pb.GroupMessage, data: st.DataObject) -> None:
    encoded = bytearray(message.SerializeToString())
    for _ in range(data.draw(st.integers(0, 4))):
        if encoded:
            encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    try:
        wire.group_from_proto(pb.GroupMessage.FromString(bytes(encoded)))
    except (DecodeError, wire.WireError):
        return


sessions = st.sampled_from([1, 1, 1, 2, 2, 3, 4])
events = st.one_of(
    st.tuples(sessions, group_messages),
    st.tuples(sessions, likely_joins),
    st.tuples(st.integers(1, 4), st.just("closed")),
    st.tuples(st.just(0), st.sampled_from([0.05, 1.0, 30.0])),
)


def a_job(stage: str) -> tuple[Job, float]:
    """A job of no group; of one group or three that compile (sessions 1 to 3); or of two (1 and 2) at work."""
    job, now_s = Job("job", Options(term=3, founding_wait_s=0.0)), 100.0
    if stage == "none":
        return job, now_s
    for session, name in enumerate("a" if stage == "one" else "abc", start=1):
        hello = m.Hello("job", m.GroupName(name), m.Incarnation(session), f"{name}:1")
        job, _ = machine.step(job, Received(SessionId(session), hello), now_s)
    if stage != "at work":
        return job, now_s
    for session in (1, 2):
        join = m.Join(m.Step(0), 0xD1, total_shards=4)
        job, _ = machine.step(job, Received(SessionId(session), join), now_s)
    job, _ = machine.step(job, SessionClosed(SessionId(3), "gone"), now_s)
    assert job.quorum is not None
    return job, now_s


@many
@given(st.sampled_from(["none", "one", "three", "at work"]), st.lists(events, max_size=40))
def test_a_job_takes_whatever_groups_say(stage: str, happens: list[tuple[int, Any]]) -> None:
    """It moves or stays as it is; its messages fit the wire, and its records fit the store."""
    job, now_s = a_job(stage)
    heard_s: dict[SessionId, float] = {}
    for session, what in happens:
        try:
            if session == 0:
                now_s += what
                job, effects = machine.step(job, Tick(heard_s), now_s)
            elif what == "closed":
                job, effects = machine.step(job, SessionClosed(SessionId(session), "gone"), now_s)
            else:
                message = wire.group_from_proto(what)
                heard_s[SessionId(session)] = now_s
                job, effects = machine.step(job, Received(SessionId(session), message), now_s)
        except (wire.WireError, machine.IllegalEvent):
            continue
        for effect in effects:
            match effect:
                case Send(_, message):
                    wire.coordinator_to_proto(message).SerializeToString()
                case Persist(record):
                    assert records.decode(records.encode(record)) == record
                case _:
                    pass


@pytest.mark.parametrize(
    "message",
    [
        pb.GroupMessage(join=pb.Join(last_quorum_id=2**64 - 1)),
        pb.GroupMessage(join=pb.Join(step=2**62 + 1)),
        pb.GroupMessage(ready=pb.Ready(step=2**63)),
        pb.GroupMessage(heal_failed=pb.HealFailed(step=2**63)),
    ],
)
def test_nobody_makes_the_numbers_run_out(message: pb.GroupMessage) -> None:
    """The next quorum's id would not fit into its field any more, and the job could go no further."""
    with pytest.raises(wire.WireError, match="exceeds the maximum of"):
        wire.group_from_proto(message)


@many
@given(st.text(max_size=80))
def test_any_text_for_a_token(text: str) -> None:
    try:
        assert len(credentials.key_from_text(text)) == credentials.KEY_BYTES
    except CredentialsError:
        return


# ---- the data plane ----

requests = st.builds(
    raw_request,
    version=st.sampled_from([0, 1, 2, 2, 2, 3, 255]),
    kind=st.sampled_from([0, 1, 2, 255]),
    job=st.just(b"job") | st.binary(max_size=255),
    group=st.binary(max_size=255),
    quorum_id=u64,
    to=st.just(b"me") | st.binary(max_size=255),
    to_incarnation=st.just(9) | u64,
)


@many
@given(st.binary(max_size=200) | requests | st.binary(max_size=100).map(lambda rest: b"jaxft-hi" + rest))
def test_any_bytes_for_a_request(data: bytes) -> None:
    """It asks for no more than a request has, and decodes only a whole one."""
    received = b""
    try:
        while (missing := _handshake.missing_bytes(received)) > 0:
            assert missing <= 43 + 3 * 255
            if len(received) == len(data):
                return
            received = data[: len(received) + missing]
        assert isinstance(_handshake.decode(received), ConnectionRequest)
    except BadRequest:
        return


@pytest.fixture(scope="module")
def listeners() -> Iterator[list[Listener]]:
    key = credentials.data_key(JobKey(bytes(32)))
    made = [
        Listener(host="127.0.0.1", job="job", group="me", incarnation=9, on_heal=lambda *_: None, key=k)
        for k in (None, key)
    ]
    yield made
    for listener in made:
        listener.close()


@some
@given(
    sent=st.binary(max_size=300) | st.tuples(requests, st.binary(max_size=100)).map(b"".join),
    locked=st.booleans(),
)
def test_any_bytes_at_a_data_port(listeners: list[Listener], sent: bytes, *, locked: bool) -> None:
    listener = listeners[locked]
    with socket.create_connection(("127.0.0.1", listener.port), timeout=patience.FAR_S) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(sent)
        end(sock)
        answers = read_all(sock) if locked else b""
        assert len(answers) < 1200
        assert listener._thread.is_alive()
    if locked:
        assert not listener._pending._waiting


def end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side was quicker
        sock.shutdown(socket.SHUT_WR)


REQUEST = ConnectionRequest("exchange", "job", "g", 1, "me", 9, 1)
answers = st.binary(max_size=100) | st.builds(
    lambda magic, version, status, length, rest: struct.pack("<8sBBH", magic, version, status, length) + rest,
    st.sampled_from([b"jaxft-re", b"jaxft-hi"]),
    st.sampled_from([2, 2, 2, 1, 0, 255]),
    st.sampled_from([0, 1, 2, 2, 3, 255]),
    st.sampled_from([0, 31, 32, 33, 512, 513, 65535]),
    st.binary(max_size=600),
)


@contextmanager
def answering(sent: bytes) -> Iterator[str]:
    """A listener that sends this to any client."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):  # shut down below
                while True:  # a dialler whose connection is broken dials again
                    with server.accept()[0] as sock:
                        sock.settimeout(patience.FAR_S)
                        with contextlib.suppress(OSError):  # who dialled is gone already
                            sock.sendall(sent)
                        end(sock)
                        read_all(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@some
@given(sent=st.lists(answers, max_size=3).map(b"".join))
def test_any_answer_to_a_dialler_with_a_key(sent: bytes) -> None:
    """None of them is accepted, for none proves anything."""
    key = credentials.data_key(JobKey(bytes(32)))
    # A listener that answers "busy" is dialled again until the deadline.
    with answering(sent) as address, pytest.raises((ConnectionError, TimeoutError)):
        dial(address, REQUEST, deadline_s=time.monotonic() + 1.0, key=key)


@some
@given(sent=answers)
def test_any_answer_to_a_dialler(sent: bytes) -> None:
    with answering(sent) as address:
        try:
            dial(address, REQUEST, deadline_s=time.monotonic() + 1.0).close()
        except (ConnectionError, TimeoutError):
            return


# ---- the exchange, and healing ----

stamps = st.builds(_frames.Stamp, sender=st.integers(0, 65535), job=u64, quorum_id=u64, step=u64, layout=u64)
headers = st.builds(
    lambda stamp, kind, start, stop, region, offset, length: stamp.header(
        kind, node=(start, stop), region=region, offset=offset, length_bytes=length
    ),
    stamps,
    st.sampled_from([1, 2]),
    *([u32] * 3),
    u64,
    u32,
)


@many
@given(
    st.binary(min_size=_frames.HEADER_BYTES, max_size=_frames.HEADER_BYTES)
    | st.binary(min_size=60, max_size=60).map(lambda rest: b"JXFT" + rest),
    st.lists(headers, max_size=3),
)
def test_any_header_of_a_frame_can_be_told_from_what_was_expected(
    received: bytes, expected: list[bytes]
) -> None:
    sent = _frames.difference(received, expected)
    assert 0 < len(sent) < 3000


@many
@given(
    st.binary(min_size=REQUEST_BYTES, max_size=REQUEST_BYTES)
    | st.binary(min_size=REQUEST_BYTES - 4, max_size=REQUEST_BYTES - 4).map(
        lambda rest: struct.pack("!I", 0x4A584833) + rest
    )
)
def test_any_request_for_a_heal(data: bytes) -> None:
    try:
        assert Request.decode(data).encode()[:5] == data[:5]
    except BadFrame:
        return


@many
@given(
    st.binary(min_size=REPLY_BYTES, max_size=REPLY_BYTES)
    | st.binary(min_size=REPLY_BYTES - 4, max_size=REPLY_BYTES - 4).map(
        lambda rest: struct.pack("!I", 0x4A584833) + rest
    )
)
def test_any_reply_of_a_donor(data: bytes) -> None:
    try:
        assert Reply.decode(data).encode()[:5] == data[:5]
    except BadFrame:
        return


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
manifest_like = st.fixed_dictionaries(
    {},
    optional={
        "step": json_values,
        "leaves": st.lists(st.lists(json_values, max_size=3), max_size=3),
        "stripe": st.lists(json_values, max_size=3) | json_values,
        "live": json_values,
    },
)


@many
@given(st.text(max_size=100) | json_values.map(json.dumps) | manifest_like.map(json.dumps))
def test_any_manifest_of_a_donor(sent: str) -> None:
    try:
        found = read_manifest(sent)
    except BadFrame:
        return
    assert isinstance(found.step, int)
    assert all(isinstance(leaf, LeafType) for leaf in found.leaves)
    assert 0 <= found.stripe.number < found.stripe.count


@pytest.mark.parametrize(
    "sent", ["[" * 100_000, "1" * 10_000, '{"step": 1e999, "leaves": []}', '{"leaves": 3}', "nan"]
)
def test_manifests_that_are_meant_to_break_json(sent: str) -> None:
    with pytest.raises(BadFrame, match="its manifest cannot be read"):
        read_manifest(sent)


# ---- checkpoints ----

GOOD = Manifest(3, "job", 2**63, "digest", (("['w']", "float32[3]"),))


@many
@given(json_values)
def test_any_description_of_a_checkpoint(found: Any) -> None:
    with pytest.raises(Damaged):
        Manifest.from_json(found)


@many
@given(
    st.fixed_dictionaries({}, optional={field.name: json_values for field in fields(Manifest)}),
    st.dictionaries(st.text(max_size=5), json_values, max_size=1),
    st.sets(st.sampled_from([field.name for field in fields(Manifest)]), max_size=1),
)
def test_any_description_with_the_right_checksum(
    parts: dict[str, Any], more: dict[str, Any], less: set[str]
) -> None:
    """Written by another jaxft, or by a program that can compute a checksum."""
    described = {**GOOD.to_json(), **parts, **more}
    described = {name: value for name, value in described.items() if name not in {"checksum", *less}}
    described["checksum"] = checksum(described)
    try:
        made = Manifest.from_json(described)
    except Damaged:
        return
    assert type(made.step) is int
    assert type(made.job) is str
    assert all(type(path) is str and type(kind) is str for path, kind in made.leaves)
