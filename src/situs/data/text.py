"""The config of a set of text: which columns hold the sentences, and how they become ids."""

from __future__ import annotations

from dataclasses import dataclass, replace

from situs.config import Checked
from situs.errors import SitusError
from situs.limits import Count

LONGEST = 128
"""Default for the most ids of a sample, where the model takes as many."""

COLUMNS = ("column", "pair", "label")
"""Fields of `TextConfig` that name columns; a model remembers them."""


@dataclass(frozen=True, kw_only=True)
class TextConfig(Checked):
    """The column with the sentences, and how sentences become token ids."""

    tokeniser: str | None = None
    """Folder with tokenizer.json. Default: the model's tokeniser."""

    column: str | None = None
    """Column with the sentences. Default: the only text column."""

    pair: str | None = None
    """Column with the second sentence, for a classifier of sentence pairs (MRPC: sentence2, MNLI: hypothesis)."""

    label: str | None = None
    """Column with the labels. Default: label, labels, fine_label, cls or class."""

    longest: Count | None = None
    """Largest number of tokens per sentence, including special tokens. Longer sentences are cut at the end. In a pair,
    the longer sentence is cut. For plain text, this is the length of a block. Default: 128, or the model's largest
    length if that is smaller."""

    unlabelled: bool = False
    """Read only sentences, without labels, from tables or plain text (one sentence per line). Long sentences are
    divided into pieces of text.longest tokens. Methods that learn from sentences without labels set this field."""

    def check(self) -> None:
        if self.pair is not None and self.pair in (self.column, self.label):
            allowed = "neither the column of the first sentence nor the column of the labels"
            raise SitusError(field="pair", value=self.pair, allowed=allowed)


@dataclass(frozen=True, kw_only=True)
class Columns(Checked):
    """Columns of the evaluation data, if they differ from those of the training data."""

    column: str | None = None
    """Column with the sentences. Default: the column used in training, or the only text column."""

    pair: str = ""
    """Column with the second sentence. Use "none" for single sentences. Default: as in training."""

    label: str | None = None
    """Column with the labels. Default: the column used in training, or label, labels, fine_label, cls or class."""

    def over(self, text: TextConfig) -> TextConfig:
        """`text` with these columns in place of its own."""
        columns = {name: column for name in COLUMNS if (column := getattr(self, name))}
        return replace(text, **columns | ({"pair": None} if self.pair == "none" else {}))
