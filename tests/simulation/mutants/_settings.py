"""Settings in which rare faults meet."""

from typing import Any


def of(groups: int, **changes: Any) -> dict[str, Any]:
    """Groups of which none is a spare, differs or leaves early, with streams that hold."""
    return {
        "names": tuple(f"group-{number}" for number in range(groups)),
        "spares": frozenset[str](),
        "min_replicas": 1,
        "shards": 6,
        "one_differs": False,
        "leaves_early": False,
        "flaky": 0.0,
        **changes,
    }


FIVE_ALIKE = of(5, differ=False, starts_s=0.2, founding_wait_s=0.02)
FOUR_THAT_DIFFER = of(4, differ=True)
THREE_OF_TWO_RANKS = of(3, ranks=(2, 2, 2), unreadable=None, drift=0.0)
RANKS_THAT_DIFFER = of(3, ranks=(1, 2, 4), unreadable=None, drift=0.0)
FOUR_THAT_HEAL_SLOWLY = of(4, founding_wait_s=0.02, saves_every=1, fetch_s=6.0, storm_s=3.0)
THREE_THAT_EDIT = of(
    3, edits=frozenset(range(200)), edits_otherwise="group-1", ranks=(), starts_s=0.2, brings=0
)
THREE_THAT_SAVE = of(
    3, saving_s=0.2, saving_fails=0.0, saves_last=True, saves_every=1, differ=False, brings=0
)
ELEVEN = of(11, spares=frozenset({"group-9", "group-10"}), shards=9, min_replicas=3, starts_s=0.2, ranks=())


def supervised(groups: int, **changes: Any) -> dict[str, Any]:
    """Groups that a launcher starts, and nothing else."""
    quiet = {"unreadable": None, "raises": False, "memoryless": False, "die_at_end": False, "weighted": False}
    timing = {"starts_s": 0.2, "brings": 0, "storm_s": 5.0, "failure_timeout_s": 6.0, "exchange_s": 0.006}
    return of(
        groups, supervised=True, ranks=(), slow="", careful=False, drift=0.0, **(quiet | timing | changes)
    )
