"""A joiner runs `compute` once while its donors send, so that its first step is not slower than others."""

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft._arrays import _memory
from jaxft._arrays._memory import result_regions
from jaxft._heal._store import StateStore
from jaxft._programs._build import Shared, cut_programs
from jaxft._programs._programs import Programs
from jaxft._programs._trace import joined
from jaxft._ranks._ranks import OneRank
from jaxft._replica._call import Call
from jaxft._replica._held_state import HeldState
from jaxft._replica._rehearsal import Rehearsal

STEP = 7
SIZE = 1 << 19  # a large enough contribution for its memory to be kept


def grad_fn(state: Any, batch: jax.Array) -> tuple[Any, Any]:
    return [batch * leaf for leaf in state], None


def printing(state: Any, batch: jax.Array) -> tuple[Any, Any]:
    jax.debug.print("{}", batch)
    return grad_fn(state, batch)


def update_fn(state: Any, mean: Any, _local: Any) -> tuple[Any, Any]:
    return [leaf - change for leaf, change in zip(state, mean, strict=True)], {}


def torn(_step: int, _shard: int) -> Any:
    raise OSError("the disk is gone")


class Joiner:
    """A group that came with the state of `STEP`, and heals."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, overlap: int = 1, prints: bool = False) -> None:
        _memory._idle.clear()  # of other tests: the first block that is kept is the next to be taken
        state = [jnp.ones(SIZE, jnp.float32), jnp.ones(SIZE, jnp.float32)]
        self.asked: list[tuple[int, int]] = []
        self.ran: list[str] = []
        grads = printing if prints else grad_fn
        self.programs = cut_programs(
            joined(grads, update_fn), state, self.batch_for(0, 0), Shared(overlap=overlap)
        )
        self.held = HeldState(cast(Any, None), StateStore(), OneRank(), STEP, digest_every=1)
        self.held.leaves = self.programs.state_leaves(state)
        self.held.first_step = STEP
        session = SimpleNamespace(got_on=lambda: None)
        self.rehearsal = Rehearsal(cast(Any, session), OneRank(), self.held)
        self.asked.clear()
        for name in ("compute", "compute_next"):
            monkeypatch.setattr(Programs, name, self.noted(name, getattr(Programs, name)))

    def batch_for(self, step: int, shard: int) -> jax.Array:
        self.asked.append((step, shard))
        return jnp.float32(2.0)

    def noted(self, name: str, run: Any) -> Any:
        def note(programs: Programs, state: Sequence[jax.Array], *rest: Any) -> Any:
            self.ran.append(name)
            assert [leaf.shape for leaf in state] == [(SIZE,), (SIZE,)]
            return run(programs, state, *rest)

        return note

    def rehearse(self) -> None:
        self.rehearsal.start(self.call)

    @property
    def call(self) -> Call:
        return Call(self.programs, self.batch_for, 2, "allow")


def test_it_computes_once_on_the_batch_that_it_was_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    joiner = Joiner(monkeypatch)
    joiner.rehearse()
    assert joiner.asked == [(STEP, 0)]
    assert joiner.ran == ["compute"]
    assert not any(leaf.is_deleted() for leaf in joiner.held.leaves), "the state is still held"


def test_the_memory_for_the_results_was_written_before_and_is_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joiner = Joiner(monkeypatch)
    layout = joiner.programs.stages.layout
    (used,) = result_regions(layout)
    used.fill(3.0)
    address = used.ctypes.data
    del used  # kept for the next of this size
    joiner.rehearsal.touch_results(joiner.call)
    (result,) = result_regions(layout)
    assert result.ctypes.data == address
    assert not np.any(result), "it has written to all of it"


def test_a_group_that_has_taken_a_step_does_not_rehearse(monkeypatch: pytest.MonkeyPatch) -> None:
    joiner = Joiner(monkeypatch)
    joiner.held.made = True
    (used,) = result_regions(joiner.programs.stages.layout)
    used.fill(3.0)
    del used
    joiner.rehearse()
    joiner.rehearsal.touch_results(joiner.call)
    assert (joiner.asked, joiner.ran) == ([], [])
    (result,) = result_regions(joiner.programs.stages.layout)
    assert np.all(result == 3.0), "it is left as it was"


def test_it_does_so_once_also_if_the_heal_fails_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    joiner = Joiner(monkeypatch)
    joiner.rehearse()
    joiner.rehearse()
    assert joiner.ran == ["compute"]


def test_an_error_of_the_batch_function_does_not_end_the_heal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    joiner = Joiner(monkeypatch)
    joiner.batch_for = torn  # pyright: ignore[reportAttributeAccessIssue]
    with caplog.at_level(logging.WARNING, "jaxft"):
        joiner.rehearse()
    assert "could not be rehearsed" in caplog.text
    assert "the disk is gone" in caplog.text
    assert joiner.ran == []


def test_in_a_group_of_several_processes_an_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may have started, and would wait for this process in a collective."""
    joiner = Joiner(monkeypatch)
    session, ranks = SimpleNamespace(got_on=lambda: None), SimpleNamespace(size=2)
    joiner.rehearsal = Rehearsal(cast(Any, session), cast(Any, ranks), joiner.held)
    joiner.batch_for = torn  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(OSError, match="the disk is gone"):
        joiner.rehearse()
