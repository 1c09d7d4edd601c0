"""Several ranks write one checkpoint: here two threads, each with the parts of one device."""

import json
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jaxft_protocol.ranks.lanes import Span
from orbax.checkpoint.experimental import v1 as ocp

from jaxft._arrays._device_digest import PendingDigest, StateDigest
from jaxft._arrays._lanes import Lanes
from jaxft._arrays._leaf_types import type_of
from jaxft._checkpoints import Checkpoints, _checkpoints, _zarr
from jaxft._checkpoints._group import OneProcess, agreed
from jaxft._checkpoints._host import HostCopy, skeleton
from jaxft._checkpoints._manifest import Damaged, Manifest, leaves_of
from jaxft._checkpoints._parts import PartsCopy, stored_arrays
from jaxft._checkpoints._reading import read_manifest
from jaxft._checkpoints._writer import Target, follow, lead
from tests import patience
from tests.step_models import mostly_long

from .states import PATIENCE_S, names, of_equinox, of_everything, of_nnx, of_optax, restored, same, save

RANKS = 2


@dataclass
class Line:
    """The messages of the ranks in a save."""

    folder: "queue.SimpleQueue[str]" = field(default_factory=queue.SimpleQueue)
    saved: "queue.SimpleQueue[str]" = field(default_factory=queue.SimpleQueue)


class Ranks:
    size = RANKS

    def __init__(self, rank: int, line: Line) -> None:
        self.rank = rank
        self._line = line

    def choose(self, _what: str, number: int) -> int:
        return number

    def agree(self, _what: str, failure: str) -> str:
        return failure

    def got_on(self) -> None: ...

    def digest(self) -> PendingDigest:
        return StateDigest().start(jax.tree.leaves(of_optax(5)))

    def save_begins(self, _number: int, folder: str) -> str:
        if self.rank:
            return patience.get(self._line.folder, "rank 0's folder")
        self._line.folder.put(folder)
        return folder

    def save_ends(self, _number: int, failure: str) -> Sequence[str]:
        if self.rank:
            self._line.saved.put(failure)
            return ()
        return [*filter(None, [failure, patience.get(self._line.saved, "rank 1's part")])]


class Half(PartsCopy):
    """The parts of the first or second device."""

    def __init__(self, state: Any, rank: int) -> None:
        leaves = jax.tree.leaves(state)
        shardings = [leaf.sharding if leaf.committed else None for leaf in leaves]
        shapes = [leaf.shape for leaf in leaves]
        lanes = Lanes.of(shapes, list(map(type_of, leaves)), shardings, jax.devices()[:RANKS])
        self.skeleton = skeleton(state)
        self.arrays = stored_arrays(state)
        self.digest = StateDigest().start(leaves)
        host = HostCopy(state).join()
        self._parts = [(part, host[part.leaf][part.index]) for part in lanes.parts(Span(rank, rank + 1))]


