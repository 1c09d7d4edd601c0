"""`make setup` on an environment that is there already."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import patience

ROOT = Path(__file__).parents[1]
VERSION = "python{}.{}".format(*sys.version_info)


def clone(folder: Path, version: str) -> Path:
    """What `make setup` needs of a clone, with an environment whose programs only write down how they were called."""
    shutil.copy(ROOT / "Makefile", folder)
    for name in (".", "coordinator", "launcher", "protocol"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "pyproject.toml").touch()
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    (folder / ".venv" / "lib" / version).mkdir(parents=True)
    for name in ("python", "pip", "uv"):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {folder}/calls\n')
        (programs / name).chmod(0o755)
    return folder


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return patience.run(["make", "setup", *arguments], cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [(), (f"PYTHON={sys.executable}",)])
def test_an_environment_is_kept_when_what_it_needs_changes(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """A second interpreter of the same version, put over the first one, finds the modules of the first."""
    folder = clone(tmp_path, VERSION)
    done = make(folder, *arguments)
    assert done.returncode == 0, done.stderr
    calls = (folder / "calls").read_text().splitlines()
    assert any(call.startswith("uv pip install") for call in calls), calls
    assert not (folder / ".venv" / "pyvenv.cfg").exists(), "it was made again"
    assert make(folder).returncode == 0
    assert (folder / "calls").read_text().splitlines() == calls, "it was installed again"


def test_another_version_of_python_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = clone(tmp_path, "python3.9")
    done = make(folder, f"PYTHON={sys.executable}")
    assert done.returncode == 2
    assert f".venv has another Python than {sys.executable}. Run make clean first" in done.stderr
    assert not (folder / "calls").exists()


def test_what_setup_installs_is_compiled() -> None:
    """Where Python writes no bytecode, each of the many processes of a test would compile its imports."""
    for package in ("jax", "grpc", "numpy"):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        assert Path(importlib.util.cache_from_source(spec.origin)).exists(), package
