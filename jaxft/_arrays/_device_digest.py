"""A digest of the training state, computed on the devices that hold it, and cheap enough to send with votes.

Each leaf is read as unsigned 32-bit words. A word is mixed with its position in the leaf's *global* shape, by a
bijection for each position, and the mixed words are added modulo 2**32. Integer sums are exact in any order, so the
digest cannot depend on how a leaf is sharded, nor on how XLA orders its work. Two sums are taken of differently mixed
words; then the sums of the leaves are mixed with the leaf's number and added in the same way.

Since every mix is a bijection, a change of one word is certain to change the digest. Any other change, such as two
words or two leaves that changed places, goes unnoticed with probability 2**-64. It detects accidents, not attackers.

Of a leaf of which several devices hold copies, one copy counts. The others are compared with it, and a difference
changes the digest.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxft._arrays._host_copies import compiled_ahead
from jaxft._errors import ConfigurationError

# A digest may take this long: 1 % of a step of 100 ms.
_BUDGET_S = 1e-3
# Bytes per second. CPU: 13 to 37 GB/s were measured in large leaves and 5 to 10 in 300 small ones, on two
# cores, which the digest takes from the next step. Other devices are limited by memory bandwidth, 1 TB/s or more
# on any recent data-centre GPU or TPU; half of that is assumed, not measured.
_BYTES_PER_S = {"cpu": 5e9}
_BYTES_PER_S_ELSEWHERE = 500e9
# One program sums this many leaves of one kind, and is called as often as necessary. XLA compiles a program in 9 ms
# of processor time for each leaf.
_TOGETHER = 32

_Sums: TypeAlias = tuple[jax.Array, jax.Array]
# From the leaves to the sums of each mesh's leaves, and whether copies of a leaf differ, [leaves, 3] each.
_Fold: TypeAlias = Callable[[list[jax.Array]], list[jax.Array]]
_Kind: TypeAlias = tuple[Sharding, tuple[int, ...], np.dtype]  # of a leaf


class _Plan(NamedTuple):
    """How a state of some types is summed.

    Attributes:
        parts: programs, and the numbers of the leaves that each is given.
        order: the numbers of the leaves in the order of the results.
    """

    parts: Sequence[tuple[_Fold, Sequence[int]]]
    order: Sequence[int]


class StateDigest:
    """Computes digests of the states of one program, with the same compiled programs for states of the same types."""

    def __init__(self) -> None:
        self._plans: dict[tuple[_Kind, ...], _Plan] = {}

    def start(self, leaves: Sequence[jax.Array]) -> "PendingDigest":
        """Dispatch the digest of a state's leaves without waiting for it. The first call compiles.

        The leaves may be donated as soon as this returns: they are read before they are overwritten, and no
        reference to them is kept. In a group of several processes all must call it, as with any program.

        Args:
            leaves: the state's leaves, in its order, of any dtype, typed PRNG keys included, wherever jit accepts
                them: on several meshes of the same devices, in host memory (`pinned_host`), or uncommitted.

        Raises:
            ConfigurationError: a leaf was consumed before.
        """
        deleted = [number for number, leaf in enumerate(leaves) if leaf.is_deleted()]
        if deleted:
            # On two or more CPU devices, a program that is given such an array crashes the process.
            raise ConfigurationError(
                f"Leaf {deleted[0]} of the {len(leaves)} leaves of the state was consumed by an earlier step, or by "
                "other code that donates it, so the state cannot be compared with other groups' states. Use only "
                "the state that the step returned (`state, metrics = step(state, batch)`)."
            )
        shardings = _shardings(leaves)
        kinds = tuple(
            (sharding, leaf.shape, leaf.dtype) for sharding, leaf in zip(shardings, leaves, strict=True)
        )
        if kinds not in self._plans:
            self._plans[kinds] = _plan_for(leaves, kinds)
        parts, order = self._plans[kinds]
        sums = [part for fold, numbers in parts for part in fold([leaves[number] for number in numbers])]
        return PendingDigest(sums, order)


class PendingDigest:
    """A digest that a device may still be computing."""

    def __init__(self, sums: Sequence[jax.Array], order: Sequence[int]) -> None:
        self._sums = sums  # of each mesh's leaves, [leaves, 3]
        self._order = order  # the leaves' numbers, mesh by mesh

    def result(self) -> int:
        """Wait for the digest and return it: 64 bits, unsigned."""
        low, high = _join(self._table[:, :2]).tolist()
        return high << 32 | low

    def of_leaves(self) -> list[int]:
        """Wait for the digest; return the digests of the leaves."""
        return [high << 32 | low for low, high in self._table[:, :2].tolist()]

    def apart(self) -> list[int]:
        """Wait for the digest; return the numbers of the leaves of which devices hold copies that differ."""
        return np.flatnonzero(self._table[:, 2]).tolist()

    @functools.cached_property
    def _table(self) -> np.ndarray:
        table = np.zeros((len(self._order), 3), np.uint32)
        if self._sums:
            table[np.asarray(self._order)] = np.concatenate([np.asarray(some) for some in self._sums])
        return table


def period_steps(state_bytes: int, platform: str) -> int:
    """Return the smallest period, in steps, at which digests cost less than 1 % of 100 ms steps; at least 1.

    Args:
        state_bytes: the size of the whole state, not of one device's part: the groups of a job must agree on the
            period, and may have different meshes. With more devices a digest only gets cheaper.
        platform: JAX's name for it, such as "cpu" or "rocm".
    """
    return max(1, math.ceil(state_bytes / (_BYTES_PER_S.get(platform, _BYTES_PER_S_ELSEWHERE) * _BUDGET_S)))


def _shardings(leaves: Sequence[jax.Array]) -> list[Sharding]:
    """Where the leaves lie in the program that sums them.

    Unplaced leaves are brought to the devices of leaves on a mesh, where the first step leaves them, so that the
    digests of the first state and of later ones are one program.
    """
    shardings = [leaf.sharding for leaf in leaves]
    on = next(filter(None, (_mesh(leaf.sharding) for leaf in leaves if leaf.committed)), None)
    if on is None:
        return shardings
    free = [not leaf.committed and len(leaf.sharding.device_set) == 1 for leaf in leaves]
    everywhere = NamedSharding(on, PartitionSpec())
    return [everywhere if loose else own for loose, own in zip(free, shardings, strict=True)]


def _mesh(sharding: Sharding) -> Mesh | None:
    on = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return on if isinstance(on, Mesh) else None


def _plan_for(leaves: Sequence[jax.Array], kinds: Sequence[_Kind]) -> _Plan:
    placed = next((mesh for sharding, *_ in kinds if (mesh := _mesh(sharding)) is not None), None)
    folds: dict[tuple[_Kind, ...], tuple[_Fold, list[int]]] = {}
    parts: list[tuple[_Fold, Sequence[int]]] = []
    order: list[int] = []
    for numbers in _divided(kinds):
        key = tuple(kinds[number] for number in numbers)
        if key not in folds:
            given = [leaves[number] for number in numbers]
            folds[key] = _fold_for(given, [sharding for sharding, *_ in key], placed)
        fold, places = folds[key]
        parts.append((fold, numbers))
        order += [numbers[place] for place in places]
    return _Plan(parts, order)


def _divided(kinds: Sequence[_Kind]) -> list[Sequence[int]]:
    """The numbers of the leaves, divided into sets of `_TOGETHER` leaves of one kind, and the others."""
    alike: dict[_Kind, list[int]] = {}
    for number, kind in enumerate(kinds):
        alike.setdefault(kind, []).append(number)
    parts: list[Sequence[int]] = []
    others: list[int] = []
    for numbers in alike.values():
        stop = len(numbers) - len(numbers) % _TOGETHER
        parts += [numbers[start : start + _TOGETHER] for start in range(0, stop, _TOGETHER)]
        others += numbers[stop:]
    return [*parts, sorted(others)] if others else parts


def _fold_for(
    leaves: Sequence[jax.Array], shardings: Sequence[Sharding], placed: Mesh | None
) -> tuple[_Fold, list[int]]:
    """Return what sums leaves like these that lie so, mesh by mesh, and the order of its results.

    Its results are joined on the host: no program adds arrays on different meshes with explicit axes.
    """
    meshes: dict[Mesh | None, list[int]] = {}
    # Leaves of one mesh that are divided alike are neighbours, for `_joined_copies`.
    for number in sorted(range(len(leaves)), key=lambda number: sorted(_split(_spec(shardings[number])))):
        meshes.setdefault(_mesh(shardings[number]), []).append(number)

    def fold(given: Sequence[jax.Array]) -> list[jax.Array]:
        near = list(map(_on_device, given, shardings))
        return [
            _sums_on_mesh(
                [near[number] for number in numbers],
                mesh,
                [_spec(shardings[number]) for number in numbers],
            )
            for mesh, numbers in meshes.items()
        ]

    # Leaves without a mesh are computed on the devices of leaves with a mesh; their sums are replicated.
    results = [
        None if placed is None else NamedSharding(placed if mesh is None else mesh, PartitionSpec())
        for mesh in meshes
    ]
    order = [number for numbers in meshes.values() for number in numbers]
    like = [
        leaf if leaf.sharding == sharding else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    return compiled_ahead(jax.jit(fold, out_shardings=results), like), order


def _on_device(leaf: jax.Array, sharding: Sharding) -> jax.Array:
    """A leaf on the devices, moved there if it was offloaded to host memory."""
    if "host" in (sharding.memory_kind or ""):
        return jax.device_put(leaf, jax.memory.Space.Device)
    return leaf


def _sums_on_mesh(
    leaves: Sequence[jax.Array], mesh: Mesh | None, specs: Sequence[PartitionSpec]
) -> jax.Array:
    """The sums of each leaf, and whether its copies differ, [leaves, 3].

    One collective for all leaves; XLA would make one per leaf.
    """
    if mesh is None:
        return jnp.stack([jnp.stack((*_leaf_sums(leaf, ()), jnp.uint32(0))) for leaf in leaves])

    def local(pieces: list[jax.Array]) -> jax.Array:
        offsets = functools.cache(_offset)  # few differ, and XLA takes long to compile many
        sums = [
            jnp.stack(_leaf_sums(piece, list(map(offsets, _axes(spec), piece.shape))))
            for piece, spec in zip(pieces, specs, strict=True)
        ]
        by_device = lax.all_gather(jnp.stack(sums), mesh.axis_names)
        by_axis = by_device.reshape(*mesh.shape.values(), len(specs), 2)
        joined: list[jax.Array] = []
        start = 0
        for split, alike in itertools.groupby(map(_split, specs)):
            stop = start + len(list(alike))
            joined.append(_joined_copies(by_axis[..., start:stop, :], mesh, split))
            start = stop
        return jnp.concatenate(joined)

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(list(specs),), out_specs=PartitionSpec(), check_vma=False
    )
    return mapped(list(leaves))


def _offset(axes: tuple[str, ...], size: int) -> jax.Array:
    """Where a device's piece begins, in a dimension that these axes divide into pieces of this size."""
    return lax.axis_index(axes).astype(jnp.uint32) * jnp.uint32(size) if axes else jnp.uint32(0)


