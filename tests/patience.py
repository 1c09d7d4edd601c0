"""Deadlines that follow the machine's speed: load makes a test slow, not red.

Theory of operation. `machine_s` is a clock. It runs with the wall's clock while the machine has a core for every
thread that wants to run. When `runnable` threads share `cores` cores it runs at `cores / runnable` of that rate, and
it also loses the time that a hypervisor has taken away. A daemon thread samples both (/proc/loadavg, /proc/stat) ten
times a second; where they cannot be read, the clock is the wall's.

So a deadline of 60 s passes after 60 s on a quiet machine, and after some 270 s with nine runnable threads on two
cores. No load stretches a deadline beyond `MOST_STRETCH` times its length: a test that hangs fails in any case.

Two kinds of deadline are in the tests:

* waits of the test itself: `until`, `run`, `communicate`, `wait_for`, ... measure machine time, and name for what
  they waited;
* deadlines that the code under test takes (`deadline_s=`, `timeout_s=`) are on the wall's clock. Where such a
  deadline only guards against a hang, it is `far()` or `FAR_S`, and the guard of the whole test (conftest.py) ends
  the hang.
"""

import asyncio
import contextlib
import os
import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

# A wait within a test: ten times the slowest of them on a quiet machine.
LIMIT_S = 60.0
# For deadlines of the code under test that only guard against a hang. The test's own guard comes first.
FAR_S = 3600.0
MOST_STRETCH = 20.0

_SAMPLE_S = 0.1
# A sample that comes later than this was itself kept from running: nothing else got more.
_LONGEST_SAMPLE_S = 0.5
_POLL_S = 0.01
_HISTORY_SAMPLES = 3000
_WINDOW_SAMPLES = 100


class TooLong(AssertionError):
    """A wait of a test took longer than its limit."""


# The share that a process gains for each step of a nicer neighbour (sched_prio_to_weight in Linux).
_NICE = os.nice(0)


def rate(runnable: int, cores: int, stolen: float) -> float:
    """The part of a core that a thread gets: 1.0 on a quiet machine, never less than 1 / MOST_STRETCH."""
    share = 1.0 if runnable <= cores else cores / runnable * 1.25**-_NICE
    return max(1.0 / MOST_STRETCH, share * (1.0 - stolen))


class Clock:
    """Adds up machine seconds, in a thread that samples the load."""

    def __init__(self) -> None:
        self._cores = _cores()
        self._changed = threading.Condition()
        self._total_s = 0.0
        self._rate = 1.0
        self._ticks = _cpu_ticks()
        self._last_s = time.monotonic()
        self._alarms: list[tuple[float, Callable[[], None]]] = []
        self._history: deque[tuple[float, float]] = deque(maxlen=_HISTORY_SAMPLES)
        threading.Thread(target=self._sample_forever, name="machine-clock", daemon=True).start()

    def now_s(self) -> float:
        with self._changed:
            since_s = min(time.monotonic() - self._last_s, _LONGEST_SAMPLE_S)
            return self._total_s + since_s * self._rate

    def alarm(self, after_s: float, ring: Callable[[], None]) -> Callable[[], None]:
        """Call `ring` in the clock's thread once `after_s` machine seconds are over; return what prevents it."""
        alarm = (self.now_s() + after_s, ring)
        with self._changed:
            self._alarms.append(alarm)

        def cancel() -> None:
            with self._changed:
                if alarm in self._alarms:
                    self._alarms.remove(alarm)

        return cancel

    def stretch(self) -> float:
        """By how much the machine slowed things down in the worst ten seconds of the last minutes: 1 to MOST_STRETCH.

        More than that was no load: the machine has been suspended.
        """
        with self._changed:
            history = list(self._history)
        windows = zip(history, history[_WINDOW_SAMPLES:], strict=False)
        ratios = ((wall - wall_0) / (own - own_0) for (wall_0, own_0), (wall, own) in windows)
        return min(MOST_STRETCH, max(1.0, *ratios, 1.0))

    def _sample_forever(self) -> None:
        while True:
            time.sleep(_SAMPLE_S)
            for ring in self._sample():
                ring()

    def _sample(self) -> list[Callable[[], None]]:
        now_s, ticks = time.monotonic(), _cpu_ticks()
        total, stolen = (new - old for new, old in zip(ticks, self._ticks, strict=True))
        with self._changed:
            self._rate = rate(_runnable() - 1, self._cores, stolen / total if total > 0 else 0.0)
            self._total_s += min(now_s - self._last_s, _LONGEST_SAMPLE_S) * self._rate
            self._last_s, self._ticks = now_s, ticks
            self._history.append((now_s, self._total_s))
            due = [alarm for alarm in self._alarms if alarm[0] <= self._total_s]
            self._alarms = [alarm for alarm in self._alarms if alarm not in due]
        return [ring for _, ring in due]


def _cores() -> int:
    """How many cores this process may use: its affinity, or the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def _opened(path: str) -> int:
    """A descriptor that stays open: some tests count their process's. -1 if there is no such file."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


_LOADAVG, _STAT = _opened("/proc/loadavg"), _opened("/proc/stat")


