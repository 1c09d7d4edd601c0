"""CPU devices in the place of an accelerator, to test without one.

Memory of the kind `pinned_host` exists on CPU too, so all copies are made. Only XLA's additions are the CPU's,
which may flush denormals: values in these tests have none.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxft._arrays import _device_sums, _host_copies
from jaxft._programs import _stages

_values = _device_sums._values


def normal_values(dtype: str, seed: int) -> np.ndarray:
    """Values to compare a device's additions on, without denormals and the small numbers whose sums may be some."""
    found = _values(dtype, seed)
    if np.dtype(dtype).kind in "iu":
        return found
    least = np.asarray(jax.numpy.finfo(dtype).smallest_normal, found.dtype)
    with np.errstate(invalid="ignore"):  # NaNs that signal
        return np.where(np.abs(found) < 8 * least, np.ones_like(found), found)


_REPLACED: tuple[tuple[Any, str, Any], ...] = (
    (_host_copies, "_has_memory", lambda _platform: True),
    (_device_sums, "_values", normal_values),
    (_device_sums, "_memory_stats", lambda _device: {"bytes_limit": 1 << 40, "bytes_in_use": 0}),
    (_stages, "BUCKET_BYTES", _stages.BUCKET_BYTES),
    (_stages, "MOST_BUCKETS", _stages.MOST_BUCKETS),
)


def pretend(*, bucket_bytes: int = _stages.BUCKET_BYTES) -> None:
    """From now on, CPU devices count as accelerators in this process.

    Args:
        bucket_bytes: how many bytes one exchange has at least, if a program contributes more. 1: each leaf has one.
    """
    for module, name, replacement in _REPLACED:
        assert hasattr(module, name)
        setattr(module, name, replacement)
    _stages.BUCKET_BYTES = bucket_bytes
    if bucket_bytes == 1:
        _stages.MOST_BUCKETS = 1 << 20
    _forget()


@contextlib.contextmanager
def pretended(*, bucket_bytes: int = _stages.BUCKET_BYTES) -> Iterator[None]:
    """Within the context, CPU devices count as accelerators in this process."""
    before = [getattr(module, name) for module, name, _ in _REPLACED]
    pretend(bucket_bytes=bucket_bytes)
    try:
        yield
    finally:
        for (module, name, _), original in zip(_REPLACED, before, strict=True):
            setattr(module, name, original)
        _forget()


def _forget() -> None:
    _device_sums.device_sums.cache_clear()
    _device_sums.adds_as_numpy.cache_clear()
