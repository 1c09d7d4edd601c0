"""A folder that all processes of a test run share: expensive things are made once."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

_NAME = "JAXFT_TESTS_SHARED"


def make() -> None:
    """Called once, before pytest-xdist starts its workers, which inherit the environment."""
    os.environ[_NAME] = tempfile.mkdtemp(prefix="jaxft-tests-")


def remove() -> None:
    shutil.rmtree(os.environ.pop(_NAME), ignore_errors=True)


def shared(name: str) -> Path:
    folder = Path(os.environ[_NAME]) / name
    folder.mkdir(exist_ok=True)
    return folder


def compiled() -> dict[str, Any]:
    """Settings of JAX with which processes share what XLA has compiled.

    A process that is killed while it writes leaves half an entry, which JAX passes over, with a warning.
    """
    return {
        "jax_compilation_cache_dir": str(shared("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }


def compiled_environment() -> dict[str, str]:
    """The same for processes that read them from their environment."""
    return {name.upper(): str(value) for name, value in compiled().items()}
