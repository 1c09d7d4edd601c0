"""Each file here is a story that a reader should understand: commands, and the coordinator's answers.

After a change of the protocol, `pytest tests/scenarios --record` writes the traces again: read the difference.
"""

from pathlib import Path

import pytest

from tests.scenarios.player import Player

FILES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_trace_is_as_recorded(file: Path, request: pytest.FixtureRequest) -> None:
    recorded = file.read_text()
    played = Player().play(recorded)
    if request.config.getoption("--record"):
        file.write_text(played)
        return
    assert played == recorded


def test_a_command_that_was_changed_has_another_trace() -> None:
    text = "> come a\n> come b\n"
    assert Player().play(text) != Player().play(text.replace("come b", "hello b"))


def test_there_are_scenarios() -> None:
    assert len(FILES) >= 10
