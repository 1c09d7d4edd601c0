"""A donor that trains on while a joiner heals from it: the same bits at the end, without a coordinator."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import step_models
from jaxft_protocol.messages import Stripe

import jaxft
from jaxft._arrays._digest import digest
from jaxft._heal import _blob
from jaxft._heal._server import HealServer
from jaxft._heal._store import StateStore
from jaxft._programs._build import cut_programs
from jaxft._programs._programs import Programs
from jaxft._transport._listener import Abort, Listener

from .donors import LONG_S, Donor, fetch_state, in_thread, joiner, mesh, until

SHAPE = (64, 48)
HEAL = 3


def train_step(state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], dict[str, Any]]:
    def loss_fn(w: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(batch @ w) ** 2)

    grads = jaxft.pmean(jax.grad(loss_fn)(state["w"]))
    key, noise = jax.random.split(state["key"])
    mu = 0.9 * state["mu"] + grads
    w = state["w"] - 0.1 * mu + 1e-3 * jax.random.uniform(noise)
    half = w.astype(jnp.bfloat16)
    return {"w": w, "mu": mu, "half": half, "key": key, "count": state["count"] + 1}, {}


def first_state(devices: int, seed: int = 0) -> dict[str, Any]:
    def put(array: np.ndarray) -> jax.Array:
        if devices == 1:
            return jnp.array(array, copy=True)
        where = jax.sharding.NamedSharding(mesh(devices), jax.sharding.PartitionSpec("x"))
        return jax.device_put(array, where)

    w = np.random.default_rng(seed).standard_normal(SHAPE, dtype=np.float32)
    return {
        "w": put(w),
        "mu": put(np.zeros(SHAPE, np.float32)),
        "half": put(w.astype("bfloat16")),
        "key": jax.random.key(seed),
        "count": jnp.zeros((), jnp.int32),
    }


def means_at(step: int) -> list[np.ndarray]:
    return [np.random.default_rng(1000 + step).standard_normal(SHAPE, dtype=np.float32)]


class Training:
    """A donor's training thread, using the store as the runner does. Each step waits to be let."""

    def __init__(self, store: StateStore, programs: Programs, state: dict[str, Any]) -> None:
        self.step = 0
        self.state = state
        self.let = threading.Semaphore(0)
        self.stopping = False
        self._store = store
        self._programs = programs
        store.publish(0, jax.tree.leaves(state))
        self.ended = in_thread(self._run)

    def _run(self) -> None:
        while self.let.acquire(timeout=LONG_S) and not self.stopping:
            means = means_at(self.step)
            self._store.log(self.step, means)
            self._store.before_donation()
            self.state, _ = step_models.apply(self._programs, self.state, means, None)
            leaves = jax.block_until_ready(jax.tree.leaves(self.state))
            self.step += 1
            self._store.publish(self.step, leaves)

    def run_to(self, step: int) -> None:
        for _ in range(step - self.step):
            self.let.release()
        until(lambda: self.step == step, f"the donor to reach step {step}")

    def end(self) -> None:
        self.stopping = True
        self.let.release()
        self.ended()


@contextmanager
def trainings(count: int, programs: Programs, devices: int) -> Iterator[list[tuple[Donor, Training]]]:
    made: list[tuple[Donor, Training]] = []
    listeners: list[Listener] = []
    try:
        for number in range(count):
            store = StateStore()
            serve = HealServer(store).serve
            listeners.append(
                Listener(host="127.0.0.1", job="job", group=f"group-{number}", incarnation=1, on_heal=serve)
            )
            donor = Donor(f"group-{number}", f"127.0.0.1:{listeners[-1].port}", store)
            made.append((donor, Training(store, programs, first_state(devices))))
        yield made
    finally:
        for _, training in made:
            training.end()
        for listener in listeners:
            listener.close()


def replayed(fetcher: Any, programs: Programs, state: Any, first: int, stop: int) -> Any:
    for step in range(first, stop):
        means = fetcher.means(step, programs.contribution, cancel=Abort())
        state, _ = step_models.apply(programs, state, means, None)
        jax.block_until_ready(state)
    return state


@pytest.fixture(scope="module")
def programs_for() -> Callable[[int], Programs]:
    made: dict[int, Programs] = {}

    def find(devices: int) -> Programs:
        if devices not in made:
            made[devices] = cut_programs(train_step, first_state(devices), np.ones((4, SHAPE[0]), np.float32))
        return made[devices]

    return find


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize(("donors", "stripes"), [(1, 1), (2, 1), (2, 2), (3, 3)])
def test_a_joiner_ends_with_the_bits_of_the_donors(
    donors: int,
    stripes: int,
    devices: int,
    programs_for: Callable[[int], Programs],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_blob, "UNDIVIDED_BYTES", 0)
    programs = programs_for(devices)
    with trainings(donors, programs, devices) as running:
        for number, (donor, training) in enumerate(running):
            training.run_to(3)
            donor.store.pin(HEAL, 3, stripe=Stripe(number % stripes, stripes))
            training.run_to(5)  # before the joiner comes
        with joiner(*(donor for donor, _ in running), heal_id=HEAL) as fetcher:
            ours = first_state(devices, seed=9)
            fetched = in_thread(lambda: fetch_state(fetcher, 3, jax.tree.leaves(ours)))
            for _, training in running:
                training.run_to(8)  # while it fetches
            state = jax.tree.unflatten(jax.tree.structure(ours), fetched())
            state = replayed(fetcher, programs, state, 3, 6)
            for _, training in running:
                training.run_to(10)
            state = replayed(fetcher, programs, state, 6, 10)
        for donor, training in running:
            donor.store.release(HEAL)
            assert not donor.store._log
            assert not donor.store._snapshots
            assert digest(state) == digest(training.state)
        assert state["count"] == 10
        # From here on it is a group like any other.
        more, _ = step_models.apply(programs, state, means_at(10), None)
        for _, training in running:
            training.run_to(11)
            assert digest(more) == digest(training.state)


