"""Top-1, top-5 and loss of a classifier on a whole split, and which classes it knows.

For example: situs evaluate accuracy runs/ft --out look
"""

from __future__ import annotations

from dataclasses import dataclass

from situs.cli.model_args import open_from
from situs.cli.result import MeasureArgs, asked, present


@dataclass(frozen=True, kw_only=True)
class Args(MeasureArgs):
    """Accuracy of a classifier."""


def run(args: Args) -> None:
    """Evaluates, prints one line of numbers and writes the page."""
    from situs.evaluate.accuracy import evaluate_accuracy

    present(evaluate_accuracy(open_from(args), **asked(args)), args.out)
