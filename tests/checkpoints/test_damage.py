"""A checkpoint that is damaged is never used, and never silently."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from jaxft import CannotRestore, Checkpoints
from jaxft._checkpoints import _marks
from jaxft._checkpoints._group import OneProcess
from jaxft._checkpoints._writer import _superseded

from .states import PATIENCE_S, of_optax, same, saved


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_the_one_before_is_used(
    damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of every file in turn. Some do not matter to orbax; then what is read is whole all the same."""
    checkpoints = saved(tmp_path, 5, 10)
    mattered: set[str] = set()
    for file in sorted(path for path in (tmp_path / "10").rglob("*") if path.is_file()):
        content = file.read_bytes()
        if not content:
            continue
        caplog.clear()
        damage(file)
        restored = checkpoints.restore(of_optax(), job="docs")
        assert restored is not None
        assert same(restored.state, of_optax(restored.step))
        warnings = [record.getMessage() for record in caplog.records if record.name == "jaxft"]
        if restored.step == 5:
            mattered.add(str(file.relative_to(tmp_path / "10").parent))
            (warning,) = warnings
            assert warning.startswith(f"Skipped the checkpoint {tmp_path / '10'}: ")
        else:
            assert (restored.step, warnings) == (10, [])
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
    restored = checkpoints.restore(of_optax(), job="docs")
    assert restored is not None
    assert restored.step == 5
    assert "description" in caplog.text


def test_a_digest_that_differs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Orbax is content with it; the arrays are those of another step."""
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
    restored = checkpoints.restore(of_optax(), job="docs")
    assert restored is not None
    assert restored.step == 5
    checkpoints.save(10, of_optax(10), job="docs", history=7)
    checkpoints.finish(PATIENCE_S)
    restored = checkpoints.restore(of_optax(), job="docs")
    assert restored is not None
    assert restored.step == 10
    assert {entry.name for entry in tmp_path.iterdir()} == {"5", "10"}


def test_a_damaged_one_does_not_count_among_those_kept(tmp_path: Path) -> None:
    saved(tmp_path, 5, 10)
    (tmp_path / "10" / "state" / "manifest.ocdbt").unlink()
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.restore(of_optax(), job="docs")
    checkpoints.save(15, of_optax(15), job="docs", history=7)
    checkpoints.finish(PATIENCE_S)
    assert checkpoints.steps() == [5, 10, 15]


def test_what_is_no_checkpoint_is_not_looked_at(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 5)
    for name in ("notes", "007", "10.orbax-checkpoint-tmp", ".unfinished-1", "-3", "²"):
        (tmp_path / name).mkdir()
    (tmp_path / "20").write_text("a file")
    assert checkpoints.steps() == [5]


def damaged_newest(folder: Path, damage: Callable[[Path], None]) -> None:
    """Checkpoints of the steps 5, 10 and 15, the newest damaged."""
    saved(folder, 5, 10, 15)
    damage(folder / "15" / "state" / "manifest.ocdbt")


def restored_step(folder: Path) -> int:
    restored = Checkpoints(folder).restore(of_optax(), job="docs")
    assert restored is not None
    assert same(restored.state, of_optax(restored.step))
    return restored.step


def mark_of(folder: Path, step: int) -> Path:
    return folder / str(step) / ".damaged"


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_another_group_than_its_reader_writes_it_again(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    damaged_newest(tmp_path, damage)
    assert restored_step(tmp_path) == 10
    saved(tmp_path, 15)
    assert restored_step(tmp_path) == 15
    assert not list(tmp_path.glob("*/.damaged"))


def test_another_group_than_its_reader_does_not_count_it(tmp_path: Path) -> None:
    damaged_newest(tmp_path, cut)
    assert restored_step(tmp_path) == 10
    assert saved(tmp_path, 20, keep=2).steps() == [10, 15, 20]
    assert saved(tmp_path, 25, keep=2).steps() == [20, 25]


def test_the_reader_does_not_delete_what_another_group_has_written_again(tmp_path: Path) -> None:
    damaged_newest(tmp_path, cut)
    reader = Checkpoints(tmp_path, keep=2)
    assert reader.restore(of_optax(), job="docs") is not None
    saved(tmp_path, 15)
    reader.save(20, of_optax(20), job="docs", history=7)
    reader.finish(PATIENCE_S)
    assert reader.steps() == [15, 20]
    assert restored_step(tmp_path) == 20


def test_a_mark_goes_when_it_can_be_read_after_all(tmp_path: Path) -> None:
    saved(tmp_path, 5, 10)
    file = tmp_path / "10" / "state" / "manifest.ocdbt"
    content = file.read_bytes()
    cut(file)
    assert restored_step(tmp_path) == 5
    assert mark_of(tmp_path, 10).exists()
    file.write_bytes(content)
    assert restored_step(tmp_path) == 10
    assert not mark_of(tmp_path, 10).exists()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_what_this_host_cannot_read_is_not_marked(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged_newest(tmp_path, cut)
    whole = os.read

    def failing(descriptor: int, size: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("manifest.ocdbt"):
            raise OSError(code, os.strerror(code))
        return whole(descriptor, size)

    monkeypatch.setattr(os, "read", failing)
    reader = Checkpoints(tmp_path)
    restored = reader.restore(of_optax(), job="docs")
    assert restored is not None
    assert restored.step == 10
    assert not mark_of(tmp_path, 15).exists()
    reader.save(15, of_optax(15), job="docs", history=7)
    reader.finish(PATIENCE_S)
    assert restored_step(tmp_path) == 15, "for the group itself it is damaged"


@pytest.mark.parametrize("what", ["their folder", "the files"])
def test_a_disk_that_cannot_be_read_is_not_called_damage(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoints may be intact, so they should not be moved away."""
    saved(tmp_path, 5)

    def failing(*_: object, **__: object) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        if what == "the files":
            cut(next((tmp_path / "5").rglob("manifest.ocdbt")))
            patch.setattr(os, "read", failing)
        else:
            patch.setattr(os, "scandir", failing)
        with pytest.raises(CannotRestore, match=r"PermissionError: .* check .* permissions") as refused:
            Checkpoints(tmp_path).restore(of_optax(), job="docs")
    assert "damaged" not in str(refused.value)
    assert "away" not in str(refused.value)


