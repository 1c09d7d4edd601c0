"""Where arrays live: the tables cover the state, and the mesh changes its place and not its numbers."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from llama3_cases import OPTIMIZER, TINY, abstract_params, batch_of, corpus_of, params_of, tiny

import jaxft
from examples.llama3._config import MODEL_SIZES, ModelConfig, SettingsError, check_mesh
from examples.llama3._data import Batches
from examples.llama3._optimizer import make_optimizer
from examples.llama3._sharding import (
    PARAMETER_AXES,
    ActivationSharding,
    batch_sharding,
    make_mesh,
    parameter_name,
    partition_spec,
    placed,
    state_shardings,
)
from examples.llama3._state import TrainState, init_state, parameter_count
from examples.llama3.train import make_train_step
from jaxft._programs._build import cut_programs

pytestmark = pytest.mark.unoptimized

# Written out by hand: the results of the tables.
EXPECTED_SPECS = {
    "embedding": PartitionSpec("tp", ("context", "fsdp")),
    "attention_norm": PartitionSpec("pipeline", ("context", "fsdp")),
    "query": PartitionSpec("pipeline", ("context", "fsdp"), "tp", None),
    "key": PartitionSpec("pipeline", ("context", "fsdp"), "tp", None),
    "value": PartitionSpec("pipeline", ("context", "fsdp"), "tp", None),
    "output": PartitionSpec("pipeline", "tp", None, ("context", "fsdp")),
    "ffn_norm": PartitionSpec("pipeline", ("context", "fsdp")),
    "gate": PartitionSpec("pipeline", ("context", "fsdp"), "tp"),
    "up": PartitionSpec("pipeline", ("context", "fsdp"), "tp"),
    "down": PartitionSpec("pipeline", "tp", ("context", "fsdp")),
    "final_norm": PartitionSpec(("context", "fsdp")),
    "head": PartitionSpec(("context", "fsdp"), "tp"),
}


def of_one_stage(spec: PartitionSpec) -> PartitionSpec:
    """Layers are not sharded over a single stage."""
    return PartitionSpec(*(None if axis == "pipeline" else axis for axis in spec))


@pytest.mark.parametrize("config", [TINY, tiny(tied_embeddings=True), MODEL_SIZES["405B"]])
def test_the_table_names_every_parameter_and_its_dimensions(config: ModelConfig) -> None:
    extents = {
        "layer": config.layers,
        "dim": config.dim,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "ffn": config.ffn_dim,
        "vocab": config.vocab_size,
    }
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params(config))
    assert {parameter_name(path) for path, _ in leaves} | {"head"} == set(PARAMETER_AXES)
    for path, leaf in leaves:
        assert leaf.shape == tuple(extents[axis] for axis in PARAMETER_AXES[parameter_name(path)])


def test_partition_specs_come_to_what_is_written_here() -> None:
    assert {name: partition_spec(*axes) for name, axes in PARAMETER_AXES.items()} == EXPECTED_SPECS


@pytest.mark.parametrize("stages", [1, 2])
def test_moments_live_where_their_parameter_does_and_scalars_everywhere(stages: int) -> None:
    """Layers are not sharded over a single stage: jaxft then divides a scan over them, and else does not."""
    abstract = jax.eval_shape(
        lambda params: TrainState(jnp.int32(0), params, make_optimizer(OPTIMIZER).init(params)),
        abstract_params(TINY),
    )
    shardings = state_shardings(abstract, make_mesh(2, 1, pipeline=stages))
    specs: dict[str, list[PartitionSpec]] = {}
    for path, sharding in jax.tree_util.tree_leaves_with_path(shardings):
        specs.setdefault(parameter_name(path), []).append(sharding.spec)
    for name, spec in EXPECTED_SPECS.items():
        spec = spec if stages > 1 else of_one_stage(spec)
        assert specs.pop(name) == [spec] * 3, name  # the parameter, Adam's two moments
    assert all(spec == PartitionSpec() for scalars in specs.values() for spec in scalars)


def test_with_a_mesh_activations_are_tied_to_it() -> None:
    mesh = make_mesh(2, 2)
    tie = jax.jit(lambda x: ActivationSharding(mesh.abstract_mesh)(x, "batch", "ffn"))
    x = jax.device_put(np.ones((4, 6), np.float32), NamedSharding(mesh, PartitionSpec()))
    assert tie(x).sharding.spec == PartitionSpec("fsdp", "tp")


@pytest.mark.long
def test_a_step_on_a_mesh_gives_the_numbers_of_one_device() -> None:
    fsdp, tp = 2, 2
    one, spread = _trained(1, 1), _trained(fsdp, tp)
    for path, leaf in jax.tree_util.tree_leaves_with_path(spread):
        if leaf.ndim:
            assert leaf.sharding.spec == of_one_stage(EXPECTED_SPECS[parameter_name(path)])
            assert leaf.addressable_shards[0].data.size == leaf.size // _parts(leaf.sharding.spec, fsdp, tp)
    for here, there in zip(jax.tree.leaves(one), jax.tree.leaves(spread), strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-3, atol=1e-5)


@pytest.mark.long
@pytest.mark.unoptimized(False)
def test_the_initial_state_has_the_same_bits_on_every_mesh() -> None:
    one = init_state(TINY, OPTIMIZER, make_mesh(1, 1), seed=3)
    four = init_state(TINY, OPTIMIZER, make_mesh(2, 2), seed=3)
    for here, there in zip(jax.tree.leaves(one), jax.tree.leaves(four), strict=True):
        assert np.array_equal(here, there)


@pytest.mark.long
def test_no_device_ever_makes_more_of_a_large_state_than_its_part() -> None:
    """Compiles `init_state` without running it, and asks the compiler how much memory each device needs."""
    model, needs = MODEL_SIZES["405B"], []

    def compile_only(function: Any, **options: Any) -> Any:
        return lambda *args: needs.append(
            jitted(function, **options).lower(*args).compile().memory_analysis()
        )

    jitted = jax.jit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("examples.llama3._state.jax.jit", compile_only)
        init_state(model, OPTIMIZER, make_mesh(2, 2), seed=0)
    (need,) = needs
    # The parameter and two moments, float32, over four devices.
    quarter_bytes = 3 * 4 * parameter_count(abstract_params(model)) / 4
    assert need.output_size_in_bytes == pytest.approx(quarter_bytes, rel=0.001)
    assert need.temp_size_in_bytes < 1e6


# Meshes that do not fit.


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"fsdp": 4, "tp": 2}, r"fsdp=4 x tp=2 needs 8 devices, but there are 4 here\. .*--cpu-devices 8"),
        ({"fsdp": 0}, "--fsdp must be above 0 and finite, not 0"),
        ({"tp": -1}, "--tp must be above 0 and finite, not -1"),
        ({"tp": 3}, r"tp=3 does not divide the attention heads, 4\. Choose --tp from 1, 2, 4\."),
        ({"tp": 4}, r"tp=4 does not divide the key and value heads, 2\. Choose --tp from 1, 2\."),
        ({"fsdp": 3, "batch_per_shard": 3}, r"fsdp=3 does not divide the model width, 32\."),
        ({"fsdp": 4}, r"fsdp=4 does not divide the sequences of a shard \(--batch-per-shard\), 2\."),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(mesh: dict[str, int], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check_mesh(TINY, **{"fsdp": 1, "tp": 1, "batch_per_shard": 2, "device_count": 4, **mesh})


@functools.cache
def _trained(fsdp: int, tp: int) -> TrainState:
    """Return the state after one step, computed on such a mesh from parameters that numpy made."""
    mesh = make_mesh(fsdp, tp)
    moments = jax.eval_shape(make_optimizer(OPTIMIZER).init, abstract_params(TINY))
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params_of(TINY),
        opt_state=jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), moments),
    )
    shardings = state_shardings(state, mesh)
    data = Batches(
        corpora=(corpus_of(4000),), seq_len=16, batch_per_shard=2, shards=1, vocab_size=320, seed=0
    )
    train_step = make_train_step(TINY, OPTIMIZER, mesh, mean=lambda gradients: gradients)
    step = jax.jit(train_step, out_shardings=(shardings, None))
    new_state, metrics = step(
        jax.device_put(state, shardings), jax.device_put(data(0, 0), batch_sharding(mesh))
    )
    assert np.isfinite(float(metrics["loss"]))
    return new_state


def _parts(spec: PartitionSpec, fsdp: int, tp: int) -> int:
    return (fsdp if ("context", "fsdp") in spec else 1) * (tp if "tp" in spec else 1)


@pytest.mark.long
@pytest.mark.unoptimized(False)
def test_groups_on_other_meshes_run_one_program_and_get_equal_states() -> None:
    """As with `jaxft launch --rungs`: means that are clipped change the state alike on any mesh."""
    optimizer = dataclasses.replace(OPTIMIZER, any_mesh=True, clip_norm=1e-3)
    random = np.random.default_rng(2)
    rounds: list[list[np.ndarray]] = []
    found: list[tuple[str, list[str]]] = []
    for fsdp in (1, 2, 4):
        mesh = make_mesh(fsdp, 1)
        state = init_state(TINY, optimizer, mesh, seed=0)
        batch = placed(batch_of(np.ones((4, 17), np.int32)), batch_sharding(mesh))
        programs = cut_programs(make_train_step(TINY, optimizer, mesh, mean=jaxft.pmean), state, batch)
        shapes = [made.aval.shape for made in programs.cut.contributions]
        rounds = rounds or [
            [random.standard_normal(shape, np.float32) for shape in shapes] for _ in range(16)
        ]
        digests: list[str] = []
        for means in rounds:
            # `apply` consumes the state.
            state = init_state(TINY, optimizer, mesh, seed=0)
            new, _ = programs.apply(programs.state_leaves(state), means, None)
            digests.append(jaxft.digest(new))
        found.append((programs.fingerprint["program on any mesh"], digests))
    assert len(set(found[0][1])) == len(rounds)
    assert found[1] == found[2] == found[0]
