"""Top-1, top-5 and loss of a classifier on a whole split, and which classes it knows.

For example: situs evaluate accuracy runs/ft --out look
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from situs.cli.model_args import ImageArgs, open_from
from situs.cli.result import print_cells, tell_left_out, write_result


@dataclass(frozen=True, kw_only=True)
class Args(ImageArgs):
    """Accuracy of a classifier."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward."""


def run(args: Args) -> None:
    """Evaluates, prints one line of numbers and writes the page."""
    from situs.evaluate.accuracy import ClassTally, evaluate_accuracy
    from situs.evaluate.accuracy_page import by_class, finding, make_page, table
    from situs.models.data import check_classes, check_labels, load_set, made_with

    model = open_from(args)
    loader = load_set(model, args.data, args.split, args.batch, model.device, count=args.count, shared=True)
    check_classes(model, loader)
    classes = check_labels(loader)
    tally = ClassTally(len(classes))
    found = evaluate_accuracy(model.backbone, loader, classes=len(classes), precision=args.precision, tally=tally)
    answers = tally.answers()
    facts = made_with(model, loader, args.seed, args.precision)
    page, pictures = make_page(model.name, found, answers, classes, facts)
    print_cells(f"{loader.source.name}, {found.count:,} images", *table(model.name, found))
    print(finding(model.name, found, len(classes)))
    tell_left_out(loader)
    numbers = {**facts, **asdict(found), "classes": by_class(answers, classes)}
    print(write_result(args.out, "accuracy", numbers, page, pictures, of=[model]))
