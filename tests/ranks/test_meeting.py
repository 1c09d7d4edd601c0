"""The collective in which the ranks of a group meet, when a rank does not come to it."""

import math
import threading
import time
from types import SimpleNamespace

import jax
import pytest

import jaxft
from jaxft._base import _room
from jaxft._errors import ConfigurationError
from jaxft._replica import _membership
from jaxft._replica._config import GroupConfig
from tests import patience
from tests.shortages import no_threads

CONFIG = GroupConfig(coordinator="c:1", group="a", failure_timeout_s=patience.FAR_S)


class Ended(BaseException):
    """In place of the end of this process."""


@pytest.fixture(autouse=True)
def ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(_name: str, other: str, why: str) -> None:
        raise Ended(f"{other} is lost ({why})")

    monkeypatch.setattr(_membership, "end_with", end)


def test_a_collective_that_gives_up_by_itself_ends_this_process() -> None:
    """Gloo does so after 30 s, whatever the failure timeout is. An exception would have JAX wait for the others."""
    gave_up = jax.errors.JaxRuntimeError("UNKNOWN: Gloo context initialization failed: DEADLINE_EXCEEDED")
    with (
        pytest.raises(
            Ended, match=r"another rank is lost \(it has not entered its Manager, or has ended: UNKN"
        ),
        _membership._met_in_time(CONFIG),  # pyright: ignore[reportPrivateUsage]
    ):
        raise gave_up


def test_a_moment_without_room_for_a_thread_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with no_threads() as allow:
        monkeypatch.setattr(_room, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: allow()))
        with _membership._met_in_time(CONFIG):  # pyright: ignore[reportPrivateUsage]
            pass


@pytest.mark.parametrize("timeout_s", [1e10, 1e300, math.inf])
def test_each_wait_of_a_rank_takes_the_longest_timeout(timeout_s: float) -> None:
    config = GroupConfig(coordinator="c:1", group="a", failure_timeout_s=timeout_s)
    assert threading.Lock().acquire(timeout=config.failure_timeout_s)


def test_another_error_is_one_of_the_program() -> None:
    with (
        pytest.raises(ValueError, match="something else"),
        _membership._met_in_time(CONFIG),  # pyright: ignore[reportPrivateUsage]
    ):
        raise ValueError("something else")


def test_a_rank_that_has_not_met_the_others_is_refused_before_it_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank would join as the group, and evict the one before it."""
    monkeypatch.setenv("JAXFT_NPROC", "2")
    monkeypatch.setenv("JAXFT_GROUP", "a")
    manager = jaxft.Manager("localhost:1", group="a")
    with (
        pytest.raises(
            ConfigurationError, match=r"started 2 processes as group 'a'.*distributed\.initialize\(num_"
        ),
        manager,
    ):
        pass
    # Ranks may also be separate groups, each with its name.
    assert _membership._rank_and_size("a-rank-1") == (0, 1)  # pyright: ignore[reportPrivateUsage]
