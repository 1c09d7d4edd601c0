"""A joiner and donors that each keep a stripe, over real connections: lost stripes, slow donors, late requests."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
import pytest
from jaxft_protocol.messages import WHOLE, Stripe
from jaxft_protocol.ranks.lanes import Span

from jaxft._errors import HealFailed
from jaxft._heal import _blob, _stripes
from jaxft._heal._frames import Kind, Request, Status
from jaxft._transport._listener import Abort
from tests import patience

from .donors import (
    LONG_S,
    MB,
    Donor,
    blob_of_leaves,
    donor,
    fetch_state,
    hostile,
    in_thread,
    joiner,
    manifest,
    own,
    same_bits,
    send_chunk,
    send_text,
    specs_of,
    until,
    values,
)

HEAL = 5
LEAVES = 12  # of one chunk each


@pytest.fixture(scope="module")
def state() -> list[np.ndarray]:
    return [values((MB,), "uint8", number) for number in range(LEAVES)]


def like(leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [np.zeros_like(leaf) for leaf in leaves]


@contextlib.contextmanager
def donors(
    state: Sequence[np.ndarray], count: int, *, live: bool = False, of: int | None = None
) -> Iterator[list[Donor]]:
    """The first `count` of `of` donors, which keep a stripe each; `live`: of a state that is not donated yet."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(donor(f"group-{number}", state)) for number in range(count)]
        for number, each in enumerate(made):
            each.store.pin(HEAL, 0, stripe=Stripe(number, of or count))
            if not live:
                donate(each)
        yield made


def donate(one: Donor) -> None:
    one.store.log(0, [np.zeros(3, np.float32)])
    one.store.before_donation()
    one.store.publish(1, [])


