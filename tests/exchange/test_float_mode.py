"""Sums in a thread whose processor sets denormals to zero, as after the import of a library built with -Ofast."""

import ctypes
import shutil
import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest

import jaxft
from jaxft._arrays._layout import Layout, LeafSpec
from jaxft._exchange._partials import Partials
from jaxft._exchange._reduce import check_floats
from tests import patience

from .members import assert_same_bits, mesh, run_exchange, together

T = TypeVar("T")
LAYOUT = Layout.of([LeafSpec("w", (300_000,), "float32")])
TINY = [np.full(300_000, value, np.float32) for value in (1.5e-39, 4.5e-40, 1.1e-38, 3e-45)]


@pytest.fixture(scope="module")
def flushing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[], T]], Callable[[], T]]:
    """Makes a call load such a library first, which must be in a thread that ends with the test."""
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("fast")

    def first_loading(call: Callable[[], T]) -> Callable[[], T]:
        def loads_and_calls() -> T:
            assert threading.current_thread() is not threading.main_thread()
            # Each needs its own library: only the first load runs what sets the mode.
            library = folder / f"fast{len(list(folder.iterdir()))}.so"
            patience.run(["gcc", "-Ofast", "-shared", "-o", library, "-xc", "/dev/null"], check=True)
            ctypes.CDLL(str(library))
            with pytest.raises(jaxft.ConfigurationError, match="NumPy sets denormal numbers to zero"):
                check_floats()
            return call()

        return loads_and_calls

    return first_loading


def held(shards: list[int], total: int) -> Partials:
    partials = Partials(LAYOUT, total)
    for shard in shards:
        partials.add(shard, [TINY[shard % len(TINY)]])
    return partials


@pytest.mark.usefixtures("lane")
def test_a_group_alone_keeps_denormals(flushing: Callable[..., Callable[[], list[np.ndarray]]]) -> None:
    alone = lambda: held([0, 1, 2, 3, 4], 5).mean_alone()  # noqa: E731
    (flushed,) = together([flushing(alone)])
    assert_same_bits(flushed, alone())


@pytest.mark.usefixtures("lane")
def test_members_that_flush_exchange_the_same_bits(
    flushing: Callable[..., Callable[[], list[np.ndarray]]],
) -> None:
    shards = [[0, 3], [1, 2, 4]]
    alone = held([0, 1, 2, 3, 4], 5).mean_alone()
    with mesh(shards) as links:
        members = [
            lambda one=one, mine=mine: run_exchange(one, held(mine, 5))
            for one, mine in zip(links, shards, strict=True)
        ]
        for means in together([flushing(members[0]), members[1]]):
            assert_same_bits(means, alone)


def test_a_thread_that_flushes_does_so_again_after_a_sum(
    flushing: Callable[..., Callable[[], int]],
) -> None:
    """The mode is the program's."""

    def sums_and_looks() -> int:
        held([0, 1], 2).mean_alone()
        return int((TINY[0] / np.float32(2)).view(np.int32)[0])

    assert together([flushing(sums_and_looks)]) == [0]


def test_a_group_that_flushes_may_not_join(flushing: Callable[..., Callable[[], None]]) -> None:
    def joins() -> None:
        with jaxft.Manager("127.0.0.1:1", group="a", failure_timeout_s=0.1):
            pass

    (error,) = together([flushing(joins)])
    assert isinstance(error, jaxft.ConfigurationError)
    assert "-Ofast" in str(error)
