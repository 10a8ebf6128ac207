"""Perplexity of a causal language model on a text: how unsure it is of the next word.

For example: situs evaluate perplexity runs/lm --data wikitext.txt --out look
"""

from __future__ import annotations

from dataclasses import dataclass

from situs.cli.result import MeasureArgs, measuring


@dataclass(frozen=True, kw_only=True)
class Args(MeasureArgs):
    """Perplexity of a language model."""


run = measuring("situs.evaluate.perplexity.evaluate_perplexity")
