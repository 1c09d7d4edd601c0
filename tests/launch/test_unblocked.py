"""A stream whose reader has stopped does not hold up its writer."""

import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxft_launch.supervise._output import Lines, make_output
from jaxft_launch.supervise._unblocked import Unblocked, unblocked
from tests import patience

MUCH = "a line of a training program\n" * 10_000
# More than a pipe takes, 64 KiB.
LINES = "seq 100000000 100020000; exec sleep 600"


def read_all(fd: int) -> bytes:
    os.set_blocking(fd, False)
    found = bytearray()
    while True:
        try:
            part = os.read(fd, 1 << 16)
        except BlockingIOError:
            return bytes(found)
        if not part:
            return bytes(found)
        found += part


@pytest.mark.parametrize("make", [os.pipe, os.openpty])
def test_what_nothing_reads_is_left_out_and_told(make: Callable[[], tuple[int, int]]) -> None:
    reads, writes = make()
    with open(writes, "w") as stream:
        made = Unblocked(stream, patience_s=0.05)
        assert made.write(MUCH) == len(MUCH)
        made.write("this is left out, too\n")
        first = read_all(reads)
        assert first.startswith(b"a line of a training program")
        assert len(first) < len(MUCH)
        made.write("now it is read again\n")
        second = read_all(reads).replace(b"\r\n", b"\n")
    assert second.startswith(b"\n[")
    assert b" bytes of output are left out here: nothing read it]\nnow it is read again\n" in second
    os.close(reads)


def test_a_slow_reader_gets_everything() -> None:
    reads, writes = os.pipe()
    found: list[bytes] = []

    def read() -> None:
        left = len(MUCH)
        while left:
            found.append(os.read(reads, 777))
            left -= len(found[-1])

    reader = threading.Thread(target=read)
    reader.start()
    with open(writes, "w") as stream:
        Unblocked(stream, patience_s=patience.FAR_S).write(MUCH)
    patience.join(reader)
    os.close(reads)
    assert b"".join(found) == MUCH.encode()


def test_a_character_that_the_encoding_lacks_ends_nothing(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w", encoding="ascii") as stream:
        Lines(unblocked(stream)).pass_on("group-0", "accuracy \u2713 \ud800")
    assert (tmp_path / "out").read_text() == "[group-0] accuracy \\u2713 \\ud800\n"


def test_a_terminal_that_is_gone_and_a_full_disk_end_nothing() -> None:
    master, slave = os.openpty()
    with open(slave, "w") as stream:
        made = Unblocked(stream)
        os.close(master)
        made.write("lost\n")
    with open("/dev/full", "w") as full:
        Unblocked(full).write("lost\n")


def test_a_stream_in_memory_stays_as_it_is() -> None:
    stream = io.StringIO()
    assert unblocked(stream) is stream
    assert isinstance(make_output(unblocked(stream)), Lines)


@pytest.mark.processes
def test_a_launcher_whose_output_nothing_reads_obeys(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "jaxft_launch",
        "launch",
        "--coordinator",
        "localhost:1",
        "--groups",
        "2",
    ]
    command += ["--no-warm", "--folder", str(tmp_path / "run"), "--", "sh", "-c", LINES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as running:
        try:
            log = tmp_path / "run" / "group-1.0.log"
            patience.until(
                lambda: log.exists() and log.stat().st_size > 1 << 17, "more output than a pipe takes"
            )
            running.send_signal(signal.SIGTERM)
            patience.until(lambda: running.poll() is not None, "the launcher to end")
        finally:
            running.kill()


@pytest.mark.processes
@pytest.mark.parametrize("ignored", [True, False])
def test_nohup_is_heeded(tmp_path: Path, ignored: bool) -> None:
    """With SIGHUP ignored, as `nohup` starts it, the groups go on; otherwise they are drained."""
    command = [
        sys.executable,
        "-m",
        "jaxft_launch",
        "launch",
        "--coordinator",
        "localhost:1",
        "--groups",
        "1",
    ]
    command += ["--no-warm", "--folder", str(tmp_path / "run"), "--", "sleep", "600"]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    finally:
        signal.signal(signal.SIGHUP, before)
    with running:
        try:
            events = tmp_path / "run" / "events.jsonl"
            patience.until(lambda: events.exists() and "group_started" in events.read_text(), "a group")
            running.send_signal(signal.SIGHUP)
            running.send_signal(signal.SIGTERM)
            patience.until(lambda: running.poll() is not None, "the launcher to end")
            # Of two signals that it heeds, the second ends everything at once.
            assert ("SIGTERM" if ignored else "SIGHUP") in events.read_text()
            assert ("SIGHUP" if ignored else "SIGTERM") not in events.read_text()
        finally:
            running.kill()
