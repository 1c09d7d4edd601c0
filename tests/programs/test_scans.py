"""Scans whose stacked results are exchanged: divided by rows, with the same bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from step_models import bits, mostly_long

import jaxft
from jaxft._programs._build import Shared, cut_only, cut_programs
from jaxft._programs._partition import Cut
from jaxft._programs._programs import Programs

pytestmark = pytest.mark.unoptimized

LAYERS = 6
Given = dict[str, jax.Array]


def weights() -> Given:
    rng = np.random.default_rng(5)
    shapes = {"first": (16, 16), "layers": (LAYERS, 16, 16), "scales": (LAYERS, 16)}
    return {
        name: jnp.asarray(np.float32(0.3) * rng.standard_normal(shape, np.float32))
        for name, shape in shapes.items()
    }


def batch() -> np.ndarray:
    return np.random.default_rng(6).standard_normal((8, 16), np.float32)


def net(params: Given, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, one: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        weight, scale = one
        return jnp.tanh(x @ weight) * scale[None] + x, None

    x, _ = lax.scan(layer, x @ params["first"], (params["layers"], params["scales"]))
    return jnp.mean(x**2)


def remat_net(params: Given, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, one: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ one[0]) * one[1][None] + x, None

    x, _ = lax.scan(jax.checkpoint(layer), x @ params["first"], (params["layers"], params["scales"]))
    return jnp.mean(x**2)


def trained(loss: Any, dtype: str = "float32") -> Any:
    def train_step(params: Given, x: jax.Array) -> Any:
        local, grads = jax.value_and_grad(loss)(params, x)
        grads, mean = jaxft.pmean((jax.tree.map(lambda grad: grad.astype(dtype), grads), local))
        new = jax.tree.map(lambda one, grad: one - 0.1 * grad.astype(one.dtype), params, grads)
        return new, {"loss": mean, "local": local, "norm": jnp.sum(grads["layers"].astype(jnp.float32))}

    return train_step


def mapped(params: Given, x: jax.Array) -> Any:
    """A scan forwards whose results are exchanged, and whose carry is a metric; one result is halved before."""

    def turn(total: jax.Array, one: jax.Array) -> Any:
        made = jnp.tanh(x @ one).sum(axis=0)
        return total + made, (made, made * 3.0)

    total, (made, more) = lax.scan(turn, jnp.zeros(16), params["layers"])
    mean, other = jaxft.pmean((made, -(more * 0.5)))
    return {**params, "scales": params["scales"] - mean * other}, {"total": total, "first": more[0]}


def aux_net(params: Given, x: jax.Array) -> jax.Array:
    """A carry that is only added to, as a loss of experts: its gradient leaves the scan as it came."""

    def layer(carry: tuple[jax.Array, jax.Array], one: tuple[jax.Array, jax.Array]) -> Any:
        y = jnp.tanh(carry[0] @ one[0]) * one[1][None]
        return (carry[0] + y, carry[1] + jnp.mean(y**2)), None

    start = (x @ params["first"], jnp.float32(0.0))
    (x, extra), _ = lax.scan(layer, start, (params["layers"], params["scales"]))
    return jnp.mean(x**2) + 0.01 * extra


def of_the_state(params: Given, x: jax.Array) -> Any:
    """A scan over the state alone: its mean is the identity, and it belongs to `apply`."""
    _, noise = lax.scan(lambda at, one: (at + 1.0, jnp.sin(one * at)), jnp.float32(0.0), params["scales"])
    noise, mean = jaxft.pmean((noise * 0.37, jnp.sum(x @ params["first"], axis=0)))
    return {**params, "scales": params["scales"] - noise, "first": params["first"] - mean[None]}, {}


STEPS = {
    "carry that is added to": trained(aux_net),
    "plain": trained(net),
    "remat": trained(remat_net),
    "bfloat16": trained(net, "bfloat16"),
    "forwards": mapped,
}


def run(programs: Programs) -> tuple[list[bytes], Any]:
    leaves, means = programs.state_leaves(weights()), []
    made, local = programs.compute(leaves, batch())
    means += map(np.asarray, made)
    while local.program + 1 < programs.stages.count:
        made, local = programs.compute_next(leaves, (), local)
        means += map(np.asarray, made)
    new, metrics = programs.apply(leaves, means, local)
    return [bits(leaf) for leaf in new], jax.tree.map(bits, metrics)


def labels(cut: Cut) -> list[list[str]]:
    return [list(labels) for labels in cut.labels]


@pytest.mark.unoptimized(False)
@pytest.mark.parametrize("name", mostly_long(STEPS, "remat", "forwards"))
def test_the_bits_of_the_whole_scan(name: str, caplog: pytest.LogCaptureFixture) -> None:
    whole = cut_programs(STEPS[name], weights(), batch())
    divided = cut_programs(STEPS[name], weights(), batch(), Shared(overlap=2))
    assert (whole.stages.count, divided.stages.count) == (1, 2)
    assert run(divided) == run(whole)
    assert "gains nothing" not in caplog.text


def test_the_last_rows_come_first_if_the_scan_runs_backwards() -> None:
    found = labels(cut_only(STEPS["plain"], weights(), batch(), Shared(overlap=3)))
    assert found == [
        ["pmean[1]", "pmean[0]['layers'][4:6]", "pmean[0]['scales'][4:6]"],
        ["pmean[0]['layers'][2:4]", "pmean[0]['scales'][2:4]"],
        ["pmean[0]['layers'][0:2]", "pmean[0]['scales'][0:2]", "pmean[0]['first']"],
    ]


def test_more_parts_than_rows() -> None:
    found = labels(cut_only(mapped, weights(), batch(), Shared(overlap=LAYERS)))
    assert [len(stage) for stage in found] == [2] * LAYERS
    assert found[-1] == ["pmean[0][5:6]", "pmean[1][5:6]"]


def test_no_row_is_computed_twice() -> None:
    stages = cut_only(STEPS["plain"], weights(), batch(), Shared(overlap=3)).stages
    scans = [
        [eqn.params["length"] for eqn in stage.compute.jaxpr.eqns if eqn.primitive.name == "scan"]
        for stage in stages
    ]
    assert scans == [[LAYERS, 2], [2], [2]], "forwards in one, and backwards in three"


def test_a_scan_over_the_state_is_not_divided() -> None:
    assert labels(cut_only(of_the_state, weights(), batch(), Shared(overlap=3))) == [["pmean[1]"]]


def on_mesh(spec: P) -> tuple[Given, Any]:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    state = {
        name: jax.device_put(leaf, NamedSharding(mesh, spec if leaf.ndim == 3 else P()))
        for name, leaf in weights().items()
    }
    return state, jax.device_put(batch(), NamedSharding(mesh, P("x")))


@pytest.mark.long
def test_pieces_have_the_sharding_of_their_parameter() -> None:
    state, x = on_mesh(P(None, None, "x"))
    programs = cut_programs(STEPS["plain"], state, x, Shared(overlap=2))
    layers = [
        (one.label, pin.spec)
        for one, pin in zip(programs.cut.contributions, programs.executables.pins, strict=True)
        if "layers" in one.label
    ]
    assert [label for label, _ in layers] == ["pmean[0]['layers'][3:6]", "pmean[0]['layers'][0:3]"]
    assert {spec for _, spec in layers} == {P(None, None, "x")}


def test_rows_that_lie_on_different_devices_are_not_divided() -> None:
    state, x = on_mesh(P("x"))
    found = labels(cut_only(STEPS["plain"], state, x, Shared(overlap=2)))
    assert "pmean[0]['layers']" in [label for stage in found for label in stage]
    assert "pmean[0]['scales'][0:3]" in [label for stage in found for label in stage]


@pytest.mark.parametrize(
    ("spec", "rows"),
    [(P(None, None, "x"), ["[3:6]", "[0:3]"]), (P("x"), [""])],
    ids=["columns", "rows"],
)
def test_gradients_with_a_sharding_constraint(spec: P, rows: list[str]) -> None:
    """A constraint on parameters is one on their gradients too: differentiation turns it around."""
    state, x = on_mesh(P())
    sharding = NamedSharding(state["layers"].sharding.mesh, spec)

    def train_step(params: Given, x: jax.Array) -> Any:
        def loss(layers: jax.Array) -> jax.Array:
            return net({**params, "layers": lax.with_sharding_constraint(layers, sharding)}, x)

        grad = jax.grad(loss)(params["layers"])
        return {**params, "layers": params["layers"] - jaxft.pmean(grad)}, {}

    found = labels(cut_only(train_step, state, x, Shared(overlap=2)))
    assert [label for stage in found for label in stage] == [f"pmean{each}" for each in rows]


def accumulated(params: Given, x: jax.Array) -> Any:
    def part(total: Given, rows: jax.Array) -> tuple[Given, None]:
        return jax.tree.map(jnp.add, total, jax.grad(net)(params, rows)), None

    grads, _ = lax.scan(part, jax.tree.map(jnp.zeros_like, params), x.reshape(2, -1, 16))
    return jax.tree.map(lambda one, grad: one - grad, params, jaxft.pmean(grads)), {}


def test_the_log_says_once_that_nothing_can_be_divided(caplog: pytest.LogCaptureFixture) -> None:
    step, state = jaxft.fault_tolerant(accumulated, None, overlap=4), weights()
    for rows in (4, 2):  # two types of batch
        state, _ = step(state, batch()[:rows])
    assert caplog.text.count("overlap=4 gains nothing") == 1
