import collections
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.dealing import dealt


@dataclass(frozen=True)
class Item:
    path: Path
    number: int
    markers: frozenset[str] = frozenset()

    def get_closest_marker(self, name: str) -> bool | None:
        return name in self.markers or None


def items_of(file: str, count: int, *markers: str) -> list[Any]:
    return [Item(Path(file), number, frozenset(markers)) for number in range(count)]


TESTS = [
    *items_of("a.py", 30),
    *items_of("train.py", 6, "processes", "timeout"),
    *items_of("b.py", 50),
    *items_of("long.py", 4, "processes", "timeout"),
    *items_of("quick.py", 15, "processes"),
    *items_of("other.py", 10, "processes"),
    *items_of("c.py", 40),
]


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 200])
def test_every_test_is_dealt_once(workers: int) -> None:
    assert collections.Counter(dealt(TESTS, workers)) == collections.Counter(TESTS)


def test_each_slice_begins_with_as_much_waiting_and_no_file_of_it_is_divided() -> None:
    found: list[Any] = dealt(TESTS, 2)
    half = len(TESTS) // 2
    slices = found[:half], found[half:]
    weights, files = [], []
    for part in slices:
        waits = [bool(item.get_closest_marker("processes")) for item in part]
        assert waits == sorted(waits, reverse=True)
        weights.append(
            sum(
                5 if item.get_closest_marker("timeout") else 1 for item in part if "processes" in item.markers
            )
        )
        files.append({item.path for item in part if "processes" in item.markers})
    assert weights == [40, 35]
    assert not files[0] & files[1]


def test_tests_of_which_all_wait_are_dealt_too() -> None:
    only = items_of("train.py", 6, "processes") + items_of("long.py", 3, "processes")
    assert collections.Counter(dealt(only, 4)) == collections.Counter(only)
