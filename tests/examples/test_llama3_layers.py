"""Stages, spans and microbatches: one program on a mesh gives the numbers of one device."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from llama3_cases import OPTIMIZER, batch_of, params_of, tiny

import jaxft
from examples.llama3._config import ModelConfig, SettingsError, check_mesh
from examples.llama3._layers import Positions, run_layers
from examples.llama3._model import Llama
from examples.llama3._optimizer import make_optimizer
from examples.llama3._sharding import ActivationSharding, batch_sharding, make_mesh, state_shardings
from examples.llama3._state import TrainState
from examples.llama3.train import make_train_step

pytestmark = pytest.mark.unoptimized

CONFIG = tiny(dim=16, layers=4, ffn_dim=32)
LENGTH = 16


@pytest.fixture
def _strict_dtypes() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"):
        yield


def batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, of which the last is only a target; the documents they are in; their positions there."""
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, 256, (4, LENGTH + 1)).astype(np.int32)
    segments = np.sort(rng.integers(0, 3, (4, LENGTH)), axis=1).astype(np.int32)
    first = [[list(row).index(segment) for segment in row] for row in segments]
    return tokens, segments, (np.arange(LENGTH) - np.array(first)).astype(np.int32)


@functools.cache
def loss_and_gradients(config: ModelConfig, **axes: int) -> list[np.ndarray]:
    mesh = make_mesh(**{"fsdp": 1, "tp": 1, **axes})
    shard = ActivationSharding(mesh.abstract_mesh)
    graph = nnx.graphdef(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0), shard=shard)))
    params = params_of(config)
    shardings = state_shardings(params, mesh)

    def loss(params: Any, tokens: jax.Array, *documents: jax.Array) -> jax.Array:
        return nnx.merge(graph, params).loss(tokens[:, :-1], tokens[:, 1:], *documents)

    run = jax.jit(jax.value_and_grad(loss), out_shardings=(None, shardings))
    placed = jax.device_put(batch(), batch_sharding(mesh))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(run(jax.device_put(params, shardings), *placed))]


@pytest.mark.long
@pytest.mark.usefixtures("_strict_dtypes")
@pytest.mark.parametrize(
    ("axes", "microbatches"),
    [
        ({"fsdp": 2, "tp": 2}, 1),
        ({"pipeline": 4}, 4),
        ({"context": 4}, 1),
        ({"pipeline": 2, "fsdp": 2}, 2),
        ({"pipeline": 2, "context": 2}, 2),
    ],
    ids=str,
)
def test_a_mesh_gives_the_loss_and_gradients_of_one_device(axes: dict[str, int], microbatches: int) -> None:
    spread = loss_and_gradients(dataclasses.replace(CONFIG, microbatches=microbatches), **axes)
    for here, there in zip(spread, loss_and_gradients(CONFIG), strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-4, atol=1e-5 * np.abs(there).max())


@pytest.mark.long
@pytest.mark.unoptimized(False)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (4, 4), (2, 4)])
def test_a_pipeline_has_the_bits_of_its_microbatches_without_one(stages: int, microbatches: int) -> None:
    """Output, and gradients of input and parameters: what idle stages compute adds exact zeros."""
    rng = np.random.default_rng(0)
    x, cotangent = rng.normal(size=(2, 8, LENGTH, 16)).astype(np.float32)
    weights = {"up": rng.normal(size=(4, 16, 16)).astype(np.float32) / 4}
    positions = Positions(np.ones((1, LENGTH, 2, 1, 2), np.float32), None)

    def layer(x: jax.Array, weights: dict[str, jax.Array], _: Positions) -> jax.Array:
        return x + jnp.tanh(x @ weights["up"])

    def bits(stages: int) -> list[bytes]:
        mesh = make_mesh(1, 1, pipeline=stages)
        shard = ActivationSharding(mesh.abstract_mesh)
        run = functools.partial(run_layers, layer, shard=shard, microbatches=microbatches)

        def out_and_gradients(weights: jax.Array, x: jax.Array) -> Any:
            out, pull = jax.vjp(lambda weights, x: run(weights, x, positions), weights, x)
            return out, pull(cotangent)

        placed = jax.device_put(weights, NamedSharding(mesh, PartitionSpec("pipeline")))
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(jax.jit(out_and_gradients)(placed, x))]

    assert bits(stages) == bits(1)


@pytest.mark.long
def test_the_cut_step_gives_the_numbers_of_the_whole_one() -> None:
    """jaxft cuts the step at its mean; the pipeline and the ring are in the program before it."""
    config = dataclasses.replace(CONFIG, microbatches=2, remat="selective")
    mesh = make_mesh(1, 1, pipeline=2, context=2)
    tokens, _, _ = batch()

    def first_state() -> TrainState:
        params = params_of(config)
        moments = jax.eval_shape(make_optimizer(OPTIMIZER).init, params)
        opt_state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), moments)
        state = TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=opt_state)
        return jax.device_put(state, state_shardings(state, mesh))

    placed = jax.device_put(batch_of(tokens), batch_sharding(mesh))
    shardings = state_shardings(first_state(), mesh)
    whole = jax.jit(
        make_train_step(config, OPTIMIZER, mesh, mean=lambda x: x), out_shardings=(shardings, None)
    )
    cut = jaxft.fault_tolerant(
        make_train_step(config, OPTIMIZER, mesh, mean=jaxft.pmean), manager=None, shards=1
    )
    state, metrics = cut(first_state(), lambda *_: placed)
    expected, expected_metrics = whole(first_state(), placed)
    assert float(metrics["loss"]) == pytest.approx(float(expected_metrics["loss"]), rel=1e-6)
    for here, there in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert here.sharding.is_equivalent_to(there.sharding, here.ndim)
        np.testing.assert_allclose(here, there, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline": 3}, r"pipeline=3 does not divide the layers, 4\. Choose --pipeline from 1, 2, 4\."),
        (
            {"pipeline": 8, "device_count": 4},
            r"pipeline=8 x fsdp=1 x tp=1 needs 8 devices, .*--cpu-devices 8",
        ),
        ({"context": 0}, "--context must be above 0 and finite, not 0"),
        ({"context": 4, "seq_len": 12}, r"divides sequences into 8 equal parts, but --seq-len is 12\."),
        ({"microbatches": 3}, r"microbatches=3 does not divide the sequences of a shard"),
        (
            {"microbatches": 4, "fsdp": 2},
            r"microbatches=4 x fsdp=2 does not divide .* Make it a multiple of 8",
        ),
        ({"context": 2, "attention": "cudnn"}, r"context=2 needs ring attention.* --attention is cudnn\."),
    ],
)
def test_axes_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    of_model = {name: settings[name] for name in ("microbatches", "attention") if name in settings}
    of_mesh = {"fsdp": 1, "tp": 1, "batch_per_shard": 4, "device_count": 8, "seq_len": 16}
    of_mesh |= {name: value for name, value in settings.items() if name not in of_model}
    with pytest.raises(SettingsError, match=message):
        check_mesh(dataclasses.replace(CONFIG, **of_model), **of_mesh)
