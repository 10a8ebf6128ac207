"""Several fine-tuned runs as one classifier: each alone, their averaged answer, and how alike they answer.

For example: situs evaluate ensemble runs/mp3-ft runs/mae-ft --out look
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from situs.cli.flags import POSITIONAL
from situs.cli.model_args import OpenArgs, open_one_of
from situs.errors import SitusError


@dataclass(frozen=True, kw_only=True)
class Args(OpenArgs):
    """Accuracy of several classifiers together."""

    sources: Annotated[tuple[str, ...], POSITIONAL, Parameter(metavar="MODEL MODEL …")]
    """Two or more classifiers: fine-tuned runs, exports, or any other model."""

    average: Literal["softmax", "logits"] = "softmax"
    """What is averaged: the probabilities, or what stands before the softmax."""

    count: Annotated[int | None, Parameter(metavar="IMAGES")] = None
    """So many of the images, chosen at random and the same every time; all where nothing is said."""

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """The images; by default those the first run was trained on."""

    split: str | None = None
    """train, val or test; val and test stand in for each other. By default val, or all of data that is not split."""

    held_out: Annotated[float | None, Parameter(metavar="SHARE")] = None
    """Share of data without val and test that is held out as both; by default what the first run held out."""

    batch: int = 256
    """Images at a time."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward."""

    out: Annotated[Path, Parameter(metavar="FOLDER")] = Path("look")
    """Where the numbers (.json), the page (.html) and the figures (.png) go."""


def run(args: Args) -> None:
    """Evaluates all in one pass, prints a row for each and one for all, and writes the page."""
    from situs import __version__
    from situs.cli.model_args import check_folder
    from situs.cli.result import present
    from situs.evaluate.ensemble import evaluate_ensemble
    from situs.models.data import check_classes, load_set
    from situs.results import Provenance

    if len(args.sources) < 2 or len(set(args.sources)) < len(args.sources):
        raise SitusError("an ensemble needs at least two runs, each named once")
    check_folder(args.out)
    models, loaders = {}, {}
    for source in args.sources:
        model = open_one_of(source, args)
        name = model.name if model.name not in models else source
        # All on the first one's data, each with its own preparation: their own might be different sets.
        first = next(iter(models.values()), model).data
        model = model.holding_out(first.held_out if args.held_out is None else args.held_out)
        models[name] = model
        path = args.data if args.data is not None or not loaders else first.path or None
        loaders[name] = load_set(model, path, split=args.split, batch=args.batch, count=args.count, shared=True)
        check_classes(model, loaders[name])
    backbones = {name: model.backbone for name, model in models.items()}
    found = evaluate_ensemble(backbones, loaders, average=args.average, precision=args.precision)
    data = next(iter(loaders.values())).source.name
    facts = {"data": data, "precision": args.precision, "average": args.average, "situs": __version__}
    made = (Provenance({}, (model.origin,), loaders[name].source.left_out()) for name, model in models.items())
    members = {name: model.facts for name, model in models.items()}
    present(replace(found, members=members, provenance=Provenance.joint(made, facts)), args.out)
