from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """For --folder; not yet made."""
    return tmp_path / "run"
