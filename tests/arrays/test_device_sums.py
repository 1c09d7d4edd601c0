"""Whether a device adds as numpy does, and how much room it has.

Its sums are in `tests/exchange/test_device_partials.py`.
"""

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxft._arrays import _device_sums
from jaxft._arrays._device_sums import adds_as_numpy, device_sums, free_bytes
from jaxft._arrays._layout import Layout, LeafSpec
from tests.accelerators import normal_values, pretended

PAIRS = [
    ("float32", "float32"),
    ("bfloat16", "float32"),
    ("float16", "float32"),
    ("int32", "int32"),
    ("uint32", "uint32"),
]


@pytest.fixture(autouse=True)
def _asked_again() -> None:
    adds_as_numpy.cache_clear()


@pytest.mark.parametrize("pair", PAIRS)
def test_numbers_that_are_not_denormal_are_added_as_numpy_does(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_device_sums, "_values", normal_values)
    assert adds_as_numpy(jax.devices()[0], *pair)


def test_a_device_that_flushes_denormals_is_told_from_one_that_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """XLA's threads on CPU flush them."""
    assert not adds_as_numpy(jax.devices()[0], "float32", "float32")
    assert re.search(r"does not add float32 as numpy does \(\d+ of 4096 sums differ\)", caplog.text)
    assert "--xla_gpu_ftz" in caplog.text
    assert adds_as_numpy(jax.devices()[0], "int32", "int32")


def test_a_device_that_cannot_add_is_not_asked_to(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_device_sums, "_values", lambda *_: 1 // 0)
    assert not adds_as_numpy(jax.devices()[0], "float32", "float32")
    assert "(ZeroDivisionError('integer division or modulo by zero')), so the host adds" in caplog.text


def test_the_users_mesh_and_checks_for_nan_are_not_those_of_the_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program on one device is an error where a mesh of several is set, and a NaN where JAX looks for them."""
    monkeypatch.setattr(_device_sums, "_values", normal_values)
    with jax.set_mesh(jax.make_mesh((4,), ("x",))), jax.debug_nans(True):
        assert adds_as_numpy(jax.devices()[1], "float32", "float32")


def test_sums_are_compiled_once_though_contributions_are_not_committed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As for a state that was not placed. A program must not be missing after a failure."""
    layout = Layout.of([LeafSpec("x", (6,), "bfloat16")])
    one = jnp.arange(6, dtype=jnp.bfloat16)
    assert not one.committed
    with pretended(), jax.log_compiles(), caplog.at_level("WARNING"):
        sums = device_sums(layout, (one.sharding,))
        assert sums is not None
        assert "Compiling" in caplog.text
        caplog.clear()
        two = sums.add([one], [one], summed=(False, False))
        assert two is not None
        three = sums.add(two, [one], summed=(True, False))
        other = sums.add([one], [one], summed=(False, False))
        assert three is not None
        assert other is not None
        (found,) = sums.add(three, other, summed=(True, True)) or ()
    assert caplog.text == ""
    np.testing.assert_array_equal(found, 5 * np.arange(6, dtype=np.float32))


def test_sums_that_are_not_finite_are_no_error_where_jax_looks_for_them() -> None:
    """On the host they are no error either: `nonfinite=` decides about such a step."""
    layout = Layout.of([LeafSpec("x", (2,), "float32")])
    large = jax.device_put(np.array([3e38, np.nan], np.float32))
    with jax.debug_nans(True), jax.debug_infs(True), pretended():
        sums = device_sums(layout, (large.sharding,))
        assert sums is not None
        (found,) = sums.add([large], [large], summed=(False, False)) or ()
        np.testing.assert_array_equal(np.asarray(found), [np.inf, np.nan])


def test_room_is_for_one_more_sum_and_the_next_compute() -> None:
    layout = Layout.of([LeafSpec("x", (6,), "bfloat16")])
    one = jnp.arange(6, dtype=jnp.bfloat16)
    with pretended(), pytest.MonkeyPatch.context() as patch:
        sums = device_sums(layout, (one.sharding,), 1000)
        assert sums is not None
        for limit, room in ((1024, True), (1023, False)):
            stats = {"bytes_limit": limit + limit // 19, "bytes_in_use": 0}
            patch.setattr(_device_sums, "_memory_stats", lambda _device, stats=stats: stats)
            free = free_bytes(jax.devices()[0])
            assert (free >= 1024) is room
            assert sums.have_room() is room
            assert (sums.add([one], [one], summed=(False, False)) is not None) is room


def test_a_device_that_has_no_memory_after_all_leaves_the_sum_to_the_host(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layout = Layout.of([LeafSpec("x", (6,), "float32")])
    one = jnp.arange(6.0)

    def full(*_: object) -> list[jax.Array]:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    with pretended():
        sums = device_sums(layout, (one.sharding,))
        assert sums is not None
        sums._adders = {summed: [full] for summed in sums._adders}
        assert sums.add([one], [one], summed=(False, False)) is None
        with pytest.raises(jax.errors.JaxRuntimeError):  # a sum may be gone
            sums.add([one], [one], summed=(True, False))
    assert "could not add contributions, so the host does: RESOURCE_EXHAUSTED" in caplog.text


def test_the_values_have_all_that_may_differ() -> None:
    for dtype, _ in PAIRS[:3]:
        with np.errstate(invalid="ignore"):  # NaNs that signal become quiet
            one, other = (_device_sums._values(dtype, seed).astype(np.float64) for seed in range(2))
        least = float(jax.numpy.finfo(dtype).smallest_normal)
        assert np.count_nonzero((np.abs(one) < least) & (np.abs(other) < least)) > 500
        assert np.count_nonzero(np.isnan(one)) > 0
        assert np.count_nonzero((np.abs(one) > 1e-3) & (np.abs(one) < 10)) > 1000


def test_on_cpu_the_host_adds() -> None:
    layout = Layout.of([LeafSpec("x", (3,), "int32", "sum")])
    assert device_sums(layout, (SingleDeviceSharding(jax.devices()[0]),)) is None


@pytest.mark.parametrize(
    ("stats", "free"),
    [(None, 0), ({}, 0), ({"bytes_in_use": 5}, -5), ({"bytes_limit": 1000, "bytes_in_use": 300}, 650)],
)
def test_the_room_of_a_device(stats: Any, free: int) -> None:
    assert free_bytes(SimpleNamespace(memory_stats=lambda: stats)) == free
