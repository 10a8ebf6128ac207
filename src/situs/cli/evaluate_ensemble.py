"""Several fine-tuned runs as one classifier: each alone, and their averaged answer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
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


def run(args: Args) -> None:
    """Evaluates all in one pass and prints a row for each and one for all."""
    from situs.cli.scores import print_scores, write_scores
    from situs.evaluate.ensemble import evaluate_ensemble
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
        loaders[name] = load_set(subject, path, args.split, args.batch, device)
        check_classes(subject, loaders[name])
    models = {name: subject.backbone for name, subject in subjects.items()}
    found = evaluate_ensemble(models, loaders, average=args.average, precision=args.precision)
    data = next(iter(loaders.values())).source.name
    print_scores(data, {**found.alone, f"together ({args.average})": found.together})
    if args.out is not None:
        members = {name: {**subjects[name].facts, **asdict(score)} for name, score in found.alone.items()}
        facts = {"data": data, "precision": args.precision, "average": args.average}
        write_scores(args.out, {**facts, "alone": members, "together": asdict(found.together)})
