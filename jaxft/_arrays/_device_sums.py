"""Sums of contributions in the memory of an accelerator.

XLA on a GPU adds by IEEE 754, as numpy does, so a sum has the same bits on either. That is not taken for granted: a
device adds only if it has added chosen values as numpy does, denormals among them (`--xla_gpu_ftz` would flush them).
Otherwise, and always on CPU, where XLA's threads may flush them, the host adds. Which of two NaNs a sum keeps makes
no difference: the result of an exchange has one NaN only.
"""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxft._arrays._host_copies import compiled_ahead, is_accelerator
from jaxft._arrays._layout import Layout, Operation

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
        shardings: of their leaves. A program adds the leaves on the same devices.
        reserved_bytes: the memory of each device that the next `compute` needs, and sums must not take.
    """

    def __init__(self, layout: Layout, shardings: Sequence[Sharding], reserved_bytes: int) -> None:
        self._dtypes = [spec.dtype for spec in layout.specs]
        self._sum_dtypes = [layout.regions[extent.region].sum_dtype for extent in layout.extents]
        self._operations: list[Operation] = [spec.operation for spec in layout.specs]
        self._shapes = [spec.shape for spec in layout.specs]
        self._shardings = list(shardings)
        self._reserved_bytes = reserved_bytes
        # The numbers of the leaves that are on the same devices, and their adders.
        on_devices: dict[frozenset[Any], list[int]] = {}
        for number, sharding in enumerate(shardings):
            on_devices.setdefault(frozenset(sharding.device_set), []).append(number)
        self._together = list(on_devices.values())
        self._adders: dict[tuple[bool, bool], list[_Add]] = {}
        self._needed_bytes = self._sum_bytes()

    def compile(self) -> None:
        """Compile all programs: after a failure of another group none must be missing."""
        for left, right in ((False, False), (True, False), (True, True)):
            self._adders[left, right] = [
                _adder(
                    [(self._sum_dtypes[number], self._operations[number]) for number in numbers],
                    [self._shardings[number] for number in numbers],
                    self._specs(numbers, summed=left),
                    self._specs(numbers, summed=right),
                    consumes_left=left,
                )
                for numbers in self._together
            ]

    def have_room(self) -> bool:
        """Whether each device has memory left for one more sum of all leaves and for the next `compute`."""
        return all(
            free_bytes(device) >= self._reserved_bytes + needed
            for device, needed in self._needed_bytes.items()
        )

    def _sum_bytes(self) -> dict[Any, int]:
        """The bytes of the sum of all leaves on each of this process's devices."""
        found: dict[Any, int] = {}
        for dtype, shape, sharding in zip(self._sum_dtypes, self._shapes, self._shardings, strict=True):
            piece_bytes = np.dtype(dtype).itemsize * int(np.prod(sharding.shard_shape(shape)))
            for device in sharding.addressable_devices:
                found[device] = found.get(device, 0) + piece_bytes
        return found

    def add(
        self, left: list[jax.Array], right: list[jax.Array], *, summed: tuple[bool, bool]
    ) -> list[jax.Array] | None:
        """Start to add the leaves of two nodes, in the dtype of sums, without waiting. None: there is no room.

        Args:
            left: of the left node; consumed if they are sums, so that no room is needed.
            right: of its sibling.
            summed: whether each of them are sums, or a single contribution in the dtypes of the leaves.
        """
        if summed[0]:
            return self._added(left, right, summed)
        if not self.have_room():
            return None
        try:
            return self._added(left, right, summed)
        except jax.errors.JaxRuntimeError as error:
            _log.warning("A device could not add contributions, so the host does: %s", error)
            return None

    def _added(
        self, left: list[jax.Array], right: list[jax.Array], summed: tuple[bool, bool]
    ) -> list[jax.Array]:
        found: dict[int, jax.Array] = {}
        for numbers, add in zip(self._together, self._adders[summed], strict=True):
            with _any_values():
                sums = add([left[number] for number in numbers], [right[number] for number in numbers])
            found.update(zip(numbers, sums, strict=True))
        return [found[number] for number in range(len(left))]

    def _specs(self, numbers: Sequence[int], *, summed: bool) -> list[jax.ShapeDtypeStruct]:
        dtypes = self._sum_dtypes if summed else self._dtypes
        return [
            jax.ShapeDtypeStruct(
                self._shapes[number], jnp.dtype(dtypes[number]), sharding=self._shardings[number]
            )
            for number in numbers
        ]


