"""The setting of a seed: the job, its timing, which faults there are and how often, each with its moment.

Faults are drawn up front, each with its own random numbers, so that one can be left out and the others stay.
"""

import random
from dataclasses import dataclass, replace

# How often each kind comes if a seed has it at all. `faults.py` has each.
WEIGHTS: dict[str, float] = {
    "kill": 5,
    "crash": 4,
    "leave": 1,
    "break": 4,
    "hang": 2,
    "stop": 2,
    "stuck": 3,
    "flip": 2,
    "wipe": 0.5,
    "link": 4,
    "cut": 3,
    "isolate": 1,
    "coordinator": 5,
    "takeover": 3,
    "detour": 3,
    "stall": 1.5,
    "disk": 1,
    "lie": 0.5,
    "amnesia": 3,
    "double": 0.5,
}
# Of groups of several processes.
RANK_WEIGHTS: dict[str, float] = {"rank": 4, "numb": 2}
LAUNCHER_WEIGHTS: dict[str, float] = {"raise": 4, "ail": 3}

# Things that a healthy group may do at any time: none is evicted for them.
HARMLESS = "pause"

# Kinds that hold up no message.
_PROMPT = ("kill", "crash", "leave", "hang", "stuck", "flip", "link", "double", "raise", "drain", HARMLESS)

MOST_SHARDS = 6


# The longest exchange, where no link is slow.
QUICK_S = 0.006


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong. The numbers are from [0, 1); each kind reads them in its own way."""

    index: int
    at_s: float
    kind: str
    victim: float
    other: float
    amount: float
    how: float


@dataclass(frozen=True, slots=True)
class Setting:
    names: tuple[str, ...]
    spares: frozenset[str]
    min_replicas: int
    shards: int | None
    heartbeat_timeout_s: float
    join_timeout_s: float
    exchange_timeout_s: float
    keepalive_s: float
    delay_s: float  # of a message, at most
    shard_s: float  # to compute one, at most
    disk_s: float  # of the coordinator, to write one record, at most
    drift: float  # of a clock's rate, at most
    flaky: float  # how often an exchange breaks at one member
    compares: bool  # fingerprints of the states
    saves_every: int  # steps
    differ: bool  # each group begins with a different state
    starts_s: float  # within which the groups start
    careful: bool  # chaos spares the last group that holds the state
    brings: int  # steps of a checkpoint from before the coordinator's first life
    founding_wait_s: float
    gather_s_per_member: float  # how long losses are gathered
    storm_s: float
    exchange_s: float  # which a slow link needs, at most
    slow: str  # a group whose shards take many times as long; "" if there is none
    faults: tuple[Fault, ...]
    nonfinite: str  # the job's policy for means that are not finite
    poisoned: frozenset[int]  # steps of which one shard makes them so
    # Classes that came later, with separate random numbers: older seeds keep theirs.
    memoryless: bool = False  # the coordinator has no store, and the clocks of its machines differ
    keeps_bytes: int = 1 << 18  # of groups that are gone, in the coordinator's memory
    one_differs: bool = False  # the last regular group begins with another state, and all must be there
    leaves_early: bool = False  # a founder leaves as finished before the first quorum
    die_at_end: bool = False  # when the first group ends its loop, others die, and come again
    raises: bool = False  # the coordinator fails on an event of the job once
    fetch_s: float = 0.15  # which a joiner needs for a state, at most
    slow_from_s: float = 0.0  # when the links become slow, if they do
    unreadable: int | None = None  # a step of which one shard cannot be read, in any group
    weighted: bool = False  # groups have different numbers of devices, and others with each start
    ranks: tuple[int, ...] = ()  # how many processes the groups have, in the order of their names; else one
    edits: frozenset[int] = frozenset()  # steps before which the job edits its state
    edits_otherwise: str = ""  # a group whose first process makes another edit
    early: tuple[
        int, ...
    ] = ()  # by how many steps the loops of groups end earlier, in the order of their names
    saving_s: float = 0.0  # to write a checkpoint, or one rank's part of it, at most
    saving_fails: float = 0.0  # how often a checkpoint cannot be written
    guests: int = 0  # other jobs of the same coordinator
    refuses: float = 0.0  # how often the store refuses a record
    supervised: bool = False  # groups and the coordinator run when a launcher starts them
    rungs: bool = False  # which knows a ladder of two rungs for each group
    failure_timeout_s: float = 30.0
    saves_last: bool = False  # no group ends before the job's last state is saved

    def weight_of(self, incarnation: int) -> int:
        """Of how many devices a process makes its mesh."""
        return (1, 4, 2, 8, 3)[incarnation % 5] if self.weighted else 1

    def early_by(self, name: str) -> int:
        """By how many steps a group's loop ends earlier than the longest."""
        return self.early[self.names.index(name)] if self.early else 0

    def size_of(self, name: str) -> int:
        """How many processes a group has. A group of several does not survive an exception of the user's code."""
        number = self.names.index(name)
        return self.ranks[number] if number < len(self.ranks) and self.unreadable is None else 1

    @property
    def prompt(self) -> bool:
        """Messages arrive in milliseconds: no fault holds them up."""
        return all(fault.kind in _PROMPT for fault in self.faults)

    @property
    def harmless(self) -> bool:
        """Nothing goes wrong: groups only take their time."""
        return (
            not self.flaky
            and not self.brings
            and not self.raises
            and self.unreadable is None
            and not self.edits_otherwise
            and all(fault.kind == HARMLESS for fault in self.faults)
        )

    def is_unreadable(self, step: int, shard: int) -> bool:
        return step == self.unreadable and shard == step % (self.shards or 1)

    def bad_shard(self, step: int) -> int | None:
        """The shard that makes the means of this step not finite, if there is one."""
        total = MOST_SHARDS if self.shards is None else self.shards
        return step % total if step in self.poisoned else None


