"""From text to token ids: bytes, which need no download, or any tokenizer of Hugging Face's `tokenizers`."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from examples.llama3._config import SettingsError
from examples.llama3._packages import needed

# Names of the special tokens in common tokenizers, for files that come without a tokenizer_config.json.
_BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>")
_EOS_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>")


class Tokenizer(Protocol):
    """Text to token ids. A document begins with `bos` and ends with `eos`; a tokenizer has at least one of the two.

    Attributes:
        vocab_size: above all token ids.
        fingerprint: differs between tokenizers that give different ids.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def bos(self) -> int | None: ...
    @property
    def eos(self) -> int | None: ...
    @property
    def fingerprint(self) -> str: ...

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return the token ids of each text, without special tokens."""
        ...

    def decode(self, tokens: np.ndarray) -> bytes:
        """Return the text of token ids, without special tokens."""
        ...


class Bytes:
    """A byte is its own token."""

    vocab_size = 259
    bos = 256
    eos = 257
    fingerprint = "bytes"

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, tokens: np.ndarray) -> bytes:
        return tokens[tokens < 256].astype(np.uint8).tobytes()


class HuggingFace:
    """A tokenizer.json. Bytes that are not UTF-8 become U+FFFD."""

    def __init__(self, path: Path) -> None:
        tokenizers = needed("tokenizers", by="--tokenizer")
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            data = file.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except OSError as error:
            raise SettingsError(
                f"The tokenizer {str(file)!r} cannot be read: {error.strerror}. Point --tokenizer to a "
                "tokenizer.json."
            ) from error
        except Exception as error:  # tokenizers raises plain Exceptions
            raise SettingsError(f"{str(file)!r} is not a tokenizer.json: {error}") from error
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1
        self.bos = _special(file, "bos_token", _BOS_NAMES, ids)
        self.eos = _special(file, "eos_token", _EOS_NAMES, ids)
        if self.bos is None and self.eos is None:
            raise SettingsError(
                f"The tokenizer {str(file)!r} has no token for the beginning or the end of a document. Put a "
                'tokenizer_config.json beside it, with "bos_token" or "eos_token".'
            )
        special = f"{self.bos} {self.eos} ".encode()
        self.fingerprint = hashlib.sha256(special + data).hexdigest()

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        strings = [text.decode("utf-8", errors="replace") for text in texts]
        encoded = self._tokenizer.encode_batch_fast(strings, add_special_tokens=False)
        return [np.array(document.ids, np.uint32) for document in encoded]

    def decode(self, tokens: np.ndarray) -> bytes:
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True).encode()


def load_tokenizer(path: Path | None) -> Tokenizer:
    """Return the tokenizer of a file or folder, or (None) the tokenizer of bytes.

    Raises:
        SettingsError: it cannot be read, or has no special token that separates documents.
    """
    return Bytes() if path is None else HuggingFace(path)


def _special(file: Path, name: str, usual: Sequence[str], ids: dict[str, int]) -> int | None:
    """The id of a special token: as the tokenizer's configuration names it, else by its usual names."""
    configuration = file.with_name("tokenizer_config.json")
    given = _settings_of(configuration).get(name)
    if isinstance(given, dict):
        given = given.get("content")
    if given is not None and given not in ids:
        raise SettingsError(f"{str(configuration)!r} names the {name} {given!r}, which the tokenizer lacks.")
    names = usual if given is None else (given,)
    return next((ids[name] for name in names if name in ids), None)


def _settings_of(configuration: Path) -> dict[str, Any]:
    try:
        settings = json.loads(configuration.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SettingsError(f"The configuration {str(configuration)!r} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise SettingsError(f"The configuration {str(configuration)!r} is not a JSON object.")
    return settings