class OneOfTwo(OneProcess):
    """A group in which another rank cannot read the files of a checkpoint."""

    def agree(self, what: str, failure: str) -> str:
        return failure or ("rank 1: PermissionError" if "files of the damaged" in what else "")


def test_what_another_rank_cannot_read_is_not_marked(tmp_path: Path) -> None:
    damaged_newest(tmp_path, cut)
    restored = Checkpoints(tmp_path).restore(of_optax(), job="docs", group=OneOfTwo())
    assert restored is not None
    assert restored.step == 10
    assert not mark_of(tmp_path, 15).exists()


def test_a_mark_gets_into_the_folder_that_was_read_and_not_into_its_successor(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    with _marks.held(tmp_path / "5") as folder:
        assert folder is not None
        (tmp_path / "5").rename(tmp_path / "old")
        saved(tmp_path, 5)
        _marks.mark(folder)
    assert (tmp_path / "old" / ".damaged").exists()
    assert not mark_of(tmp_path, 5).exists()


def test_a_disk_that_cannot_be_marked_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged_newest(tmp_path, cut)
    whole: Any = os.open

    def read_only(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return whole(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", read_only)
    assert restored_step(tmp_path) == 10
    monkeypatch.undo()
    assert not mark_of(tmp_path, 15).exists()


def test_none_is_deleted_for_marks_alone() -> None:
    """A host whose accelerator is broken may mark all of them: until there are enough others, they stay."""
    steps, marked = [80, 90, 100, 110], frozenset({80, 90, 100})
    assert _superseded(steps, 110, 2, marked) == []
    assert _superseded([*steps, 120], 120, 2, marked) == [80, 90, 100]
    assert _superseded([*steps, 120], 120, 2, frozenset()) == [80, 90, 100]
    assert _superseded(steps, 110, 1, marked) == [80, 90, 100]