def earlier(seed: int, *, ranks: bool = True) -> Setting:
    """Return what `seed` stood for before there were the classes of `classes.py`; without `ranks`, of one process."""
    drawn = _drawn(seed)
    return replace(_with_ranks(seed, drawn) if ranks else drawn, weighted=ranks and seed % 22 == 21)


def _drawn(seed: int) -> Setting:
    rng = random.Random(seed)
    groups = rng.choice((2, 3, 3, 4, 4, 5))
    first = rng.choice((0, 8))
    names = tuple(f"group-{first + i}" for i in range(groups))
    spares = frozenset(names[groups - 1 :] if groups >= 3 and rng.random() < 0.3 else ())
    regular = groups - len(spares)
    shards = None if rng.random() < 0.2 else rng.randint(regular, MOST_SHARDS)
    kinds = [kind for kind in WEIGHTS if rng.random() < 0.5]
    if shards is None:
        # A step that was decided twice has the same bits only if the shards are fixed.
        kinds = [kind for kind in kinds if kind != "lie"]
    heartbeat_timeout_s = rng.choice((0.5, 1.0, 1.0))
    if "amnesia" in kinds:
        # Without a store nothing can be lost from it, and no other coordinator can stand by.
        kinds = [kind for kind in kinds if kind not in ("lie", "takeover")]
    founding_wait_s = rng.choice((0.02, 0.02, 0.2, heartbeat_timeout_s))
    if "amnesia" in kinds:
        founding_wait_s = heartbeat_timeout_s
    gather_s_per_member = rng.choice((0.0, 0.0, 0.01))
    storm_s = rng.uniform(0.6, 2.5) + founding_wait_s
    compares = rng.random() < 0.6
    # Separate random numbers: so that what else a seed stands for stays as it was.
    other = random.Random(seed + (1 << 43))
    nonfinite = other.choices(("allow", "skip", "raise"), (6, 3, 1))[0]
    least = other.randint(1, 30) if nonfinite == "raise" else 0
    poisoned = frozenset(step for step in range(least, 200) if other.random() < 0.3)
    if not compares:
        kinds = [kind for kind in kinds if kind != "flip"]
    setting = Setting(
        names=names,
        spares=spares,
        min_replicas=min(regular, rng.choice((0, 1, 1, 2, 3, groups))),
        shards=shards,
        heartbeat_timeout_s=heartbeat_timeout_s,
        join_timeout_s=rng.choice((0.3, 1.0)),
        exchange_timeout_s=rng.uniform(0.4, 2.0),
        keepalive_s=rng.uniform(0.5, 2.5),
        delay_s=rng.choice((0.002, 0.005, 0.03)),
        shard_s=rng.choice((0.02, 0.04, 0.08)),
        disk_s=rng.choice((0.0, 0.004, 0.03)),
        drift=rng.choice((0.0, 0.02, 0.1)),
        flaky=rng.choice((0.0, 0.0, 0.1, 0.3)),
        compares=compares,
        saves_every=rng.choice((1, 2, 4)),
        differ=rng.random() < 0.3,
        starts_s=rng.choice((0.2, 0.2, 1.2)),
        careful=rng.random() < 0.4,
        brings=rng.randint(1, 4) if rng.random() < 0.1 else 0,
        founding_wait_s=founding_wait_s,
        gather_s_per_member=gather_s_per_member,
        storm_s=storm_s,
        exchange_s=QUICK_S,
        slow="",
        faults=faults_of(rng, kinds, storm_s),
        nonfinite=nonfinite,
        poisoned=poisoned,
    )
    setting = _unhurried(setting, random.Random(seed + (1 << 42)))
    return _widened(seed, setting, regular)


