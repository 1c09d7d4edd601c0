"""A state that is kept for joiners during later steps.

A snapshot starts as references to the arrays, which costs nothing. A leaf is *captured*, that is, protected from the
donation of its array, when the first joiner asks for it. Before that donation the leaves of this donor's stripe
(`_blob.py`) are captured, and other leaves that no joiner has asked for are let go:

* On the CPU backend a host view of an array is not a copy, and JAX copies an array that has a live view instead of
  donating it. So the view is a copy-on-write snapshot. jaxlib does this but does not promise it, so every reader
  checks afterwards whether the array was overwritten (`intact`).
* On an accelerator a copy to pinned host memory is started, and not waited for: the device makes it during the
  next steps, and reads the array before a donation overwrites it. There only the stripe is served, so that a donor
  needs host memory for no more.
* For the few types that XLA packs (int4), a host view is a copy from the start.

A leaf on several devices is joined, in C order, when its first byte is read. A joiner of several processes asks for
the parts that belong to some lanes; these are read where they lie, if they lie together.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxft_protocol.messages import WHOLE, Stripe
from jaxft_protocol.ranks.lanes import Span

from jaxft._arrays._host_copies import (
    HostCopy,
    goes_to_pinned,
    host_copies,
    is_accelerator,
    on_accelerator,
    pinned_limit_bytes,
    unique_pieces,
)
from jaxft._arrays._leaf_types import LeafType, is_key, type_of
from jaxft._arrays._pieces import Pieces
from jaxft._heal._blob import Blob, BlobLayout, NotKept, Spoiled, bands_in, bands_of, bytes_of, keeps

# Copies of states that take more than this part of XLA's pinned memory go to other memory: gradients need the rest.
PINNED_PART = 0.5

_Piece = tuple[tuple[slice, ...], np.ndarray]


class Snapshot:
    """A state: the pieces of this process, as `Pieces.split` returns them, of which `stripe` is kept in any case.

    Args:
        leaves: the pieces, of any dtypes.
        pieces: how the state is split; None: leaves are whole.
        stripe: the leaves that are captured before the donation.
        taken_bytes: XLA's pinned memory in other copies of states.
    """

    def __init__(
        self,
        leaves: Sequence[Any],
        pieces: Pieces | None = None,
        stripe: Stripe = WHOLE,
        *,
        taken_bytes: int = 0,
    ) -> None:
        self._lock = threading.Lock()
        self._leaves: list[Any] = list(leaves)
        self._pieces = pieces
        self.stripe = stripe
        self._bands: list[int] = []
        self._sources: list[_Leaf] | None = None
        self._let_go = False
        self._taken_bytes = taken_bytes
        self._blobs: dict[Span | None, Blob] = {}

    def blob(self, span: Span | None = None) -> Blob:
        """All that was given, or the parts that belong to some of this process's lanes."""
        with self._lock:
            if span not in self._blobs:
                self._blobs[span] = self._blob(span)
            return self._blobs[span]

    def capture(self, wanted: Callable[[], bool] = lambda: True) -> None:
        """Protect the stripe from the donation of its arrays; stop as soon as it is not `wanted`.

        On an accelerator copies are started, and only waited for where there is no pinned memory for all of them.
        """
        with self._lock:
            sources = self._leaf_sources()
        for source in sources:
            if not wanted():
                return
            if source.kept:
                source.capture()

    def let_go(self) -> None:
        """Drop the leaves that were not captured: their arrays are about to be donated."""
        with self._lock:
            self._let_go = True
            sources, self._leaves = self._sources or [], []
        for source in sources:
            source.let_go()

    @property
    def live(self) -> bool:
        """Whether more than the stripe can be read."""
        with self._lock:
            return not self._let_go and all(source.live for source in self._leaf_sources())

    def intact(self) -> bool:
        with self._lock:
            return self._sources is None or all(source.intact() for source in self._sources)

    @property
    def copied_bytes(self) -> int:
        """The most host memory that it takes on an accelerator; 0 on CPU, where the state lies there already."""
        with self._lock:
            return sum(source.copied_bytes for source in self._leaf_sources())

    @property
    def pinned_bytes(self) -> int:
        """How much of that is pinned memory."""
        with self._lock:
            return sum(source.pinned_bytes for source in self._leaf_sources())

    @property
    def missing_bytes(self) -> int:
        """How much of the rest has not been taken yet."""
        with self._lock:
            return sum(source.missing_bytes for source in self._leaf_sources())

    def _leaf_sources(self) -> "list[_Leaf]":
        if self._sources is None:
            leaves, pieces = self._leaves, self._pieces
            self._bands = bands_of([*map(type_of, leaves)]) if pieces is None else bands_in(pieces)
            kept = [keeps(self.stripe, band) for band in self._bands]
            copied_bytes = [
                _copied_bytes(leaf) if mine else 0 for leaf, mine in zip(leaves, kept, strict=True)
            ]
            to_pinned = [
                mine and _is_array(leaf) and goes_to_pinned(leaf)
                for leaf, mine in zip(leaves, kept, strict=True)
            ]
            pinned_bytes = sum(
                type_of(leaf).size_bytes for leaf, pinned in zip(leaves, to_pinned, strict=True) if pinned
            )
            room = pinned_bytes <= PINNED_PART * pinned_limit_bytes() - self._taken_bytes
            self._sources = [
                _Leaf(leaf, kept=mine, copied_bytes=copied, pinned=pinned and room)
                for leaf, mine, copied, pinned in zip(leaves, kept, copied_bytes, to_pinned, strict=True)
            ]
            self._leaves = []
        return self._sources

    def _blob(self, span: Span | None) -> Blob:
        sources = self._leaf_sources()
        if span is None:
            return Blob(BlobLayout.of([source.type for source in sources], self._bands), sources)
        assert self._pieces is not None
        types = self._pieces.types(span)
        parts = [
            _PartOf(sources[number], index, part)
            for (number, index), part in zip(self._pieces.picks(span), types, strict=True)
        ]
        return Blob(BlobLayout.of(types, bands_in(self._pieces, span)), parts)


