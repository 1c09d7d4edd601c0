"""Classes of seeds that came later, each with its own random numbers: older seeds stay as they were."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .setting import QUICK_S, Setting, earlier, faults_of, more_faults

_LINES = Path(__file__).with_name("seeds.txt").read_text(encoding="utf-8").splitlines()
_SEEDS = [line.split()[0] for line in _LINES if not line.startswith("#")]
KEPT = tuple(int(seed.rstrip("+")) for seed in _SEEDS)
# They were found before there were these classes, and would stand for something else.
_WITHOUT = frozenset(int(seed) for seed in _SEEDS if not seed.endswith("+"))


def draw(seed: int) -> Setting:
    """Return what `seed` stands for: a function of the seed alone."""
    setting = earlier(seed)
    if seed in _WITHOUT:
        return setting
    for number, (often, add) in enumerate(_CLASSES):
        rng = random.Random(seed + (1 << 47) + (number << 48))
        if rng.random() < often:
            setting = add(setting, rng)
    return setting


def focused(seed: int, kinds: Sequence[str], changes: Mapping[str, Any]) -> Setting:
    """The job and the timing of `seed`, with other faults, all of these kinds: for paths that are too rare else.

    Without kinds it keeps its own faults. `changes` are made last; if they name `ranks`, none are drawn.
    """
    setting = earlier(seed, ranks="ranks" not in changes)
    if "amnesia" in kinds:
        setting = replace(setting, founding_wait_s=setting.heartbeat_timeout_s)
    if "flip" in kinds:
        setting = replace(setting, compares=True, keeps_bytes=1 << 18)  # as for every seed that has it
    if "takeover" in kinds or "lie" in kinds:
        setting = replace(setting, memoryless=False)
    if kinds:
        storm_s = changes.get("storm_s", setting.storm_s)
        setting = replace(setting, faults=faults_of(random.Random(seed), list(kinds), storm_s))
    return replace(setting, **changes)


def _many(setting: Setting, rng: random.Random) -> Setting:
    """Nine groups and two spares: more donors than a heal asks, and two places that spares may take."""
    names = tuple(f"group-{number}" for number in range(11))
    shards = None if setting.shards is None else rng.randint(9, 12)
    least = rng.choice((1, 3, 8))
    return replace(
        setting,
        names=names,
        spares=frozenset(names[9:]),
        shards=shards,
        min_replicas=least,
        slow="",
        ranks=(),
        unreadable=None,
    )


def _edits(setting: Setting, rng: random.Random) -> Setting:
    """The job edits its state before some steps; one group's first process may make another edit."""
    regular = [name for name in setting.names if name not in setting.spares]
    kinds = {fault.kind for fault in setting.faults}
    forgets = setting.memoryless or setting.brings or kinds & {"lie", "amnesia", "flip", "wipe"}
    otherwise = rng.choice(regular) if rng.random() < 0.3 and len(regular) > 2 and not forgets else ""
    edits = frozenset(step for step in range(400) if rng.random() < 0.4)
    return replace(setting, edits=edits, edits_otherwise=otherwise, ranks=())


def _early(setting: Setting, rng: random.Random) -> Setting:
    """Some loops end at an earlier step than others."""
    # The first ends last, and as many as a step needs with it: else the job waits for groups that have ended.
    least = max(1, setting.min_replicas)
    early = tuple(rng.choice((0, 0, 1, 3)) if n >= least else 0 for n in range(len(setting.names)))
    return replace(setting, early=early, die_at_end=False)


def _saving(setting: Setting, rng: random.Random) -> Setting:
    """Checkpoints take time and may fail; and the last state is saved before a group ends."""
    return replace(
        setting,
        saving_s=rng.choice((0.01, 0.1, 0.5)),
        saving_fails=rng.choice((0.0, 0.2, 0.9)),
        saves_last=not setting.early,
    )


def _deaf(setting: Setting, rng: random.Random) -> Setting:
    """The thread of a session stands still alone."""
    return more_faults(setting, rng, ["deaf"])


def _shared(setting: Setting, rng: random.Random) -> Setting:
    """The coordinator serves other jobs too; its store refuses records, and operators evict groups."""
    refuses = rng.choice((0.0, 0.02, 0.1)) if not setting.memoryless else 0.0
    raises = setting.raises or rng.random() < 0.3
    setting = replace(setting, guests=rng.randint(1, 3), refuses=refuses, raises=raises, die_at_end=False)
    return more_faults(setting, rng, ["evict"]) if rng.random() < 0.5 else setting


def _supervised(setting: Setting, rng: random.Random) -> Setting:
    """A launcher starts groups and the coordinator, and ends what hangs; nothing comes back by itself."""
    storm_s = rng.uniform(3.0, 8.0)
    kinds = ["kill", "crash", "stuck", "coordinator", "raise", "ail", "wipe", "stop", "cut", "link"]
    kinds = rng.sample(kinds, rng.randint(1, 5))
    return replace(
        setting,
        supervised=True,
        rungs=rng.random() < 0.3,
        failure_timeout_s=6.0,
        storm_s=storm_s,
        faults=faults_of(rng, kinds, storm_s),
        ranks=(),
        early=(),
        memoryless=False,
        leaves_early=False,
        die_at_end=False,
        one_differs=False,
        edits_otherwise="",
        raises=False,
        unreadable=None,
        weighted=False,
        brings=0,
        slow="",
        exchange_s=QUICK_S,
    )


def _drains(setting: Setting, rng: random.Random) -> Setting:
    """Groups are drained while streams break and coordinators die."""
    return more_faults(setting, rng, ["drain", "break", "coordinator"])


# How often each is drawn.
_CLASSES: tuple[tuple[float, Callable[[Setting, random.Random], Setting]], ...] = (
    (0.01, _many),
    (0.06, _edits),
    (0.05, _early),
    (0.08, _saving),
    (0.06, _deaf),
    (0.06, _drains),
    (0.06, _supervised),
    (0.08, _shared),
)
