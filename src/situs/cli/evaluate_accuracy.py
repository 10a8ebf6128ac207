"""Top-1, top-5 and loss of a fine-tuned run (or its export) on a whole split."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What every evaluation of classifiers takes."""

    data: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """The images; by default those a run was trained on."""

    split: str = "val"
    """train, val or test; val and test stand in for each other where one is missing."""

    ema: bool = True
    """The mean of the weights where there is one, or the weights themselves."""

    batch: int = 256
    """Images at a time."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward."""

    device: str | None = None
    """cpu, cuda or cuda:N; a GPU where there is one."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the numbers as JSON too."""


@dataclass(frozen=True, kw_only=True)
class Args(Evaluation):
    """Accuracy of a classifier."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A fine-tuned run, or its export."""


def run(args: Args) -> None:
    """Evaluates and prints one line of numbers."""
    from situs.cli.scores import print_scores, write_scores
    from situs.evaluate.accuracy import evaluate_accuracy
    from situs.evaluate.subject import check_classes, load_set, open_subject
    from situs.train.distributed import start

    device = start(args.device).device
    subject = open_subject(args.source, ema=None if args.ema else False, device=device)
    loader = load_set(subject, args.data, args.split, args.batch, device, shared=True)
    check_classes(subject, loader)
    count = None if loader.classes is None else len(loader.classes)
    found = evaluate_accuracy(subject.backbone, loader, classes=count, precision=args.precision)
    print_scores(loader.source.name, {subject.name: found})
    if (skipped := loader.source.skip_report()) is not None:
        print(skipped)
    if args.out is not None:
        facts = {**subject.facts, "data": loader.source.name, "precision": args.precision}
        write_scores(args.out, {**facts, **asdict(found)})
