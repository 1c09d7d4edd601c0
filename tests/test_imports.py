"""What `import jaxft` and the commands import: JAX takes seconds, and most of them do not need it."""

import ast
import importlib
import pickle
import sys
import traceback
from pathlib import Path

import pytest

import jaxft
from tests import patience

PATIENCE_S = 60.0
# Nothing answers there.
NOWHERE = ("--http", "http://localhost:1")
HEAVY = {"jax", "jaxlib", "numpy", "ml_dtypes", "flax", "orbax", "grpc", "google", "cryptography"}
WEB = {"uvicorn", "starlette", "prometheus_client"}

# Runs `sys.argv[2:]` as a command whose main is `sys.argv[1]`, and prints its imports.
COMMAND = """
import contextlib, importlib, io, sys
name, *words = sys.argv[1:]
sys.argv = ["command", *words]
module, _, function = name.rpartition(".")
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    getattr(importlib.import_module(module), function)()
print(*{name.partition(".")[0] for name in sys.modules})
"""


def imported(source: str, *words: str, cwd: Path | None = None) -> set[str]:
    """The packages that a program reports as imported."""
    done = patience.run(
        [sys.executable, "-c", source, *words], capture_output=True, text=True, limit_s=PATIENCE_S, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["no-such-command"]])
def test_what_needs_no_options_does_not_import_their_parser(words: list[str]) -> None:
    found = imported(COMMAND, "jaxft_launch.__main__.main", *words)
    assert "jaxft" in found
    assert not found & {*HEAVY, "tyro", "rich", "asyncio", "ssl"}


@pytest.mark.parametrize(
    "words",
    [
        ["launch", "--help"],
        ["status", *NOWHERE, "--json"],
        ["doctor", "--help"],
        ["plan", "--groups", "8"],
        pytest.param(["status", "--help"], marks=pytest.mark.long),
        pytest.param(["drain", "--help"], marks=pytest.mark.long),
        pytest.param(["drain", "group-0", "--job", "toy", *NOWHERE], marks=pytest.mark.long),
        pytest.param(["chaos", "--no-such-option"], marks=pytest.mark.long),
    ],
)
def test_a_command_that_does_no_training_starts_without_jax(words: list[str]) -> None:
    found = imported(COMMAND, "jaxft_launch.__main__.main", *words)
    assert "tyro" in found
    assert not found & HEAVY


@pytest.mark.processes
def test_a_launcher_never_imports_jax(tmp_path: Path) -> None:
    words = ("launch", "--no-warm", "--folder", "launched", "--", sys.executable, "-c", "print('trained')")
    found = imported(COMMAND, "jaxft_launch.__main__.main", *words, cwd=tmp_path)
    assert "trained" in (tmp_path / "launched" / "group-0.0.log").read_text()
    assert not found & HEAVY


@pytest.mark.parametrize("words", [["--bind", "0.0.0.0:0"], ["token", "--help"]])
def test_a_coordinator_that_does_not_serve_imports_no_server(words: list[str]) -> None:
    found = imported(COMMAND, "jaxft_coordinator._cli.main", *words)
    assert "tyro" in found
    assert not found & {*HEAVY, *WEB, "uvloop"}


def test_a_coordinator_without_an_http_port_imports_no_web_server() -> None:
    found = imported(COMMAND, "jaxft_coordinator._cli.main", "--bind", "192.0.2.1:1", "--insecure")
    assert {"grpc", "uvloop"} <= found
    assert not found & WEB


def test_importing_jaxft_imports_nothing_but_its_errors() -> None:
    found = imported("import jaxft, sys; jaxft.JoinRefused, dir(jaxft); print(*sys.modules)")
    assert {name for name in found if name.startswith("jaxft")} == {
        "jaxft",
        "jaxft._errors",
        "jaxft._version",
    }
    assert not found & {*HEAVY, "asyncio"}


def test_a_training_program_without_a_token_or_ranks_does_not_import_what_they_need() -> None:
    found = imported(
        "import jaxft, sys; jaxft.Manager, jaxft.fault_tolerant, jaxft.pmean; print(*sys.modules)"
    )
    assert {"jax", "grpc", "jaxft._session._session"} <= found
    unused = {
        "cryptography",
        "jaxft._ranks._leader",
        "jaxft._ranks._follower",
        "jaxft._supervised._agent",
    }
    assert not found & unused


def test_each_public_name_is_that_of_its_module() -> None:
    homes = _declared_homes()
    assert set(homes) | {"__version__", "data"} == set(jaxft.__all__) <= set(dir(jaxft))
    for name, home in homes.items():
        value = getattr(jaxft, name)
        assert value is getattr(importlib.import_module(home), name), name
        assert pickle.loads(pickle.dumps(value)) is value
    assert jaxft.data is importlib.import_module("jaxft.data")


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'jaxft' has no attribute 'pmena'"):
        jaxft.pmena  # pyright: ignore  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'pmena' from 'jaxft'"):
        from jaxft import pmena  # pyright: ignore  # noqa: F401


def _declared_homes() -> dict[str, str]:
    """The module of each public name, as a type checker reads it."""
    source = ast.parse(Path(jaxft.__file__).read_text())
    return {
        alias.name: node.module
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("jaxft.")
        for alias in node.names
        if not alias.name.startswith("__")
    }


def test_an_error_is_printed_under_the_name_that_programs_catch() -> None:
    errors = [getattr(jaxft, name) for name in jaxft.__all__]
    kinds = [kind for kind in errors if isinstance(kind, type) and issubclass(kind, BaseException)]
    assert jaxft.JobHalted in kinds
    for kind in kinds:
        printed = traceback.format_exception_only(kind("it is so"))
        assert printed == [f"jaxft.{kind.__name__}: it is so\n"]
        assert isinstance(pickle.loads(pickle.dumps(kind("it is so"))), kind)
