"""A checkpoint that is damaged is never used, and never silently."""

from collections.abc import Callable
from pathlib import Path

import pytest

from jaxft import CannotRestore, Checkpoints

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
    assert checkpoints.steps() == [5, 15]


def test_what_is_no_checkpoint_is_not_looked_at(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 5)
    for name in ("notes", "007", "10.orbax-checkpoint-tmp", ".unfinished-1", "-3", "²"):
        (tmp_path / name).mkdir()
    (tmp_path / "20").write_text("a file")
    assert checkpoints.steps() == [5]
