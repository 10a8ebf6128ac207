"""Several fine-tuned runs as one classifier: each alone, their averaged answer, and how alike they answer.

For example: situs evaluate ensemble runs/mp3-ft runs/mae-ft --out look
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from situs.cli.evaluate_accuracy import Evaluation
from situs.errors import SitusError


@dataclass(frozen=True, kw_only=True)
class Args(Evaluation):
    """Accuracy of several classifiers together."""

    sources: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN RUN …")]
    """Two or more fine-tuned runs, or their exports."""

    average: Literal["softmax", "logits"] = "softmax"
    """What is averaged: the probabilities, or what stands before the softmax."""

    count: Annotated[int | None, tyro.conf.arg(metavar="IMAGES")] = None
    """So many of the images, chosen at random and the same every time; all where nothing is said."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("look")
    """Where the numbers (.json), the page (.html) and the figures (.png) go."""


def run(args: Args) -> None:
    """Evaluates all in one pass, prints a row for each and one for all, and writes the page."""
    from situs import __version__
    from situs.cli.result import print_cells, write_result
    from situs.evaluate.ensemble import evaluate_ensemble
    from situs.evaluate.ensemble_page import finding, make_page, table
    from situs.evaluate.subject import check_classes, load_set, open_subject
    from situs.train.distributed import start

    if len(args.sources) < 2 or len(set(args.sources)) < len(args.sources):
        raise SitusError("an ensemble needs at least two runs, each named once")
    device = start(args.device).device
    subjects, loaders = {}, {}
    for source in args.sources:
        subject = open_subject(source, ema=None if args.ema else False, device=device)
        name = subject.name if subject.name not in subjects else source
        subjects[name] = subject
        # All on the first one's data, each with its own preparation: their own might be different sets.
        path = args.data if args.data is not None or not loaders else subjects[next(iter(subjects))].data.path
        loaders[name] = load_set(subject, path, args.split, args.batch, device, count=args.count, shared=True)
        check_classes(subject, loaders[name])
    models = {name: subject.backbone for name, subject in subjects.items()}
    found = evaluate_ensemble(models, loaders, average=args.average, precision=args.precision)
    data = next(iter(loaders.values())).source.name
    facts = {"data": data, "precision": args.precision, "average": args.average, "situs": __version__}
    print_cells(f"{data}, {found.together.count:,} images", *table(found, args.average))
    print(finding(found))
    told = {name: f"{s.facts['method'] or 'unknown method'} on {s.facts['model']}" for name, s in subjects.items()}
    page, pictures = make_page(found, args.average, {**told, **facts})
    members = {name: {**subjects[name].facts, **asdict(score)} for name, score in found.alone.items()}
    numbers = {**facts, **asdict(found), "alone": members}
    print(write_result(args.out, "ensemble", numbers, page, pictures))
