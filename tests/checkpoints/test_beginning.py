"""The note of the state with which a job began: how long it stays, and when it counts."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxft._checkpoints import Checkpoints, _beginning
from jaxft._checkpoints._beginning import NAME, Beginning
from jaxft._checkpoints._manifest import checksum

BEGUN = Beginning("job", 2**64 - 1, 0, 2**63 + 1)


def test_it_comes_back_as_it_was_until_a_later_note_takes_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    for begun in (BEGUN, dataclasses.replace(BEGUN, history=5)):
        _beginning.write(folder, begun)
        assert _beginning.read(folder) == begun
    assert [path.name for path in folder.iterdir()] == [NAME]


def test_without_one_there_is_none(tmp_path: Path) -> None:
    assert _beginning.read(tmp_path) is None
    assert _beginning.read(tmp_path / "nowhere") is None
    _beginning.remove(tmp_path)


def test_a_complete_checkpoint_takes_it_away(tmp_path: Path) -> None:
    _beginning.write(tmp_path, BEGUN)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"w": jnp.zeros(2)}, job="job", history=BEGUN.history)
    checkpoints.finish(60.0)
    assert checkpoints.steps() == [3]
    assert not (tmp_path / NAME).exists()


def test_beside_a_checkpoint_it_says_nothing(tmp_path: Path) -> None:
    """As after a crash of the writer between its two last acts."""
    (tmp_path / "3").mkdir()
    _beginning.write(tmp_path, BEGUN)
    assert _beginning.read(tmp_path) is None


def written(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields | {"checksum": checksum(fields)}).encode()


GOOD = dataclasses.asdict(BEGUN)
BAD = {
    "torn": written(GOOD)[:-9],
    "empty": b"",
    "deep": b"[" * 60_000,
    "no checksum": json.dumps(GOOD).encode(),
    "another checksum": written(GOOD).replace(b"18446744073709551615", b"18446744073709551614"),
    "a field too many": written({**GOOD, "more": 1}),
    "another type": written({**GOOD, "step": True}),
    "no history": written({**GOOD, "history": 0}),
    "more than 64 bits": written({**GOOD, "digest": 2**64}),
    "too long": written({**GOOD, "job": "j" * 100_000}),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_damaged_counts_as_none_and_the_log_says_so(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / NAME).write_bytes(BAD[what])
    with caplog.at_level(logging.WARNING, "jaxft"):
        assert _beginning.read(tmp_path) is None
    assert f"{tmp_path / NAME} is damaged" in caplog.text


def test_a_folder_in_its_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / NAME).mkdir()
    with caplog.at_level(logging.WARNING, "jaxft"):
        assert _beginning.read(tmp_path) is None
    assert "Cannot read with which state the job began" in caplog.text
    with pytest.raises(OSError):
        _beginning.write(tmp_path, BEGUN)
