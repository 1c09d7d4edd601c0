"""The settings of this folder when it runs alone, and the figures at the end of such a run.

In the default run pytest takes the settings of the repository instead, and these tests run on CPU with small sizes,
like all others.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from tests import shared
from tests.accelerator import models

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# A group of another process compiles by itself. With autotuning it may pick other kernels, with other roundings.
XLA_FLAGS = "--xla_gpu_deterministic_ops=true"
# The groups need a part, too (test_groups.py).
MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}


def runs_alone(config: pytest.Config) -> bool:
    return config.rootpath == HERE


def pytest_configure(config: pytest.Config) -> None:
    """Set what JAX reads when it starts its backend; processes that the tests start inherit it."""
    if not runs_alone(config):
        return
    os.environ["XLA_FLAGS"] = f"{XLA_FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()
    os.environ.update({name: os.environ.get(name, value) for name, value in MEMORY.items()})
    ours = [str(ROOT / name) for name in ("", "protocol", "coordinator")]
    os.environ["PYTHONPATH"] = os.pathsep.join([*ours, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    os.environ.pop("JAXFT_TOKEN", None)
    shared.make()
    config.add_cleanup(shared.remove)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.accelerator)


@pytest.fixture(autouse=True)
def _defaults_of_jax() -> Iterator[None]:
    """Leave promotion as users have it: optax and flax rely on it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [f"accelerator: {models.machine()}"] if runs_alone(config) else []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the tests' measurements (`record_property`)."""
    if not runs_alone(terminalreporter.config):
        return
    terminalreporter.section(f"measured on {models.machine()}")
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{name}: {value}")