def _adder(
    kinds: Sequence[tuple[str, Operation]],
    shardings: Sequence[Sharding],
    left: list[jax.ShapeDtypeStruct],
    right: list[jax.ShapeDtypeStruct],
    *,
    consumes_left: bool,
) -> _Add:
    """A compiled program that adds leaves. A sum on the left is overwritten; a contribution may be needed again."""

    def add(one: list[jax.Array], other: list[jax.Array]) -> list[jax.Array]:
        return [
            (jax.lax.max if operation == "max" else jax.lax.add)(a.astype(dtype), b.astype(dtype))
            for a, b, (dtype, operation) in zip(one, other, kinds, strict=True)
        ]

    donated = (0,) if consumes_left else ()
    with _any_values():
        return compiled_ahead(
            jax.jit(add, out_shardings=list(shardings), donate_argnums=donated), left, right
        )


@contextlib.contextmanager
def _any_values() -> Iterator[None]:
    """Have JAX not look for NaN and infinities: the result of the exchange is checked, as on the host."""
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


@functools.lru_cache(maxsize=64)  # batches of several shapes have the same contributions
def device_sums(
    layout: Layout, shardings: tuple[Sharding, ...], reserved_bytes: int = 0
) -> DeviceSums | None:
    """The sums of a layout, compiled; None where the host has to add: on CPU, and where the bits would differ."""
    if not layout.specs:
        return None
    devices = {device for sharding in shardings for device in sharding.addressable_devices}
    device = min(devices, key=lambda device: device.id)
    pairs = sorted({(region.dtype, region.sum_dtype) for region in layout.regions})
    if not is_accelerator(device) or not all(adds_as_numpy(device, *pair) for pair in pairs):
        return None
    sums = DeviceSums(layout, shardings, reserved_bytes)
    sums.compile()
    _log.info("Shards are added on the devices: %d leaves on %d of %s.", len(shardings), len(devices), device)
    return sums


def free_bytes(device: Any) -> int:
    """A device's free memory for sums; 0 if its backend does not report it."""
    stats = _memory_stats(device) or {}
    limit = stats.get("bytes_limit", 0)
    return limit - limit // _SPARE_PART - stats.get("bytes_in_use", 0)


def _memory_stats(device: Any) -> Any:
    return device.memory_stats()


@functools.cache
def adds_as_numpy(device: Any, dtype: str, sum_dtype: str) -> bool:
    """Whether a device adds values of a dtype, and of its dtype of sums, with numpy's bits."""
    outcomes: list[int | Exception] = []

    def compare() -> None:
        try:
            with _any_values():
                outcomes.append(sum(_differ(device, of, sum_dtype) for of in {dtype, sum_dtype}))
        except Exception as error:  # logged below: then the host adds
            outcomes.append(error)

    # In another thread, where no mesh of the user's is set. It only compiles and runs, for which JAX has no deadline.
    thread = threading.Thread(target=compare, name="jaxft-sums", daemon=True)
    thread.start()
    thread.join()
    (outcome,) = outcomes
    if outcome:
        _log.warning(
            "%s does not add %s as numpy does (%s), so the host adds contributions. Look for --xla_gpu_ftz or a "
            "fast-math flag in XLA_FLAGS.",
            device,
            dtype,
            f"{outcome} of {_COMPARED} sums differ" if isinstance(outcome, int) else repr(outcome),
        )
    return not outcome


def _differ(device: Any, dtype: str, sum_dtype: str) -> int:
    """How many of the values are added to other bits than numpy's."""
    at = SingleDeviceSharding(device)
    one, other = (_values(dtype, seed) for seed in range(2))
    with np.errstate(all="ignore"):
        wanted = np.add(one, other, dtype=np.dtype(sum_dtype))
    add = jax.jit(lambda a, b: jax.lax.add(a.astype(sum_dtype), b.astype(sum_dtype)))
    found = np.asarray(add(jax.device_put(one, at), jax.device_put(other, at)))
    return int(np.count_nonzero(_bits(found) != _bits(wanted)))


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
