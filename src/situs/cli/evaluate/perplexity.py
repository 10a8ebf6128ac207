"""Perplexity of a causal language model on a text: how unsure it is of the next word.

For example (runs/lm: a language model fine-tuned on text, or its folder; texts.txt: a text of yours):
situs evaluate perplexity runs/lm --data texts.txt --out look
"""

from __future__ import annotations

from dataclasses import dataclass

from situs.cli.result import WordArgs, measuring


@dataclass(frozen=True, kw_only=True)
class Args(WordArgs):
    """Perplexity of a language model."""


run = measuring("situs.evaluate.perplexity.evaluate_perplexity")
