"""Sums of contributions in the memory of an accelerator.

Additions of XLA on a GPU are those of IEEE 754, as numpy's are, so a sum has the same bits on either. That is not
taken for granted: a device adds only if it has added chosen values as numpy does, denormals among them
(`--xla_gpu_ftz` would flush them). Otherwise, and always on CPU, where XLA's threads may flush them, the host adds.
Which of two NaNs a sum keeps makes no difference: the result of an exchange has one NaN only.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxft._arrays._host_copies import is_accelerator
from jaxft._arrays._layout import Layout

_log = logging.getLogger("jaxft")

# How many additions are compared with numpy's before a device adds, for each pair of dtypes.
_COMPARED = 1 << 12
# This part of a device's memory stays free: programs that are dispatched already may still take some.
_SPARE_PART = 20

_Add = Callable[[list[jax.Array], list[jax.Array]], list[jax.Array]]


class DeviceSums:
    """Adds contributions of one layout on the device that made them.

    Args:
        layout: of the contributions.
        shardings: those of their leaves, all on the same devices.
    """

    def __init__(self, layout: Layout, shardings: Sequence[Sharding]) -> None:
        self._dtypes = [spec.dtype for spec in layout.specs]
        self._sum_dtypes = [layout.regions[extent.region].sum_dtype for extent in layout.extents]
        self._shapes = [spec.shape for spec in layout.specs]
        self._shardings = list(shardings)
        self._programs: dict[tuple[bool, bool], _Add] = {}

    def compile(self) -> None:
        """Compile what can be needed: a failure of another group must not find a program missing."""
        for summed in ((False, False), (True, False), (True, True)):
            self._programs[summed] = self._compiled(*summed)

    def have_room(self) -> bool:
        """Whether each device has memory left for one more sum of all leaves."""
        needed = sum(
            np.dtype(dtype).itemsize * int(np.prod(sharding.shard_shape(shape)))
            for dtype, shape, sharding in zip(self._sum_dtypes, self._shapes, self._shardings, strict=True)
        )
        return all(free_bytes(device) >= needed for device in self._shardings[0].addressable_devices)

    def add(
        self, left: list[jax.Array], right: list[jax.Array], *, summed: tuple[bool, bool]
    ) -> list[jax.Array]:
        """Start to add the leaves of two nodes, in the dtype of sums. Returns without waiting.

        Args:
            left: of the left node; consumed if they are sums.
            right: of its sibling.
            summed: whether each of them are sums, or a single contribution in the dtypes of the leaves.
        """
        return self._programs[summed](left, right)

    def _compiled(self, left: bool, right: bool) -> _Add:
        def add(one: list[jax.Array], other: list[jax.Array]) -> list[jax.Array]:
            return [
                jax.lax.add(a.astype(dtype), b.astype(dtype))
                for a, b, dtype in zip(one, other, self._sum_dtypes, strict=True)
            ]

        # A sum is overwritten by the next one. A single contribution may be needed for another quorum.
        jitted = jax.jit(add, out_shardings=self._shardings, donate_argnums=(0,) if left else ())
        jitted.lower(self._specs(left), self._specs(right)).compile()  # kept by JAX
        return jitted

    def _specs(self, summed: bool) -> list[jax.ShapeDtypeStruct]:
        dtypes = self._sum_dtypes if summed else self._dtypes
        return [
            jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
            for shape, dtype, sharding in zip(self._shapes, dtypes, self._shardings, strict=True)
        ]


@functools.lru_cache(maxsize=64)  # batches of several shapes have the same contributions
def device_sums(layout: Layout, shardings: tuple[Sharding, ...]) -> DeviceSums | None:
    """The sums of a layout, compiled; None where the host has to add: on CPU, and on what adds to other bits."""
    if not layout.specs:
        return None
    devices = shardings[0].addressable_devices
    if any(sharding.addressable_devices != devices for sharding in shardings):
        return None
    device = min(devices, key=lambda one: one.id)
    pairs = sorted({(region.dtype, region.sum_dtype) for region in layout.regions})
    if not is_accelerator(device.platform) or not all(adds_as_numpy(device, *pair) for pair in pairs):
        return None
    sums = DeviceSums(layout, shardings)
    sums.compile()
    return sums


def free_bytes(device: Any) -> int:
    """What a device's memory has left for sums; 0 if its backend does not tell."""
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit", 0)
    return limit - limit // _SPARE_PART - stats.get("bytes_in_use", 0)


@functools.cache
def adds_as_numpy(device: Any, dtype: str, sum_dtype: str) -> bool:
    """Whether a device adds values of a dtype, and of that in which they are summed, with numpy's bits."""
    at = SingleDeviceSharding(device)
    for of in {dtype, sum_dtype}:
        one, other = (_values(of, seed) for seed in range(2))
        with np.errstate(all="ignore"):
            wanted = np.add(one, other, dtype=np.dtype(sum_dtype))
        add = jax.jit(lambda a, b: jax.lax.add(a.astype(sum_dtype), b.astype(sum_dtype)))
        found = np.asarray(add(jax.device_put(one, at), jax.device_put(other, at)))
        differ = int(np.count_nonzero(_bits(found) != _bits(wanted)))
        if differ:
            _log.warning(
                "%s adds %d of %d values of %s to other bits than numpy, so the host adds contributions. Look for "
                "--xla_gpu_ftz or a fast-math flag in XLA_FLAGS.",
                device,
                differ,
                _COMPARED,
                of,
            )
            return False
    return True


def _values(dtype: str, seed: int) -> np.ndarray:
    """Values of all sizes: any bits, denormals, and numbers near one, whose sums are rounded."""
    random = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    unsigned = np.dtype(f"uint{8 * kind.itemsize}")
    values = random.integers(0, 1 << 8 * kind.itemsize, _COMPARED, unsigned, endpoint=False).view(kind)
    if kind.kind in "iu":
        return values
    third = _COMPARED // 3
    mantissa_bits = jnp.finfo(kind).nmant
    values[:third] = random.integers(0, 1 << mantissa_bits, third, unsigned).view(kind)
    values[third : 2 * third] = random.standard_normal(third).astype(kind)
    return values


def _bits(values: np.ndarray) -> np.ndarray:
    """The bits of values, with one NaN."""
    if values.dtype.kind not in "iu":
        values = np.where(np.isnan(values), np.asarray(np.nan, values.dtype), values)
    return values.view(np.dtype(f"uint{8 * values.itemsize}"))
