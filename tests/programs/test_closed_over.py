"""Large arrays that a step closes over are inputs of its programs, and belong to no state."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from step_models import bits

import jaxft
from jaxft._errors import ConfigurationError
from jaxft._programs import _closed_over, _warnings
from jaxft._programs._build import Shared, cut_programs
from jaxft._programs._closed_over import LARGE_BYTES
from jaxft._programs._fingerprint import compared
from jaxft._programs._programs import Programs

pytestmark = pytest.mark.unoptimized

KEY = "closed-over arrays"
SHARDS = 2
WIDTH = 512  # WIDTH * WIDTH float32 are LARGE_BYTES
OPTIMIZER = optax.sgd(1e-2, momentum=0.9)


def frozen(seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((WIDTH, WIDTH)) / 20).astype(dtype)


def adapters() -> Any:
    down = np.random.default_rng(1).standard_normal((WIDTH, 2)).astype(np.float32)
    weights = {"down": jnp.asarray(down), "up": jnp.zeros((2, WIDTH))}
    return weights, OPTIMIZER.init(weights)


def batch_for(step: int, shard: int, rows: int = 4) -> np.ndarray:
    return np.random.default_rng([step, shard]).standard_normal((rows, WIDTH)).astype(np.float32)


def tuned(base: Any, weights: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(batch @ base.astype(jnp.float32) + batch @ weights["down"] @ weights["up"])
    return jnp.mean((hidden - batch) ** 2)


def step_over(base: Any) -> Callable[[Any, Any], Any]:
    """A step that trains adapters of frozen weights, which `apply` reads, too."""

    def train_step(state: Any, batch: Any) -> Any:
        weights, opt_state = state
        loss, grads = jaxft.pmean(jax.value_and_grad(lambda weights: tuned(base, weights, batch))(weights))
        updates, opt_state = OPTIMIZER.update(grads, opt_state)
        weights = optax.apply_updates(weights, updates)
        return (weights, opt_state), {"loss": loss, "norm": jnp.sum(jnp.square(base).astype(jnp.float32))}

    return train_step


def run(train_step: Any, state: Any, steps: int = 3, **options: Any) -> tuple[Any, Any]:
    step = jaxft.fault_tolerant(train_step, None, shards=SHARDS, **options)
    metrics: Any = None
    for _ in range(steps):
        state, metrics = step(state, batch_for)
    return state, metrics


def built(base: Any, shared: Shared | None = None) -> Programs:
    return cut_programs(step_over(base), adapters(), batch_for(0, 0), shared)


def in_state(state: Any, batch: Any) -> Any:
    """The same step with the frozen weights in the state."""
    base, rest = state
    rest, metrics = step_over(base)(rest, batch)
    return (base, rest), metrics


@pytest.mark.unoptimized(False)
def test_a_large_array_is_no_constant_of_the_programs() -> None:
    programs = built(jnp.asarray(frozen()))
    for program in (programs.executables.computes[0], programs.executables.apply):
        memory: Any = program.memory_analysis()
        assert memory.argument_size_in_bytes >= LARGE_BYTES
        assert "constant({" not in program.compiled.as_text()


def test_a_small_array_is_a_constant() -> None:
    small = jnp.asarray(frozen()[:, : WIDTH // 2])
    programs = cut_programs(
        lambda state, batch: (state - jaxft.pmean(jnp.mean(batch @ small)), {}),
        jnp.zeros(()),
        batch_for(0, 0),
    )
    assert programs.cut.stages[0].compute.consts != ()
    assert programs.cut.stages[0].compute.closed_over == ()
    assert programs.fingerprint[KEY] == ""
    assert KEY not in compared(programs.fingerprint, other_meshes=False)


@pytest.mark.unoptimized(False)
@pytest.mark.parametrize("base", [frozen(), jnp.asarray(frozen())], ids=["numpy", "jax"])
def test_it_has_the_bits_of_one_that_the_state_holds(base: Any) -> None:
    state, metrics = run(step_over(base), adapters())
    (_, expected), wanted = run(in_state, (jnp.asarray(base), adapters()))
    assert bits((state, metrics)) == bits((expected, wanted))


@pytest.mark.unoptimized(False)
def test_frozen_weights_of_four_bits() -> None:
    base = jnp.asarray(np.tile(frozen() * 20, (1, 4)).reshape(4, WIDTH, WIDTH)).astype(jnp.int4)

    def over(base: Any) -> Any:
        return lambda state, batch: step_over(base[1])(state, batch)

    def held(state: Any, batch: Any) -> Any:
        rest, metrics = over(state[0])(state[1], batch)
        return (state[0], rest), metrics

    state, metrics = run(over(base), adapters())
    (_, expected), wanted = run(held, (base, adapters()))
    assert bits((state, metrics)) == bits((expected, wanted))


def test_its_values_are_compared_and_its_placement_is_not() -> None:
    base = frozen()
    one = built(jnp.asarray(base)).fingerprint
    assert one[KEY].endswith(f"(1 array, {LARGE_BYTES} bytes)")
    assert built(base).fingerprint[KEY] == one[KEY]
    changed = base.copy()
    changed[-1, -1] += 1
    other = built(jnp.asarray(changed)).fingerprint
    assert {key for key in one if one[key] != other[key]} == {KEY}
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
    spread = built(jax.device_put(base, NamedSharding(mesh, P(None, "fsdp")))).fingerprint
    assert spread[KEY] == one[KEY]
    assert compared(one, other_meshes=True)[KEY] == one[KEY]


@pytest.mark.parametrize(
    ("placed", "axis_type"),
    [("the array", AxisType.Auto), pytest.param("both", AxisType.Explicit, marks=pytest.mark.long)],
)
def test_a_mesh_of_the_array_or_of_the_state(placed: str, axis_type: AxisType) -> None:
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(axis_type,))
    everywhere = NamedSharding(mesh, P())
    # Divided only with automatic axes: with explicit ones the author declares where a product lies.
    divided = NamedSharding(mesh, P(None, "fsdp") if axis_type is AxisType.Auto else P())
    base, state = jax.device_put(frozen(), divided), adapters()
    if placed == "both":
        state = jax.device_put(state, everywhere)
    state, metrics = run(step_over(base), state, 2)
    expected, wanted = run(step_over(jnp.asarray(frozen())), adapters(), 2)
    for mine, theirs in zip(
        jax.tree.leaves((state, metrics)), jax.tree.leaves((expected, wanted)), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-5)
    assert all(leaf.sharding.device_set == everywhere.device_set for leaf in jax.tree.leaves(state))


def lies(where: str, memory: str | None = None) -> Sharding:
    """A placement of an array or of the state, not divided."""
    first, *others = jax.devices()[:4]
    devices = {
        "one": [first],
        "another": others[:1],
        "all": [first, *others],
        "reversed": [*others[::-1], first],
    }
    if len(devices[where]) == 1:
        return SingleDeviceSharding(devices[where][0], memory_kind=memory)
    return NamedSharding(Mesh(np.array(devices[where]), ("fsdp",)), P(), memory_kind=memory)


@pytest.mark.parametrize("mine", ["another", "reversed"])
def test_an_array_that_lies_elsewhere_than_the_step_is_brought_there(mine: str) -> None:
    """Also if the program that reads it reads nothing that was placed."""
    base, home = jax.device_put(frozen(), lies(mine)), lies("all")

    def train_step(state: Any, batch: Any) -> Any:
        return state + jaxft.pmean(jnp.mean(jnp.abs(batch @ base))) + base[0, 0], {}

    state, _ = run(train_step, jax.device_put(jnp.ones(()), home), 2)
    assert state.sharding.device_set == home.device_set
    expected = np.float32(1)
    for number in range(2):
        means = [np.mean(np.abs(batch_for(number, shard) @ frozen())) for shard in range(SHARDS)]
        expected += np.mean(means) + frozen()[0, 0]
    np.testing.assert_allclose(state, expected, rtol=1e-4)


def test_a_numpy_array_that_changes_later_is_that_of_the_first_call() -> None:
    """At an address that JAX could use as it is."""
    memory = np.zeros(LARGE_BYTES + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    base = memory[begin : begin + LARGE_BYTES].view(np.float32).reshape(WIDTH, WIDTH)
    base[:] = frozen()

    def over(base: Any) -> Any:
        return lambda state, batch: (state + jaxft.pmean(jnp.mean(jnp.abs(batch @ base))) + base[0, 0], {})

    step = jaxft.fault_tolerant(over(base), None, shards=SHARDS)
    state, _ = step(jnp.ones(()), batch_for)
    base[:] = 0
    for _ in range(2):
        state, _ = step(state, batch_for)
    expected, _ = run(over(frozen()), jnp.ones(()))
    assert bits(state) == bits(expected)


@pytest.mark.unoptimized(False)
def test_one_that_a_nested_jit_closes_over_is_an_input() -> None:
    base = frozen()

    @jax.jit
    def inner(weights: Any, batch: Any) -> Any:
        return jax.jit(tuned)(base, weights, batch)

    def train_step(state: Any, batch: Any) -> Any:
        loss, grads = jaxft.pmean(jax.value_and_grad(jax.jit(lambda weights: inner(weights, batch)))(state))
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    state = adapters()[0]
    programs = cut_programs(train_step, state, batch_for(0, 0))
    assert programs.fingerprint[KEY].endswith(f"(1 array, {LARGE_BYTES} bytes)")
    memory: Any = programs.executables.computes[0].memory_analysis()
    assert memory.argument_size_in_bytes >= LARGE_BYTES
    assert "constant({" not in str(programs.executables.computes[0].compiled.as_text())


@pytest.mark.parametrize("where", ["another", "all"])
def test_what_the_memory_of_a_host_holds_is_brought_to_the_devices(where: str) -> None:
    base = jax.device_put(frozen(), lies("one", "pinned_host"))

    def train_step(state: Any, batch: Any) -> Any:
        near = jax.device_put(base, jax.memory.Space.Device)
        return state + jaxft.pmean(jnp.mean(jnp.abs(batch @ near))), {}

    state, _ = run(train_step, jax.device_put(jnp.ones(()), lies(where)), 1)
    means = [np.mean(np.abs(batch_for(0, shard) @ frozen())) for shard in range(SHARDS)]
    np.testing.assert_allclose(state, 1 + np.mean(means), rtol=1e-5)


def test_it_is_brought_to_the_devices_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By all programs, for batches of all shapes, and not in each step."""
    put: list[tuple[int, ...]] = []

    def device_put(array: Any, *where: Any) -> Any:
        put.append(array.shape)
        return jax.device_put(array, *where)

    monkeypatch.setattr(_closed_over, "jax", SimpleNamespace(**{**vars(jax), "device_put": device_put}))
    step = jaxft.fault_tolerant(step_over(frozen()), None, shards=SHARDS)
    state = step.join(adapters(), batch_for)
    for rows in (4, 8, 4):
        state, _ = step(state, lambda number, shard, rows=rows: batch_for(number, shard, rows))
    assert put == [(WIDTH, WIDTH)]


