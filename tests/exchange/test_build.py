"""The build of the compiled lane: its error where it cannot build, and the promise of the wheel."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from .lanes import ROOT, built

BUILD = ROOT / "lane" / "build.py"


@pytest.mark.parametrize(
    ("compiler", "why"), [("none", "'none' cannot be run"), ("false", "false .* failed")]
)
def test_without_a_compiler_it_says_so_and_changes_nothing(tmp_path: Path, compiler: str, why: str) -> None:
    target = tmp_path / "liblane.so"
    target.write_bytes(b"before")
    done = subprocess.run(
        [sys.executable, BUILD, "--out", target],
        env={**os.environ, "CC": compiler},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert re.search(f"The compiled lane was not built: {why}", done.stderr)
    assert "The exchange uses Python: the same bits" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["liblane.so"]
    assert target.read_bytes() == b"before"


def test_it_needs_no_newer_glibc_than_the_wheel_says() -> None:
    # manylinux_2_17 is the oldest that installers still know.
    assert 0 < runpy.run_path(str(BUILD))["glibc_minor"](built()) <= 17
