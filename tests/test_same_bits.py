"""A cut step gives the bits of the plain jitted step in which `pmean` is the identity."""

import importlib.util
from collections.abc import Callable

import jax
import pytest
import step_models
from step_models import Model, bits, identity, mostly_long

import jaxft

MODELS = {
    name: getattr(step_models, name)
    for name in (
        "mlp_adam",
        "bf16_sgd",
        "transformer",
        "accumulating",
        "plain_dataclass",
        "linen",
        "nnx_split",
        "equinox_partition",
    )
}


@pytest.mark.parametrize("name", mostly_long(MODELS, "mlp_adam", "bf16_sgd", "linen", "equinox_partition"))
def test_one_shard(name: str) -> None:
    if name == "equinox_partition" and importlib.util.find_spec("equinox") is None:
        pytest.skip("equinox is not installed")
    make: Callable[[], Model] = MODELS[name]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        model = make()
        calls = 0

        def counted(state: object, batch: object) -> tuple[object, object]:
            nonlocal calls
            calls += 1
            return model.step(jaxft.pmean)(state, batch)

        plain = jax.jit(model.step(identity))
        step = jaxft.fault_tolerant(counted, None)
        expected, actual = model.state(), model.state()
        for number in range(3):
            expected, expected_metrics = plain(expected, model.batch(number))
            actual, metrics = step(actual, model.batch(number))
            assert jax.tree.structure(metrics) == jax.tree.structure(expected_metrics)
            assert bits(metrics) == bits(expected_metrics)
            assert bits(actual) == bits(expected)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert calls == 1
    assert step.step == 3
