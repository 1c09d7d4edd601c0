"""Shardings within a group stay the same, step after step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import step_models
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from step_models import MuNuParams, bits, identity, mlp_adam, mostly_long

import jaxft
from jaxft._programs._build import cut_programs
from jaxft._programs._shardings import pins

pytestmark = pytest.mark.unoptimized

AXES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
# Each parameter of the MLP: sharded by columns and rows (TP), and over all devices (FSDP).
LAYOUT = {"w1": P("fsdp", "tp"), "b1": P("tp"), "w2": P("tp", None)}


def mesh_of(axes: str) -> Mesh:
    return jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(AXES[axes],) * 2)


def placed_state(mesh: Mesh) -> MuNuParams:
    state = mlp_adam().state()

    def place(params: Any) -> Any:
        return {name: jax.device_put(p, NamedSharding(mesh, LAYOUT[name])) for name, p in params.items()}

    return MuNuParams(place(state.mu), place(state.nu), place(state.params), state.count)


def on_mesh(mesh: Mesh, batch: Any) -> Any:
    return jax.device_put(batch, NamedSharding(mesh, P()))


def test_shardings_are_kept() -> None:
    mesh, model = mesh_of("auto"), mlp_adam()
    traces = 0

    def counted(state: Any, batch: Any) -> Any:
        nonlocal traces
        traces += 1
        return model.step(jaxft.pmean)(state, batch)

    step, plain = jaxft.fault_tolerant(counted, None), jax.jit(model.step(identity))
    state, expected = placed_state(mesh), placed_state(mesh)
    before = [leaf.sharding for leaf in jax.tree.leaves((state.mu, state.nu, state.params))]
    for number in range(2):
        batch = on_mesh(mesh, model.batch(number))
        state, metrics = step(state, batch)
        jax.block_until_ready(state)
        assert [leaf.sharding for leaf in jax.tree.leaves((state.mu, state.nu, state.params))] == before
        expected, expected_metrics = plain(expected, batch)
        jax.block_until_ready(expected)
        np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-5)
    assert traces == 1
    assert len(step._cache.all) == 1
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.unoptimized(False)
def test_gradients_leave_as_their_parameters_lie() -> None:
    """With automatic axes nothing else ties them: unpinned, XLA gathers some."""
    mesh, model = mesh_of("auto"), mlp_adam()
    state, batch = placed_state(mesh), on_mesh(mesh, model.batch(0))
    programs = cut_programs(model.step(jaxft.pmean), state, batch)
    contribution, _ = step_models.compute(programs, state, batch)
    names = sorted(LAYOUT)
    for name, grad in zip(names, contribution, strict=False):
        assert grad.sharding == NamedSharding(mesh, LAYOUT[name])
    memory = programs.executables.apply.memory_analysis()
    assert memory.alias_size_in_bytes == sum(
        leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state)
    )
    shardings = {name: state.params[name].sharding for name in names}
    new_state, _ = step_models.apply(programs, state, contribution, None)
    assert {name: new_state.params[name].sharding for name in names} == shardings


def test_unplaced_state_is_replicated_where_the_batch_lies() -> None:
    """Plain data parallelism within a group: one trace, although the first state lies on one device."""
    mesh, model = mesh_of("auto"), mlp_adam()
    batch = jax.device_put(model.batch(0), NamedSharding(mesh, P(("fsdp", "tp"))))
    traces = 0

    def counted(state: Any, batch: Any) -> Any:
        nonlocal traces
        traces += 1
        return model.step(jaxft.pmean)(state, batch)

    step, state = jaxft.fault_tolerant(counted, None), model.state()
    for _ in range(3):
        state, _ = step(state, batch)
        jax.block_until_ready(state)
    assert {leaf.sharding for leaf in jax.tree.leaves(state)} == {NamedSharding(mesh, P())}
    assert traces == 1
    assert len(step._cache.all) == 1


def test_unplaced_leaves_are_replicated_if_others_are_packed() -> None:
    """Programs that take packed leaves are called through jit, which would place the others as XLA likes."""
    mesh = mesh_of("auto")
    sharded, replicated = NamedSharding(mesh, P(None, "tp")), NamedSharding(mesh, P())

    def train_step(state: Any, batch: Any) -> Any:
        grad = jaxft.pmean(jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"]))
        mu = 0.9 * state["mu"] + grad
        packed = (state["packed"].astype("float32") * 0.5).astype(jnp.int4)
        return {"packed": packed, "mu": mu, "w": state["w"] - 0.1 * mu, "n": state["n"] + 1}, {}

    packed = jax.device_put(np.arange(4).astype(jnp.int4), replicated)
    w = jax.device_put(np.ones((8, 16), np.float32), sharded)
    step = jaxft.fault_tolerant(train_step, None)
    state: Any = {"packed": packed, "mu": jnp.zeros((8, 16)), "n": jnp.int32(0), "w": w}
    for _ in range(2):
        state, _ = step(state, np.ones((4, 8), np.float32))
    assert {name: leaf.sharding for name, leaf in state.items()} == {
        "packed": replicated,
        "mu": replicated,
        "n": replicated,
        "w": sharded,
    }


@pytest.mark.parametrize("axes", mostly_long(AXES, "auto"))
def test_an_offloaded_optimizer_leaves_the_gradients_on_the_devices(axes: str) -> None:
    """Its moments have the names and shapes of the parameters, and may come before them in the state."""
    mesh = mesh_of(axes)
    specs = {"loss": P(), "w": P("fsdp", None)}
    places = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}

    def train_step(state: Any, batch: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((w * batch) ** 2))(state["w"])
        means = jaxft.pmean({"loss": loss, "w": grad})
        moments = jax.device_put(state["moments"], jax.memory.Space.Device)
        moments = jax.tree.map(lambda moment, mean: 0.9 * moment + mean, moments, means)
        w = state["w"] - 0.1 * moments["w"]
        return {"moments": jax.device_put(moments, jax.memory.Space.Host), "w": w}, {"loss": loss}

    zeros = {"loss": np.float32(0), "w": np.zeros((8, 4), np.float32)}
    there = {name: sharding.with_memory_kind("pinned_host") for name, sharding in places.items()}
    w = jax.device_put(np.arange(32, dtype=np.float32).reshape(8, 4), places["w"])
    state: Any = {"moments": jax.device_put(zeros, there), "w": w}
    step = jaxft.fault_tolerant(train_step, None)
    for _ in range(2):
        state, _ = step(state, np.float32(2))
    assert {name: leaf.sharding for name, leaf in state["moments"].items()} == there
    assert state["w"].sharding == places["w"]


@pytest.mark.long
def test_a_batch_that_is_placed_elsewhere_is_another_program() -> None:
    """One apply serves both, also where XLA was free to choose how a contribution leaves compute."""
    mesh, model = mesh_of("auto"), mlp_adam()

    def train_step(state: Any, batch: Any) -> Any:
        state, metrics = model.step(jaxft.pmean)(state, batch)
        return state, metrics | {"x": jaxft.pmean(batch["x"])}

    step, state = jaxft.fault_tolerant(train_step, None), model.state()
    for spec in (P(), P("fsdp"), P(), P("fsdp")):
        batch = jax.device_put(model.batch(0), NamedSharding(mesh, spec))
        state, _ = step(state, batch)
        jax.block_until_ready(state)
    assert len(step._cache.all) == 2
    assert len({id(programs.executables.apply) for programs in step._cache.all}) == 1


def test_leaves_on_other_devices_are_refused_by_name() -> None:
    mesh, few = mesh_of("auto"), Mesh(np.array(jax.devices()[:2]), ("few",))

    def train_step(state: Any, batch: Any) -> Any:
        mean = jaxft.pmean(jnp.mean(batch["x"] @ state["w"]))
        return {"n": state["n"] + 1, "w": state["w"] - mean}, {}

    def refused(n: Any, x: Any) -> str:
        w = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("fsdp", "tp")))
        with pytest.raises(jaxft.ConfigurationError) as caught:
            jaxft.fault_tolerant(train_step, None)({"n": n, "w": w}, {"x": x})
        return str(caught.value)

    n, x = jnp.int32(0), jnp.ones((2, 8))
    w = "the leaf ['w'] of the state on devices 0, 1, 2, 3"
    for alone in (jax.devices()[0], jax.devices()[3]):
        on = f"on device {alone.id}, and {w}"
        assert f"leaf ['n'] of the state lies {on}" in refused(jax.device_put(n, alone), x)
        assert f"leaf ['x'] of the batch lies {on}" in refused(n, jax.device_put(x, alone))
    on = f"on devices 0, 1, and {w}"
    assert f"['n'] of the state lies {on}" in refused(jax.device_put(n, NamedSharding(few, P())), x)
    assert f"['x'] of the batch lies {on}" in refused(n, jax.device_put(x, NamedSharding(few, P("few"))))


def test_leaves_on_the_same_devices_in_another_order_are_refused_by_name() -> None:
    """`jax.make_mesh` may choose another order, as for a torus, than `Mesh(jax.devices(), ...)` has."""
    mesh = mesh_of("auto")
    turned = Mesh(mesh.devices[::-1, ::-1], mesh.axis_names)
    step = jaxft.fault_tolerant(lambda w, x: (w - jaxft.pmean(jnp.mean(x)), {}), None)
    with pytest.raises(jaxft.ConfigurationError) as caught:
        step(
            jax.device_put(jnp.ones(4), NamedSharding(turned, P("fsdp"))),
            jax.device_put(jnp.ones(4), NamedSharding(mesh, P("fsdp"))),
        )
    assert "the batch lies on devices 0, 1, 2, 3, and the state on devices 3, 2, 1, 0" in str(caught.value)
    assert "in one order" in str(caught.value)


def test_a_sharded_key_and_a_counter() -> None:
    mesh = mesh_of("auto")

    def train_step(state: Any, batch: Any) -> Any:
        keys = jax.vmap(jax.random.fold_in, (0, None))(state["keys"], state["n"])
        return {"keys": keys, "n": state["n"] + 1, "w": state["w"] - jaxft.pmean(batch)}, {}

    keys = jax.device_put(jax.random.split(jax.random.key(0), 4), NamedSharding(mesh, P("fsdp")))
    state: Any = {"keys": keys, "n": 0, "w": jnp.zeros(8)}
    step = jaxft.fault_tolerant(train_step, None)
    expected = jax.random.split(jax.random.key(0), 4)
    for number in range(3):
        state, _ = step(state, np.ones(8, np.float32))
        jax.block_until_ready(state)
        expected = jax.vmap(jax.random.fold_in, (0, None))(expected, number)
    assert state["keys"].sharding == NamedSharding(mesh, P("fsdp"))
    assert bits(state["keys"]) == bits(expected)
    assert len(step._cache.all) == 1


@pytest.mark.long
def test_a_nested_jit_keeps_its_shardings() -> None:
    """A pmean in a jax.jit is inlined; its shardings become constraints."""
    mesh = mesh_of("auto")
    sharded, replicated = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())

    @jax.jit
    def train_step(state: Any, batch: Any) -> Any:
        average = jax.jit(
            lambda x: (jaxft.pmean(x), x), in_shardings=replicated, out_shardings=(sharded, sharded)
        )
        mean, mine = average(batch)
        return state + mean, {"mean": mean, "mine": mine}

    step = jaxft.fault_tolerant(train_step, None)
    state = jax.device_put(jnp.zeros(8), replicated)
    state, metrics = step(state, np.ones(8, np.float32))
    assert state.sharding == replicated
    assert metrics["mean"].sharding == sharded
    assert metrics["mine"].sharding == sharded


@pytest.mark.parametrize("placed", [False, True], ids=["numpy", "on the mesh"])
def test_rows_of_the_batch_that_are_read_after_an_exchange(*, placed: bool) -> None:
    """With explicit axes, XLA may not choose where they lie in between: the sharding is part of their type."""
    mesh, exchanges = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,)), 2

    def rows_of(step: int, shard: int) -> Any:
        rows = np.random.default_rng([step, shard]).standard_normal((exchanges, 8, 8), dtype=np.float32)
        return jax.device_put(rows, NamedSharding(mesh, P())) if placed else rows

    def training(mean: Any) -> Any:
        def step(w: jax.Array, rows: jax.Array) -> Any:
            for number in range(exchanges):
                w = w - 0.1 * mean(jax.grad(lambda w, row=rows[number]: jnp.mean((row @ w - 1.0) ** 2))(w))
            return w, {"after": jnp.mean((rows[0] @ w - 1.0) ** 2)}

        return step

    with jax.set_mesh(mesh):
        start = jax.device_put(jnp.linspace(-0.5, 0.5, 64).reshape(8, 8), NamedSharding(mesh, P("x", None)))
        wanted, metrics = jax.jit(training(lambda tree: tree))(start, rows_of(0, 0))
        found, ours = jaxft.fault_tolerant(training(jaxft.pmean), None, shards=1)(start, rows_of)
    assert found.sharding == wanted.sharding
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_allclose(ours["after"], metrics["after"], rtol=1e-5)


def test_what_programs_pass_on_is_sharded_over_automatic_axes_besides_explicit_ones() -> None:
    """Its type does not contain these, and is no reason to keep it whole on each of their devices."""
    axis_types = (AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=axis_types)

    def train_step(w: jax.Array, rows: jax.Array) -> Any:
        hidden = jnp.tanh(rows @ w)
        mean = jaxft.pmean(hidden.mean())
        return w - 0.1 * jaxft.pmean((hidden * mean).mean(0, keepdims=True)), {}

    with jax.set_mesh(mesh):
        w = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P(None, "y")))
        rows = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P("x", None)))
        first, _ = cut_programs(train_step, w, rows).executables.computes
    assert [sharding.spec for sharding in first.output_shardings] == [P(), P("x", "y")]


# Which parameter a contribution belongs to


class Named:
    def __init__(self, path: tuple[str, ...], shape: tuple[int, ...]) -> None:
        self.path = path
        self.aval = jax.typeof(np.zeros(shape, np.float32))
        self.rows = None


def test_pins_go_by_name_then_by_shape() -> None:
    mesh = mesh_of("auto")
    one, two, none = NamedSharding(mesh, P("tp")), NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
    state = [
        (("mu", "dense", "w"), (4, 4), one),
        (("params", "dense", "w"), (4, 4), one),
        (("params", "out", "w"), (4, 4), two),
        (("params", "out", "b"), (4,), none),
        (("params", "dense", "b"), (4,), none),
        (("nu", "dense", "w"), (4, 4), none),  # of leaves with one name, the first counts
    ]
    specs = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for _, shape, sharding in state]
    contributions: Any = [
        Named(("0", "dense", "w"), (4, 4)),
        Named(("0", "out", "w"), (4, 4)),
        Named(("0", "out", "b"), (4,)),
        Named(("something else",), (4,)),  # all leaves of that shape lie alike
        Named(("something else",), (4, 4)),  # they do not
        Named(("0", "dense", "w"), (5,)),  # no leaf of that shape
    ]
    found = pins(contributions, specs, [path for path, _, _ in state])
    assert found == [one, two, none, none, None, None]


def test_on_one_device_a_state_that_was_placed_there_is_that_of_other_groups() -> None:
    """A restore with other code places leaves that a fresh state leaves where they are."""
    state, batch = mlp_adam().state(), mlp_adam().batch(0)
    placed = jax.device_put(state, jax.devices()[0])
    assert all(leaf.committed for leaf in jax.tree.leaves(placed))
    fresh, restored = (
        cut_programs(mlp_adam().step(jaxft.pmean), like, batch).fingerprint for like in (state, placed)
    )
    assert fresh == restored
