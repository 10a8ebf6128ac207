"""Top-1, top-5 and loss of a classifier on a whole split, and which classes it knows.

For example: situs evaluate accuracy runs/ft --out look
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from situs.cli.model_args import ImageArgs, open_from
from situs.cli.result import present


@dataclass(frozen=True, kw_only=True)
class Args(ImageArgs):
    """Accuracy of a classifier."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward."""


def run(args: Args) -> None:
    """Evaluates, prints one line of numbers and writes the page."""
    from situs.evaluate.accuracy import evaluate_classes
    from situs.models.data import check_classes, check_labels, load_set, made_with

    model = open_from(args)
    loader = load_set(model, args.data, args.split, args.batch, model.device, count=args.count, shared=True)
    check_classes(model, loader)
    found = evaluate_classes(model.backbone, loader, check_labels(loader), precision=args.precision)
    present(replace(found, provenance=made_with(model, loader, args.seed, args.precision)), args.out)
