"""Words that do not belong in our text, and where they are: `python -m tests.words`.

The list is `words.toml`. It applies to docs, comments, docstrings and messages, so whole files are searched. A word
within an identifier (`test_strangers_are_refused`) does not count.

Pronouns without nouns are counted instead of forbidden: `python -m tests.words --pronouns [PATH...]` lists them, and
the tests limit how many there may be in 1,000 words.
"""

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIST = Path(__file__).with_suffix(".toml")
SEARCHED = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Makefile",
    "docs",
    "protocol",
    "coordinator",
    "jaxft",
    "launcher",
    "lab",
    "examples",
    "benchmarks",
    "tests",
)
SUFFIXES = {".md", ".py", ".proto", ".txt", ".sh", ""}
GENERATED = re.compile(r"_pb2(_grpc)?\.py$|(^|/)(_build|__pycache__|[\w.-]+\.egg-info)/|(^|/)LICENSE$")

# "A member that lags" is clear at the first reading, and "one that is behind" is not.
PRONOUNS = re.compile(
    r"\b(?:(?:one|those) (?:that|whose|of|in|which)|that of|what (?:is|it|has|the|a|an|was|they|this)"
    r"|told|tells|said|says|so many|so long|beside|goes on)\b",
    re.IGNORECASE,
)

# Between two words of a phrase: a space, or a line's end with a comment sign or quotes.
_GAP = r"[\s#\"']+"


def words() -> dict[str, str]:
    """Return each unwanted word or phrase with a better one."""
    return {
        word: better
        for section in tomllib.loads(LIST.read_text(encoding="utf-8")).values()
        for word, better in section.items()
    }


def pattern(unwanted: Sequence[str]) -> re.Pattern[str]:
    phrases = (
        _GAP.join(map(re.escape, phrase.split())) for phrase in sorted(unwanted, key=len, reverse=True)
    )
    return re.compile(rf"\b(?:{'|'.join(phrases)})\b", re.IGNORECASE)


def findings(
    text: str, unwanted: Mapping[str, str], found: re.Pattern[str]
) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the unwanted word and the better one."""
    for match in found.finditer(text):
        word = " ".join(re.split(_GAP, match.group().lower()))
        yield text.count("\n", 0, match.start()) + 1, word, unwanted[word]


def files(where: str) -> list[Path]:
    """Return the files to search: `where` itself, or all below it."""
    path = ROOT / where
    paths = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [each for each in paths if each.is_file() and each.suffix in SUFFIXES and not _is_generated(each)]


def search(paths: Sequence[Path]) -> list[str]:
    """Return one line of text for each finding in `paths`."""
    unwanted = words()
    found = pattern(list(unwanted))
    return [
        f"{path.relative_to(ROOT)}:{line}: {word!r}: better {better}"
        for path in paths
        for line, word, better in findings(path.read_text(encoding="utf-8"), unwanted, found)
    ]


def checked() -> list[Path]:
    return [path for where in SEARCHED for path in files(where)]


def pronouns(paths: Sequence[Path]) -> list[str]:
    """Return one line of text for each pronoun without a noun in `paths`."""
    return [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()!r}"
        for path in paths
        for text in [path.read_text(encoding="utf-8")]
        for match in PRONOUNS.finditer(text)
    ]


def pronouns_per_1000_words(paths: Sequence[Path]) -> float:
    words_in_all = sum(len(path.read_text(encoding="utf-8").split()) for path in paths)
    return len(pronouns(paths)) / words_in_all * 1000


def _is_generated(path: Path) -> bool:
    return GENERATED.search(path.relative_to(ROOT).as_posix()) is not None


def main() -> int:
    if sys.argv[1:2] == ["--pronouns"]:
        paths = [path for where in sys.argv[2:] or SEARCHED for path in files(where)]
        found = pronouns(paths)
        sys.stdout.write("".join(f"{each}\n" for each in found))
        sys.stdout.write(f"{len(found)}, {pronouns_per_1000_words(paths):.2f} in 1,000 words\n")
        return 0
    problems = search(checked())
    sys.stdout.write("".join(f"{problem}\n" for problem in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
