"""Imported by the warm processes of storms: every rank keeps its compiled programs in JAX's persistent cache.

JAX lets process 0 alone write to the cache, for all. On the CPU that leaves the other ranks without one: the key of
an entry hashes the description of the devices, and on the CPU (not on a GPU) that names their process. Ranks of
simulated devices would compile everything again at each return.
"""

from typing import Any

import jax
from jax._src import compiler, distributed

_write = compiler._cache_write


def _write_as_process_0(*arguments: Any) -> None:
    state = distributed.global_state
    if jax.default_backend() != "cpu" or state.process_id == 0:
        return _write(*arguments)
    own, state.process_id = state.process_id, 0
    try:
        _write(*arguments)
    finally:
        state.process_id = own


compiler._cache_write = _write_as_process_0
