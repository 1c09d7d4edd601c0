"""The large arrays that a step closes over, such as the frozen weights of a model that is fine-tuned.

XLA works on a constant while it compiles, and copies it into each program that reads it: under `jax.jit`, the first
step over 256 MB takes eight times as long as with inputs, and 1.1 GB more memory. So large ones are
inputs of the programs. They are brought to the devices once, and belong to no state: no group exchanges, heals or
saves them. Each group brings its own, and their digest is compared before it joins.

Small ones stay constants, which XLA can compute with ahead: masks, tables, schedules.
"""

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax.sharding import Sharding

from jaxft._arrays._device_digest import StateDigest
from jaxft._arrays._host_copies import no_mesh
from jaxft._arrays._lanes import device_order
from jaxft._arrays._leaf_types import is_key
from jaxft._errors import ConfigurationError

LARGE_BYTES = 1 << 20
_ALIGNED_BYTES = 64


def is_large(value: Any) -> bool:
    """Whether a closed-over value is an input of the programs, and not a constant."""
    if not isinstance(value, np.ndarray | jax.Array) or is_key(value):
        return False
    return value.nbytes >= LARGE_BYTES


class ClosedOver:
    """Places the large arrays of one step on the devices of its programs, and compares them between groups."""

    def __init__(self) -> None:
        self._keys: dict[int, tuple[Hashable, Any]] = {}  # with the array, so that no other gets its identity
        self._placed: dict[tuple[Hashable, Sharding], jax.Array] = {}
        self._texts: dict[tuple[Hashable, ...], str] = {}
        self._digest = StateDigest()

    def placed(self, array: Any, sharding: Sharding) -> jax.Array:
        """Return an array as a program takes it, brought there at the first call."""
        key = self._key(array), sharding
        if key not in self._placed:
            with no_mesh():
                self._placed[key] = jax.device_put(_source(array, sharding), sharding)
        return self._placed[key]

    def text(self, values: Iterable[Any]) -> str:
        """Return the number, the bytes and a digest of the large arrays among `values`; "" if there are none.

        The digest does not depend on how they lie on devices. All processes of a group must call this together.

        Raises:
            ConfigurationError: devices that hold the same part of an array have other values.
        """
        found = {self._key(value): value for value in values if is_large(value)}
        if not found:
            return ""
        key, arrays = tuple(found), list(found.values())
        if key not in self._texts:
            refuse_deleted(arrays)
            types = [f"{array.dtype}{list(array.shape)}" for array in arrays]
            text = " ".join(map("{} {:016x}".format, types, self._digests(arrays)))
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            size = sum(array.nbytes for array in arrays)
            self._texts[key] = f"{digest} ({len(arrays)} array{'s' if len(arrays) > 1 else ''}, {size} bytes)"
        return self._texts[key]

    def _digests(self, arrays: Sequence[Any]) -> list[int]:
        """The digest of each array. They may lie on different devices."""
        orders = [
            device_order(array.sharding) if isinstance(array, jax.Array) and array.committed else ()
            for array in arrays
        ]
        most = max(orders, key=len)
        near: dict[tuple[int, ...], list[int]] = {}
        for number, order in enumerate(orders):
            near.setdefault(order or most, []).append(number)
        digests = [0] * len(arrays)
        for numbers in near.values():
            pending = self._digest.start([jnp.asarray(arrays[number]) for number in numbers])
            if apart := pending.apart():
                array = arrays[numbers[apart[0]]]
                raise ConfigurationError(
                    f"The step closes over an array, {array.dtype}{list(array.shape)}, that has other values on some "
                    "devices of this group than on others that hold the same part of it. In a group of several "
                    "processes, each must make it from the same file or seed."
                )
            for number, digest in zip(numbers, pending.of_leaves(), strict=True):
                digests[number] = digest
        return digests

    def _key(self, array: Any) -> Hashable:
        """Arrays of JAX are known by their identity. Of a numpy array, each use in a step is another object."""
        if id(array) not in self._keys:
            key: Hashable = id(array)
            if isinstance(array, np.ndarray):
                values = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                key = str(array.dtype), array.shape, xxhash.xxh3_128_digest(values.data)
            self._keys[id(array)] = key, array
        return self._keys[id(array)][0]


def _source(array: Any, sharding: Sharding) -> Any:
    """The array to bring to the devices."""
    if not isinstance(array, jax.Array):
        # The caller may change it later, and on the CPU JAX may use its memory: the traced values must stay.
        cpu = any(device.platform == "cpu" for device in sharding.device_set)
        return _copy(array) if cpu else array
    if array.sharding.is_equivalent_to(sharding, array.ndim) or not array.is_fully_addressable:
        return array
    # JAX cannot bring an array to its own devices in another order.
    return np.asarray(array) if array.sharding.device_set == sharding.device_set else array


def _copy(array: Any) -> np.ndarray:
    """A copy at an address that JAX takes as it is, so that it makes no further one."""
    memory = np.empty(array.nbytes + _ALIGNED_BYTES, np.uint8)
    begin = -memory.ctypes.data % _ALIGNED_BYTES
    copy = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def refuse_deleted(arrays: Sequence[Any]) -> None:
    """Raise ConfigurationError if one was deleted: on two or more CPU devices a program would crash the process."""
    for array in arrays:
        if isinstance(array, jax.Array) and array.is_deleted():
            raise ConfigurationError(
                f"The step closes over an array, {array.dtype}{list(array.shape)}, that was deleted, or consumed by "
                "a function that donates it (`donate_argnums`). Keep it for as long as the step is used, or give "
                "that function a copy (`jax.numpy.copy`)."
            )


def specs(arrays: Sequence[Any], step: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
    """The types of a program's closed-over arrays, given those of the state and the batch of its step.

    An array that lies on their devices, in the same order, stays as it is. Any other is brought to them.
    """
    orders = [device_order(spec.sharding) for spec in step if spec.sharding is not None]
    found: list[jax.ShapeDtypeStruct] = []
    for array in arrays:
        aval = jax.typeof(array)
        sharding = placement(array)
        stays = sharding is not None and (not orders or device_order(sharding) in orders)
        found.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding if stays else None))
    return found


def placement(array: Any) -> Sharding | None:
    """The sharding of an array that was placed on several devices, or not in its device's default memory."""
    if not (isinstance(array, jax.Array) and array.committed):
        return None
    (device, *others) = array.sharding.device_set
    kind = array.sharding.memory_kind
    return array.sharding if others or kind not in (None, device.default_memory().kind) else None
