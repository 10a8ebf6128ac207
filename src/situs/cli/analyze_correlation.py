"""How alike the features of two places are, in one image and in two: whether a model's features keep their position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from situs.cli.model_args import ImageArgs


@dataclass(frozen=True, kw_only=True)
class Args(ImageArgs):
    """Correlation between places."""

    count: Annotated[int | None, Parameter(metavar="IMAGES")] = 64
    """So many of the images, chosen at random and the same every time."""

    batch: int = 16
    """Images at a time."""

    depth: str = "norm"
    """The maps to draw: of "embedding", a block's number, or "norm", the model's end."""


def run(args: Args) -> None:
    """Runs the images through the model, prints the means of every depth, and writes the page."""
    from situs.analyze.correlation import Correlations, correlate
    from situs.cli.model_args import open_from
    from situs.cli.result import present
    from situs.errors import unknown_name
    from situs.models.data import load_set, made_with

    model = open_from(args)
    loader = load_set(model, args.data, split=args.split, batch=args.batch, count=args.count)
    found = correlate(model.backbone, loader, positions=model.positions)
    if args.depth not in found:
        raise unknown_name("depth", args.depth, found)
    told = None if model.positions else {"positions": "left out, as in its training"}
    present(Correlations(found, args.depth, provenance=made_with(model, loader, args.seed, more=told)), args.out)
