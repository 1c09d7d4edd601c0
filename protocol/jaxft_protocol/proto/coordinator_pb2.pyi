from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GroupMessage(_message.Message):
    __slots__ = ("hello", "join", "ready", "vote", "heartbeat", "heal_failed", "leave", "pinned", "sample", "drain", "mac")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    HEAL_FAILED_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    join: Join
    ready: Ready
    vote: Vote
    heartbeat: Heartbeat
    heal_failed: HealFailed
    leave: Leave
    pinned: Pinned
    sample: Sample
    drain: Drain
    mac: bytes
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., join: _Optional[_Union[Join, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., vote: _Optional[_Union[Vote, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., heal_failed: _Optional[_Union[HealFailed, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., pinned: _Optional[_Union[Pinned, _Mapping]] = ..., sample: _Optional[_Union[Sample, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., mac: _Optional[bytes] = ...) -> None: ...

class CoordinatorMessage(_message.Message):
    __slots__ = ("welcome", "refused", "new_quorum", "commit", "pin", "release", "heal", "frontier_moved", "waiting", "finished", "evicted", "goodbye", "halted", "challenge", "alive", "all_computed", "drained", "paused", "mac")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    NEW_QUORUM_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    HEAL_FIELD_NUMBER: _ClassVar[int]
    FRONTIER_MOVED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    HALTED_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    ALL_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refused: Refused
    new_quorum: NewQuorum
    commit: Commit
    pin: Pin
    release: Release
    heal: Heal
    frontier_moved: FrontierMoved
    waiting: Waiting
    finished: Finished
    evicted: Evicted
    goodbye: Goodbye
    halted: Halted
    challenge: Challenge
    alive: Alive
    all_computed: AllComputed
    drained: Drained
    paused: Paused
    mac: bytes
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., new_quorum: _Optional[_Union[NewQuorum, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., pin: _Optional[_Union[Pin, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., heal: _Optional[_Union[Heal, _Mapping]] = ..., frontier_moved: _Optional[_Union[FrontierMoved, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., evicted: _Optional[_Union[Evicted, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., halted: _Optional[_Union[Halted, _Mapping]] = ..., challenge: _Optional[_Union[Challenge, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ..., all_computed: _Optional[_Union[AllComputed, _Mapping]] = ..., drained: _Optional[_Union[Drained, _Mapping]] = ..., paused: _Optional[_Union[Paused, _Mapping]] = ..., mac: _Optional[bytes] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "job", "group", "incarnation", "rank", "ranks", "address", "proof", "nonce", "term", "step", "history", "stream")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    job: str
    group: str
    incarnation: int
    rank: int
    ranks: int
    address: str
    proof: bytes
    nonce: bytes
    term: int
    step: int
    history: int
    stream: int
    def __init__(self, protocol_version: _Optional[int] = ..., job: _Optional[str] = ..., group: _Optional[str] = ..., incarnation: _Optional[int] = ..., rank: _Optional[int] = ..., ranks: _Optional[int] = ..., address: _Optional[str] = ..., proof: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., term: _Optional[int] = ..., step: _Optional[int] = ..., history: _Optional[int] = ..., stream: _Optional[int] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("step", "digest", "settings", "last_quorum_id", "min_replicas", "history", "spare", "members", "total_shards", "weight")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    LAST_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    MIN_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    SPARE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SHARDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    step: int
    digest: int
    settings: _containers.ScalarMap[str, str]
    last_quorum_id: int
    min_replicas: int
    history: int
    spare: bool
    members: int
    total_shards: int
    weight: int
    def __init__(self, step: _Optional[int] = ..., digest: _Optional[int] = ..., settings: _Optional[_Mapping[str, str]] = ..., last_quorum_id: _Optional[int] = ..., min_replicas: _Optional[int] = ..., history: _Optional[int] = ..., spare: bool = ..., members: _Optional[int] = ..., total_shards: _Optional[int] = ..., weight: _Optional[int] = ...) -> None: ...

class Pinned(_message.Message):
    __slots__ = ("heal_id", "digest")
    HEAL_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    heal_id: int
    digest: int
    def __init__(self, heal_id: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("heal_id", "step")
    HEAL_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    heal_id: int
    step: int
    def __init__(self, heal_id: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("quorum_id", "step", "ok", "accused", "reason", "digest", "nonfinite", "raised", "shard", "edit")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    ACCUSED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_FIELD_NUMBER: _ClassVar[int]
    RAISED_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EDIT_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    step: int
    ok: bool
    accused: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    digest: int
    nonfinite: str
    raised: bool
    shard: int
    edit: int
    def __init__(self, quorum_id: _Optional[int] = ..., step: _Optional[int] = ..., ok: bool = ..., accused: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., digest: _Optional[int] = ..., nonfinite: _Optional[str] = ..., raised: bool = ..., shard: _Optional[int] = ..., edit: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("computed_quorum_id", "computed_step", "away", "moves")
    COMPUTED_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_STEP_FIELD_NUMBER: _ClassVar[int]
    AWAY_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    computed_quorum_id: int
    computed_step: int
    away: bool
    moves: bool
    def __init__(self, computed_quorum_id: _Optional[int] = ..., computed_step: _Optional[int] = ..., away: bool = ..., moves: bool = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("step", "steps", "attempts", "shards", "shards_again", "compute_s", "exchange_s", "vote_s", "apply_s", "heals", "heal_s", "heal_bytes", "values")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_AGAIN_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_S_FIELD_NUMBER: _ClassVar[int]
    VOTE_S_FIELD_NUMBER: _ClassVar[int]
    APPLY_S_FIELD_NUMBER: _ClassVar[int]
    HEALS_FIELD_NUMBER: _ClassVar[int]
    HEAL_S_FIELD_NUMBER: _ClassVar[int]
    HEAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    step: int
    steps: int
    attempts: int
    shards: int
    shards_again: int
    compute_s: float
    exchange_s: float
    vote_s: float
    apply_s: float
    heals: int
    heal_s: float
    heal_bytes: int
    values: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., steps: _Optional[int] = ..., attempts: _Optional[int] = ..., shards: _Optional[int] = ..., shards_again: _Optional[int] = ..., compute_s: _Optional[float] = ..., exchange_s: _Optional[float] = ..., vote_s: _Optional[float] = ..., apply_s: _Optional[float] = ..., heals: _Optional[int] = ..., heal_s: _Optional[float] = ..., heal_bytes: _Optional[int] = ..., values: _Optional[_Mapping[str, float]] = ...) -> None: ...

class HealFailed(_message.Message):
    __slots__ = ("heal_id", "reason", "step", "history")
    HEAL_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    heal_id: int
    reason: str
    step: int
    history: int
    def __init__(self, heal_id: _Optional[int] = ..., reason: _Optional[str] = ..., step: _Optional[int] = ..., history: _Optional[int] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("finished",)
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    finished: bool
    def __init__(self, finished: bool = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("heartbeat_interval_ms", "has_frontier", "frontier_step", "frontier_quorum_id", "frontier_held", "term", "samples")
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    HAS_FRONTIER_FIELD_NUMBER: _ClassVar[int]
    FRONTIER_STEP_FIELD_NUMBER: _ClassVar[int]
    FRONTIER_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    FRONTIER_HELD_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    heartbeat_interval_ms: int
    has_frontier: bool
    frontier_step: int
    frontier_quorum_id: int
    frontier_held: bool
    term: int
    samples: bool
    def __init__(self, heartbeat_interval_ms: _Optional[int] = ..., has_frontier: bool = ..., frontier_step: _Optional[int] = ..., frontier_quorum_id: _Optional[int] = ..., frontier_held: bool = ..., term: _Optional[int] = ..., samples: bool = ...) -> None: ...

class Difference(_message.Message):
    __slots__ = ("name", "job", "group")
    NAME_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    name: str
    job: str
    group: str
    def __init__(self, name: _Optional[str] = ..., job: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason", "differences")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    reason: str
    differences: _containers.RepeatedCompositeFieldContainer[Difference]
    def __init__(self, reason: _Optional[str] = ..., differences: _Optional[_Iterable[_Union[Difference, _Mapping]]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("group", "incarnation", "address", "shards", "weight")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    group: str
    incarnation: int
    address: str
    shards: _containers.RepeatedScalarFieldContainer[int]
    weight: int
    def __init__(self, group: _Optional[str] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ..., shards: _Optional[_Iterable[int]] = ..., weight: _Optional[int] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("group", "reason")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    group: str
    reason: str
    def __init__(self, group: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class NewQuorum(_message.Message):
    __slots__ = ("quorum_id", "step", "total_shards", "members", "joined", "left", "history", "base_quorum_id", "gone", "dealt")
    class Dealt(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LISTED: _ClassVar[NewQuorum.Dealt]
        AT_BOUNDARY: _ClassVar[NewQuorum.Dealt]
        AFTER_LOSS: _ClassVar[NewQuorum.Dealt]
        ONE_EACH: _ClassVar[NewQuorum.Dealt]
    LISTED: NewQuorum.Dealt
    AT_BOUNDARY: NewQuorum.Dealt
    AFTER_LOSS: NewQuorum.Dealt
    ONE_EACH: NewQuorum.Dealt
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SHARDS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    BASE_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    DEALT_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    step: int
    total_shards: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    joined: _containers.RepeatedCompositeFieldContainer[Change]
    left: _containers.RepeatedCompositeFieldContainer[Change]
    history: int
    base_quorum_id: int
    gone: _containers.RepeatedScalarFieldContainer[str]
    dealt: NewQuorum.Dealt
    def __init__(self, quorum_id: _Optional[int] = ..., step: _Optional[int] = ..., total_shards: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., joined: _Optional[_Iterable[_Union[Change, _Mapping]]] = ..., left: _Optional[_Iterable[_Union[Change, _Mapping]]] = ..., history: _Optional[int] = ..., base_quorum_id: _Optional[int] = ..., gone: _Optional[_Iterable[str]] = ..., dealt: _Optional[_Union[NewQuorum.Dealt, str]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("quorum_id", "step", "next")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    step: int
    next: NewQuorum
    def __init__(self, quorum_id: _Optional[int] = ..., step: _Optional[int] = ..., next: _Optional[_Union[NewQuorum, _Mapping]] = ...) -> None: ...

class Pin(_message.Message):
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

class Release(_message.Message):
    __slots__ = ("heal_id",)
    HEAL_ID_FIELD_NUMBER: _ClassVar[int]
    heal_id: int
    def __init__(self, heal_id: _Optional[int] = ...) -> None: ...

class Heal(_message.Message):
    __slots__ = ("heal_id", "step", "donors", "log_only", "history")
    HEAL_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DONORS_FIELD_NUMBER: _ClassVar[int]
    LOG_ONLY_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    heal_id: int
    step: int
    donors: _containers.RepeatedCompositeFieldContainer[Member]
    log_only: bool
    history: int
    def __init__(self, heal_id: _Optional[int] = ..., step: _Optional[int] = ..., donors: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., log_only: bool = ..., history: _Optional[int] = ...) -> None: ...

class FrontierMoved(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("reason", "held", "fresh")
    REASON_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    reason: str
    held: bool
    fresh: bool
    def __init__(self, reason: _Optional[str] = ..., held: bool = ..., fresh: bool = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class Evicted(_message.Message):
    __slots__ = ("reason", "may_return", "aside")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MAY_RETURN_FIELD_NUMBER: _ClassVar[int]
    ASIDE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    may_return: bool
    aside: bool
    def __init__(self, reason: _Optional[str] = ..., may_return: bool = ..., aside: bool = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Drained(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Paused(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Halted(_message.Message):
    __slots__ = ("reason", "kind")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        DIVERGED: _ClassVar[Halted.Kind]
        NONFINITE: _ClassVar[Halted.Kind]
        FAILED: _ClassVar[Halted.Kind]
        RAISED: _ClassVar[Halted.Kind]
    DIVERGED: Halted.Kind
    NONFINITE: Halted.Kind
    FAILED: Halted.Kind
    RAISED: Halted.Kind
    REASON_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    reason: str
    kind: Halted.Kind
    def __init__(self, reason: _Optional[str] = ..., kind: _Optional[_Union[Halted.Kind, str]] = ...) -> None: ...

class AllComputed(_message.Message):
    __slots__ = ("quorum_id", "step")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    step: int
    def __init__(self, quorum_id: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Alive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Challenge(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    def __init__(self, nonce: _Optional[bytes] = ...) -> None: ...
