"""Batches that worker threads compute ahead: the same ones, errors where they are asked for, and little memory."""

import sys
import threading
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
import pytest

from jaxft._base import _calls, _room
from jaxft.data import Batches, Prefetch, _prefetch
from jaxft.data._prefetch import Workers
from tests import patience
from tests.shortages import no_thread_at_first, no_threads

DATA = Batches(np.arange(64), shards=2, samples_per_shard=4, seed=1)


class Recorded:
    """A batch function that records its calls and their threads, and waits where the test asks for it."""

    shards = 2

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, bool]] = []
        self.gates: dict[tuple[int, int], threading.Event] = {}
        self.fails: set[tuple[int, int]] = set()

    def __call__(self, step: int, shard: int) -> Any:
        ahead = threading.current_thread() is not threading.main_thread()
        if ahead and (gate := self.gates.get((step, shard))) is not None:
            assert gate.wait(patience.FAR_S)
        self.calls.append((step, shard, ahead))
        _calls.got_on()
        if (step, shard) in self.fails:
            raise OSError(f"cannot read step {step}")
        return DATA(step, shard)

    def until(self, step: int, shard: int) -> None:
        """Wait until a worker has computed a batch."""
        patience.until(lambda: (step, shard, True) in self.calls, f"step {step}, shard {shard}")


def test_the_batches_are_the_same_and_computed_ahead() -> None:
    recorded = Recorded()
    batches = Prefetch(recorded)
    assert batches.shards == 2
    for step in range(6):
        for shard in (0, 1):
            assert batches(step, shard).index.tolist() == DATA(step, shard).index.tolist()
            recorded.until(step + 1, shard)
            recorded.until(step + 2, shard)
    assert [call for call in recorded.calls if not call[2]] == [(0, 0, False), (0, 1, False)]


def asked(batches: Any, step: int) -> Any:
    """A batch that a worker has computed, if it was foreseen."""
    patience.until(lambda: all(future.done() for _, future in batches._futures.values()), "the workers")
    return batches(step, 0)


def test_it_takes_the_place_of_batches_in_a_loop() -> None:
    for batches in (DATA, DATA.samples_only()):
        ahead = Prefetch(batches)
        assert (ahead.shards, ahead.steps_per_epoch, ahead.fingerprint) == (2, 8, DATA.fingerprint)
    with pytest.raises(AttributeError, match="steps_per_epoch"):
        _ = Prefetch(lambda step, _shard: step).steps_per_epoch


def test_a_worker_has_the_settings_and_the_mesh_of_the_loop() -> None:
    """They are JAX's for each thread: without them the bits depend on which batches were foreseen."""
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    found: list[threading.Thread] = []

    def batch_for(step: int, _shard: int) -> Any:
        found.append(threading.current_thread())
        values = jax.random.normal(jax.random.key(step), (4,), dtype=float)
        return jax.device_put(values, jax.sharding.PartitionSpec("rows"))

    batches = Prefetch(batch_for)
    with jax.enable_x64(True), jax.default_prng_impl("rbg"), jax.set_mesh(mesh):
        foreseen = [asked(batches, step) for step in range(3)]
        expected = [batch_for(step, 0) for step in range(3)]
        assert batches(3, 0).dtype == np.float64
    assert found[0] is threading.main_thread()
    assert len(set(found)) == 2
    for one, other in zip(foreseen, expected, strict=True):
        assert (one.dtype, one.sharding) == (np.float64, other.sharding)
        np.testing.assert_array_equal(one, other)
    with jax.set_mesh(mesh):
        assert asked(batches, 4).dtype == np.float32, "foreseen in another context"
        assert asked(batches, 5).dtype == np.float32


def test_what_was_not_foreseen_is_computed_at_once() -> None:
    recorded = Recorded()
    batches = Prefetch(recorded, ahead=1)
    recorded.gates[1, 0] = threading.Event()
    batches(0, 0)
    assert batches(40, 1).index.tolist() == DATA(40, 1).index.tolist()
    assert (40, 1, False) in recorded.calls, "also while the worker is busy"
    recorded.gates[1, 0].set()
    recorded.until(41, 1)


def test_asked_for_again_it_is_computed_again_so_that_what_is_impure_shows() -> None:
    recorded = Recorded()
    batches = Prefetch(recorded)
    batches(0, 0)
    recorded.until(1, 0)
    batches(1, 0)
    batches(1, 0)
    assert (1, 0, False) in recorded.calls


