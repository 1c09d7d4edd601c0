"""The house rules that a machine can check."""

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=ROOT, timeout=100
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert result.returncode == 0, result.stdout
    assert "3 kept, 0 broken" in result.stdout


def test_the_coordinator_runs_where_jax_is_not_installed() -> None:
    run("""
        import sys
        for name in ("jax", "jaxlib", "numpy", "jaxft"):
            sys.modules[name] = None  # importing it raises
        import jaxft_coordinator._cli
        import jaxft_coordinator._server
    """)


def test_importing_jaxft_starts_no_backend_opens_no_socket_and_configures_no_logging() -> None:
    run("""
        import logging, socket, threading
        import jax, grpc  # what they do at import is theirs
        threads = set(threading.enumerate())

        def refuse(*arguments, **keywords):
            raise AssertionError("a socket was opened")

        socket.socket.connect = socket.socket.bind = refuse
        import jaxft
        from jax.extend import backend
        import jax._src.xla_bridge as bridge
        assert not bridge.backends_are_initialized()
        assert set(threading.enumerate()) == threads
        assert not logging.getLogger().handlers
        assert [type(handler).__name__ for handler in logging.getLogger("jaxft").handlers] == ["NullHandler"]
    """)


def test_importing_jaxft_reads_nothing_of_the_environment() -> None:
    out = run("""
        import os, sys
        import jax, grpc, grpc.aio, numpy, xxhash, ml_dtypes, google.protobuf.descriptor_pb2
        read = []

        class Watched(type(os.environ)):
            def __getitem__(self, key):
                read.append(key)
                return super().__getitem__(key)

        watched = Watched.__new__(Watched)
        watched.__dict__.update(os.environ.__dict__)
        os.environ = watched
        before = set(sys.modules)
        import jaxft
        print([name for name in read if name.startswith("JAXFT")])
    """)
    assert out.strip() == "[]"


def test_the_public_surface_is_small_and_documented() -> None:
    import jaxft

    assert len(jaxft.__all__) <= 17
    for name in jaxft.__all__:
        member = getattr(jaxft, name)
        assert name == "__version__" or member.__doc__, f"{name} has no docstring"
