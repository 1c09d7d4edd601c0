"""Settings for every test. They must stand before JAX starts a backend."""

import os

# Simulated devices share few cores; collectives among them would otherwise abort the process after 40 s.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_cpu_collective_call_terminate_timeout_seconds=600"
).strip()

os.environ.pop("JAXFT_TOKEN", None)

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write the traces of tests/scenarios anew")