def divided(tree: Any) -> Any:
    """Matrices by rows over two devices, as far as they have an even number."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:RANKS]), ("fsdp",))
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, rows) if leaf.ndim > 1 and leaf.shape[0] % RANKS == 0 else leaf,
        tree,
    )


def save_by_two(folder: Path, step: int, state: Any, **options: Any) -> list[BaseException | None]:
    """Save a state; return the error of each rank."""
    line, errors = Line(), [None, None]
    manifest = Manifest(step, "docs", 7, "", leaves_of(state))
    keep = options.pop("keep", 3)
    seen = options.pop("seen", folder)

    def run(rank: int, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:
            errors[rank] = error  # pyright: ignore

    ranks = [Ranks(rank, line) for rank in range(RANKS)]
    halves = [Half(state, rank) for rank in range(RANKS)]
    works = [
        lambda: lead(Target(folder, keep), manifest, lambda: halves[0], ranks[0], 1),
        lambda: follow(seen, step, lambda: halves[1], ranks[1], 1),
    ]
    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        patience.join(thread)
    return errors  # pyright: ignore


STATES = {
    "optax": of_optax,
    "nnx": of_nnx,
    "equinox": of_equinox,
    "everything": of_everything,
    "bare": lambda seed: jax.random.normal(jax.random.key(seed), (4, 3)),
}


@pytest.mark.unoptimized
@pytest.mark.parametrize("name", mostly_long(STATES, "optax", "everything"))
def test_it_is_like_one_that_orbax_has_written(name: str, tmp_path: Path) -> None:
    make = STATES[name]
    state = divided(make(3))
    alone = Checkpoints(tmp_path / "alone")
    save(alone, 5, state)
    assert save_by_two(tmp_path / "both", 5, state) == [None, None]
    found = restored(Checkpoints(tmp_path / "both"), divided(make(0)))
    assert same(found.state, state)
    assert len(found.digest) == 16
    metadata = [tmp_path / who / "5" / "state" / "_METADATA" for who in ("alone", "both")]
    ours, theirs = (json.loads(path.read_text()) for path in metadata)
    assert ours == theirs
    one, other = (ocp.load(str(tmp_path / who / "5")) for who in ("alone", "both"))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)
    files = [{path.name for path in (tmp_path / who / "5").iterdir()} for who in ("alone", "both")]
    assert files[0] == files[1]
    described: Any = ocp.metadata(str(tmp_path / "both" / "5"))
    assert described.custom_metadata["step"] == 5


@pytest.mark.unoptimized
def test_parts_of_what_one_process_has_written_are_read(tmp_path: Path) -> None:
    state = divided(of_everything(3) | {"matrix": jnp.arange(24.0).reshape(4, 6)})
    alone = Checkpoints(tmp_path)
    save(alone, 5, state)
    leaves = HostCopy(state).join()
    for rank in range(RANKS):
        parts = [part for part, _ in Half(state, rank).take()]
        found = dict(_zarr.read_parts(tmp_path / "5" / "state", stored_arrays(state), parts))
        for part in parts:
            assert isinstance(found[part], np.ndarray)
            assert found[part].tobytes() == leaves[part.leaf][part.index].tobytes()
            assert found[part].dtype == leaves[part.leaf].dtype
            assert found[part].shape == leaves[part.leaf][part.index].shape


@pytest.mark.unoptimized
def test_a_rank_that_fails_leaves_nothing_but_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert save_by_two(tmp_path, 5, divided(of_optax(5)), keep=1) == [None, None]
    whole = _zarr.write_parts

    def broken(state: Path, rank: int, *rest: Any) -> None:
        if rank == 1:
            raise OSError(28, "No space left on device")
        whole(state, rank, *rest)

    monkeypatch.setattr(_zarr, "write_parts", broken)
    first, second = save_by_two(tmp_path, 10, divided(of_optax(10)), keep=1)
    assert "No space left on device" in str(first)
    assert "No space left on device" in str(second)
    assert names(tmp_path) == {"5"}
    monkeypatch.undo()
    assert save_by_two(tmp_path, 10, divided(of_optax(10)), keep=1) == [None, None]
    assert names(tmp_path) == {"10"}


@pytest.mark.unoptimized
def test_a_rank_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    first, second = save_by_two(tmp_path / "one", 5, divided(of_optax(5)), seen=tmp_path / "other")
    for error in (first, second):
        assert "rank 1 does not see the folder" in str(error)
        assert "put the checkpoints on a file system that all processes share" in str(error)
    assert not names(tmp_path / "one")


@pytest.mark.parametrize("failing", range(RANKS))
def test_a_rank_that_cannot_copy_its_part_fails_the_save_in_all(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 then begins no save; another rank informs rank 0, which waits for its part."""
    state, line = of_optax(5), Line()

    def copied(rank: int) -> PartsCopy:
        if rank == failing:
            raise MemoryError(f"host copy of rank {rank}")
        return Half(state, rank)

    ranks = [Checkpoints(tmp_path / "saved") for _ in range(RANKS)]
    for rank, checkpoints in enumerate(ranks):
        monkeypatch.setattr(_checkpoints, "PartsCopy", lambda *_, rank=rank: copied(rank))
        checkpoints.save(5, state, job="docs", history=7, group=Ranks(rank, line))
    for checkpoints in ranks:
        checkpoints.finish(PATIENCE_S)
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == (RANKS if failing else 1)
    assert all(f"MemoryError: host copy of rank {failing}" in error for error in errors)
    assert ranks[0].steps() == []
    assert not names(tmp_path / "saved")


class OtherFails(OneProcess):
    """A group in which another rank has failed."""

    def agree(self, what: str, failure: str) -> str:
        return failure or f"rank 1 could not {what}"


def test_what_another_rank_could_not_read_is_damaged_for_all() -> None:
    assert agreed(OneProcess(), "read it", lambda: 5) == 5
    with pytest.raises(Damaged, match="rank 1 could not read it"):
        agreed(OtherFails(), "read it", lambda: 5)
    with pytest.raises(Damaged, match="a bit is flipped") as raised:
        agreed(OtherFails(), "read it", lambda: _damaged("a bit is flipped"))
    assert isinstance(raised.value.__cause__, Damaged)


def _damaged(text: str) -> None:
    raise Damaged(text)


def test_a_rank_that_does_not_see_the_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        Damaged, match="rank 1 does not see it, but rank 0 does: put the checkpoints on a file sys"
    ):
        read_manifest(tmp_path / "5", 5, Ranks(1, Line()))
