"""The compiled lane under the address and undefined-behaviour sanitizers: all its tests again, slower."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import patience

from .lanes import GIVEN, ROOT, build

LIMIT_S = 300.0


@pytest.mark.long
def test_no_byte_out_of_bounds_and_nothing_undefined(tmp_path: Path) -> None:
    library = tmp_path / "liblane.so"
    build(
        library, "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g"
    )
    # The interpreter itself was built without: the sanitizer's library has to be the first one that is loaded. It
    # looks for the functions that throw exceptions of C++ then, which jaxlib does, and Python has none.
    asan, stdcpp = (_library(name) for name in ("libasan.so", "libstdc++.so.6"))
    if not (asan.is_absolute() and stdcpp.is_absolute()):
        pytest.skip("this compiler comes without the address sanitizer's library, or without the one for C++")
    environment = {
        **os.environ,
        GIVEN: str(library),
        "LD_PRELOAD": f"{asan}:{stdcpp}",
        "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps memory until it ends
    }
    files = [f"tests/exchange/test_{name}.py" for name in ("compiled_sums", "lanes", "macs", "grid")]
    done = patience.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "0",
            "-m",
            "not storm",
            "-p",
            "no:cacheprovider",
            *files,
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        limit_s=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert " passed" in done.stdout


def _library(name: str) -> Path:
    """Where the compiler's own libraries are; the name as it is if it has no such one."""
    asked = ["cc", f"-print-file-name={name}"]
    return Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
