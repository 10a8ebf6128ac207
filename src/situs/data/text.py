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
    """Folder whose tokenizer.json turns sentences into ids; by default the model's own."""

    column: str | None = None
    """Column of the sentences; by default the only one that holds words."""

    pair: str | None = None
    """Column of the second sentence, where a classifier reads two: MRPC's sentence2, MNLI's hypothesis."""

    label: str | None = None
    """Column of the labels; by default label, labels, fine_label, cls or class, where there is one."""

    longest: Count | None = None
    """Most ids of a sentence, special ones included: a longer one is cut at its end, of a pair the longer sentence. For
    a language model the length of a block. By default 128, or fewer where the model takes fewer."""

    unlabelled: bool = False
    """Read the sentences alone, without labels, from tables and from plain text (one a line) alike; a long one becomes
    several of `longest` ids. Set by methods that learn from the order of words."""

    def check(self) -> None:
        if self.pair is not None and self.pair in (self.column, self.label):
            allowed = "another column than that of the first sentence and that of the labels"
            raise SitusError(field="pair", value=self.pair, allowed=allowed)


@dataclass(frozen=True, kw_only=True)
class Columns(Checked):
    """Columns of a set that is evaluated, where they differ from those that the model remembers."""

    column: str | None = None
    """Column of the sentences; by default what the model was trained on, or the only one that holds words."""

    pair: str = ""
    """Column of the second sentence, by default what the model was trained on; none: single sentences."""

    label: str | None = None
    """Column of the labels; by default what the model was trained on, or label, labels, fine_label, cls or class."""

    def over(self, text: TextConfig) -> TextConfig:
        """`text` with these columns in place of its own."""
        columns = {name: column for name in COLUMNS if (column := getattr(self, name))}
        return replace(text, **columns | ({"pair": None} if self.pair == "none" else {}))


TEXT = TextConfig()