def test_an_exception_comes_where_its_batch_is_asked_for_and_nowhere_else() -> None:
    recorded = Recorded()
    recorded.fails = {(1, 0), (1, 1)}
    batches = Prefetch(recorded)
    batches(0, 0)
    recorded.until(2, 0)
    with pytest.raises(OSError, match="cannot read step 1"):
        batches(1, 0)
    recorded.fails.clear()
    assert batches(1, 0).index.tolist() == DATA(1, 0).index.tolist(), "the next call reads it again"
    assert batches(5, 1).index.tolist() == DATA(5, 1).index.tolist()


def test_a_moment_without_a_thread_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = no_thread_at_first(monkeypatch)
    assert Workers(1).submit(lambda: 5).result(patience.FAR_S) == 5
    assert "jaxft-data" in refused


def test_without_a_thread_for_long_a_program_still_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_room, "TIMEOUT_S", 0.0)
    with no_threads(), pytest.raises(RuntimeError, match=r"can't start new thread, for .*pids\.max") as kept:
        Workers(1).submit(lambda: 5)
    assert kept.tb is not None, "it holds the thread that was not started"
    assert all(thread.ident is not None for thread in _prefetch._threads)


def test_a_long_wait_says_for_what(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("jaxft_protocol.values.SLOW_WAIT_S", 0.01)
    recorded = Recorded()
    gate = recorded.gates[1, 0] = threading.Event()
    batches = Prefetch(recorded)
    begun = threading.Event()
    inner = recorded.__call__
    batches._batch_for = lambda step, shard: (begun.set() if step == 1 else None, inner(step, shard))[1]
    with caplog.at_level("INFO", "jaxft"):
        batches(0, 0)
        assert begun.wait(patience.FAR_S)
        threading.Thread(
            target=lambda: (patience.until(lambda: caplog.records, "the word"), gate.set()), daemon=True
        ).start()
        batches(1, 0)
    assert "for a worker to compute the batch of step 1, shard 0" in caplog.records[0].message


def test_a_batch_that_comes_just_after_a_wait_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    late: Future[str] = Future()
    monkeypatch.setattr("jaxft_protocol.values.SLOW_WAIT_S", 0.01)
    monkeypatch.setattr(_prefetch._log, "info", lambda *_: late.set_result("the batch"))
    assert _prefetch._result(late, 1, 0) == "the batch"


def test_what_others_compute_is_dropped() -> None:
    recorded = Recorded()
    batches = Prefetch(recorded, ahead=2)
    for step in range(20):
        batches(step, step % 2)
    assert len(batches._futures) <= 6


def test_progress_of_the_worker_counts_for_the_step() -> None:
    moves: list[str] = []
    recorded = Recorded()
    batches = Prefetch(recorded)
    with _calls.reporting(lambda: moves.append(threading.current_thread().name)):
        batches(0, 0)
        recorded.until(1, 0)
    patience.until(lambda: any(name.startswith("jaxft-data") for name in moves), "the worker's progress")
    assert moves[0] == "MainThread"


ENDS = """
import threading
import numpy as np
from jaxft.data import Prefetch, _prefetch

_prefetch.LEAVE_S = {leave_s}
begun = threading.Event()

def batch_for(step, shard):
    print("computes step", step, flush=True)
    if step == 1:
        begun.set()
        {runs}
    return np.zeros(1)

batches = Prefetch(batch_for, ahead=3)
batches(0, 0)
begun.wait()
{last}
print("the program ends", flush=True)
"""


@pytest.mark.parametrize(
    ("runs", "leave_s", "last"),
    [("_prefetch._leaving.wait()", patience.FAR_S, ""), ("threading.Event().wait()", 0.01, "del batches")],
    ids=["slow", "hangs"],
)
def test_a_program_ends_without_what_no_worker_has_begun(runs: str, leave_s: float, last: str) -> None:
    program = ENDS.format(runs=runs, leave_s=leave_s, last=last)
    ended = patience.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "computes step 0\ncomputes step 1\nthe program ends\n"
    assert ("still computes a batch" in ended.stderr) == (leave_s < 1)


def test_threads_end_with_what_they_compute_for() -> None:
    batches = Prefetch(DATA)
    before = set(threading.enumerate())
    batches(0, 0)
    [thread] = set(threading.enumerate()) - before
    del batches
    patience.join(thread)
