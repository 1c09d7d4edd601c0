"""A checkpoint that is damaged is never used, and never silently."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from jaxft import CannotRestore, Checkpoints
from jaxft._checkpoints import _folder, _reading, _zarr
from jaxft._checkpoints._writer import superseded

from .states import names, of_optax, restored, same, save, saved


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    "damage", [flip, *(pytest.param(damage, marks=pytest.mark.long) for damage in (cut, Path.unlink))]
)
def test_the_one_before_is_used(
    damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of every file in turn. Orbax does not need some of them: then the state is whole all the same."""
    checkpoints = saved(tmp_path, 5, 10)
    mattered: set[str] = set()
    for file in sorted(path for path in (tmp_path / "10").rglob("*") if path.is_file()):
        content = file.read_bytes()
        if not content:
            continue
        caplog.clear()
        damage(file)
        found = restored(checkpoints)
        assert same(found.state, of_optax(found.step))
        warnings = [record.getMessage() for record in caplog.records if record.name == "jaxft"]
        if found.step == 5:
            mattered.add(str(file.relative_to(tmp_path / "10").parent))
            (warning,) = warnings
            assert warning.startswith(f"Skipped the checkpoint {tmp_path / '10'}: ")
        else:
            assert (found.step, warnings) == (10, [])
        file.write_bytes(content)
    assert {".", "state", "state/d", "state/ocdbt.process_0/d"} <= mattered


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ('"docs"', '"dogs"'),
        ("float32[3]", "float32[4]"),
        ('"step": 10', '"step": 12'),
        ("checksum", "chequsum"),
    ],
)
def test_a_damaged_description_is_no_other_job(
    word: str, instead: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = saved(tmp_path, 5, 10)
    file = tmp_path / "10" / "_CHECKPOINT_METADATA"
    assert word in file.read_text()
    file.write_text(file.read_text().replace(word, instead))
    found = restored(checkpoints)
    assert found.step == 5
    assert "description" in caplog.text


def test_a_digest_that_differs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Orbax is content with it; the arrays are another step's."""
    checkpoints = saved(tmp_path, 5, 10)
    (tmp_path / "10" / "state").rename(tmp_path / "gone")
    (tmp_path / "5" / "state").rename(tmp_path / "10" / "state")
    (tmp_path / "gone").rename(tmp_path / "5" / "state")
    with pytest.raises(CannotRestore, match=r"are damaged \(steps 5, 10\)"):
        checkpoints.restore(of_optax(), job="docs")
    assert caplog.text.count("the state read has the digest") == 2


def test_a_renamed_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = saved(tmp_path, 5)
    (tmp_path / "5").rename(tmp_path / "50")
    with pytest.raises(CannotRestore, match="move them away"):
        checkpoints.restore(of_optax(), job="docs")
    assert "its manifest is for step 5" in caplog.text


def test_a_damaged_one_is_written_anew(tmp_path: Path) -> None:
    saved(tmp_path, 5, 10)
    (tmp_path / "10" / "state" / "manifest.ocdbt").unlink()
    checkpoints = Checkpoints(tmp_path, keep=2)
    found = restored(checkpoints)
    assert found.step == 5
    save(checkpoints, 10)
    found = restored(checkpoints)
    assert found.step == 10
    assert names(tmp_path) == {"5", "10"}


def test_a_disk_that_cannot_be_listed_is_not_called_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoints may be intact, so they should not be moved away."""
    saved(tmp_path, 5)

    def failing(*_: object) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "scandir", failing)
    with pytest.raises(CannotRestore, match=r"PermissionError: .* check .* permissions") as refused:
        Checkpoints(tmp_path).restore(of_optax(), job="docs")
    assert "damaged" not in str(refused.value)
    assert "away" not in str(refused.value)


def failing_reads(
    monkeypatch: pytest.MonkeyPatch, where: str, error: Exception, times: int
) -> Callable[[], int]:
    """Have reads of the checkpoint of step 10 fail; return how often they have."""
    failed = list[Path]()
    real = getattr(_reading, where) if where == "read_metadata" else _zarr.read_parts

    def read(path: Path, *rest: Any) -> Any:
        if "10" in path.parts and len(failed) < times:
            failed.append(path)
            raise error
        return real(path, *rest)

    monkeypatch.setattr(*((_reading, where) if where == "read_metadata" else (_zarr, where)), read)
    return lambda: len(failed)


ERRORS = {
    "descriptors": OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    "a stale handle": OSError(errno.ESTALE, os.strerror(errno.ESTALE)),
    "an I/O error": OSError(errno.EIO, os.strerror(errno.EIO)),
    "no thread": RuntimeError("can't start new thread"),
    "TensorStore": ValueError("RESOURCE_EXHAUSTED: Error opening: Too many open files [os_error_code='24']"),
}


@pytest.mark.parametrize(
    ("what", "where"), [("a stale handle", "read_metadata"), *((what, "read_parts") for what in ERRORS)]
)
def test_an_error_of_the_system_is_waited_out(
    what: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = saved(tmp_path, 5, 10)
    monkeypatch.setattr(_folder, "_FIRST_PAUSE_S", 0.001)
    failed = failing_reads(monkeypatch, where, ERRORS[what], times=3)
    found = restored(checkpoints)
    assert (found.step, failed()) == (10, 3)
    assert "Tries again for 20 s" in caplog.text
    assert "Skipped" not in caplog.text


@pytest.mark.parametrize("what", ["a stale handle", "TensorStore"])
def test_a_system_that_fails_for_long_leads_to_the_one_before_and_deletes_nothing(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = saved(tmp_path, 5, 10)
    monkeypatch.setattr(_folder, "PATIENCE_S", 0.0)
    failing_reads(monkeypatch, "read_parts", ERRORS[what], times=1000)
    found = restored(checkpoints)
    assert found.step == 5
    assert f"Skipped the checkpoint {tmp_path / '10'}: reading it failed with" in caplog.text
    inode = (tmp_path / "10").stat().st_ino
    save(checkpoints, 10)
    assert (tmp_path / "10").stat().st_ino == inode, "it may be intact"
    shutil.rmtree(tmp_path / "5")
    with pytest.raises(
        CannotRestore, match=r"\(steps 10\); .* They may be intact: .* check their permissions"
    ):
        checkpoints.restore(of_optax(), job="docs")


def test_an_error_that_a_library_has_swallowed_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = saved(tmp_path, 5, 10)
    failing_reads(monkeypatch, "read_parts", ValueError("NOT_FOUND: no such array"), times=1)
    found = restored(checkpoints)
    assert found.step == 10


def test_a_checkpoint_that_is_superseded_while_it_is_read_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 5, keep=1)
    real, others = _reading.read_metadata, iter((6, 7))

    def read(folder: Path) -> Any:
        """Another group saves the next state, and deletes this one, before it is read."""
        if (step := next(others, None)) is not None:
            saved(tmp_path, step, keep=1)
        return real(folder)

    monkeypatch.setattr(_reading, "read_metadata", read)
    found = restored(Checkpoints(tmp_path))
    assert found.step == 7
    assert same(found.state, of_optax(7))
    assert "Skipped" not in caplog.text


def test_none_is_deleted_because_one_process_calls_it_damaged() -> None:
    """A host whose accelerator is broken may say so of all: until there are enough others, they stay."""
    assert superseded([5, 10, 15], 15, 2, set()) == [5]
    assert superseded([5, 10, 15, 20], 10, 1, set()) == [5], "newer ones are left to their writers"
    assert superseded([5, 10, 15], 15, 2, {10}) == []
    steps, damaged = [80, 90, 100, 110], frozenset({80, 90, 100})
    assert superseded(steps, 110, 2, damaged) == []
    assert superseded([*steps, 120], 120, 2, damaged) == [80, 90, 100]
    assert superseded(steps, 110, 1, damaged) == [80, 90, 100]
