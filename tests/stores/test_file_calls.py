"""A store in a folder whose system calls fail one after the other, and a process that dies at each."""

import contextlib
import errno
from pathlib import Path

import pytest

from tests import injection
from tests.stores import processes
from tests.stores.processes import Process
from tests.stores.test_file_crashes import step_in

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(injection.why_not()), reason=injection.why_not() or "it can"),
]

# Each call fails now and then, at moments that meet in many ways.
ERRORS = ("pwrite64:error=ENOSPC:when=17+7", "fdatasync:error=EIO:when=13+5")
# Of a process that dies before.
STEPS = 100
DEATHS = (
    "pwrite64:signal=KILL:when=1",  # of the new file
    "fdatasync:signal=KILL:when=2",
    "/^rename:signal=KILL:when=1",
    "fsync:signal=KILL:when=1",  # of the folder
    "pwrite64:signal=KILL:when=4",
    "fdatasync:signal=KILL:when=1",
    "fdatasync:signal=KILL:when=2",
    "pwrite64:signal=KILL:when=20",  # of a decision
    "fdatasync:signal=KILL:when=5",
    "fdatasync:signal=KILL:when=16",
)


def append_until(process: Process, step: int) -> int:
    """Append until a step is durable, however often it fails; return how often that was."""
    failures = 0
    while (output := process.ask("one", "acknowledged", "failed"))["step"] < step or output[
        "event"
    ] == "failed":
        if output["event"] == "failed":
            failures += 1
            assert "Nothing was written" in output["why"]
            assert output["errno"] in (errno.ENOSPC, errno.EIO, errno.EDQUOT)
    return failures


def test_no_decision_is_lost_or_made_up_whatever_call_fails(tmp_path: Path):
    folder = tmp_path / "store"
    with processes.members(tmp_path) as members:
        process = members.start("a:1", before=injection.failing(*ERRORS), kind="file", folder=folder)
        process.hear("leads")
        assert append_until(process, 99) > 20
        acknowledged = process.end()
        assert acknowledged == list(range(100))
        assert members.start("b:1", kind="file", folder=folder).hear("leads")["step"] == 99


def test_no_decision_is_lost_or_made_up_wherever_the_process_dies(tmp_path: Path):
    folder = tmp_path / "store"
    step, term = -1, 0
    with processes.members(tmp_path) as members:
        for death in DEATHS:
            process = members.start("a:1", before=injection.failing(death), kind="file", folder=folder)
            with contextlib.suppress(BrokenPipeError):
                process.tell("one\n" * STEPS)
            acknowledged = process.end()
            assert len(acknowledged) < STEPS, f"{death}: it lives on"
            led = [output for output in process.heard if output["event"] == "leads"]
            assert led or not acknowledged, death
            for output in led:
                # One append may have been durable before any group received it.
                assert output["step"] in (step, step + 1), death
                assert output["term"] > term, death
                step, term = output["step"], output["term"]
            assert acknowledged == list(range(step + 1, step + 1 + len(acknowledged))), death
            step += len(acknowledged)
            if (folder / "decisions.sqlite3").exists():
                assert step_in(folder) in (step, step + 1), death
        assert members.start("b:1", kind="file", folder=folder).hear("leads")["step"] in (step, step + 1)


@pytest.mark.parametrize("code", ["ENOLCK", "EOPNOTSUPP", "ENOSYS"])
def test_a_file_system_without_locks_is_said(tmp_path: Path, code: str):
    folder = tmp_path / "store"
    with processes.members(tmp_path) as members:
        before = injection.failing(f"flock:error={code}")
        process = members.start("a:1", before=before, kind="file", folder=folder)
        assert process.end() == []
        output = process.log.read_text()
    assert f"cannot lock {folder / 'lock'}: " in output
    assert "Its file system has no locks: name a folder on a disk of this machine, or use --etcd" in output


def test_a_machine_without_descriptors_is_said_with_the_limit(tmp_path: Path):
    folder = tmp_path / "store"
    with processes.members(tmp_path) as members:
        before = injection.failing("/^mkdir:error=ENFILE")
        process = members.start("a:1", before=before, kind="file", folder=folder)
        assert process.end() == []
        output = process.log.read_text()
    assert f"cannot keep the coordinator's state in {folder}: Too many open files in system" in output
    assert "Raise the limit on open files (ulimit -n" in output
