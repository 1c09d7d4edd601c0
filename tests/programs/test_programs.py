"""The two programs behind a step: their contributions, guarantees and fingerprints."""

import functools
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import step_models
from step_models import bits, mlp_adam, numpy_batch

import jaxft
from jaxft._arrays._layout import LeafSpec
from jaxft._errors import ConfigurationError, StepError
from jaxft._programs._build import Shared, cut_only, cut_programs
from jaxft._programs._environment import environment
from jaxft._programs._programs import OtherTypes, Programs
from jaxft._programs._trace import joined


@functools.cache
def built_mlp() -> Programs:
    model = mlp_adam()
    return cut_programs(model.step(jaxft.pmean), model.state(), model.batch(0))


def test_contribution_is_described_in_order() -> None:
    programs = built_mlp()
    assert programs.contribution == (
        LeafSpec("pmean[0]['b1']", (16,), "float32"),
        LeafSpec("pmean[0]['w1']", (4, 16), "float32"),
        LeafSpec("pmean[0]['w2']", (16, 2), "float32"),
        LeafSpec("pmean[1]", (), "float32"),
    )
    contribution, _ = step_models.compute(programs, mlp_adam().state(), numpy_batch(0))
    assert [(leaf.shape, leaf.dtype.name) for leaf in contribution] == [
        (spec.shape, spec.dtype) for spec in programs.contribution
    ]
    assert programs.stages.layout.specs == programs.contribution


def test_compute_may_run_again_and_consumes_nothing() -> None:
    model = mlp_adam()
    programs, state = built_mlp(), model.state()
    before = bits(state)
    first, _ = step_models.compute(programs, state, model.batch(0))
    second, _ = step_models.compute(programs, state, model.batch(0))
    assert bits(first) == bits(second)
    assert bits(state) == before


def test_apply_is_the_same_with_and_without_local() -> None:
    """A group that joins replays `apply` on logged means, without having seen the batch."""
    model = mlp_adam()
    programs = built_mlp()
    contribution, local = step_models.compute(programs, model.state(), model.batch(0))
    logged = [np.asarray(leaf).copy() for leaf in contribution]
    there, metrics = step_models.apply(programs, model.state(), contribution, local)
    replayed, blank = step_models.apply(programs, model.state(), logged, None)
    assert bits(replayed) == bits(there)
    assert bits(blank["loss"]) == bits(metrics["loss"])
    assert bits(blank["rate"]) == bits(metrics["rate"])
    assert np.isnan(blank["mine"])
    assert np.isnan(blank["apart"])
    assert not np.isnan(metrics["mine"])


def test_unknown_metrics_keep_their_types() -> None:
    def train_step(state: jax.Array, batch: jax.Array) -> Any:
        mean = jaxft.pmean(batch)
        metrics = {
            "count": (batch > 0).sum(),
            "any": (batch > mean).any(),
            "half": batch.astype(jnp.bfloat16),
            "known": mean,
        }
        return state + mean, metrics

    programs = cut_programs(train_step, jnp.zeros(3), jnp.ones(3))
    with jax.debug_nans(True):  # a group that comes back, to a program that looks for them
        _, metrics = step_models.apply(programs, jnp.zeros(3), [np.ones(3, np.float32)], None)
        blank = programs.blank_metrics()
    for unknown in (metrics, blank):
        assert unknown["count"].dtype == jnp.int32
        assert unknown["count"] == 0
        assert unknown["any"].dtype == bool
        assert not unknown["any"]
        assert unknown["half"].dtype == jnp.bfloat16
        assert jnp.isnan(unknown["half"]).all()
    np.testing.assert_array_equal(metrics["known"], np.ones(3))
    assert jnp.isnan(blank["known"]).all()


def test_state_only_values_are_computed_in_both_halves() -> None:
    model = step_models.accumulating()
    cut = cut_only(model.step(jaxft.pmean), model.state(), model.batch(0), Shared())
    assert cut.apply.batch == ()
    assert cut.apply.rest == ()
    assert len(cut.stages[0].compute.jaxpr.outvars) == 3 + 1  # the gradients and the metric; no key


def test_means_of_another_number_or_type() -> None:
    model = mlp_adam()
    programs = built_mlp()
    means = [np.zeros(spec.shape, spec.dtype) for spec in programs.contribution]
    with pytest.raises(ConfigurationError, match="apply was given 3 means for 4 leaves"):
        step_models.apply(programs, model.state(), means[:3], None)
    state = model.state()
    with pytest.raises(OtherTypes, match="other types or shardings"):
        step_models.apply(programs, state, [mean.astype(np.float16) for mean in means], None)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_state_of_another_structure_or_type() -> None:
    model = mlp_adam()
    programs, state = built_mlp(), model.state()
    with pytest.raises(OtherTypes, match="The state has another structure"):
        step_models.compute(programs, {"not": "it"}, model.batch(0))
    with pytest.raises(OtherTypes, match="other types or shardings"):
        step_models.compute(programs, state._replace(params=mlp_adam(width=8).state().params), model.batch(0))
    with pytest.raises(OtherTypes, match="The batch has another structure, shape or dtype"):
        step_models.compute(programs, state, numpy_batch(0, rows=3))


