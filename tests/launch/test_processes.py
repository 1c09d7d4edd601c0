import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxft_launch.processes._processes import DIE_WITH_PARENT, Child, Processes
from tests import patience
from tests.chaos.cases import WITHOUT_JAX

DEADLINE_S = 30.0
# Prints a line, then runs until it is ended.
WAITER = ("-c", "import signal, sys; print('up', flush=True); signal.pause()")
STUBBORN = (
    "-c",
    "import signal\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('up', flush=True)\n"
    "while True: signal.pause()",
)


def wait_until(true: Callable[[], bool]) -> None:
    deadline_s = patience.machine_s() + DEADLINE_S
    while not true():
        assert patience.machine_s() < deadline_s
        time.sleep(0.005)


def start(processes: Processes, name: str, words: tuple[str, ...] = WAITER) -> Child:
    child = processes.start(name, [sys.executable, "-S", *words])
    wait_until(lambda: "up" in child.log.read_text() or child.exit_code() is not None)
    return child


def exists(pid: int) -> bool:
    """Whether a process with this pid exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    return Processes(tmp_path, cwd=tmp_path)


def test_a_killed_process_is_gone_and_another_takes_its_place(processes: Processes) -> None:
    with processes:
        victim = start(processes, "group-1.0")
        assert victim.exit_code() is None
        victim.kill()
        again = start(processes, "group-1.1")
        assert victim.wait(patience.FAR_S)
        assert victim.exit_code() == -signal.SIGKILL
        assert again.exit_code() is None
        assert again.pid != victim.pid


def test_leaving_ends_every_process(processes: Processes) -> None:
    with processes:
        children = [start(processes, name) for name in ("a", "b")]
    assert [child.exit_code() for child in children] == [-signal.SIGTERM, -signal.SIGTERM]


def test_leaving_by_an_error_ends_every_process_at_once(processes: Processes) -> None:
    children: list[Child] = []

    def fail() -> None:
        with processes:
            children.extend([start(processes, "a"), start(processes, "b", STUBBORN)])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert not any(exists(child.pid) for child in children)


def test_what_a_child_has_started_ends_with_it(processes: Processes) -> None:
    """Child processes of a Python program may end by themselves first, such as the tracker of its shared memory."""
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-S', *{WAITER!r}])"
    with processes:
        program = start(processes, "program", ("-c", script))
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children")
        (inner,) = map(int, children.read_text().split())
        program.kill()
        assert program.wait(patience.FAR_S)
        assert exists(inner)
        program.kill_rest()
        wait_until(lambda: not exists(inner))


def test_a_process_that_does_not_listen_is_killed(processes: Processes) -> None:
    with processes:
        stubborn = start(processes, "stubborn", STUBBORN)
        processes.end([stubborn], timeout_s=0.1)
        assert stubborn.exit_code() == -signal.SIGKILL


def test_no_process_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    """The parent gets SIGKILL, so it cannot end its children itself."""
    script = WITHOUT_JAX + (
        "import pathlib, signal, sys\n"
        "from jaxft_launch.processes._processes import Processes\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "child = Processes(folder, cwd=folder).start('orphan', sys.argv[2:])\n"
        "print(child.pid, flush=True)\n"
        "signal.pause()\n"
    )
    orphan = [sys.executable, "-S", *STUBBORN]
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), *orphan], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        log = tmp_path / "orphan.log"
        wait_until(lambda: "up" in log.read_text())
        assert exists(pid)
        parent.kill()
    wait_until(lambda: not exists(pid))


def test_orders_reach_a_child_that_takes_them_and_are_lost_on_a_dead_one(
    processes: Processes, tmp_path: Path
) -> None:
    with processes:
        pipe = tmp_path / "echo.orders"
        script = "import sys; [print('heard', line, flush=True) for line in open(sys.argv[1])]"
        child = processes.start("echo", [sys.executable, "-S", "-c", script, str(pipe)], orders=pipe)
        for order in ("die vote 0.5", "pace 1"):
            child.order(order)
            wait_until(lambda order=order: f"heard {order}" in child.log.read_text())
        child.kill()
        assert child.wait(patience.FAR_S)
        child.order("die again")


def test_a_child_whose_parent_is_gone_already_does_not_begin() -> None:
    command = [sys.executable, str(DIE_WITH_PARENT), str(os.getppid()), sys.executable, "-c", "print('up')"]
    bound = subprocess.run(command, capture_output=True, text=True)
    assert (bound.returncode, bound.stdout) == (1, "")
    assert "the parent ended" in bound.stderr


def test_a_child_has_our_environment_the_given_folder_and_no_input(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a separate process group."""
    monkeypatch.setenv("OURS", "1")
    show = "print(os.environ['OURS'], os.getcwd(), repr(sys.stdin.read()), os.getpgrp() == os.getpid(), 'up')"
    with processes:
        child = start(processes, "child", ("-c", f"import os, sys; {show}"))
        assert child.wait(patience.FAR_S)
        assert child.log.read_text() == f"1 {tmp_path.resolve()} '' True up\n"
