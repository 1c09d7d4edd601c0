"""The arrays of a checkpoint on disk, written and read part by part by the processes of a group.

Theory of operation. Orbax could save arrays of several processes, but not as a group needs it: every save compares
the paths of all processes by collectives on the devices (0.12.8, `_check_directory_consistency`), and collectives
belong to the thread that trains. Its barriers also let all processes wait for minutes if one has failed. So each
process writes its own parts with TensorStore, in Orbax's format: a database (OCDBT) of arrays (zarr, version 3) for
each process, in chunks of the size of one part. Rank 0 then makes one database of all, by reference to their files;
Orbax does the same. Nothing waits for another process here.
"""

import importlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from jaxft._arrays._lanes import Part
from jaxft._checkpoints._orbax import as_stored, stored_dtype
from jaxft._checkpoints._parts import Stored

# TensorStore reads, or compresses and writes, this much at once, and holds it in memory a second time.
_IN_FLIGHT_BYTES = 256 << 20


def own_folder(state: Path, rank: int) -> Path:
    return state / f"ocdbt.process_{rank}"


def write_parts(
    state: Path, rank: int, arrays: Sequence[Stored], parts: Iterable[tuple[Part, np.ndarray]]
) -> None:
    """Write this process's parts of some arrays. TensorStore's errors propagate."""
    ts = _tensorstore()
    context = ts.Context()
    own_folder(state, rank).mkdir()
    writing: deque[tuple[Any, int]] = deque()
    in_flight = 0
    for part, array in parts:
        if not array.size:
            continue  # the shape is known
        stored = arrays[part.leaf]
        spec = _spec(own_folder(state, rank), stored, array.shape)
        target = ts.open(spec, context=context, create=True, open=True).result()
        writing.append((_block(target, part).write(as_stored(array)), array.nbytes))
        in_flight += array.nbytes
        while in_flight > _IN_FLIGHT_BYTES:
            future, size = writing.popleft()
            future.result()
            in_flight -= size
    for future, _ in writing:
        future.result()


def merge(state: Path, ranks: int) -> None:
    """Make one database of the processes' databases. TensorStore's errors propagate."""
    ts = _tensorstore()
    context = ts.Context()  # of all: databases of two contexts cannot refer to the same files

    def opened(folder: Path) -> Any:
        return ts.KvStore.open(_database(folder), context=context).result()

    transaction = ts.Transaction(atomic=True)
    whole = opened(state).with_transaction(transaction)
    own = [own_folder(state, rank) for rank in range(ranks)]
    copies = [opened(each).experimental_copy_range_to(whole) for each in own if any(each.iterdir())]
    for copy in copies:
        copy.result()
    transaction.commit_sync()


def read_parts(
    state: Path, arrays: Sequence[Stored], parts: Iterable[Part]
) -> Iterator[tuple[Part, np.ndarray]]:
    """Read parts of some arrays, array by array. TensorStore's errors propagate.

    The chunks on disk may be larger than the parts, as a single process writes them. So each array is read once: the
    smallest block that has all the parts.
    """
    ts = _tensorstore()
    context = ts.Context()
    reading: deque[tuple[int, Callable[[], Iterator[tuple[Part, np.ndarray]]]]] = deque()
    in_flight = 0
    for number, group in groupby(sorted(parts, key=lambda part: part.leaf), key=lambda part: part.leaf):
        stored, wanted = arrays[number], list(group)
        around = _around(wanted)
        whole = around.type_of(stored.type)
        if not whole.size_bytes:
            yield from ((part, np.empty(part.type_of(stored.type).shape, whole.dtype)) for part in wanted)
            continue
        spec = {"driver": "zarr3", "kvstore": _database(state, stored.name)}
        source = ts.open(spec, context=context, open=True, read=True).result()
        future = _block(source, around).read(order="C")
        reading.append((whole.size_bytes, partial(_divided, future, np.dtype(whole.dtype), around, wanted)))
        in_flight += whole.size_bytes
        while in_flight > _IN_FLIGHT_BYTES:
            size, taken = reading.popleft()
            yield from taken()
            in_flight -= size
    for _, taken in reading:
        yield from taken()


def _divided(
    future: Any, dtype: "np.dtype[Any]", around: Part, parts: Sequence[Part]
) -> Iterator[tuple[Part, np.ndarray]]:
    array = future.result().view(dtype)
    yield from ((part, array[_within(part, around)]) for part in parts)


def _around(parts: Sequence[Part]) -> Part:
    """The smallest block that has these blocks of a leaf."""
    sides = zip(*(part.block for part in parts), strict=True)
    return Part(
        parts[0].leaf,
        tuple((min(start for start, _ in side), max(stop for _, stop in side)) for side in sides),
    )


def _within(part: Part, around: Part) -> tuple[Any, ...]:
    sides = zip(part.block, around.block, strict=True)
    # The dots keep an array of no dimensions an array.
    return (*(slice(start - first, stop - first) for (start, stop), (first, _) in sides), ...)


def _block(array: Any, part: Part) -> Any:
    return array[part.index] if part.block else array


def _spec(own: Path, stored: Stored, chunk: Sequence[int]) -> dict[str, Any]:
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    codecs = [little, {"name": "zstd", "configuration": {"level": 3}}]
    shards = {"chunk_shape": chunk, "codecs": codecs, "index_codecs": [little, {"name": "crc32c"}]}
    return {
        "driver": "zarr3",
        "kvstore": _database(own, stored.name),
        "metadata": {
            "shape": stored.type.shape,
            "data_type": stored_dtype(stored.type.dtype),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "codecs": [{"name": "sharding_indexed", "configuration": shards}],
        },
        # A chunk of zeros is on disk like any other, so that a missing chunk is noticed.
        "store_data_equal_to_fill_value": True,
    }


def _database(folder: Path, name: str = "") -> dict[str, Any]:
    spec: dict[str, Any] = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}
    return spec | {"path": f"{name}/"} if name else spec


def _tensorstore() -> Any:
    return importlib.import_module("tensorstore")
