"""Settings in which rare faults meet."""

from typing import Any

FIVE_ALIKE: dict[str, Any] = {
    "names": tuple(f"group-{number}" for number in range(5)),
    "spares": frozenset[str](),
    "min_replicas": 1,
    "shards": 6,
    "differ": False,
    "one_differs": False,
    "leaves_early": False,
    "starts_s": 0.2,
    "founding_wait_s": 0.02,
    "flaky": 0.0,
}
FOUR_THAT_DIFFER: dict[str, Any] = {
    "names": tuple(f"group-{number}" for number in range(4)),
    "spares": frozenset[str](),
    "min_replicas": 1,
    "shards": 6,
    "differ": True,
    "one_differs": False,
    "leaves_early": False,
    "flaky": 0.0,
}
THREE_OF_TWO_RANKS: dict[str, Any] = {
    "names": tuple(f"group-{number}" for number in range(3)),
    "ranks": (2, 2, 2),
    "spares": frozenset[str](),
    "min_replicas": 1,
    "shards": 6,
    "one_differs": False,
    "leaves_early": False,
    "unreadable": None,
    "drift": 0.0,
    "flaky": 0.0,
}
RANKS_THAT_DIFFER: dict[str, Any] = THREE_OF_TWO_RANKS | {"ranks": (1, 2, 4)}
FOUR_THAT_HEAL_SLOWLY: dict[str, Any] = {
    "names": tuple(f"group-{number}" for number in range(4)),
    "spares": frozenset[str](),
    "min_replicas": 1,
    "shards": 6,
    "one_differs": False,
    "leaves_early": False,
    "founding_wait_s": 0.02,
    "flaky": 0.0,
    "saves_every": 1,
    "fetch_s": 6.0,
    "storm_s": 3.0,
}
