"""What may import what, and what importing costs."""

import re
import sys
from pathlib import Path

import pytest

from tests import patience

ROOT = Path(__file__).parent.parent
PATIENCE_S = 100.0

# Runs before anything else: afterwards only imports happen.
GUARD = """
import os, socket, sys, threading

def forbid(what):
    def refuse(*arguments, **options):
        raise AssertionError(f"importing jaxft {what}: {arguments[1:]}")
    return refuse

# What jaxft stands on may look around while it is imported; jaxft itself may not.
import jax, numpy, xxhash, grpc.aio, google.protobuf, jax.numpy, jax.extend.core
import cryptography.hazmat.primitives.ciphers.aead
from jaxft_protocol import wire
from jaxft_protocol.proto import coordinator_pb2_grpc, ranks_pb2

threads = threading.active_count()
handlers = list(__import__("logging").getLogger().handlers)
socket.socket.__init__ = forbid("opens a socket")
socket.getaddrinfo = forbid("looks up a name")
read = type(os.environ).__getitem__
type(os.environ).__getitem__ = forbid("reads the environment")
"""

IMPORT = """
import importlib
from jaxft import *
from jaxft_launch.processes._warm_process import ALWAYS

for name in ALWAYS:
    importlib.import_module(name)

type(os.environ).__getitem__ = read
import logging
from jax._src import xla_bridge

assert not xla_bridge.backends_are_initialized(), "a backend was started"
assert threading.active_count() == threads, "a thread was started"
assert logging.getLogger().handlers == handlers, "logging was configured"
assert not logging.getLogger("jaxft").handlers  # not even NullHandler: without any, Python prints warnings
print("light")
"""


def test_the_import_contracts_hold():
    lint_imports = Path(sys.executable).with_name("lint-imports")
    done = patience.run(
        [str(lint_imports), "--no-cache"], cwd=ROOT, capture_output=True, text=True, limit_s=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_importing_jaxft_is_light():
    done = patience.run(
        [sys.executable, "-c", GUARD + IMPORT], capture_output=True, text=True, limit_s=PATIENCE_S
    )
    assert done.stdout == "light\n", done.stderr


def test_the_public_surface_is_small_and_documented():
    import jaxft

    values = [getattr(jaxft, name) for name in jaxft.__all__]
    errors = [value for value in values if isinstance(value, type) and issubclass(value, Exception)]
    assert len(values) - len(errors) <= 14
    for name in jaxft.__all__:
        assert name == "__version__" or getattr(jaxft, name).__doc__, f"{name} has no docstring"


@pytest.mark.parametrize("page", ["guarantees.md", "failure-model.md", "security.md"])
def test_every_test_that_the_promises_name_exists(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    for path in re.findall(r"`(tests/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path
    named = re.findall(r"`(?:[\w/]*?(test_\w+\.py))?(?:::(test_\w+))?`", text)
    last = ""
    for file, test in named:
        if not file and not test:
            continue
        last = file or last  # `::test` alone is in the file that was named last
        paths = [*(ROOT / "tests").rglob(last)]
        assert paths, last
        assert not test or any(f"def {test}(" in path.read_text() for path in paths), f"{last}::{test}"
    assert sum(1 for _, test in named if test) > 5
