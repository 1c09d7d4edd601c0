"""Lets every rank of simulated devices find what it compiled before it was killed."""

import os
import sys
from pathlib import Path

import pytest

from lab._examples import RANK_CACHES
from tests import patience

COMPILE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
import jax
from jax._src import distributed
distributed.global_state.process_id = 1
jax.jit(lambda x: x * 3 + 1)(4.0).block_until_ready()
assert distributed.global_state.process_id == 1
"""


def entries(folder: Path, *modules: str) -> list[Path]:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    patience.run([sys.executable, "-c", COMPILE, *modules], env=environment, check=True)
    return sorted(folder.glob("*-cache"))


@pytest.mark.long
@pytest.mark.parametrize(("modules", "written"), [((), False), ((RANK_CACHES,), True)])
def test_rank_1_writes_what_it_compiles(modules: tuple[str, ...], written: bool, tmp_path: Path) -> None:
    assert bool(entries(tmp_path, *modules)) == written
