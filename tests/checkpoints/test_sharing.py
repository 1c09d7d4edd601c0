"""The owner of a folder, and the calls that it must allow; who saves a state that several groups hold."""

import errno
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jaxft import Checkpoints, ConfigurationError
from jaxft._checkpoints import _folder, _orbax, _sharing
from jaxft._checkpoints._group import OneProcess
from tests import patience

from .states import PATIENCE_S, names, of_optax, saved

# Which job a folder belongs to.


def test_a_folder_belongs_to_the_job_that_came_first(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    for _ in range(2):  # also when it is started again
        Checkpoints(folder).claim("one")
    with pytest.raises(ConfigurationError, match=r"belongs to the job 'one', and this is the job 'other'"):
        Checkpoints(folder).claim("other")
    Checkpoints(folder).claim("other", {"job"})
    with pytest.raises(ConfigurationError, match="belongs to the job 'other'"):
        Checkpoints(folder).claim("one")
    assert [path.name for path in folder.iterdir()] == [".job"]


def test_of_jobs_that_begin_at_once_one_has_the_folder(tmp_path: Path) -> None:
    jobs = [f"job-{number}" for number in range(8)]
    present = threading.Barrier(len(jobs))

    def claimed(job: str) -> bool:
        present.wait(PATIENCE_S)
        try:
            Checkpoints(tmp_path).claim(job)
        except ConfigurationError:
            return False
        return True

    with ThreadPoolExecutor(len(jobs)) as pool:
        assert sum(pool.map(claimed, jobs)) == 1


def test_a_group_that_joins_while_another_one_saves_does_not_wait(tmp_path: Path) -> None:
    Checkpoints(tmp_path).claim("docs")
    with _sharing.turn(tmp_path, lambda: False, patience_s=PATIENCE_S):
        Checkpoints(tmp_path).claim("docs")


# The calls that it must allow.


def failing(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, code: int, only: Callable[..., bool]
) -> None:
    real = getattr(module, name)

    def fail(*arguments: Any, **options: Any) -> Any:
        if only(*arguments):
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    monkeypatch.setattr(module, name, fail)


def of_folder(descriptor: int, *_: Any) -> bool:
    return os.path.isdir(f"/proc/self/fd/{descriptor}")


FAULTS: dict[str, tuple[Any, ...]] = {
    "read-only": (os, "mkdir", errno.EROFS, lambda *_: True, "it cannot be locked: OSError: .*Read-only"),
    "no locks": (fcntl, "flock", errno.ENOLCK, lambda *_: True, "it cannot be locked: OSError: .*No locks"),
    "full": (
        Path,
        "write_text",
        errno.ENOSPC,
        lambda *_: True,
        "it cannot be written to: OSError: .*No space",
    ),
    "no sync": (os, "fsync", errno.EIO, lambda *_: True, "it cannot be synced: OSError: .*Input/output"),
    "no rename": (
        os,
        "rename",
        errno.ENOSYS,
        lambda *_: True,
        "it cannot be changed by renaming files: OSError",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_folder_that_does_not_do_is_refused_before_the_first_step(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *fault, text = FAULTS[what]
    monkeypatch.setattr(_folder, "PATIENCE_S", 0.0)
    failing(monkeypatch, *fault)
    with pytest.raises(ConfigurationError, match=rf"'{tmp_path}' cannot hold checkpoints: {text}"):
        Checkpoints(tmp_path).claim("docs")
    monkeypatch.undo()
    assert not names(tmp_path), "nothing unfinished is left"


class Second(OneProcess):
    """The second of two processes; rank 0 has made a folder, which this one sees or not."""

    rank, size = 1, 2

    def __init__(self, number: int) -> None:
        self.number = number

    def choose(self, _what: str, _number: int) -> int:
        return self.number


def test_ranks_must_see_one_folder(tmp_path: Path) -> None:
    (tmp_path / ".seen-5").mkdir()
    Checkpoints(tmp_path).claim("docs", group=Second(5))
    with pytest.raises(
        ConfigurationError, match=rf"Rank 1 does not see in '{tmp_path}' what rank 0 has made"
    ):
        Checkpoints(tmp_path).claim("docs", group=Second(6))


def test_a_disk_that_is_away_for_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = iter([True, True])
    failing(monkeypatch, os, "fsync", errno.ESTALE, lambda *_: next(away, False))
    Checkpoints(tmp_path).claim("docs")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_disk_that_cannot_sync_folders_is_used_with_one_warning(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CIFS, and some of FUSE: nothing was ever saved there."""
    monkeypatch.setattr(_folder, "_unsynced", set())
    failing(monkeypatch, os, "fsync", code, of_folder)
    Checkpoints(tmp_path).claim("docs")
    assert saved(tmp_path, 5, 10).steps() == [5, 10]
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert "cannot sync folders" in warning
    failing(monkeypatch, os, "fsync", code, lambda *_: True)
    assert saved(tmp_path, 15).steps() == [5, 10], "a file that cannot be synced is another matter"


# Who saves.


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def last(folder: Path, step: int = 7, *, patience_s: float = PATIENCE_S) -> str:
    """Save the last state, as each group does; return why it is not saved."""
    checkpoints = Checkpoints(folder)
    checkpoints.last_comes(patience_s)
    checkpoints.save(step, of_optax(step), job="docs", history=0)
    return checkpoints.finish(PATIENCE_S)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The paths that were written."""
    real, found = _orbax.write, list[Path]()

    def write(path: Path, *rest: Any) -> None:
        found.append(path)
        real(path, *rest)

    monkeypatch.setattr(_orbax, "write", write)
    return found


def test_a_state_that_all_groups_hold_is_written_once(
    tmp_path: Path, pool: ThreadPoolExecutor, writes: list[Path]
) -> None:
    assert list(pool.map(last, [tmp_path] * 4)) == [""] * 4
    assert len(writes) == 1
    assert names(tmp_path) == {"7"}


def test_another_group_saves_once_the_first_has_ended_without(
    tmp_path: Path,
    pool: ThreadPoolExecutor,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jaxft_protocol.values.SLOW_WAIT_S", 0.01)
    caplog.set_level(logging.INFO, "jaxft")
    with _sharing.turn(tmp_path, lambda: False, patience_s=0.0):
        other = pool.submit(last, tmp_path)
        patience.until(lambda: "for another group to save this state" in caplog.text, "the other to wait")
        assert not other.done()
    assert other.result() == ""
    assert names(tmp_path) == {"7"}


def test_a_group_that_saves_and_writes_nothing_is_not_waited_for_without_end(tmp_path: Path) -> None:
    with _sharing.turn(tmp_path, lambda: False, patience_s=0.0):
        assert last(tmp_path, patience_s=0.05) == ""
    assert names(tmp_path) == {"7"}


def test_why_the_last_state_is_not_saved_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(_orbax, "write", fail)
        assert last(tmp_path) == "OSError: [Errno 28] No space left on device"
    assert "next due step" not in caplog.text
    assert last(tmp_path) == ""
