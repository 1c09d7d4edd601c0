"""Whether a device adds as numpy does, and how much room it has.

What it adds is in `tests/exchange/test_device_partials.py`.
"""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxft._arrays import _device_sums
from jaxft._arrays._device_sums import adds_as_numpy, device_sums, free_bytes
from jaxft._arrays._layout import Layout, LeafSpec

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
    values = _device_sums._values

    def normal(dtype: str, seed: int) -> np.ndarray:
        found = values(dtype, seed)
        if np.dtype(dtype).kind in "iu":
            return found
        least = np.asarray(jax.numpy.finfo(dtype).smallest_normal, found.dtype)
        with np.errstate(invalid="ignore"):  # NaNs that signal
            return np.where(np.abs(found) < 8 * least, np.ones_like(found), found)

    monkeypatch.setattr(_device_sums, "_values", normal)
    assert adds_as_numpy(jax.devices()[0], *pair)


def test_a_device_that_flushes_denormals_is_told_from_one_that_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """XLA's threads on CPU flush them."""
    assert not adds_as_numpy(jax.devices()[0], "float32", "float32")
    assert "--xla_gpu_ftz" in caplog.text
    assert adds_as_numpy(jax.devices()[0], "int32", "int32")


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
    class Device:
        def memory_stats(self) -> Any:
            return stats

    assert free_bytes(Device()) == free  # pyright: ignore[reportArgumentType]