class _Leaf:
    """One leaf: first the array, then (captured) host views or copies of its pieces, then one run of bytes.

    Of an accelerator's array, a copy is started in between. A leaf that is not `kept` can be let go instead.
    """

    def __init__(self, leaf: Any, *, kept: bool, copied_bytes: int, pinned: bool) -> None:
        self.type = type_of(leaf)
        self.kept = kept
        self.copied_bytes = copied_bytes
        self._joined_bytes = max(0, copied_bytes - self.type.size_bytes)
        # Whether it can be read as long as it is not let go.
        self.live = kept or not (_is_array(leaf) and on_accelerator(leaf))
        self._pinned = pinned
        self._lock = threading.Lock()
        self._leaf: Any = leaf if self.live else None
        self._gone = not self.live
        self._copy: HostCopy | None = None
        self._pieces: list[_Piece] = []
        self._watched: list[jax.Array] = []  # arrays whose memory the pieces are
        self._flat: memoryview | None = None
        self._spoiled = False

    @property
    def pinned_bytes(self) -> int:
        """The pinned host memory that its copy takes; 0 if the copy is not pinned."""
        return self.type.size_bytes if self._pinned else 0

    @property
    def missing_bytes(self) -> int:
        """The memory still to take on an accelerator: for its copy, unless that is pinned, and to join its pieces."""
        if self._leaf is not None and not self._pinned:
            return self.copied_bytes
        return self._joined_bytes if self._flat is None else 0

    def capture(self) -> None:
        if self._leaf is None:  # without the lock, which a thread may hold for long while it joins
            return
        with self._lock:
            self._capture()

    def let_go(self) -> None:
        """Drop the array, unless it has been captured."""
        if self._leaf is None:  # as in `capture`
            return
        with self._lock:
            self._gone = self._leaf is not None
            self._leaf = None

    def flat(self) -> memoryview:
        with self._lock:
            self._read()
            if self._flat is None:
                self._flat = self._join()
            return self._flat

    def part(self, index: tuple[slice, ...]) -> tuple[np.ndarray, list[jax.Array]]:
        """A block of the leaf, contiguous, and the arrays whose memory it may share."""
        with self._lock:
            self._read()
            for where, piece in self._pieces:
                if where == index and piece.flags.c_contiguous:
                    return piece, list(self._watched)
            if self._flat is None:
                self._flat = self._join()
            whole = np.asarray(self._flat).view(np.dtype(self.type.dtype))
            return np.ascontiguousarray(whole.reshape(self.type.shape)[index]), list(self._watched)

    def intact(self) -> bool:
        # Not `is_deleted` of the whole leaf: that looks at its first buffer only (JAX 0.10 to 0.12).
        return not self._spoiled and not any(shard.is_deleted() for shard in self._watched)

    def _capture(self) -> None:
        if self._leaf is None:
            return
        try:
            if _is_array(self._leaf) and on_accelerator(self._leaf):
                (self._copy,) = host_copies([self._leaf], pinned=self._pinned)
                # There may have been no room for it.
                self._pinned = all(isinstance(piece, jax.Array) for _, piece in self._copy.pieces)
            else:
                self._pieces, self._watched = _host_pieces(self._leaf, self.type)
        except RuntimeError as error:  # deleted: released here, and donated, before a server read it
            raise Spoiled(str(error)) from error
        self._leaf = None

    def _read(self) -> None:
        """Have the leaf's pieces in host memory; waits for a copy. Raises Spoiled or NotKept."""
        if self._gone:
            raise NotKept("it is not of the stripe that this donor keeps of the state")
        self._capture()
        if self._copy is None:
            return
        try:
            self._pieces, self._copy = _pieces_of(self._copy), None
        except RuntimeError as error:  # the copy has failed
            raise Spoiled(str(error)) from error

    def _join(self) -> memoryview:
        if len(self._pieces) == 1 and self._pieces[0][1].flags.c_contiguous:
            return bytes_of(self._pieces[0][1])
        whole = np.empty(self.type.shape, np.dtype(self.type.dtype))
        for index, piece in self._pieces:
            whole[index] = piece
        # Drop the views, so that the arrays can be donated again.
        self._spoiled = not self.intact()
        self._pieces, self._watched = [], []
        return bytes_of(whole)


