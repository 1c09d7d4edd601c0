from jaxft_protocol.proto import coordinator_pb2 as _coordinator_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LeaderMessage(_message.Message):
    __slots__ = ("directive", "decision", "verdict", "stop_work", "pin_state", "release_pin", "all_computed", "beat", "group_ends", "settled", "save_begins")
    DIRECTIVE_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    STOP_WORK_FIELD_NUMBER: _ClassVar[int]
    PIN_STATE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_PIN_FIELD_NUMBER: _ClassVar[int]
    ALL_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    GROUP_ENDS_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    SAVE_BEGINS_FIELD_NUMBER: _ClassVar[int]
    directive: Directive
    decision: Decision
    verdict: Verdict
    stop_work: StopWork
    pin_state: PinState
    release_pin: _coordinator_pb2.Release
    all_computed: _coordinator_pb2.AllComputed
    beat: Beat
    group_ends: GroupEnds
    settled: Settled
    save_begins: SaveBegins
    def __init__(self, directive: _Optional[_Union[Directive, _Mapping]] = ..., decision: _Optional[_Union[Decision, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., stop_work: _Optional[_Union[StopWork, _Mapping]] = ..., pin_state: _Optional[_Union[PinState, _Mapping]] = ..., release_pin: _Optional[_Union[_coordinator_pb2.Release, _Mapping]] = ..., all_computed: _Optional[_Union[_coordinator_pb2.AllComputed, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., group_ends: _Optional[_Union[GroupEnds, _Mapping]] = ..., settled: _Optional[_Union[Settled, _Mapping]] = ..., save_begins: _Optional[_Union[SaveBegins, _Mapping]] = ...) -> None: ...

class RankMessage(_message.Message):
    __slots__ = ("hello", "outcome", "beat", "group_ends", "raised", "saved")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    GROUP_ENDS_FIELD_NUMBER: _ClassVar[int]
    RAISED_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    hello: RankHello
    outcome: Outcome
    beat: Beat
    group_ends: GroupEnds
    raised: Raised
    saved: Saved
    def __init__(self, hello: _Optional[_Union[RankHello, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., group_ends: _Optional[_Union[GroupEnds, _Mapping]] = ..., raised: _Optional[_Union[Raised, _Mapping]] = ..., saved: _Optional[_Union[Saved, _Mapping]] = ...) -> None: ...

class RankHello(_message.Message):
    __slots__ = ("rank", "address")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    address: str
    def __init__(self, rank: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class Directive(_message.Message):
    __slots__ = ("attempt", "apply", "heal", "replay", "take_digest", "read_checkpoint", "over", "fail", "left", "leave_job")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    APPLY_FIELD_NUMBER: _ClassVar[int]
    HEAL_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    TAKE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    READ_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    FAIL_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    LEAVE_JOB_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    apply: Apply
    heal: _coordinator_pb2.CoordinatorMessage
    replay: Replay
    take_digest: int
    read_checkpoint: bool
    over: int
    fail: Fail
    left: bool
    leave_job: bool
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., apply: _Optional[_Union[Apply, _Mapping]] = ..., heal: _Optional[_Union[_coordinator_pb2.CoordinatorMessage, _Mapping]] = ..., replay: _Optional[_Union[Replay, _Mapping]] = ..., take_digest: _Optional[int] = ..., read_checkpoint: bool = ..., over: _Optional[int] = ..., fail: _Optional[_Union[Fail, _Mapping]] = ..., left: bool = ..., leave_job: bool = ...) -> None: ...

class Attempt(_message.Message):
    __slots__ = ("quorum", "step")
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    quorum: _coordinator_pb2.CoordinatorMessage
    step: int
    def __init__(self, quorum: _Optional[_Union[_coordinator_pb2.CoordinatorMessage, _Mapping]] = ..., step: _Optional[int] = ...) -> None: ...

class Apply(_message.Message):
    __slots__ = ("quorum_id", "step")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    step: int
    def __init__(self, quorum_id: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Replay(_message.Message):
    __slots__ = ("heal", "step", "until")
    HEAL_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    heal: _coordinator_pb2.CoordinatorMessage
    step: int
    until: int
    def __init__(self, heal: _Optional[_Union[_coordinator_pb2.CoordinatorMessage, _Mapping]] = ..., step: _Optional[int] = ..., until: _Optional[int] = ...) -> None: ...

class Fail(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("what", "value", "number")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    what: str
    value: bool
    number: int
    def __init__(self, what: _Optional[str] = ..., value: bool = ..., number: _Optional[int] = ...) -> None: ...

class SaveBegins(_message.Message):
    __slots__ = ("number", "folder")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    number: int
    folder: str
    def __init__(self, number: _Optional[int] = ..., folder: _Optional[str] = ...) -> None: ...

class Saved(_message.Message):
    __slots__ = ("number", "failure")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    number: int
    failure: str
    def __init__(self, number: _Optional[int] = ..., failure: _Optional[str] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("what", "failure", "accused", "note")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ACCUSED_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    what: str
    failure: str
    accused: _containers.RepeatedScalarFieldContainer[str]
    note: str
    def __init__(self, what: _Optional[str] = ..., failure: _Optional[str] = ..., accused: _Optional[_Iterable[str]] = ..., note: _Optional[str] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("outcome", "stopped")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    stopped: bool
    def __init__(self, outcome: _Optional[_Union[Outcome, _Mapping]] = ..., stopped: bool = ...) -> None: ...

class Raised(_message.Message):
    __slots__ = ("step", "text", "shard")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    step: int
    text: str
    shard: int
    def __init__(self, step: _Optional[int] = ..., text: _Optional[str] = ..., shard: _Optional[int] = ...) -> None: ...

class Settled(_message.Message):
    __slots__ = ("failure", "done")
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    failure: Fail
    done: bool
    def __init__(self, failure: _Optional[_Union[Fail, _Mapping]] = ..., done: bool = ...) -> None: ...

class StopWork(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class PinState(_message.Message):
    __slots__ = ("heal_id", "step", "log_only", "stripe", "stripes")
    HEAL_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOG_ONLY_FIELD_NUMBER: _ClassVar[int]
    STRIPE_FIELD_NUMBER: _ClassVar[int]
    STRIPES_FIELD_NUMBER: _ClassVar[int]
    heal_id: int
    step: int
    log_only: bool
    stripe: int
    stripes: int
    def __init__(self, heal_id: _Optional[int] = ..., step: _Optional[int] = ..., log_only: bool = ..., stripe: _Optional[int] = ..., stripes: _Optional[int] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("progress", "drains", "waits_s", "away")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DRAINS_FIELD_NUMBER: _ClassVar[int]
    WAITS_S_FIELD_NUMBER: _ClassVar[int]
    AWAY_FIELD_NUMBER: _ClassVar[int]
    progress: int
    drains: bool
    waits_s: float
    away: str
    def __init__(self, progress: _Optional[int] = ..., drains: bool = ..., waits_s: _Optional[float] = ..., away: _Optional[str] = ...) -> None: ...

class GroupEnds(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: str
    def __init__(self, error: _Optional[str] = ...) -> None: ...
