"""A store in a folder, and real processes that die, stop, or run out of disk."""

import asyncio
import contextlib
import errno
import shutil
import time
from pathlib import Path

import pytest
from jaxft_coordinator.stores import FileStore, records

from tests import patience
from tests.stores import examples, processes, scenarios
from tests.stores.processes import PATIENCE_S, Process

pytestmark = pytest.mark.processes


FILE = "decisions.sqlite3"


def step_in(folder: Path) -> int:
    """The step that a copy of a folder remembers, whose coordinator has died; -1 if there is none."""
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    try:
        opened = asyncio.run(scenarios.written(FileStore(copy)))
    finally:
        shutil.rmtree(copy)
    return examples.step_of(opened) if opened.jobs else -1


def until_step(process: Process, step: int) -> None:
    while process.hear("acknowledged")["step"] < step:
        pass


@pytest.mark.long
def test_what_was_acknowledged_survives_sigkill_in_order(tmp_path: Path):
    """Killed at some moment of an append, again and again, it never forgets and never makes up."""
    folder = tmp_path / "store"
    step, term = -1, 0
    with processes.members(tmp_path) as members:
        for round_number in range(8):
            process = members.start("a:1", kind="file", folder=folder)
            led = process.hear("leads")
            # One append may have been durable before any group received it.
            assert led["step"] in (step, step + 1), round_number
            assert led["term"] > term
            process.tell("forever")
            until_step(process, led["step"] + 10 + 137 * round_number)
            acknowledged = process.kill()
            assert acknowledged == list(range(led["step"] + 1, acknowledged[-1] + 1))
            step, term = acknowledged[-1], led["term"]
            assert step_in(folder) in (step, step + 1)


def test_who_stands_by_takes_over_when_the_leader_is_killed(tmp_path: Path):
    folder = tmp_path / "store"
    with processes.members(tmp_path) as members:
        first = members.start("host-a:1", kind="file", folder=folder)
        led = first.hear("leads")
        second = members.start("host-b:1", kind="file", folder=folder)
        deadline_s = patience.machine_s() + PATIENCE_S
        while "stands by: host-a:1 leads" not in second.log.read_text():
            assert patience.machine_s() < deadline_s
            time.sleep(0.01)
        first.tell("forever")
        until_step(first, 100)
        assert second.lines.empty()
        acknowledged = first.kill()
        taken = second.hear("leads")
        assert taken["term"] > led["term"]
        assert taken["step"] in (acknowledged[-1], acknowledged[-1] + 1)
        assert second.ask("one", "acknowledged")["step"] == taken["step"] + 1


def test_who_is_frozen_still_leads(tmp_path: Path):
    """The lock is the process's as long as it lives: so no other process can lead, and nothing needs to be fenced."""
    folder = tmp_path / "store"
    with processes.members(tmp_path) as members:
        first = members.start("a:1", kind="file", folder=folder)
        first.hear("leads")
        first.ask("one", "acknowledged")
        first.stop()
        second = members.start("b:1", kind="file", folder=folder)
        deadline_s = patience.machine_s() + PATIENCE_S
        while "stands by" not in second.log.read_text():
            assert patience.machine_s() < deadline_s
            time.sleep(0.01)
        first.wake()
        assert first.ask("one", "acknowledged")["step"] == 1
        first.ask("close", "closed")
        assert second.hear("leads")["step"] == 1


# ---- no room ----


def may_mount() -> str:
    """Why this test cannot have a separate file system; "" if it can."""
    if shutil.which("unshare") is None:
        return "there is no command unshare"
    probe = "mount -t tmpfs -o size=64k none /mnt"
    done = patience.run(["unshare", "-m", "sh", "-c", probe], capture_output=True, limit_s=PATIENCE_S)
    return f"it may not mount: {done.stderr.decode().strip()}" if done.returncode else ""


def test_a_full_disk_fails_the_append_and_nothing_else(tmp_path: Path):
    """A real one, of 128 KB, in a mount namespace of the process."""
    if why := may_mount():
        pytest.skip(why)
    folder = tmp_path / "disk"
    folder.mkdir()
    # The process's own view of its folder is /proc/PID/root, from here.
    mount = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=128k none "$0" && exec "$@"', str(folder))
    with processes.members(tmp_path) as members:
        process = members.start("a:1", before=mount, kind="file", folder=folder)
        process.hear("leads")
        inside = Path(f"/proc/{process.process.pid}/root{folder}")
        process.ask("one", "acknowledged")
        ballast = inside / "ballast"
        ballast.write_bytes(bytes(40 << 10))
        failed = process.ask("big 90000", "failed")
        assert failed["errno"] == errno.ENOSPC
        assert "The disk is full: free some space" in failed["why"]
        fill(ballast)
        acknowledged = until_failed(process)
        # Its last block is full to the brim; with more room, it continues.
        ballast.unlink()
        assert process.ask("one", "acknowledged")["step"] == acknowledged + 1
        assert process.ask("big 5000", "acknowledged")["step"] == acknowledged + 2
        kept = tmp_path / "kept"
        shutil.copytree(inside, kept)
        assert step_in(kept) == acknowledged + 2


def fill(ballast: Path) -> None:
    """Leave no free block."""
    with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def until_failed(process: Process) -> int:
    """Append until there is no room; return the last step that was acknowledged."""
    step = 0
    while True:
        output = process.ask("one", "acknowledged", "failed")
        if output["event"] == "failed":
            return step
        step = output["step"]


def test_the_lock_says_who_leads(tmp_path: Path):
    with processes.members(tmp_path) as members:
        led = members.start("host-a:29510", kind="file", folder=tmp_path / "store").hear("leads")
        lock = (tmp_path / "store" / "lock").read_bytes()
        assert records.decode(lock) == records.Led(led["term"], "host-a:29510")
