"""Warm processes: real forks, their statuses, and what happens when either end dies."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxft_launch.processes._processes import Child, Processes
from jaxft_launch.processes._warm import Warm, with_statuses
from tests import patience

pytestmark = pytest.mark.processes
PROGRAM = """
import os, signal, sys
import jax, jaxft
match sys.argv[1:]:
    case ["exit", status]:
        sys.exit(int(status))
    case ["kill"]:
        os.kill(os.getpid(), signal.SIGKILL)
    case ["raise", name]:
        raise getattr(jaxft, name)("as ordered")
    case ["wait"]:
        print("up", flush=True)
        signal.pause()
    case ["show"]:
        own = os.getpgrp() == os.getpid()
        print(__name__, sys.argv[0], sys.path[0], os.environ["WHAT"], own, jax.devices()[0].platform)
        print(jax.config.read("jax_cuda_visible_devices"))
    case ["flags"]:
        print(sys.flags, sys.warnoptions, sys.path[:2], sys.stdout.write_through)
    case ["draw"]:
        import random, numpy
        print(random.random(), numpy.random.random())
"""

WORKER = """
import signal, subprocess, sys
worker = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("up", flush=True)
signal.sigwait({signal.SIGTERM})
worker.communicate(b"done")
print("the worker has ended with", worker.returncode, flush=True)
"""

# What JAX reads when it is imported: options of each type, and an option that is set too late.
VARIABLES = """
import os, sys
os.environ.update(JAX_ENABLE_X64="true", JAX_NUM_CPU_DEVICES="3", JAX_DEFAULT_MATMUL_PRECISION="float32")
os.environ.update(JAX_NUMPY_RANK_PROMOTION="raise", JAX_COMPILATION_CACHE_DIR="/c", JAX_ENABLE_CHECKS=sys.argv[2])
os.environ.update(JAX_EXEC_TIME_OPTIMIZATION_EFFORT="0.5")
exec(sys.argv[1])
import jax
os.environ["JAX_DEBUG_NANS"] = "1"
print(sorted(jax.config.values.items(), key=str))
print(jax.numpy.ones(1).dtype, jax.device_count(), jax.__spec__.origin == jax.__file__)
print([type(each).__module__ for each in sys.meta_path if "jaxft" in type(each).__module__])
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("a folder") / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("logs")
    with Processes(folder, cwd=folder) as made:
        yield made


@pytest.fixture(scope="module")
def warm(processes: Processes) -> Warm:
    made = processes.start_warm("warm", environment={"JAX_PLATFORMS": "cpu"})
    assert made.until_ready(), made.problem
    return made


def run(processes: Processes, warm: Warm | None, program: Path, *words: str, **environment: str) -> Child:
    name = f"child.{len(processes._children)}"
    command = [sys.executable, str(program), *words]
    environment = {"JAX_PLATFORMS": "cpu", **environment}
    return processes.start(name, command, environment=environment, warm=warm)


def ended(child: Child) -> int | None:
    assert child.wait(patience.FAR_S)
    return child.exit_code()


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("exit", "0"), 0),
        (("exit", "7"), 7),
        (("kill",), -signal.SIGKILL),
        (("raise", "CoordinatorUnreachable"), 75),
        (("raise", "JoinRefused"), 78),
        (("raise", "JobFinished"), 0),
        (("raise", "ConfigurationError"), 1),
    ],
)
def test_a_fork_ends_with_the_status_of_its_program(
    processes: Processes, warm: Warm, program: Path, words: tuple[str, ...], status: int
) -> None:
    child = run(processes, warm, program, *words)
    assert child.warm
    assert ended(child) == status, child.log.read_text()
    if words[0] == "raise":
        log = child.log.read_text()
        assert "as ordered" in log
        assert ("Traceback" in log) == (status != 0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "cold"),
    [(("-u", "-W", "ignore"), False), (("-O",), False), (("-P",), False), (("-P",), True)],
)
def test_a_program_has_the_options_of_its_command(
    options: tuple[str, ...], tmp_path: Path, program: Path, *, cold: bool
) -> None:
    """And the statuses: with an option, too, errors of the library differ from errors of the program."""
    with Processes(tmp_path, cwd=tmp_path) as processes:
        started = {"environment": {"JAX_PLATFORMS": "cpu", "WHAT": "its own"}}
        warm = None if cold else processes.start_warm("warm", options=options, **started)
        assert cold or (warm is not None and warm.until_ready())

        def run(name: str, *words: str) -> Child:
            command = [sys.executable, *options, str(program), *words]
            return processes.start(name, with_statuses(command) if cold else command, warm=warm, **started)

        child = run("shows", "flags")
        assert child.warm is not cold
        assert ended(child) == 0, child.log.read_text()
        flags = [sys.executable, *options, str(program), "flags"]
        seeded = os.environ | {"PYTHONHASHSEED": "0"}
        alone = subprocess.run(flags, capture_output=True, text=True, check=True, cwd=tmp_path, env=seeded)
        assert child.log.read_text() == alone.stdout
        assert ended(run("raises", "raise", "JoinRefused")) == 78


