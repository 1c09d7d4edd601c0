"""Settings for every test. They must stand before JAX starts a backend."""

import gc
import logging
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

# Simulated devices share few cores; collectives among them would otherwise abort the process after 40 s.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_cpu_collective_call_terminate_timeout_seconds=600"
).strip()

os.environ.pop("JAXFT_TOKEN", None)
os.environ.pop("JAXFT_TLS_CA", None)
os.environ.pop("JAXFT_TLS_CERT", None)
os.environ.pop("JAXFT_TLS_KEY", None)

# Each `make` that a test runs would inherit the variables of the `make` that runs the tests.
os.environ.pop("MAKEFLAGS", None)
os.environ.pop("MAKEOVERRIDES", None)
os.environ.pop("PYTHON", None)
os.environ.pop("VENV", None)

# Without bytecode on disk, each of some hundred processes would compile all of JAX's sources: 1.5 s of a core.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import jax
import pytest
import pytest_timeout
from hypothesis import settings as hypothesis_settings
from jax._src import compiler
from jaxft_coordinator._cli import choose_listener
from jaxft_protocol.host.admission import RateLimitFilter

from tests import dealing, parts, patience, shared

# Coordinators in tests listen as users' do.
choose_listener()

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Load makes an example slow, not wrong.
hypothesis_settings.register_profile("patient", deadline=None)
hypothesis_settings.load_profile("patient")

_promised = parts.promised()

# For a test that does not stop when asked.
LAST_RESORT_S = 30.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write the traces of tests/scenarios again")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell that runs the tests in the background has them, and their children, ignore Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # Under nohup: the tests go on, but their children do not inherit that.
        signal.signal(signal.SIGHUP, lambda _number, _frame: None)
    if not hasattr(config, "workerinput"):  # the process that starts the workers, or the only one
        shared.make()
        config.add_cleanup(shared.remove)
    for name, value in shared.compiled().items():
        jax.config.update(name, value)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by these markers
def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark each test with the part that it belongs to."""
    if part := parts.part_of(item.path, _promised):
        item.add_marker(part)


@pytest.hookimpl(trylast=True)  # after `-m` has left out tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let each worker of pytest-xdist start with its share of the tests that mostly wait for other processes.

    They are the longest, so none of them begins last; tests that compute fill the end, and are stolen in halves.
    """
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    items[:] = dealing.dealt(items, workers)


def pytest_collection_finish() -> None:
    """Keep all objects from before the first test out of collections: modules and tests stay to the end.

    There are 400,000 such objects, and a full collection would visit them all: a quarter of a second.
    """
    gc.collect()
    gc.freeze()


_compile_options = compiler.get_compile_options


def _with_quick_options(*words: Any, **named: Any) -> Any:
    """Options of a compilation. Without its fusion emitters, XLA needs 40 % less time for tests/examples."""
    if jax.config.read("jax_disable_most_optimizations"):
        own = named.get("env_options_overrides") or {}
        named["env_options_overrides"] = {"xla_cpu_use_fusion_emitters": False, **own}
    return _compile_options(*words, **named)


# JAX has no public setting for it, but one for each program. Newer XLA has no such option.
if jax.__version_info__ < (0, 11):
    compiler.get_compile_options = _with_quick_options


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have XLA spend no time on making programs fast for tests that are marked `unoptimized`."""
    marker = item.get_closest_marker("unoptimized")
    wanted = marker is not None and marker.args != (False,)
    if jax.config.read("jax_disable_most_optimizations") == wanted:
        return
    jax.clear_caches()  # no test uses programs that were compiled in the other way
    jax.config.update("jax_disable_most_optimizations", wanted)


@pytest.hookimpl
def pytest_timeout_set_timer(item: Any, settings: Any) -> bool:
    """Have the timeouts of tests (pytest-timeout) measure machine time: `tests/patience.py`."""

    def ring() -> None:
        # For a test that no signal reaches, as in a call that holds the interpreter's lock.
        cancels.append(patience.alarm(LAST_RESORT_S, lambda: pytest_timeout.timeout_timer(item, settings)))
        signal.pthread_kill(main, signal.SIGALRM)

    def cancel() -> None:
        for each in cancels:
            each()
        signal.signal(signal.SIGALRM, lambda _number, _frame: None)  # it may be on its way

    main = threading.main_thread().ident
    assert main is not None
    signal.signal(signal.SIGALRM, lambda _number, _frame: pytest_timeout.timeout_sigalrm(item, settings))
    cancels = [patience.alarm(settings.timeout, ring)]
    item.cancel_timeout = cancel
    return True


def _what_ctrl_c_does() -> tuple[object, ...]:
    """How this process takes Ctrl-C: its handler, the blocked signals, the wakeup descriptor, and garbage collection.

    The last, since a collection calls back into JAX, where a KeyboardInterrupt is lost (`tests/interrupts.py`).
    """
    wakeup_fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup_fd)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return signal.getsignal(signal.SIGINT), blocked, wakeup_fd, gc.isenabled()


@pytest.fixture(autouse=True)
def _ctrl_c_stays_as_it_was() -> Iterator[None]:
    """Fail the test that changes what Ctrl-C does, instead of a later test that needs it in the same process."""
    before = _what_ctrl_c_does()
    yield
    assert before == _what_ctrl_c_does() == (signal.default_int_handler, set(), -1, True)


@pytest.fixture(autouse=True)
def _rate_limits_begin_again() -> None:
    """Start each test with unused rate limits of logs, whatever a flood before it has logged."""
    for logger in list(logging.Logger.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            for each in logger.filters:
                if isinstance(each, RateLimitFilter):
                    each.__init__()