def test_no_other_structure_passes_for_the_one_compiled_for() -> None:
    """A prefix is not the same structure: an array where a container is now."""

    def step(state: Any, batch: jax.Array) -> tuple[Any, None]:
        return {"p": state["p"] - jaxft.pmean(batch)}, None

    programs, leaf = cut_programs(step, {"p": jnp.ones(3)}, jnp.ones(3)), jnp.ones(3)
    for other in ({"p": {"w": leaf}}, {"p": None}, {"q": leaf}, [leaf], leaf):
        with pytest.raises(OtherTypes, match="The state has another structure"):
            programs.state_leaves(other)


# Two functions


def grad_fn(state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(step_models.mlp_loss)(state["params"], batch)
    key, _ = jax.random.split(state["key"])
    return grads, {"loss": loss, "key": key}


def update_fn(state: Any, means: Any, local: Any) -> Any:
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], means)
    # The key came by way of `local`, but derives from the state alone.
    return {"params": params, "key": local["key"]}, {"loss": local["loss"]}


def test_from_functions_is_the_same_step() -> None:
    def fused(state: Any, batch: Any) -> Any:
        means, local = grad_fn(state, batch)
        return update_fn(state, means, local)

    def fresh() -> Any:
        return {"params": step_models.mlp_params(), "key": jax.random.key(0)}

    programs = cut_programs(joined(grad_fn, update_fn), fresh(), numpy_batch(0))
    expected = jax.jit(fused)(fresh(), numpy_batch(0))
    contribution, local = step_models.compute(programs, fresh(), numpy_batch(0))
    assert bits(step_models.apply(programs, fresh(), contribution, local)) == bits(expected)
    state, metrics = step_models.apply(programs, fresh(), contribution, None)
    assert bits(state) == bits(expected[0])
    assert np.isnan(metrics["loss"])


def test_from_functions_refuses_a_local_in_the_state() -> None:
    def leaking(state: Any, means: Any, local: Any) -> Any:
        state, metrics = update_fn(state, means, local)
        return state | {"params": jax.tree.map(lambda p: p * local["loss"], state["params"])}, metrics

    state = {"params": step_models.mlp_params(), "key": jax.random.key(0)}
    with pytest.raises(StepError, match=r"\['params'\]\['b1'\] derives from the batch"):
        cut_programs(joined(grad_fn, leaking), state, numpy_batch(0))


# The fingerprint


def sgd(rate: float, constant: np.ndarray, columns: int = 4) -> Programs:
    table = jnp.asarray(constant)

    def train_step(state: Any, batch: Any) -> Any:
        grads = jaxft.pmean(jax.grad(step_models.mlp_loss)(state, batch))
        return jax.tree.map(lambda p, g: p - rate * g * table.sum(), state, grads), {}

    return cut_programs(train_step, step_models.mlp_params(columns), numpy_batch(0, columns=columns))


def test_fingerprint_tells_programs_apart() -> None:
    constant = np.arange(3, dtype=np.float32)
    one, programs = sgd(0.1, constant).fingerprint, {"program", "program on any mesh"}
    assert sgd(0.1, constant.copy()).fingerprint == one
    for other, differs in (
        (sgd(0.2, constant), programs),
        (sgd(0.1, constant + 1), programs),
        (sgd(0.1, constant, columns=5), programs | {"state", "contribution"}),
    ):
        assert {key for key in one if one[key] != other.fingerprint[key]} == differs
    assert one["backend"] == "cpu"
    assert one["cores"] == str(len(os.sched_getaffinity(0)))
    assert one["devices"] == "1 x cpu"
    assert "3 leaves: ['b1']:float32[16], ['w1']:float32[4, 16], ['w2']:float32[16, 2]" in one["state"]


SCRIPT = """
import step_models, jaxft
print(sorted(step_models.bf16_sgd_programs().fingerprint.items()))
for make in (step_models.mlp_adam, step_models.transformer, step_models.accumulating):
    print(step_models.program_digest(make()))
"""


@pytest.mark.long
def test_fingerprint_is_the_same_in_every_process() -> None:
    """Hash seeds, memory addresses and source locations differ between processes."""

    def run(seed: str) -> str:
        paths = [os.path.dirname(os.path.dirname(__file__)), os.path.dirname(os.path.dirname(jaxft.__file__))]
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-c", SCRIPT]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    first = run("1")
    assert len(first.splitlines()) == len(set(first.splitlines())) == 4
    assert run("2") == first


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to take one away")
def test_fingerprint_has_the_cores_that_xla_sees() -> None:
    """On CPU the bits of a result depend on them."""
    cores = os.sched_getaffinity(0)
    with_all = environment(jax.devices())
    try:
        os.sched_setaffinity(0, {min(cores)})
        with_one = environment(jax.devices())
    finally:
        os.sched_setaffinity(0, cores)
    assert {key for key in with_all if with_all[key] != with_one[key]} == {"cores"}
