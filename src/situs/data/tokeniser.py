"""The tokenizer.json of a model's folder, read by the library that wrote it; nothing is fetched."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from situs.errors import SitusError, missing_extra
from situs.files import missing_reason

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

_AT_ONCE = 4096
_HELD: dict[Path, dict[str, bytes]] = {}


def hold_tokeniser(folder: Path, opened: Path) -> None:
    """Keeps the tokeniser of a sealed folder, as it stands in `opened`, in the memory of this process."""
    names = [name for name in (*FILES, "config.json") if (opened / name).is_file() and not (folder / name).is_file()]
    _HELD[folder.resolve()] = {name: (opened / name).read_bytes() for name in names}


def _held(folder: Path) -> dict[str, bytes]:
    """What is held of a sealed folder; nothing where a tokeniser lies there by now."""
    return {} if (folder / FILE).is_file() else _HELD.get(folder.resolve(), {})


@contextmanager
def tokeniser_files(folder: Path) -> Iterator[Path]:
    """A folder with the files of a tokeniser: the very one, or for this while one of what is held of a sealed one."""
    held = _held(folder)
    if not held:
        yield folder
        return
    with tempfile.TemporaryDirectory() as place:
        for name, content in held.items():
            (Path(place) / name).write_bytes(content)
        yield Path(place)


class Ids(NamedTuple):
    """Several sequences, compact. flat: all ids, of 16 or 32 bits, [total]; of pairs [2, total], the ids and which of
    its two sentences each stands in. ends: [n] int64, where each ends. cut: how many were cut."""

    flat: np.ndarray
    ends: np.ndarray
    cut: int

    def __getitem__(self, index: int) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.flat[..., self.ends[index - 1] if index else 0 : self.ends[index]]

    def length(self, index: int) -> int:
        """Of sequence `index`."""
        return int(self.ends[index] - (self.ends[index - 1] if index else 0))


class Tokeniser:
    """A model's own tokeniser. words: how many ids there are. pad: what fills a batch up. end: what ends a text."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(str(folder).removeprefix("hf:")).expanduser()
        self._held = _held(self.folder)
        file = self.folder / FILE
        if FILE not in self._held and not file.is_file():
            raise SitusError(
                f"{self.folder}: {missing_reason(self.folder, FILE)}, so sentences cannot be tokenised",
                field="text.tokeniser",
            )
        try:
            import tokenizers
        except ImportError as error:
            raise missing_extra("tokenizers", "hf", "reading text") from error
        try:
            self._coder = tokenizers.Tokenizer.from_buffer(self._held.get(FILE) or file.read_bytes())
        except Exception as error:  # the library raises Exception itself
            reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
            raise SitusError(f"{file}: cannot be read: {reason}", field="text.tokeniser") from error
        self._coder.no_padding()  # a folder may keep its author's
        self.words = 1 + max(self._coder.get_vocab(with_added_tokens=True).values(), default=-1)
        pad, self.end = self._special("pad"), self._special("eos")
        self.pad = next((each for each in (pad, self.end) if each is not None), 0)

    def encode(
        self, texts: Sequence[str] | Sequence[tuple[str, str]], longest: int | None = None, *, special: bool = True
    ) -> Ids:
        """The ids of each text or pair of texts, at most `longest`. special: with those that the model's inputs begin
        and end with."""
        pairs = bool(texts) and not isinstance(texts[0], str)
        if longest is None:
            self._coder.no_truncation()
        else:
            own = self._coder.num_special_tokens_to_add(is_pair=pairs) if special else 0
            if longest <= own:
                allowed = f"more than the {own} ids that the tokeniser adds itself"
                raise SitusError(field="text.longest", value=longest, allowed=allowed)
            self._coder.enable_truncation(longest)
        parts, lengths, cut = [], [], 0
        for start in range(0, len(texts), _AT_ONCE):
            for each in self._coder.encode_batch(list(texts[start : start + _AT_ONCE]), add_special_tokens=special):
                parts.append(np.array([each.ids, each.type_ids] if pairs else each.ids, self.dtype))
                lengths.append(len(each.ids))
                cut += bool(each.overflowing)
        flat = np.concatenate(parts, axis=-1) if parts else np.empty(0, self.dtype)
        return Ids(flat, np.cumsum(lengths, dtype=np.int64), cut)

    def pieces(self, texts: Sequence[str], longest: int) -> list[list[str]]:
        """Each text in pieces, one behind another, that with what the model's inputs begin and end with have at most
        `longest` ids."""
        self._coder.no_truncation()
        most, found = longest - self._coder.num_special_tokens_to_add(is_pair=False), []
        if most < 1:
            raise SitusError(field="text.longest", value=longest, allowed="more than the ids that the tokeniser adds")
        for start in range(0, len(texts), _AT_ONCE):
            found += self._cut(texts[start : start + _AT_ONCE], most, most)
        return found

    def _cut(self, texts: Sequence[str], most: int, size: int) -> list[list[str]]:
        """Each text that has more than `most` ids in pieces of `size`; a piece that has more when it is read alone, for
        it begins within a word, is cut again."""
        found = []
        for text, coded in zip(texts, self._coder.encode_batch(list(texts), add_special_tokens=False), strict=True):
            at = coded.offsets
            if len(at) <= most:
                found.append([text])
                continue
            starts = [at[first][0] for first in range(0, len(at), size)]
            ends = [at[min(first + size, len(at)) - 1][1] for first in range(0, len(at), size)]
            afters = [*starts[1:], len(text)]  # where a letter is several ids, it goes to the next piece
            spans = zip(starts, map(min, ends, afters), strict=True)
            parts = [text[start:end] for start, end in spans if start < end]
            again = self._cut(parts, most, max(1, most // 2)) if len(parts) > 1 else [parts]
            found.append([each for own in again for each in own])
        return found

    @property
    def dtype(self) -> type[np.signedinteger[Any]]:
        """The smallest integers that hold every id."""
        return np.int16 if self.words <= 1 << 15 else np.int32

    def _special(self, name: str) -> int | None:
        """The id of a special token, as the files beside it name it."""
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            token = self._read(file).get(f"{name}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and (found := self._coder.token_to_id(token)) is not None:
                return found
        found = self._read("config.json").get(f"{name}_token_id")
        return found if isinstance(found, int) and 0 <= found < self.words else None

    def _read(self, name: str) -> dict[str, Any]:
        file = self.folder / name
        try:
            text = self._held.get(name) or (file.read_bytes() if file.is_file() else b"{}")
            told = json.loads(text.decode("utf-8"))
        except ValueError as error:
            raise SitusError(f"{file}: cannot be read: {str(error)[:80]}", field="text.tokeniser") from error
        return told if isinstance(told, dict) else {}
