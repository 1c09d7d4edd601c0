"""The compiled lane in tests: built here, and loaded for each instruction set of this machine."""

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxft._exchange import _compiled

ROOT = Path(__file__).parent.parent.parent
INSTRUCTIONS = ("baseline", "avx2", "avx512")


def build(target: Path, *flags: str) -> None:
    """Build the lane as `make setup` does. Skips the test if this machine has no C compiler."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler")
    command = [sys.executable, ROOT / "lane" / "build.py", "--out", target, f"--flags={' '.join(flags)}"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)


@functools.cache
def built() -> Path:
    """The lane as it is in this tree now, not as it was at `make setup`."""
    build(_compiled.PATH)
    return _compiled.PATH


def loaded(instructions: str | None) -> _compiled.Library:
    try:
        return _compiled.Library.load(built(), instructions)
    except ValueError:
        pytest.skip(f"this machine has no {instructions}")
