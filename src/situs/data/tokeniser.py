"""The tokenizer.json of a model's folder, read by the library that wrote it; nothing is fetched."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from situs.errors import SitusError, first_line, missing_extra
from situs.files import missing_reason
from situs.hub import local_folder

FILE = "tokenizer.json"
FILES = (
    FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""What belongs to a tokeniser in a model's folder."""

_AT_ONCE = 4096  # texts
_UNSEALED: dict[Path, dict[str, bytes]] = {}


def keep_unsealed_tokeniser(folder: Path, opened: Path) -> None:
    """Keeps the tokeniser of a sealed folder, read from its decrypted copy `opened`, in the memory of this process."""
    names = [name for name in (*FILES, "config.json") if (opened / name).is_file() and not (folder / name).is_file()]
    _UNSEALED[folder.resolve()] = {name: (opened / name).read_bytes() for name in names}


def _unsealed(folder: Path) -> dict[str, bytes]:
    """The files kept of a sealed folder; empty where the folder itself has a tokeniser by now."""
    return {} if (folder / FILE).is_file() else _UNSEALED.get(folder.resolve(), {})


@contextmanager
def tokeniser_files(folder: Path) -> Iterator[Path]:
    """A folder with the files of a tokeniser: itself, or for a sealed one a temporary copy."""
    unsealed = _unsealed(folder)
    if not unsealed:
        yield folder
        return
    with tempfile.TemporaryDirectory() as place:
        for name, content in unsealed.items():
            (Path(place) / name).write_bytes(content)
        yield Path(place)


class Ids(NamedTuple):
    """Several sequences, compact. flat: all ids, of 16 or 32 bits, [total]; for pairs [2, total], the ids and which of
    the two sentences each belongs to. ends: [n] int64, where each sequence ends. cut: how many were cut."""

    flat: np.ndarray
    ends: np.ndarray
    cut: int

    def __getitem__(self, index: int) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.flat[..., self.ends[index - 1] if index else 0 : self.ends[index]]

    def length(self, index: int) -> int:
        """The length of sequence `index`."""
        return int(self.ends[index] - (self.ends[index - 1] if index else 0))


class Tokeniser:
    """A model's own tokeniser. words: size of its vocabulary. pad, end: ids of padding and of the end of a text."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = local_folder(folder)
        self._unsealed = _unsealed(self.folder)
        file = self.folder / FILE
        if FILE not in self._unsealed and not file.is_file():
            raise SitusError(
                f"{self.folder}: {missing_reason(self.folder, FILE)}, so sentences cannot be tokenised",
                field="text.tokeniser",
            )
        try:
            import tokenizers
        except ImportError as error:
            raise missing_extra("tokenizers", "hf", "reading text") from error
        try:
            self._coder = tokenizers.Tokenizer.from_buffer(self._unsealed.get(FILE) or file.read_bytes())
        except Exception as error:  # the library raises Exception itself
            raise SitusError(f"{file}: cannot be read: {first_line(error)}", field="text.tokeniser") from error
        self._coder.no_padding()  # a folder may keep its author's
        self.words = 1 + max(self._coder.get_vocab(with_added_tokens=True).values(), default=-1)
        pad, self.end = self._special("pad"), self._special("eos")
        self.pad = pad if pad is not None else self.end if self.end is not None else 0

    def encode(
        self, texts: Sequence[str] | Sequence[tuple[str, str]], longest: int | None = None, *, special: bool = True
    ) -> Ids:
        """The ids of each text or pair of texts, at most `longest`. special: with the special tokens at begin and
        end."""
        pairs = bool(texts) and not isinstance(texts[0], str)
        if longest is None:
            self._coder.no_truncation()
        else:
            added = self._coder.num_special_tokens_to_add(is_pair=pairs) if special else 0
            if longest <= added:
                allowed = f"more than the {added} special ids that the tokeniser adds"
                raise SitusError(field="text.longest", value=longest, allowed=allowed)
            self._coder.enable_truncation(longest)
        parts, lengths, cut = [], [], 0
        for start in range(0, len(texts), _AT_ONCE):
            for coded in self._coder.encode_batch(list(texts[start : start + _AT_ONCE]), add_special_tokens=special):
                parts.append(np.array([coded.ids, coded.type_ids] if pairs else coded.ids, self.dtype))
                lengths.append(len(coded.ids))
                cut += bool(coded.overflowing)
        flat = np.concatenate(parts, axis=-1) if parts else np.empty(0, self.dtype)
        return Ids(flat, np.cumsum(lengths, dtype=np.int64), cut)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        return self._coder.decode(list(ids))

    def pieces(self, texts: Sequence[str], longest: int) -> list[list[str]]:
        """Each text in consecutive pieces of at most `longest` ids, special ones included."""
        self._coder.no_truncation()
        most, pieces = longest - self._coder.num_special_tokens_to_add(is_pair=False), []
        if most < 1:
            raise SitusError(field="text.longest", value=longest, allowed="more than the ids that the tokeniser adds")
        for start in range(0, len(texts), _AT_ONCE):
            pieces += self._cut(texts[start : start + _AT_ONCE], most, most)
        return pieces

    def _cut(self, texts: Sequence[str], most: int, size: int) -> list[list[str]]:
        """Each text of more than `most` ids in pieces of `size`. A piece that begins within a word may have more ids by
        itself; then it is cut again."""
        pieces = []
        for text, coded in zip(texts, self._coder.encode_batch(list(texts), add_special_tokens=False), strict=True):
            spans = coded.offsets  # (begin, end) of each id in the text
            if len(spans) <= most:
                pieces.append([text])
                continue
            starts = [spans[first][0] for first in range(0, len(spans), size)]
            ends = [spans[min(first + size, len(spans)) - 1][1] for first in range(0, len(spans), size)]
            bounds = [*starts[1:], len(text)]  # a letter of several ids goes to the next piece
            ends = map(min, ends, bounds)
            parts = [text[start:end] for start, end in zip(starts, ends, strict=True) if start < end]
            shorter = self._cut(parts, most, max(1, most // 2)) if len(parts) > 1 else [parts]
            pieces.append([piece for part in shorter for piece in part])
        return pieces

    @property
    def dtype(self) -> type[np.signedinteger[Any]]:
        """The smallest integers that hold every id."""
        return np.int16 if self.words <= 1 << 15 else np.int32

    def _special(self, name: str) -> int | None:
        """The id of a special token, as the files of the folder name it."""
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            token = self._read(file).get(f"{name}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and (number := self._coder.token_to_id(token)) is not None:
                return number
        number = self._read("config.json").get(f"{name}_token_id")
        return number if isinstance(number, int) and 0 <= number < self.words else None

    def _read(self, name: str) -> dict[str, Any]:
        file = self.folder / name
        try:
            text = self._unsealed.get(name) or (file.read_bytes() if file.is_file() else b"{}")
            entries = json.loads(text.decode("utf-8"))
        except ValueError as error:
            raise SitusError(f"{file}: cannot be read: {str(error)[:80]}", field="text.tokeniser") from error
        return entries if isinstance(entries, dict) else {}