def _runnable() -> int:
    """How many threads run or wait for a core, the asking thread among them."""
    if _LOADAVG < 0:
        return 1
    return int(os.pread(_LOADAVG, 200, 0).split()[3].partition(b"/")[0])


def _cpu_ticks() -> tuple[int, int]:
    """The ticks of all cores since the machine started: all of them, and the ticks that a hypervisor took away."""
    if _STAT < 0:
        return 0, 0
    fields = [int(field) for field in os.pread(_STAT, 400, 0).split(b"\n", 1)[0].split()[1:9]]
    return sum(fields), fields[7] if len(fields) > 7 else 0


_clock = Clock()
machine_s = _clock.now_s
alarm = _clock.alarm


def stretched(seconds: float) -> float:
    """Seconds of the wall's clock, or more by as much as the machine has been slow lately.

    For bounds on what others have measured on the wall's clock.
    """
    return seconds * _clock.stretch()


def far() -> float:
    """A deadline for the code under test that does not pass while the test runs."""
    return time.monotonic() + FAR_S


def until(
    condition: Callable[[], T],
    what: str,
    *,
    limit_s: float = LIMIT_S,
    context: Callable[[], str] = str,
) -> T:
    """Wait until `condition` returns something true, and return that.

    Args:
        condition: asked again and again.
        what: names the wait, for the message.
        context: what else the message should show, such as logs.
    """
    over_s = machine_s() + limit_s
    while not (found := condition()):
        if machine_s() >= over_s:
            raise TooLong(f"waited {limit_s:g} s of machine time for {what}\n{context()}")
        time.sleep(_POLL_S)
    return found


def call(function: Callable[[], T], what: str = "a call to return", *, limit_s: float = LIMIT_S) -> T:
    """Return the result of `function` or raise its exception, or fail if there is neither in time.

    It runs in a daemon thread, so that a call that hangs does not hang the test.
    """
    results: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            results.append((function(), None))
        except BaseException as error:  # handed over to the caller
            results.append((None, error))

    threading.Thread(target=run, name="called", daemon=True).start()
    [(result, error)] = until(lambda: results, what, limit_s=limit_s)
    if error is not None:
        raise error
    return result  # pyright: ignore[reportReturnType]


def get(source: "queue.Queue[T] | queue.SimpleQueue[T]", what: str, *, limit_s: float = LIMIT_S) -> T:
    """The next item of a queue."""
    over_s = machine_s() + limit_s
    while True:
        try:
            return source.get(timeout=_SAMPLE_S)
        except queue.Empty:
            if machine_s() >= over_s:
                raise TooLong(f"waited {limit_s:g} s of machine time for {what}") from None


def join(thread: threading.Thread, *, limit_s: float = LIMIT_S) -> None:
    """Wait for the end of a thread."""
    over_s = machine_s() + limit_s
    while thread.is_alive():
        if machine_s() >= over_s:
            raise TooLong(f"waited {limit_s:g} s of machine time for thread {thread.name} to end")
        thread.join(_SAMPLE_S)


def wait(process: "subprocess.Popen[Any]", *, limit_s: float = LIMIT_S) -> int:
    """Wait for the end of a process; return its status. It is killed if that takes too long."""
    with _bounded(process, limit_s):
        return process.wait()


def communicate(
    process: "subprocess.Popen[Any]", given: Any = None, *, limit_s: float = LIMIT_S
) -> tuple[Any, Any]:
    """As `process.communicate`: send `given` and return its output until it ends; kill it if it takes too long."""
    with _bounded(process, limit_s):
        return process.communicate(given)


@contextlib.contextmanager
def _bounded(process: "subprocess.Popen[Any]", limit_s: float) -> Iterator[None]:
    late = threading.Event()

    def end() -> None:
        late.set()
        process.kill()

    cancel = alarm(limit_s, end)
    try:
        yield
    finally:
        cancel()
        if late.is_set():
            raise subprocess.TimeoutExpired(process.args, limit_s)


def run(
    command: Any,
    *,
    limit_s: float = LIMIT_S,
    check: bool = False,
    capture_output: bool = False,
    **options: Any,
) -> "subprocess.CompletedProcess[Any]":
    """As `subprocess.run`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **options) as process:
        try:
            out, err = communicate(process, limit_s=limit_s)
        except BaseException:
            process.kill()  # leaving the block waits for it
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


async def until_async(
    condition: Callable[[], T],
    what: str,
    *,
    limit_s: float = LIMIT_S,
    context: Callable[[], str] = str,
) -> T:
    """As `until`, while the loop runs."""
    over_s = machine_s() + limit_s
    while not (found := condition()):
        if machine_s() >= over_s:
            raise TooLong(f"waited {limit_s:g} s of machine time for {what}\n{context()}")
        await asyncio.sleep(_POLL_S)
    return found


async def wait_for(awaitable: Awaitable[T], limit_s: float = LIMIT_S) -> T:
    """As `asyncio.wait_for`.

    Raises:
        TimeoutError: it took longer; it has been cancelled.
    """
    over_s = machine_s() + limit_s
    task = asyncio.ensure_future(awaitable)
    try:
        while not (await asyncio.wait({task}, timeout=_SAMPLE_S))[0]:
            if machine_s() >= over_s:
                raise TimeoutError(f"it took longer than {limit_s:g} s of machine time")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
