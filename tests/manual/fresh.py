"""Fresh environments, far from the clone, with distributions that were built from it."""

import os
import sys
from pathlib import Path

import pytest

from tests import patience

UV = Path(sys.executable).parent / "uv"
needs_uv = pytest.mark.skipif(not UV.exists(), reason="needs uv, which make setup installs")


def fresh_environment(folder: Path, built: Path, *requirements: str) -> Path:
    """Install these from the distributions in `built` into a new environment; return the folder of its programs."""
    run(UV, "venv", "--quiet", "--python", sys.executable, folder / "env")
    # The versions that everything else is tested with; they are in uv's cache.
    frozen = run(UV, "pip", "freeze", "--python", sys.executable, "--exclude-editable")
    (folder / "versions.txt").write_text(frozen)
    words = ["--constraint", folder / "versions.txt", "--find-links", built, *requirements]
    run(UV, "pip", "install", "--quiet", "--python", folder / "env/bin/python", *words)
    return folder / "env" / "bin"


def run(*words: str | Path, cwd: Path | None = None, programs: Path | None = None) -> str:
    done = patience.run(
        list(map(str, words)), capture_output=True, text=True, limit_s=120.0, cwd=cwd, env=variables(programs)
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


def variables(programs: Path | None) -> dict[str, str]:
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAXFT", "PYTHON", "VIRTUAL"))
    }
    path = own["PATH"] if programs is None else f"{programs}{os.pathsep}{own['PATH']}"
    return {**own, "PATH": path, "JAX_PLATFORMS": "cpu"}