@pytest.mark.parametrize("when", ["before the first step", "between two steps"])
def test_one_that_was_deleted_is_refused(when: str) -> None:
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
    base = jax.device_put(frozen(), NamedSharding(mesh, P()))
    step = jaxft.fault_tolerant(step_over(base), None, shards=SHARDS)
    state = adapters()
    if when == "between two steps":
        state, _ = step(state, batch_for)
    base.delete()
    with pytest.raises(
        ConfigurationError, match=r"closes over an array, float32\[512, 512\], that was deleted"
    ):
        step(state, batch_for)


def test_a_state_that_is_also_closed_over_is_not_consumed() -> None:
    first = jnp.asarray(frozen())

    def train_step(state: Any, batch: Any) -> Any:
        grads = jaxft.pmean(jax.grad(lambda state: jnp.mean((batch @ state) ** 2))(state))
        return state - 0.1 * grads - 0.01 * (state - first), {}

    state, _ = run(train_step, first)
    assert not first.is_deleted()
    assert not np.array_equal(state, first)


@pytest.mark.parametrize(("frozen_mb", "trained_mb", "warned"), [(3, 1, True), (3, 4, False), (1, 1, False)])
def test_a_state_that_is_mostly_frozen_is_warned_of(
    frozen_mb: int,
    trained_mb: int,
    *,
    warned: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_warnings, "_MANY_BYTES", 2 << 20)

    def train_step(state: Any, batch: Any) -> Any:
        base, weights = state
        mean = jaxft.pmean(jnp.mean(batch) * base[0])
        return (base, weights - mean), {}

    state = jnp.ones(frozen_mb * 250_000), jnp.ones(trained_mb * 250_000)
    step = jaxft.fault_tolerant(train_step, None, shards=SHARDS)
    for _ in range(2):
        state, _ = step(state, batch_for)
    expected = (
        f"{frozen_mb} of the {frozen_mb + trained_mb} MB of the state (1 of 2 leaves) come back from the step"
    )
    assert [record.getMessage().count(expected) for record in caplog.records] == [1] * warned
