"""What may import what, and what importing costs."""

import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
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


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    return patience.run(command, cwd=folder, capture_output=True, text=True, limit_s=PATIENCE_S)


def test_the_import_contracts_hold() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_an_import_to_the_same_floor_or_a_higher_one_is_found(tmp_path: Path) -> None:
    """One for each pair of rooms, planted in a copy, and a room that the contract does not name."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "jaxft", tmp_path / "jaxft", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (floors,) = (contract["layers"] for contract in contracts if contract.get("containers") == ["jaxft"])
    rooms = [(floor, room) for floor, names in enumerate(floors) for room in names.split(" | ")]
    forbidden = [
        (room, other) for floor, room in rooms for above, other in rooms if above <= floor and other != room
    ]
    for _, room in rooms:
        targets = "".join(f"import jaxft.{other}\n" for here, other in forbidden if here == room)
        folder = tmp_path / "jaxft" / room
        with (folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")).open("a") as file:
            file.write(f"def _planted():\n    import sys\n{textwrap.indent(targets, '    ')}")
    (tmp_path / "jaxft" / "_new.py").touch()

    found = lint_imports(tmp_path).stdout
    assert len(rooms) > 15
    missed = [
        pair for pair in forbidden if "jaxft.{} is not allowed to import jaxft.{}:".format(*pair) not in found
    ]
    assert not missed, found
    assert "- jaxft._new" in found


def test_importing_jaxft_is_light():
    done = patience.run(
        [sys.executable, "-c", GUARD + IMPORT], capture_output=True, text=True, limit_s=PATIENCE_S
    )
    assert done.stdout == "light\n", done.stderr


def test_the_public_surface_is_small_and_documented():
    import jaxft

    values = [getattr(jaxft, name) for name in jaxft.__all__]
    errors = [value for value in values if isinstance(value, type) and issubclass(value, Exception)]
    assert len(values) - len(errors) <= 15
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
