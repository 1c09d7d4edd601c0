"""The clock by which tests wait: load slows it down, and a hang is found all the same."""

import asyncio
import queue
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests import patience

HERE = Path(__file__).parent
SPIN = (
    sys.executable,
    "-S",
    "-c",
    "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass",
)
FOREVER = (sys.executable, "-S", "-c", "import signal; signal.pause()")


def test_a_quiet_machine_goes_by_the_wall() -> None:
    assert patience.rate(0, 2, 0.0) == patience.rate(2, 2, 0.0) == 1.0


def test_a_busy_machine_gives_each_thread_its_part() -> None:
    nicer = 1.25**-patience._NICE
    assert patience.rate(8, 2, 0.0) == pytest.approx(max(0.25 * nicer, 1 / patience.MOST_STRETCH))
    assert patience.rate(1, 2, 0.5) == pytest.approx(0.5)
    assert patience.rate(10**6, 2, 0.0) == 1 / patience.MOST_STRETCH


@pytest.mark.long
def test_busy_processes_slow_the_clock() -> None:
    began_s, began_machine_s = time.monotonic(), patience.machine_s()
    spinning = [subprocess.Popen(SPIN) for _ in range(3 * patience._clock._cores)]
    try:
        patience.until(lambda: time.monotonic() > began_s + 2.0, "two seconds")
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    assert patience.machine_s() - began_machine_s < 0.75 * (time.monotonic() - began_s)
    assert patience.stretched(1.0) >= 1.0


def test_a_machine_that_was_suspended_stretches_no_deadline_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After an hour without a sample, the next one counts as half a second."""
    samples = [(number * 0.1, number * 0.1) for number in range(patience._WINDOW_SAMPLES)]
    monkeypatch.setattr(patience._clock, "_history", [*samples, (3600.0, samples[-1][1] + 0.5)])
    assert patience.stretched(2.0) == 2.0 * patience.MOST_STRETCH


def test_the_clock_only_goes_forward() -> None:
    last = patience.machine_s()
    for _ in range(20_000):
        now = patience.machine_s()
        assert now >= last - 0.05  # by as much as the rate changes within a sample
        last = now


def test_each_wait_ends_and_says_for_what() -> None:
    with pytest.raises(patience.TooLong, match=r"0\.2 s of machine time for Godot\nthe log"):
        patience.until(lambda: False, "Godot", limit_s=0.2, context=lambda: "the log")
    with pytest.raises(patience.TooLong, match="for a word"):
        patience.get(queue.Queue(), "a word", limit_s=0.2)
    held = threading.Event()
    thread = threading.Thread(target=held.wait)
    thread.start()
    with pytest.raises(patience.TooLong, match="to end"):
        patience.join(thread, limit_s=0.2)
    with pytest.raises(patience.TooLong, match="a call to return"):
        patience.call(held.wait, limit_s=0.2)
    held.set()
    patience.join(thread)
    assert patience.call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        patience.call(lambda: 1 // 0)


def test_a_process_that_hangs_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        patience.run(FOREVER, limit_s=0.2)
    with subprocess.Popen(FOREVER) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            patience.wait(process, limit_s=0.2)
        assert process.wait() == -9
    done = patience.run([sys.executable, "-S", "-c", "print('written')"], stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (0, "written\n")


def test_what_is_said_to_a_process_arrives_once() -> None:
    echo = [sys.executable, "-S", "-c", "import sys, time; time.sleep(0.3); print(sys.stdin.read())"]
    with subprocess.Popen(echo, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        logged, _ = patience.communicate(process, "word " * 100_000)
    assert logged == "word " * 100_000 + "\n"


def test_a_coroutine_that_hangs_is_cancelled() -> None:
    async def scenario() -> None:
        task = asyncio.ensure_future(asyncio.Event().wait())
        with pytest.raises(TimeoutError, match=r"longer than 0\.2 s of machine time"):
            await patience.wait_for(task, 0.2)
        assert task.cancelled()
        assert await patience.wait_for(asyncio.sleep(0, 7)) == 7

    asyncio.run(scenario())


HANGS = """
import pathlib, threading, time, pytest

@pytest.mark.timeout(1)
def test_that_waits():
    time.sleep(3600)

@pytest.mark.timeout(1)
def test_in_a_lock():
    threading.Event().wait(3600)

def test_that_passes():
    pass
"""


@pytest.mark.long
def test_a_test_that_hangs_fails_soon(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((HERE / "conftest.py").read_text())
    (tmp_path / "test_hangs.py").write_text(HANGS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null"]
    done = patience.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=HERE.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert "2 failed, 1 passed" in done.stdout, done.stdout
    assert "Timeout (>1.0s) from pytest-timeout" in done.stdout


WALL = {
    r"time\.(monotonic|perf_counter|time)\(\) [<>]=? \w*deadline": "a loop that gives up by the wall's clock",
    r"subprocess\.(run|check_output|check_call|call)\([^#]*timeout=": "use patience.run",
    r"\.communicate\(.*timeout=": "use patience.communicate",
    r"\.wait\(timeout=\d": "use patience.wait or FAR_S",
    r"(?<!desk)\.(get|join|wait|result)\((timeout=)?\d\d": "use patience.get, join or wait, or FAR_S",
    r"wait_for\(.*, \d\d+(\.\d+)?\)": "use patience.wait_for",
    r"asyncio\.timeout\(\d": "use patience.wait_for or FAR_S",
}
# What runs outside of pytest, and is ended by the test that started it.
OUTSIDE = {"worker.py", "patience.py", "test_patience.py"}


@pytest.mark.parametrize("pattern", WALL)
def test_no_test_gives_up_by_the_wall(pattern: str) -> None:
    found = [
        f"{path.relative_to(HERE)}:{number}: {line.strip()}: {WALL[pattern]}"
        for path in sorted(HERE.rglob("*.py"))
        if path.name not in OUTSIDE and "simulation" not in path.parts
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(pattern, line)
    ]
    assert not found, "\n".join(found)
