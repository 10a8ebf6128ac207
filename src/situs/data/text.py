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
    """Which column holds the sentences, and how they become ids."""

    tokeniser: str | None = None
    """Folder with the tokenizer.json. Default: the model's."""

    column: str | None = None
    """Column of the sentences. Default: the only text column."""

    pair: str | None = None
    """Column of the second sentence, for a classifier of pairs: MRPC's sentence2, MNLI's hypothesis."""

    label: str | None = None
    """Column of the labels. Default: label, labels, fine_label, cls or class."""

    longest: Count | None = None
    """Largest number of tokens per sentence, special tokens included; longer ones are cut at the end (of a pair,
    the longer sentence). For plain text: the length of a block. Default: 128, or the model's largest length if that
    is smaller."""

    unlabelled: bool = False
    """Read only sentences, without labels, from tables or plain text (one per line); long ones are divided into
    pieces of `longest` tokens. Set by methods that need it."""

    def check(self) -> None:
        if self.pair is not None and self.pair in (self.column, self.label):
            allowed = "another column than that of the first sentence and that of the labels"
            raise SitusError(field="pair", value=self.pair, allowed=allowed)


@dataclass(frozen=True, kw_only=True)
class Columns(Checked):
    """Columns of evaluation data, if they differ from those the model was trained on."""

    column: str | None = None
    """Column of the sentences. Default: the column the model was trained on, or the only text column."""

    pair: str = ""
    """Column of the second sentence; none: single sentences. Default: as in training."""

    label: str | None = None
    """Column of the labels. Default: that of training, or label, labels, fine_label, cls or class."""

    def over(self, text: TextConfig) -> TextConfig:
        """`text` with these columns in place of its own."""
        columns = {name: column for name in COLUMNS if (column := getattr(self, name))}
        return replace(text, **columns | ({"pair": None} if self.pair == "none" else {}))


TEXT = TextConfig()