def states_sent(all_of_them: Sequence[Donor]) -> list[int]:
    return [each.served[Kind.STATE] for each in all_of_them]


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_a_state_of_which_each_donor_keeps_a_stripe(
    count: int, state: list[np.ndarray], *, live: bool
) -> None:
    with donors(state, count, live=live) as keepers, joiner(*keepers) as fetcher:
        assert same_bits(fetch_state(fetcher, 0, like(state)), state)
        assert not any(each.failed for each in fetcher._donors)
        until(lambda: sum(states_sent(keepers)) == LEAVES, "the servers to have counted")
        if not live:
            shares = [sum(band * count // 12 == number for band in range(12)) for number in range(count)]
            assert states_sent(keepers) == shares


def test_each_donor_is_asked_for_its_stripe_first(state: list[np.ndarray]) -> None:
    """All begin at the same time, and each with its own stripe."""
    together = threading.Barrier(3)
    with donors(state, 3, live=True) as keepers, joiner(*keepers) as fetcher:
        for one in keepers:
            one.before_chunks = lambda one=one: None if one.served[Kind.STATE] else together.wait(LONG_S)
        assert same_bits(fetch_state(fetcher, 0, like(state)), state)
        until(lambda: sum(states_sent(keepers)) == LEAVES, "the servers to have counted")
        assert min(states_sent(keepers)) >= 1


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("leaves", [[], [np.zeros((0, 4), np.float32)], [np.float32(3)]], ids=str)
def test_hardly_any_bytes(leaves: list[np.ndarray], *, live: bool) -> None:
    with donors(leaves, 3, live=live) as keepers, joiner(*keepers) as fetcher:
        assert same_bits(fetch_state(fetcher, 0, leaves), leaves)


@pytest.mark.parametrize("count", [2, 4, 7])
def test_fewer_leaves_than_donors(count: int) -> None:
    leaves = [values((3 * MB,), "uint8"), np.zeros((0,), np.float32), np.int32(4)]
    with donors(leaves, count) as keepers, joiner(*keepers) as fetcher:
        assert same_bits(fetch_state(fetcher, 0, leaves), leaves)
        assert sorted(states_sent(keepers))[:-2] == [0] * (count - 2)


# ---- a donor that is lost ----


def test_a_stripe_that_no_donor_keeps_any_more_ends_the_heal_at_once(state: list[np.ndarray]) -> None:
    began_s = patience.machine_s()
    with donors(state, 2, of=3) as keepers, joiner(*keepers, ("c", "127.0.0.1:1")) as fetcher:
        wanted = r"no donor is left that keeps 4 of 12 chunks, from chunk 8 on \(c: .*refused"
        with pytest.raises(HealFailed, match=wanted):
            fetch_state(fetcher, 0, like(state))
        assert not any(each.failed for each in fetcher._donors[:2]), "they did nothing wrong"
    assert patience.machine_s() - began_s < 5


def test_donors_of_which_the_coordinator_left_out_one(state: list[np.ndarray]) -> None:
    """It has sent no digest: none has failed in this heal."""
    with donors(state, 2, of=3) as keepers, joiner(*keepers) as fetcher:
        wanted = r"keeps 4 of 12 chunks, from chunk 8 on \(none has failed in this heal\)"
        with pytest.raises(HealFailed, match=wanted):
            fetch_state(fetcher, 0, like(state))


def test_a_lost_stripe_is_no_loss_while_the_state_of_another_donor_is_live(state: list[np.ndarray]) -> None:
    with donors(state, 3, live=True) as keepers:
        donate(keepers[0])
        donate(keepers[2])
        keepers[2].store.release(HEAL)
        with joiner(*keepers) as fetcher:
            for each in keepers[:2]:
                each.before_chunks = lambda: until(
                    lambda: fetcher._donors[2].failed, "the third to be dropped"
                )
            assert same_bits(fetch_state(fetcher, 0, like(state)), state)
            assert "heal 5 is over" in fetcher._donors[2].failed


@pytest.mark.parametrize("sent", [0, 1, 3, 4])
def test_a_donor_dies_before_within_or_after_its_stripe(sent: int, state: list[np.ndarray]) -> None:
    """The stripe has 4 chunks. Once all of them are there, its donor is not missed."""
    blob = blob_of_leaves(state)
    others_may = threading.Event()

    def script(sock: socket.socket, ask: Callable[[], Request]) -> None:
        ask()
        manifest(sock, state, stripe=[2, 3], live=False)
        left = sent
        while left:
            request = ask()
            for chunk in range(request.first, request.first + min(request.count, left)):
                assert 8 <= chunk < 12
                send_chunk(sock, blob, chunk)
                left -= 1
        others_may.set()
        sock.shutdown(socket.SHUT_RDWR)

    with donors(state, 2, of=3) as keepers, hostile("dies", script) as third:
        for each in keepers:
            each.before_chunks = lambda: others_may.wait(LONG_S)
        with joiner(*keepers, third) as fetcher:
            if sent == 4:
                assert same_bits(fetch_state(fetcher, 0, like(state)), state)
            else:
                with pytest.raises(
                    HealFailed, match=rf"keeps {4 - sent} of 12 chunks, from chunk {8 + sent} on \(dies: "
                ):
                    fetch_state(fetcher, 0, like(state))


def test_what_was_lost_is_found_again_at_a_newer_step(state: list[np.ndarray]) -> None:
    """As the coordinator does it: a heal that failed begins again, and now each donor keeps all."""
    newer = [leaf + 1 for leaf in state]
    with donors(state, 2, of=3) as keepers:
        with joiner(*keepers) as fetcher, pytest.raises(HealFailed, match="keeps 4 of 12 chunks"):
            fetch_state(fetcher, 0, like(state))
        for each in keepers:
            each.store.release(HEAL)
            each.store.publish(1, newer)
            each.store.pin(HEAL + 1, 1)
            each.store.before_donation()
        with joiner(*keepers, heal_id=HEAL + 1) as fetcher:
            assert same_bits(fetch_state(fetcher, 1, like(state)), newer)
        assert not keepers[0].store._log


# ---- a state that is donated while it is fetched ----


def test_what_is_asked_for_too_late_is_fetched_from_its_keeper(state: list[np.ndarray]) -> None:
    """One donor is quick, and asked for the other's stripe; then it makes a step."""
    quick_is_done, slow_may = threading.Event(), threading.Event()
    with donors(state, 2, live=True) as (quick, slow):
        donate(slow)

        def before() -> None:
            if quick.served[Kind.STATE] >= LEAVES // 2 and not quick_is_done.is_set():
                donate(quick)
                quick_is_done.set()
                slow_may.set()

        quick.before_chunks = before
        slow.before_chunks = lambda: slow_may.wait(LONG_S)
        with joiner(quick, slow) as fetcher:
            assert same_bits(fetch_state(fetcher, 0, like(state)), state)
            assert quick_is_done.is_set()
            assert not any(each.failed for each in fetcher._donors)


def test_a_slow_donor_is_helped_by_one_whose_state_is_live(
    state: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_stripes, "_STALL_S", patience.stretched(0.3))
    asked, over = threading.Event(), threading.Event()
    with donors(state, 2, live=True) as (quick, slow):
        quick.before_chunks = lambda: asked.wait(LONG_S)
        slow.before_chunks = lambda: asked.set() or over.wait(LONG_S)
        with joiner(quick, slow) as fetcher:
            assert same_bits(fetch_state(fetcher, 0, like(state)), state)
            assert "it sent nothing for" in fetcher._donors[1].failed
            over.set()


def test_a_donor_that_alone_keeps_its_stripe_has_time_for_a_large_leaf(
    state: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are idle, and could not take over."""
    stall_s = patience.stretched(0.3)  # each donor must report its stripe within it
    monkeypatch.setattr(_stripes, "_STALL_S", stall_s)
    with donors(state, 2) as (quick, slow):
        slow.before_chunks = lambda: time.sleep(2 * stall_s)  # the wait itself
        with joiner(quick, slow) as fetcher:
            assert same_bits(fetch_state(fetcher, 0, like(state)), state)
            assert not any(each.failed for each in fetcher._donors)


def test_a_donor_that_stands_still_with_its_stripe_ends_the_heal_in_half_the_time(
    state: list[np.ndarray],
) -> None:
    over = threading.Event()
    with donors(state, 2) as (quick, slow):
        slow.before_chunks = lambda: over.wait(LONG_S)
        with joiner(quick, slow, timeout_s=patience.stretched(2.0)) as fetcher:
            with pytest.raises(
                HealFailed, match=r"that keeps 6 of 12 chunks, from chunk 6 on .*it sent nothing for"
            ):
                fetch_state(fetcher, 0, like(state))
            over.set()


def test_a_donor_that_never_says_what_it_keeps_is_not_waited_for_long(
    state: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_stripes, "_STALL_S", patience.stretched(0.5))
    over = threading.Event()

    def script(_: socket.socket, ask: Callable[[], Request]) -> None:
        ask()
        over.wait(LONG_S)

    with donors(state, 2, of=3) as keepers, hostile("mute", script) as mute:
        with joiner(*keepers, mute) as fetcher:
            with pytest.raises(
                HealFailed, match=r"that keeps 4 of 12 chunks, from chunk 8 on \(mute: no answer yet\)"
            ):
                fetch_state(fetcher, 0, like(state))
            over.set()


def test_a_donor_that_says_late_what_it_keeps_is_waited_for(
    state: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as other donors send: they do, until it has spoken."""
    late = threading.Event()
    with donors(state, 3) as (a, b, c):
        keeps = c.store.keeps

        def spoken_late(heal_id: int, span: Span | None = None, *, deadline_s: float) -> tuple[Stripe, bool]:
            assert late.wait(LONG_S)
            return keeps(heal_id, span, deadline_s=deadline_s)

        monkeypatch.setattr(c.store, "keeps", spoken_late)
        b.before_chunks = lambda: late.set() if b.served[Kind.STATE] else None
        with joiner(a, b, c) as fetcher:
            assert same_bits(fetch_state(fetcher, 0, like(state)), state)
            assert not any(each.failed for each in fetcher._donors)


def test_steps_beside_the_fetch_at_any_moment() -> None:
    """Real arrays that are really donated, by all donors, at every possible chunk."""
    increase = jax.jit(lambda xs: [x + 1 for x in xs], donate_argnums=0)
    wanted = [values((MB,), "uint8", number) for number in range(LEAVES)]
    for moment in range(1, LEAVES + 2, 3):
        leaves = [[own(leaf) for leaf in wanted] for _ in range(2)]
        with donor("a", leaves[0]) as a, donor("b", leaves[1]) as b:
            asked: list[int] = []
            lock = threading.Lock()

            def before(
                both: tuple[Donor, Donor] = (a, b),
                leaves: list[list[jax.Array]] = leaves,
                asked: list[int] = asked,
                lock: threading.Lock = lock,
                moment: int = moment,
            ) -> None:
                with lock:
                    asked.append(1)
                    if len(asked) != moment:
                        return
                    for each, mine in zip(both, leaves, strict=True):
                        each.store.before_donation()
                        each.store.publish(1, jax.block_until_ready(increase(mine)))

            for number, each in enumerate((a, b)):
                each.store.pin(HEAL, 0, stripe=Stripe(number, 2))
                each.before_chunks = before
            with joiner(a, b) as fetcher:
                assert same_bits(fetch_state(fetcher, 0, like(wanted)), wanted)
                assert not any(each.failed for each in fetcher._donors)


# ---- two joiners ----


def test_two_joiners_with_other_divisions_at_once(state: list[np.ndarray]) -> None:
    with donor("a", state) as a, donor("b", state) as b, donor("c", state) as c:
        for number, one in enumerate((a, b)):
            one.store.pin(1, 0, stripe=Stripe(number, 2))
        for number, one in enumerate((c, b, a)):
            one.store.pin(2, 0, stripe=Stripe(number, 3))
        for one in (a, b, c):
            donate(one)

        def heal(heal_id: int, *keepers: Donor) -> bool:
            with joiner(*keepers, heal_id=heal_id, group=f"joiner-{heal_id}") as fetcher:
                return same_bits(fetch_state(fetcher, 0, like(state)), state)

        results = [in_thread(lambda: heal(1, a, b)), in_thread(lambda: heal(2, a, b, c))]
        assert all(result() for result in results)
        for one in (a, b, c):
            until(lambda one=one: not one.store._snapshots, "the donors to let go of the state")


def test_means_are_whole_at_each_donor(state: list[np.ndarray]) -> None:
    with donors(state, 3) as keepers, joiner(*keepers) as fetcher:
        fetch_state(fetcher, 0, like(state))
        for each in keepers[1:]:
            each.store.release(HEAL)
        means = [np.zeros(3, np.float32)]
        assert same_bits(fetcher.means(0, specs_of(means), cancel=Abort()), means)


# ---- donors that lie ----


def test_a_donor_that_does_not_keep_its_own_stripe_is_dropped(state: list[np.ndarray]) -> None:
    lied = threading.Event()

    def script(sock: socket.socket, ask: Callable[[], Request]) -> None:
        ask()
        manifest(sock, state, stripe=[0, 2], live=True)
        while True:
            ask()
            send_text(sock, Status.NOT_KEPT, "it is not of the stripe")
            lied.set()

    with donor("good", state) as good, hostile("liar", script) as liar, joiner(good, liar) as fetcher:
        good.before_chunks = lambda: lied.wait(LONG_S)
        good.store.pin(HEAL, 0)
        donate(good)
        assert same_bits(fetch_state(fetcher, 0, like(state)), state)
        assert "does not keep chunk" in fetcher._donors[1].failed


@pytest.mark.parametrize("stripe", [[2, 2], [-1, 2], [0, 0], [1], [0, 1, 2], ["x", 2], None, 7, {}], ids=str)
def test_a_manifest_of_a_stripe_that_is_none(stripe: object, state: list[np.ndarray]) -> None:
    def script(sock: socket.socket, ask: Callable[[], Request]) -> None:
        ask()
        manifest(sock, state, stripe=stripe)
        ask()

    with hostile("odd", script) as odd, joiner(odd) as fetcher:
        with pytest.raises(HealFailed, match=r"odd: its manifest (cannot be read|names stripe)"):
            fetch_state(fetcher, 0, like(state))


def test_a_division_that_differs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = [values((700,), "uint8"), values((MB,), "uint8", 1)]
    with donor("other", odd) as other:
        other.store.pin(HEAL, 0, stripe=WHOLE)
        assert other.store.state(HEAL, deadline_s=0.0)[1].layout.chunks == 2
        monkeypatch.setattr(_blob, "UNDIVIDED_BYTES", 4 * MB)
        with joiner(other) as fetcher:
            with pytest.raises(
                HealFailed, match="other: it sent chunk 0 with 704 bytes instead of chunk 0 with"
            ):
                fetch_state(fetcher, 0, like(odd))
