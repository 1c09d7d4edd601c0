"""A donor keeps the means of a step for joiners, and has memory for the next ones ready before an exchange."""

import itertools
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft._arrays import _memory
from jaxft._arrays._memory import leaves_of, not_idle, result_regions
from jaxft._heal._store import StateStore
from jaxft._programs._build import cut_programs
from jaxft._programs._trace import joined
from jaxft._ranks._ranks import OneRank
from jaxft._replica import _held_state
from jaxft._replica._held_state import HeldState
from tests import patience

HEAL = 1
# Elements of float32: 2 MB, enough for their memory to be kept. Each donor has more than the one before: memory of
# another test, which JAX may let go of at any moment, has another size.
SIZES = itertools.count(1 << 19, 1024)


def grad_fn(state: Any, batch: jax.Array) -> tuple[Any, Any]:
    return [batch * leaf for leaf in state], None


def update_fn(state: Any, mean: Any, _local: Any) -> tuple[Any, Any]:
    return [leaf - change for leaf, change in zip(state, mean, strict=True)], {}


class Donor:
    """A group that takes steps by itself, with the means of an exchange."""

    def __init__(self) -> None:
        state = [jnp.ones(next(SIZES), jnp.float32)]
        self.programs = cut_programs(joined(grad_fn, update_fn), state, jnp.float32(2.0))
        self.store = StateStore()
        session = SimpleNamespace(wants_digest=lambda _step: False)
        self.held = HeldState(cast(Any, session), self.store, OneRank(), 0, digest_every=1000)
        self.held.leaves = self.programs.state_leaves(state)
        self.held.publish()
        self.sizes = [
            size for layout in self.programs.stages.layouts_with(1) for size in _memory.result_bytes(layout)
        ]

    def step(self) -> list[int]:
        """Take a step; return where its means lay."""
        made, _ = self.programs.compute(self.held.current, jnp.float32(2.0))
        jax.block_until_ready(made)  # JAX lets go here of the last step's inputs
        del made
        regions = result_regions(self.programs.stages.layout)
        for region in regions:
            region[:] = self.held.step
        means = leaves_of(self.programs.stages.layout, regions)
        self.held.advance(self.programs, means, None, skip=False, done=lambda: None)
        return [region.ctypes.data for region in regions]

    def touched(self) -> None:
        """Wait until memory is ready."""
        thread = self.held._touching
        assert thread is not None
        patience.join(thread)


@pytest.fixture
def donor() -> Donor:
    return Donor()


def test_without_a_joiner_each_step_takes_the_same_memory(donor: Donor) -> None:
    places = [donor.step() for _ in range(6)]
    assert len(set(map(tuple, places))) <= 2, "JAX may let go of a step's inputs only later"
    assert donor.held._touching is None


def test_the_next_results_take_memory_that_is_ready(donor: Donor) -> None:
    donor.step()
    donor.store.pin(HEAL, 1)
    kept = donor.step()
    donor.touched()
    assert not_idle(donor.sizes) == []
    ready = [np.frombuffer(idle.block, np.uint8).ctypes.data for idle in tuple(_memory._idle)]
    (address,) = donor.step()
    assert address in ready
    assert [address] != kept, "the joiner still needs these"
    donor.touched()
    assert not_idle(donor.sizes) == [], "and so for each step that is kept"


def test_the_means_that_are_kept_are_not_written_to(donor: Donor) -> None:
    donor.store.pin(HEAL, 0)
    for _ in range(4):
        donor.step()
        donor.touched()
    for step in range(4):
        means = donor.store.means(HEAL, step, deadline_s=0.0)
        values = np.frombuffer(means.sources[0].flat(), np.float32)
        assert np.all(values == step)


def test_where_memory_is_short_only_an_exchange_takes_more(
    donor: Donor, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(donor.sizes)
    free_bytes = 2 * needed - 1
    monkeypatch.setattr(_held_state, "available_bytes", lambda: free_bytes)
    donor.store.pin(HEAL, 0)
    donor.step()
    assert donor.held._touching is None
    free_bytes = 2 * needed
    donor.step()
    donor.touched()
    assert donor.held.step == 2


@pytest.mark.parametrize("error", [MemoryError("no"), OSError(12, "Cannot allocate memory")])
def test_without_memory_the_thread_says_so_and_training_goes_on(
    error: Exception, donor: Donor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def touch(_sizes: Sequence[int]) -> None:
        raise error

    monkeypatch.setattr(_held_state, "touch_ahead", touch)
    donor.store.pin(HEAL, 0)
    with caplog.at_level(logging.WARNING, "jaxft"):
        donor.step()
        donor.touched()
    assert "There is no memory for the results of one more step, 0.00 GB" in caplog.text
    donor.step()
    assert donor.held.step == 2
