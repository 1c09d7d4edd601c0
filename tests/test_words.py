"""The word list, and that our text keeps to it."""

from pathlib import Path

import pytest

from tests import words


def test_the_text_keeps_to_the_word_list() -> None:
    assert words.search(words.checked()) == []


def test_generated_files_are_not_searched() -> None:
    found = [path.name for path in words.files("protocol")]
    assert "coordinator.proto" in found
    assert "coordinator_pb2.py" not in found


PRONOUN, PHRASE = "no" + "body", "in va" + "in"
UNWANTED = {PRONOUN: "none", PHRASE: "without success"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"a\n{PRONOUN.title()} waits", [(2, PRONOUN, "none")]),
        (f"# tried {PHRASE.split()[0]}\n    # {PHRASE.split()[1]}, always", [(1, PHRASE, "without success")]),
        (f'"tried {PHRASE.split()[0]} "\n    "{PHRASE.split()[1]}"', [(1, PHRASE, "without success")]),
        (f"{PRONOUN}, {PHRASE}", [(1, PRONOUN, "none"), (1, PHRASE, "without success")]),
        (f"def test_{PRONOUN}_waits(): ...", []),
        ("in vanilla Python", []),
    ],
)
def test_a_finding_has_its_line_and_a_better_word(text: str, expected: list[tuple[int, str, str]]) -> None:
    assert list(words.findings(text, UNWANTED, words.pattern(list(UNWANTED)))) == expected


def test_every_word_has_a_better_one_that_is_allowed() -> None:
    unwanted = words.words()
    found = words.pattern(list(unwanted))
    for better in unwanted.values():
        assert better
        assert not found.search(better), better


def test_the_report_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(f"fine\n{PRONOUN}\n")
    (problem,) = words.search(words.files("page.md"))
    assert problem.startswith(f"page.md:2: '{PRONOUN}': better ")