class _PartOf:
    """One block of a leaf."""

    def __init__(self, leaf: _Leaf, index: tuple[slice, ...], type_: LeafType) -> None:
        self._leaf = leaf
        self._index = index
        self._type = type_
        self._lock = threading.Lock()
        self._block: np.ndarray | None = None
        self._watched: list[jax.Array] = []  # the leaf stops to watch them once it is joined

    def flat(self) -> memoryview:
        with self._lock:
            if self._block is None:
                self._block, self._watched = self._leaf.part(self._index)
                assert self._block.nbytes == self._type.size_bytes
            return bytes_of(self._block)

    def intact(self) -> bool:
        return self._leaf.intact() and not any(shard.is_deleted() for shard in self._watched)


def _host_pieces(leaf: Any, leaf_type: LeafType) -> tuple[list[_Piece], list[jax.Array]]:
    """A leaf's unique pieces in host memory, and the arrays whose memory the pieces share."""
    if not isinstance(leaf, jax.Array):
        # A number or a numpy array, as the first state of a run may hold; converted as JAX does.
        return [((), np.array(leaf).astype(leaf_type.dtype))], []
    if is_key(leaf):
        # Copied, which is cheap: JAX does not promise that a donation respects a view of a key's data.
        return [((), np.array(jax.random.key_data(leaf)))], []
    assert leaf.is_fully_addressable, "a group of several processes cannot donate its state"
    pieces: list[_Piece] = []
    watched: list[jax.Array] = []
    for shard in leaf.addressable_shards:
        if shard.replica_id != 0:
            continue
        view = np.asarray(shard.data)
        if shard.device.platform == "cpu":
            if view.size and view.ctypes.data == shard.data.unsafe_buffer_pointer():
                watched.append(shard.data)
        elif "host" in (shard.data.sharding.memory_kind or ""):
            view = np.array(view)  # offloaded to host memory: the view may share the array's memory
        pieces.append((_plain(shard.index, leaf.shape), view))
    return pieces, watched


def _pieces_of(copy: HostCopy) -> list[_Piece]:
    """The pieces of a copy where they lie in host memory; waits for them."""
    return [(_plain(index, copy.shape), np.asarray(piece)) for index, piece in copy.pieces]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not is_key(leaf)


def _copied_bytes(leaf: Any) -> int:
    """The host memory of an accelerator's leaf: twice its size if its pieces have to be joined."""
    if not _is_array(leaf) or not is_accelerator(next(iter(leaf.sharding.addressable_devices))):
        return 0
    return type_of(leaf).size_bytes * (1 if len(unique_pieces(leaf)) == 1 else 2)


def _plain(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The same index, with every bound given."""
    return tuple(slice(*one.indices(size)[:2]) for one, size in zip(index, shape, strict=True))
