"""Top-1 and balanced accuracy of a classifier on a split (or mean average precision), and which classes it knows.

For example: situs evaluate accuracy runs/ft --out look
"""

from __future__ import annotations

from dataclasses import dataclass

from situs.cli.result import SentenceArgs, measuring


@dataclass(frozen=True, kw_only=True)
class Args(SentenceArgs):
    """Accuracy of a classifier."""


run = measuring("situs.measure.accuracy.evaluate_accuracy")
