"""Top-1, top-5 and loss of a classifier on a whole split (or mean average precision), and which classes it knows.

For example: situs evaluate accuracy runs/ft --out look
"""

from __future__ import annotations

from dataclasses import dataclass

from situs.cli.result import SentenceArgs, measuring


@dataclass(frozen=True, kw_only=True)
class Args(SentenceArgs):
    """Accuracy of a classifier."""


run = measuring("situs.evaluate.accuracy.evaluate_accuracy")
