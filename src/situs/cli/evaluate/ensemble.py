"""Several fine-tuned runs as one classifier: each alone, their averaged answer, and how alike they answer.

For example: situs evaluate ensemble runs/ft exported --out look
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from situs.cli.parser.flags import POSITIONAL
from situs.cli.result import MeasureArgs, asked, open_each, present

SEVERAL = Parameter(metavar="MODEL MODEL …")


@dataclass(frozen=True, kw_only=True)
class Args(MeasureArgs):
    """Accuracy of several classifiers together."""

    model: Annotated[tuple[str, ...], POSITIONAL, SEVERAL]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Two or more classifiers: fine-tuned runs, exports, or any other model."""

    average: Literal["softmax", "logits"] = "softmax"
    """What is averaged: the probabilities or the logits."""


def run(args: Args) -> None:
    """Evaluates all in one pass, prints a row for each and one for all, and writes the page."""
    from situs.measure.ensemble import evaluate_ensemble

    present(evaluate_ensemble(open_each(args.model, args), **asked(args, held_out=args.held_out)), args.out)