def test_a_joiner_becomes_the_donor_of_the_next(programs_for: Callable[[int], Programs]) -> None:
    """Its state lies in the arena that it fetched into; a snapshot of that is as good."""
    programs = programs_for(1)
    tree = jax.tree.structure(first_state(1))
    like = jax.tree.leaves(first_state(1, seed=9))
    with trainings(1, programs, 1) as ((first, training),):
        first.store.pin(HEAL, 0)
        with joiner(first, heal_id=HEAL) as fetcher:
            state = jax.tree.unflatten(tree, fetch_state(fetcher, 0, like))
        store = StateStore()
        store.publish(0, jax.tree.leaves(state))
        store.pin(HEAL + 1, 0)
        listener = Listener(
            host="127.0.0.1", job="job", group="second", incarnation=1, on_heal=HealServer(store).serve
        )
        second = Donor("second", f"127.0.0.1:{listener.port}", store)
        for step in range(2):
            store.log(step, means_at(step))
            store.before_donation()
            state, _ = step_models.apply(programs, state, means_at(step), None)
            store.publish(step + 1, jax.block_until_ready(jax.tree.leaves(state)))
        with joiner(second, heal_id=HEAL + 1) as fetcher:
            third = jax.tree.unflatten(tree, fetch_state(fetcher, 0, like))
            third = replayed(fetcher, programs, third, 0, 2)
        listener.close()
        training.run_to(2)
        assert digest(third) == digest(state) == digest(training.state)


def assert_healed_over_one_step(
    step: Any, fresh: Callable[[], Any], ours: Any, means: list[np.ndarray]
) -> None:
    """A donor makes its first step; a joiner that holds `ours` fetches the state before, and makes it too."""
    programs = cut_programs(step, fresh(), np.ones((2, 8), np.float32))
    state = fresh()
    store = StateStore()
    store.publish(0, jax.tree.leaves(state))
    store.pin(HEAL, 0)
    store.log(0, means)
    store.before_donation()
    after, _ = step_models.apply(programs, state, means, None)
    store.publish(1, jax.block_until_ready(jax.tree.leaves(after)))
    listener = Listener(
        host="127.0.0.1", job="job", group="a", incarnation=1, on_heal=HealServer(store).serve
    )
    try:
        with joiner(Donor("a", f"127.0.0.1:{listener.port}", store), heal_id=HEAL) as fetcher:
            leaves = fetch_state(fetcher, 0, jax.tree.leaves(ours))
            healed = jax.tree.unflatten(jax.tree.structure(ours), leaves)
            healed = replayed(fetcher, programs, healed, 0, 1)
    finally:
        listener.close()
    assert digest(healed) == digest(after)
    assert jax.tree.map(lambda leaf: leaf.sharding, healed) == jax.tree.map(lambda leaf: leaf.sharding, after)


def test_a_first_state_of_numbers_and_numpy_arrays_is_healed_from() -> None:
    """A user's state at step 0 need not be of JAX; a donor must survive that a joiner asks for it."""

    def step(state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], dict[str, Any]]:
        grads = jaxft.pmean(jax.grad(lambda w: jnp.sum((batch @ w) ** 2))(state["w"]))
        return {"w": state["w"] - state["rate"] * grads, "rate": state["rate"] * 0.5, "n": state["n"] + 1}, {}

    def fresh(rate: float = 0.1, n: int = 0) -> dict[str, Any]:
        return {"w": np.ones(8, np.float32), "rate": rate, "n": n}

    assert_healed_over_one_step(step, fresh, fresh(0.9, 7), [np.full(8, 0.3, np.float32)])


def test_a_spread_state_with_a_free_scalar_is_replayed() -> None:
    """optax makes its count on no device in particular, while the parameters lie on a mesh."""

    def step(state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], dict[str, Any]]:
        grads = jaxft.pmean(jax.grad(lambda w: jnp.sum((batch @ w) ** 2))(state["w"]))
        return {"w": state["w"] - 0.1 * grads, "count": state["count"] + 1}, {}

    def fresh(value: float = 1.0) -> dict[str, Any]:
        where = jax.sharding.NamedSharding(mesh(4), jax.sharding.PartitionSpec("x"))
        w = jax.device_put(np.full((8, 4), value, np.float32), where)
        return {"w": w, "count": jnp.zeros((), jnp.int32)}

    assert_healed_over_one_step(step, fresh, fresh(2.0), [np.full((8, 4), 0.3, np.float32)])
