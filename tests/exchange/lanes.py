"""The compiled lane in tests: built here, and loaded for each instruction set of this machine."""

import fcntl
import functools
import os
import shutil
import sys
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
import pytest

from jaxft._exchange import _compiled
from tests import patience
from tests.shared import shared

ROOT = Path(__file__).parent.parent.parent
# Names a library that was built with other flags.
GIVEN = "JAXFT_TEST_LANE"
INSTRUCTIONS = ("baseline", "avx2", "avx512")


def build(target: Path, *flags: str) -> None:
    """Build the lane as `make setup` does. Skips the test if this machine has no C compiler."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler")
    command = [sys.executable, ROOT / "lane" / "build.py", "--out", target, f"--flags={' '.join(flags)}"]
    patience.run(command, check=True, capture_output=True)


@functools.cache
def built() -> Path:
    """The lane as it is in this tree now, not as it was at `make setup`; or the environment's lane."""
    if given := os.environ.get(GIVEN):
        return Path(given)
    with (shared("lane") / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = shared("lane") / "built"  # by another process of this test run
        if not done.exists():
            build(_compiled.PATH)
            done.touch()
    return _compiled.PATH


def loaded(instructions: str | None) -> _compiled.Library:
    try:
        return _compiled.Library.load(built(), instructions)
    except ValueError:
        pytest.skip(f"this machine has no {instructions}")


# Hard values for an arithmetic: zeros, denormals, the largest numbers, ties, infinities, NaNs, both signs.
SPECIAL = {
    1: "0 1 7F 81",
    2: "0 1 2 03FF 0400 7BFF 7C00 7C01 7E01 7F7F 7F80 7F81 7FC1 007F 0080",
    4: "0 1 007FFFFF 00800000 3F808000 3F818000 477FEFFF 477FF000 33000000 33000001 38800000 387FE000 387FF000 "
    "7F7FFFFF 7F7F8000 7F800000 7F800001 7FC00001 7FFFFFFF",
    8: "0 1 000FFFFFFFFFFFFF 0010000000000000 7FEFFFFFFFFFFFFF 7FF0000000000000 7FF0000000000001",
}


def any_bits(rng: np.random.Generator, dtype: str, size: int) -> np.ndarray:
    """Values of any bits, a third of them special; or of one magnitude, so that sums round. Aligned to no vector."""
    item_bytes = np.dtype(dtype).itemsize
    raw = rng.integers(0, 256, (size + 3) * item_bytes, np.uint8).view(f"u{item_bytes}")
    if "float" in dtype and rng.integers(2):
        return rng.standard_normal(size + 3).astype(dtype)[3:]
    known = np.array([int(word, 16) for word in SPECIAL[item_bytes].split()], raw.dtype)
    special = rng.choice(known, raw.size)
    special |= (rng.integers(0, 2, raw.size) << (8 * item_bytes - 1)).astype(raw.dtype)
    return np.where(rng.integers(0, 3, raw.size) == 0, special, raw).view(dtype)[3:]
