"""Perplexity of a causal language model on a text: how unsure it is of the next word.

For example (runs/lm: a language model fine-tuned on text, or its folder; texts.txt: a text of yours):
situs evaluate perplexity runs/lm --data texts.txt --out look
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from situs.cli.result import WordArgs, measuring


@dataclass(frozen=True, kw_only=True)
class Args(WordArgs):
    """Perplexity of a language model."""

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """The text, plain or a table of sentences; by default what a run was trained on."""

    count: Annotated[int | None, Parameter(metavar="BLOCKS")] = None
    """At most this many blocks of the text, chosen at random and the same every time; by default all."""

    batch: int = 256
    """Blocks at a time."""


run = measuring("situs.measure.perplexity.evaluate_perplexity")
