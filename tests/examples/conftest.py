"""Settings for the tests of the examples, on top of those for every test."""

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest


@pytest.fixture(autouse=True)
def _optax_promotes_dtypes() -> Iterator[None]:
    """optax adds floats to integer counts, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def run_example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Run an example's `main` in this process, and return its exit status."""
    levels = {name: logging.getLogger(name).level for name in ("llama3", "mlp", "jaxft")}
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(script: Any, *words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["train.py", "--compilation-cache", "None", *words])
        try:
            script.main()
        except SystemExit as stopped:
            return int(stopped.code or 0)
        return 0

    yield run
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
