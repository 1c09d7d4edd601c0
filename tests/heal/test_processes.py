"""Real donors that are killed and stopped in the middle of a heal."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxft._errors import HealFailed
from jaxft._heal import _stripes
from jaxft._heal._fetch import Fetcher
from jaxft._transport._listener import Abort
from tests import patience

from .donors import LONG_S, fetch_state, in_thread, joiner, same_bits, specs_of
from .processes import HEAL, DonorProcess, donors, means_of, state_of

pytestmark = pytest.mark.processes

SIZE_MB = 24


def zeros() -> list[np.ndarray]:
    return [np.zeros_like(leaf) for leaf in state_of(SIZE_MB)]


def kill(one: DonorProcess) -> None:
    one.process.kill()
    one.process.join()


@pytest.mark.parametrize("chunk", [1, 4, 9])
def test_a_donor_is_killed_in_the_middle_and_the_other_finishes(chunk: int) -> None:
    with donors(["a", "b"]) as (a, b), joiner(a.address, b.address) as fetcher:
        fetched = both_at_it(fetcher, a, b, chunk)
        kill(a)
        b.ask("open_trap")
        assert same_bits(fetched(), state_of(SIZE_MB))
        assert fetcher._donors[0].failed


def both_at_it(fetcher: Fetcher, a: DonorProcess, b: DonorProcess, chunk: int) -> Callable[[], Any]:
    """Start a fetch; return when `a` is about to read its n-th chunk, and `b` its second, which will wait."""
    a.ask("set_trap", chunk)
    b.ask("set_trap", 2)
    fetched = in_thread(lambda: fetch_state(fetcher, 0, zeros()))
    for each in (a, b):
        assert each.answer() == "in the trap"
    return fetched


@pytest.mark.parametrize("names", ["a", "ab"])
def test_all_donors_are_killed_and_all_are_named(names: str) -> None:
    with donors(names) as all_of_them:
        with joiner(*(each.address for each in all_of_them)) as fetcher:
            for each in all_of_them:
                each.ask("set_trap", 3)
            fetched = in_thread(lambda: fetch_state(fetcher, 0, zeros()))
            for each in all_of_them:
                assert each.answer() == "in the trap"
            began_s = patience.machine_s()
            for each in all_of_them:
                kill(each)
            with pytest.raises(HealFailed) as failure:
                fetched()
            assert patience.machine_s() - began_s < LONG_S / 2
    for name in names:
        assert f"{name}: The peer closed the connection" in str(failure.value) or (
            f"{name}: [Errno 104] Connection reset by peer" in str(failure.value)
        )


def test_a_stopped_donor_delays_the_heal_by_the_stall_limit_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_stripes, "_STALL_S", patience.stretched(0.3))
    with donors(["a", "b"], steps=2) as (a, b), joiner(a.address, b.address, timeout_s=LONG_S) as fetcher:
        fetched = both_at_it(fetcher, a, b, 3)
        os.kill(a.pid, signal.SIGSTOP)
        b.ask("open_trap")
        began_s = patience.machine_s()
        assert same_bits(fetched(), state_of(SIZE_MB))
        for step in (0, 1):
            means = fetcher.means(step, specs_of(means_of(step)), cancel=Abort())
            assert same_bits(means, means_of(step))
        assert patience.machine_s() - began_s < LONG_S / 2


def test_a_donor_that_is_stopped_before_the_heal_delays_nobody() -> None:
    with donors(["a", "b"], steps=1) as (a, b), joiner(a.address, b.address, timeout_s=LONG_S) as fetcher:
        os.kill(a.pid, signal.SIGSTOP)
        began_s = patience.machine_s()
        assert same_bits(fetch_state(fetcher, 0, zeros()), state_of(SIZE_MB))
        assert same_bits(fetcher.means(0, specs_of(means_of(0)), cancel=Abort()), means_of(0))
        assert patience.machine_s() - began_s < LONG_S / 2
        os.kill(a.pid, signal.SIGCONT)


def test_a_stopped_donor_alone_is_given_its_time_and_may_come_back() -> None:
    with donors(["a"]) as (a,):
        with joiner(a.address, timeout_s=LONG_S) as fetcher:
            a.ask("set_trap", 3)
            fetched = in_thread(lambda: fetch_state(fetcher, 0, zeros()))
            assert a.answer() == "in the trap"
            a.ask("open_trap")
            os.kill(a.pid, signal.SIGSTOP)
            os.kill(a.pid, signal.SIGCONT)
            assert same_bits(fetched(), state_of(SIZE_MB))
        with joiner(a.address, timeout_s=0.3) as fetcher:
            os.kill(a.pid, signal.SIGSTOP)
            with pytest.raises(HealFailed, match=r"a: Timed out after \d+\.\d s"):
                fetch_state(fetcher, 0, zeros())


def test_a_donor_is_killed_between_the_state_and_the_means() -> None:
    with donors(["a", "b"], steps=3) as (a, b), joiner(a.address, b.address) as fetcher:
        fetch_state(fetcher, 0, zeros())
        kill(a)
        for step in range(3):
            means = fetcher.means(step, specs_of(means_of(step)), cancel=Abort())
            assert same_bits(means, means_of(step))
        kill(b)
        with pytest.raises(HealFailed, match=r"a: .*b: "):
            fetcher.means(2, specs_of(means_of(2)), cancel=Abort())


# ---- donors that keep a stripe each ----


@pytest.mark.parametrize("chunk", [1, 4, 12])
def test_a_donor_is_killed_within_its_stripe_and_the_heal_begins_again(chunk: int) -> None:
    with donors(["a", "b"], steps=2, striped=True) as (a, b):
        with joiner(a.address, b.address) as fetcher:
            fetched = both_at_it(fetcher, a, b, chunk)
            kill(a)
            b.ask("open_trap")
            with pytest.raises(
                HealFailed, match=r"no donor is left that keeps \d+ of 25 chunks, from chunk \d+ on \(a: "
            ):
                fetched()
        b.ask("hold_again", SIZE_MB, 2)
        with joiner(b.address, heal_id=HEAL + 1) as fetcher:
            assert same_bits(fetch_state(fetcher, 2, zeros()), state_of(SIZE_MB))


def test_a_donor_is_killed_within_its_stripe_while_the_state_of_the_other_is_live() -> None:
    with donors(["a", "b"], striped=True) as (a, b), joiner(a.address, b.address) as fetcher:
        fetched = both_at_it(fetcher, a, b, 4)
        kill(a)
        b.ask("open_trap")
        assert same_bits(fetched(), state_of(SIZE_MB))
        assert fetcher._donors[0].failed


def test_a_donor_is_killed_after_its_stripe() -> None:
    arrived, all_of_a = list[int](), threading.Event()

    def moved() -> None:
        arrived.append(1)
        if len(arrived) == SIZE_MB // 2:
            all_of_a.set()

    with donors(["a", "b"], steps=1, striped=True) as (a, b):
        with joiner(a.address, b.address, moved=moved) as fetcher:
            b.ask("set_trap", 1)
            fetched = in_thread(lambda: fetch_state(fetcher, 0, zeros()))
            assert b.answer() == "in the trap"
            assert all_of_a.wait(LONG_S)
            kill(a)
            b.ask("open_trap")
            assert same_bits(fetched(), state_of(SIZE_MB))
            assert same_bits(fetcher.means(0, specs_of(means_of(0)), cancel=Abort()), means_of(0))


@pytest.mark.parametrize("before", [True, False])
def test_a_donor_that_is_stopped_with_its_stripe_ends_the_heal_soon(
    monkeypatch: pytest.MonkeyPatch, *, before: bool
) -> None:
    monkeypatch.setattr(_stripes, "_STALL_S", patience.stretched(0.3))
    with donors(["a", "b"], steps=1, striped=True) as (a, b):
        with joiner(a.address, b.address, timeout_s=patience.stretched(6.0)) as fetcher:
            began_s = patience.machine_s()
            if before:
                os.kill(a.pid, signal.SIGSTOP)
                fetched = in_thread(lambda: fetch_state(fetcher, 0, zeros()))
            else:
                fetched = both_at_it(fetcher, a, b, 3)
                os.kill(a.pid, signal.SIGSTOP)
                b.ask("open_trap")
            with pytest.raises(HealFailed, match=r"that keeps \d+ of 25 chunks, from chunk \d+ on \(a: "):
                fetched()
            assert patience.machine_s() - began_s < LONG_S / 2
            os.kill(a.pid, signal.SIGCONT)


def test_four_donors_with_a_stripe_each() -> None:
    with donors("abcd", steps=1, striped=True) as all_of_them:
        with joiner(*(each.address for each in all_of_them)) as fetcher:
            assert same_bits(fetch_state(fetcher, 0, zeros()), state_of(SIZE_MB))
            assert not any(each.failed for each in fetcher._donors)