def test_a_fork_is_like_a_process_that_python_started(
    processes: Processes, warm: Warm, program: Path
) -> None:
    child = run(processes, warm, program, "show", WHAT="its own", JAX_CUDA_VISIBLE_DEVICES="2,3")
    assert ended(child) == 0
    shown, devices = child.log.read_text().splitlines()
    assert shown == f"__main__ {program} {program.parent} its own True cpu"
    assert devices == "2,3"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The program VARIABLES, and its output in a process that has not imported JAX before."""
    program = tmp_path_factory.mktemp("variables") / "variables.py"
    program.write_text(VARIABLES)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(program), "import jax", "on"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "float64 3 True" in done.stdout
    return program, done.stdout


@pytest.mark.parametrize(
    "statement", ["import jax", "from jax.numpy import ones; ones(1)", "from jax.sharding import Mesh"]
)
def test_a_program_sets_variables_of_jax_before_it_imports_it(
    statement: str, alone: tuple[Path, str], processes: Processes, warm: Warm
) -> None:
    """Otherwise a fork trains with other bits than the program alone."""
    program, expected = alone
    child = run(processes, warm, program, statement, "on")
    assert ended(child) == 0, child.log.read_text()
    assert child.warm
    assert child.log.read_text() == expected


def test_a_variable_that_jax_would_refuse_ends_the_program(
    alone: tuple[Path, str], processes: Processes, warm: Warm
) -> None:
    child = run(processes, warm, alone[0], "import jax", "maybe")
    assert ended(child) == 1
    assert "JAX cannot be imported with these environment variables: ValueError: " in child.log.read_text()
    assert "maybe" in child.log.read_text()


def test_a_module_runs_as_with_python(processes: Processes, warm: Warm) -> None:
    (processes.folder / "a_module.py").write_text("import sys; print(__name__, sys.argv[1:])")
    child = processes.start("module", [sys.executable, "-m", "a_module", "x"], warm=warm)
    assert ended(child) == 0, child.log.read_text()
    assert child.log.read_text() == "__main__ ['x']\n"


def test_a_failure_in_a_fork_is_printed_as_by_python(processes: Processes, warm: Warm) -> None:
    script = processes.folder / "fails.py"
    script.write_text("def f():\n    1 / 0\nf()")
    child = run(processes, warm, script)
    assert child.warm
    assert ended(child) == 1
    alone = patience.run([sys.executable, str(script)], stderr=subprocess.PIPE, text=True)
    assert "Error" in alone.stderr
    assert child.log.read_text() == alone.stderr


def test_forks_do_not_draw_the_same_random_numbers(processes: Processes, warm: Warm, program: Path) -> None:
    drawn: set[str] = set()
    for _ in range(2):
        child = run(processes, warm, program, "draw")
        assert ended(child) == 0
        drawn |= set(child.log.read_text().split())
    assert len(drawn) == 4


def test_sigterm_ends_a_fork_and_not_its_warm_process(
    processes: Processes, warm: Warm, program: Path
) -> None:
    """Slurm sends it to all processes of a job at once."""
    child = run(processes, warm, program, "wait")
    patience.until(lambda: "up" in child.log.read_text(), "the fork")
    processes._warm[warm].terminate()
    # It has had the signal before it forks another one.
    assert ended(run(processes, warm, program, "exit", "3")) == 3
    assert child.exit_code() is None
    child.terminate()
    assert ended(child) == -signal.SIGTERM


@pytest.mark.parametrize("cold", [False, True])
def test_sigterm_leaves_the_workers_of_a_program_to_it(
    processes: Processes, warm: Warm, tmp_path: Path, *, cold: bool
) -> None:
    """A loader of torch raises an exception if its worker is killed, and the program could not finish its step."""
    (tmp_path / "work.py").write_text(WORKER)
    child = run(processes, None if cold else warm, tmp_path / "work.py")
    patience.until(lambda: "up" in child.log.read_text(), "the worker")
    child.terminate()
    assert ended(child) == 0
    assert child.log.read_text().endswith("the worker has ended with 0\n")


@pytest.mark.long
def test_its_forks_end_with_it(tmp_path: Path, program: Path) -> None:
    with Processes(tmp_path, cwd=tmp_path) as processes:
        warm = processes.start_warm("warm", environment={"JAX_PLATFORMS": "cpu"})
        assert warm.until_ready()
        child = run(processes, warm, program, "wait")
        patience.until(lambda: "up" in child.log.read_text(), "the fork")
        (own,) = processes._warm.values()
        own.kill()
        assert ended(child) == -signal.SIGKILL
        assert (warm.problem, warm.was_ready) == ("it has ended", True)
        patience.until(lambda: not exists(child.pid), "the fork to end")
        later = run(processes, warm, program, "exit", "5")
        assert not later.warm
        assert ended(later) == 5


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.long
def test_a_warm_process_does_not_outlive_its_launcher(tmp_path: Path, program: Path) -> None:
    script = (
        "import pathlib, signal, sys\n"
        "from jaxft_launch.processes._processes import Processes\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "processes = Processes(folder, cwd=folder)\n"
        "warm = processes.start_warm('warm', environment={})\n"
        "assert warm.until_ready()\n"
        "child = processes.start('fork', [sys.executable, sys.argv[2], 'wait'], warm=warm)\n"
        "print(child.pid, processes._warm[warm].pid, flush=True)\n"
        "signal.pause()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path), str(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    patience.until(lambda: not any(exists(pid) for pid in pids), "both to end")