def _with_ranks(seed: int, setting: Setting) -> Setting:
    """Let the groups of some jobs have several processes."""
    rng = random.Random(seed + (1 << 45))
    if rng.random() >= 0.1:
        return setting
    sizes = tuple(rng.choice((1, 2, 2, 3, 4)) for _ in setting.names)
    loses = rng.random() < 0.7
    setting = replace(setting, ranks=sizes)
    setting = more_faults(setting, rng, list(RANK_WEIGHTS)) if loses else setting
    if rng.random() < 0.15:  # one rank's lanes take much longer than another's
        setting = replace(setting, exchange_s=3.0, storm_s=setting.storm_s + 3.0)
    return setting


def _widened(seed: int, setting: Setting, regular: int) -> Setting:
    rng = random.Random(seed + (1 << 41))
    kinds = {fault.kind for fault in setting.faults}
    if rng.random() < 0.3 and "flip" not in kinds:
        # To forget who was found to be corrupt is the price of a bound: elsewhere it must cost nothing but time.
        setting = replace(setting, keeps_bytes=rng.choice((0, 100, 200)))
    if rng.random() < 0.1 and regular >= 3:
        early = rng.random() < 0.7
        setting = replace(
            setting, one_differs=True, differ=False, min_replicas=regular, leaves_early=early, brings=0
        )
    if rng.random() < 0.1:
        # Nothing fences a coordinator without a store, so there is one at a time.
        alone = tuple(fault for fault in setting.faults if fault.kind not in ("takeover", "lie"))
        setting = replace(
            setting,
            memoryless=True,
            founding_wait_s=setting.heartbeat_timeout_s,
            faults=alone,
            brings=0,
        )
    setting = replace(setting, raises=rng.random() < 0.05)
    if setting.exchange_s > QUICK_S and rng.random() < 0.5:
        setting = replace(setting, slow_from_s=rng.uniform(0.3, 1.5))
    if rng.random() < 0.15:
        setting = more_faults(setting, rng, ["raise"])
    setting = replace(setting, die_at_end=random.Random(seed + (1 << 46)).random() < 0.1)
    if (more := random.Random(seed + (1 << 44))).random() < 0.1:
        setting = more_faults(setting, more, ["drain", "hold"])
    if rng.random() < 0.05 and (setting.min_replicas <= 1 or setting.shards is not None):
        # With more, and a shard for each group, the job waits for the group that cannot read its own, as for a group
        # that is lost.
        setting = replace(setting, unreadable=rng.randint(1, 20))
    return setting


def _unhurried(setting: Setting, rng: random.Random) -> Setting:
    """Let some groups take their time, besides the faults or, in some seeds, in place of all of them.

    With numbers apart, so that all else is as it was drawn before there was this.
    """
    if rng.random() < 0.6:
        return setting
    slow = rng.choice(setting.names) if rng.random() < 0.3 else ""
    exchange_s = rng.choice((QUICK_S, QUICK_S, 3.0))
    pauses = faults_of(rng, [HARMLESS], setting.storm_s) if rng.random() < 0.6 else ()
    before = setting.faults
    if rng.random() < 0.4:
        longer_s = setting.storm_s + 4.0  # for a long pause to be seen
        drift = min(setting.drift, 0.02)
        setting = replace(setting, flaky=0.0, brings=0, drift=drift, storm_s=longer_s)
        before = ()
    numbered = [replace(fault, index=len(before) + i) for i, fault in enumerate(pauses)]
    return replace(setting, slow=slow, exchange_s=exchange_s, faults=(*before, *numbered))


def more_faults(setting: Setting, rng: random.Random, kinds: list[str]) -> Setting:
    """Add faults of these kinds."""
    more = faults_of(rng, kinds, setting.storm_s)
    first = len(setting.faults)
    numbered = [replace(fault, index=first + i) for i, fault in enumerate(more)]
    return replace(setting, faults=(*setting.faults, *numbered))


def faults_of(rng: random.Random, kinds: list[str], storm_s: float) -> tuple[Fault, ...]:
    if not kinds:
        return ()
    number = min(25, 1 + int(rng.expovariate(1 / 6)))
    # Some seeds are of one kind above all: rare paths must be frequent somewhere.
    focus = rng.choice(kinds) if rng.random() < 0.3 else ""
    often = WEIGHTS | RANK_WEIGHTS | LAUNCHER_WEIGHTS
    weights = [often.get(kind, 1.0) * (1 if kind != focus else 10) for kind in kinds]
    faults: list[Fault] = []
    at_s = 0.0
    for index, kind in enumerate(rng.choices(kinds, weights, k=number)):
        # Troubles come together.
        together = faults and rng.random() < 0.3
        at_s = at_s + rng.uniform(0.0, 0.05) if together else rng.uniform(0.1, storm_s)
        faults.append(Fault(index, at_s, kind, rng.random(), rng.random(), rng.random(), rng.random()))
    return tuple(faults)