def _joined_copies(sums: jax.Array, mesh: Mesh, split: frozenset[str]) -> jax.Array:
    """The sums of leaves that these axes divide, from the sums of all devices: of one copy of each leaf; [leaves, 3].

    If copies differ, so do the sums: memory that flips a bit of any copy is noticed. The last column marks the leaf.
    """
    copies = jnp.sum(
        sums,
        axis=tuple(n for n, name in enumerate(mesh.axis_names) if name in split),
        dtype=jnp.uint32,
    ).reshape(-1, *sums.shape[-2:])
    differences = _mix(copies - copies[:1])  # the mix of zero is zero
    apart = jnp.any(copies != copies[:1], axis=(0, 2)).astype(jnp.uint32)
    joined = copies[0] + jnp.sum(differences, axis=0, dtype=jnp.uint32)
    return jnp.concatenate([joined, apart[:, None]], axis=1)


def _spec(sharding: Sharding) -> PartitionSpec:
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def _split(spec: PartitionSpec) -> frozenset[str]:
    """The names of the mesh's axes that divide an array."""
    return frozenset(name for axes in _axes(spec) for name in axes)


def _axes(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """The names of the mesh's axes that divide each dimension."""
    return [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in spec]


@jax.jit
def _leaf_sums(piece: jax.Array, offsets: Sequence[jax.Array]) -> _Sums:
    """The two sums over a piece of a leaf that starts at these offsets; missing offsets are zero."""
    words = _words(piece)
    first, second = _position_words(words.shape, offsets, 1), _position_words(words.shape, offsets, 2)
    mixed = _mix(lax.bitwise_xor(words, first))
    zero = np.uint32(0)
    # One reduction of two operands: XLA's CPU backend runs that ten times as fast as two of one, or even as one. The
    # leaf's number is left out here, so that equal shapes share one kernel; otherwise 300 leaves compile for 10 s.
    return lax.reduce(
        (mixed, _mix(lax.bitwise_xor(mixed, second))),
        (zero, zero),
        lambda one, other: (lax.add(one[0], other[0]), lax.add(one[1], other[1])),
        tuple(range(words.ndim)),
    )


def _words(leaf: jax.Array) -> jax.Array:
    """The bits of a leaf as uint32: smaller items widened, larger ones along a further dimension."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    if jnp.iscomplexobj(leaf):
        return jnp.stack([_words(lax.real(leaf)), _words(lax.imag(leaf))], axis=-1)
    info = jnp.iinfo if jnp.issubdtype(leaf.dtype, jnp.integer) else jnp.finfo
    bits = min(32, info(leaf.dtype).bits)
    return lax.bitcast_convert_type(leaf, f"uint{bits}").astype(jnp.uint32)


def _position_words(shape: Sequence[int], offsets: Sequence[jax.Array], lane: int) -> jax.Array:
    """A number for each position: a sum over dimensions, so that no leaf is reshaped or overflows 32 bits."""
    position_words = lax.full(shape, _scramble(lane), jnp.uint32)
    for dimension in range(len(shape)):
        index = lax.broadcasted_iota(jnp.uint32, shape, dimension)
        if dimension < len(offsets):
            index = lax.add(index, lax.broadcast(offsets[dimension], shape))
        index = lax.mul(index, _constant(index, _scramble(lane + 2 * dimension + 2) | 1))
        position_words = lax.add(position_words, index)
    return position_words


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of 32-bit words; each bit of the result depends on all bits (C. Wellons' lowbias32)."""
    x = _fold_right(x, 16)
    x = lax.mul(x, _constant(x, 0x7FEB352D))
    x = _fold_right(x, 15)
    x = lax.mul(x, _constant(x, 0x846CA68B))
    return _fold_right(x, 16)


def _fold_right(x: jax.Array, bits: int) -> jax.Array:
    return lax.bitwise_xor(x, lax.shift_right_logical(x, _constant(x, bits)))


def _constant(like: jax.Array, value: int) -> jax.Array:
    return lax.full(like.shape, value, jnp.uint32)


def _scramble(number: int) -> int:
    """An arbitrary 32-bit constant: element `number` of a pseudo-random sequence (splitmix64)."""
    x = number * 0x9E3779B97F4A7C15 % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return (x ^ x >> 31) >> 32


def _join(table: np.ndarray) -> np.ndarray:
    """The digest, [2], from the sums of each leaf, [leaves, 2], with the arithmetic of `_mix`, `_position_words`."""
    rows, columns = np.indices(table.shape, np.uint32)
    row, column = (np.uint32(_scramble(3 + 2 * dimension + 2) | 1) for dimension in (0, 1))
    position_words = np.uint32(_scramble(3)) + rows * row + columns * column
    return np.asarray(np.sum(_mix_host(_mix_host(table) ^ position_words), axis=0, dtype=np.uint32))


def _mix_host(x: np.ndarray) -> np.ndarray:
    """`_mix` on the host."""
    x = (x ^ x >> 16) * np.uint32(0x7FEB352D)
    x = (x ^ x >> 15) * np.uint32(0x846CA68B)
    return x ^ x >> 16
