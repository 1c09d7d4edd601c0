"""The documents of a corpus, piece by piece: plain text, JSONL and Parquet, or Python's standard library."""

import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from examples.llama3._config import SettingsError
from examples.llama3._packages import needed

# A long document is read in pieces of about this size.
PIECE_BYTES = 2**16
_ROWS_AT_ONCE = 256  # of a Parquet file

# In the standard library: tests are repetitive, and installed packages differ between environments.
_SKIPPED_FOLDERS = frozenset({"test", "tests", "idlelib", "site-packages", "dist-packages"})


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document. Pieces end at the end of a line if there is one, and never inside a UTF-8 character."""

    text: bytes
    first: bool
    last: bool


def files_of(source: Path | None) -> list[Path]:
    """Return the files of a corpus, in an order that depends on their names alone; hidden ones are skipped.

    Raises:
        SettingsError: there is no such file or folder.
    """
    if source is None:
        return [path for path in _walk(standard_library(), without=_SKIPPED_FOLDERS) if _is_source(path)]
    if source.is_dir():
        return list(_walk(source))
    if source.is_file():
        return [source]
    raise SettingsError(
        f"There is no corpus at {str(source)!r}. Point --corpus to text, .jsonl, .parquet or .npy."
    )


def pieces(files: list[Path], *, field: str, limit_bytes: int | None) -> Iterator[Piece]:
    """Yield the documents of files, up to a limit, which may be in the middle of a document.

    Args:
        field: the field with the text in a .jsonl or .parquet file.

    Raises:
        SettingsError: a file cannot be read, or lacks the field.
    """
    room = limit_bytes
    for file in files:
        try:
            for piece in _pieces_of(file, field):
                text = piece.text if room is None else piece.text[:room]
                if room is not None:
                    room -= len(text)
                yield Piece(text, piece.first, piece.last or room == 0)
                if room == 0:
                    return
        except OSError as error:
            reason = error.strerror or error
            raise SettingsError(f"The corpus file {str(file)!r} cannot be read: {reason}.") from error


def standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _pieces_of(file: Path, field: str) -> Iterator[Piece]:
    match file.suffix:
        case ".jsonl":
            texts = _json_lines(file, field)
        case ".parquet":
            texts = _parquet(file, field)
        case _:
            yield from _plain(file)
            return
    yield from (Piece(text.encode(errors="replace"), first=True, last=True) for text in texts if text)


def _plain(file: Path) -> Iterator[Piece]:
    """One document. A NUL byte at its beginning means binary, as for grep and git: nothing is read."""
    with file.open("rb") as opened:
        block = opened.read(PIECE_BYTES)
        if b"\0" in block:
            return
        first, rest = True, b""
        while block:
            following = opened.read(PIECE_BYTES)
            text = rest + block
            end = _boundary(text) if following else len(text)
            if end > 0:
                yield Piece(text[:end], first, last=not following)
                first = False
            rest, block = text[end:], following


def _boundary(text: bytes) -> int:
    """Where to cut a text that continues: after its last line, else before its last UTF-8 character."""
    after_line = text.rfind(b"\n") + 1
    if after_line > 0:
        return after_line
    end = len(text) - 1
    while end > 0 and 0x80 <= text[end] < 0xC0:
        end -= 1
    return end if end > len(text) - 4 else len(text)


def _json_lines(file: Path, field: str) -> Iterator[str]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise SettingsError(f"Line {number} of {str(file)!r} is not JSON: {error}.") from error
            text = row.get(field) if isinstance(row, dict) else None
            if text is None and isinstance(row, dict) and field in row:
                continue  # as in Parquet
            if not isinstance(text, str):
                raise SettingsError(
                    f"Line {number} of {str(file)!r} has no text in a field {field!r}. Name it with --text-field"
                    + (f", one of {', '.join(map(repr, row))}." if isinstance(row, dict) else ".")
                )
            yield text


def _parquet(file: Path, field: str) -> Iterator[str]:
    parquet = needed("pyarrow.parquet", by="A Parquet corpus")
    arrow = needed("pyarrow", by="A Parquet corpus")
    try:
        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if field not in names or not _is_text(arrow, table.schema_arrow.field(field).type):
                raise SettingsError(
                    f"{str(file)!r} has no text in a column {field!r}. Name it with --text-field, one of "
                    f"{', '.join(map(repr, names))}."
                )
            for batch in table.iter_batches(_ROWS_AT_ONCE, columns=[field]):
                yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except arrow.ArrowInvalid as error:
        raise SettingsError(f"{str(file)!r} is not a Parquet file: {error}") from error


def _is_text(arrow: object, kind: object) -> bool:
    types = arrow.types  # pyright: ignore[reportAttributeAccessIssue]
    return types.is_string(kind) or types.is_large_string(kind)


def _walk(folder: Path, *, without: frozenset[str] = frozenset()) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in without and name[0] != ".")
        paths = (Path(parent, name) for name in sorted(files) if name[0] != ".")
        # What is there and no file may be a pipe, which would wait for a writer.
        yield from (path for path in paths if not path.exists() or path.is_file())


def _is_source(path: Path) -> bool:
    return path.suffix == ".py" and os.access(path, os.R_OK)
