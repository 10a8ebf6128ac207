"""What shuffled patches do to a classifier: top-1, Diff.Norm and consistency over γ, mask told and not told.

For example: situs evaluate consistency runs/mjp --ratios 0,.15,.5 --out look
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from cyclopts import Parameter

from situs.cli.model_args import ImageArgs, open_from
from situs.cli.result import present


@dataclass(frozen=True, kw_only=True)
class Args(ImageArgs):
    """Consistency under shuffled patches."""

    ratios: Annotated[tuple[float, ...], Parameter(metavar="γ,γ,…")] = (0.0, 0.03, 0.09, 0.15, 0.27, 0.5, 0.75, 0.9)
    """Shares of the patches to shuffle."""

    grid: Annotated[tuple[int, int] | None, Parameter(metavar="ROWS,COLUMNS")] = None
    """For a network without tokens (ResNet): the patches to shuffle; else the run's, 14 × 14 or 8 × 8."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward."""


def run(args: Args) -> None:
    """Measures, prints the table and writes the page."""
    from situs.evaluate.consistency import measure_consistency, shuffled
    from situs.models.data import examples, load_set, made_with, top1_reason
    from situs.models.model import check_classifier

    model = open_from(args)
    check_classifier(model)
    shuffled(model.trained, positions=model.positions, grid=args.grid, size=model.data.size)  # refuses a wrong --grid
    loader = load_set(model, args.data, split=args.split, batch=args.batch, count=args.count, shared=True)
    found = measure_consistency(
        model.trained,
        loader,
        args.ratios,
        seed=args.seed,
        precision=args.precision,
        positions=model.positions,
        no_top1=top1_reason(model, loader),
        classes=None if loader.classes is None else len(loader.classes),
        grid=args.grid,
    )
    made = made_with(model, loader, args.seed, args.precision)
    present(replace(found, example=examples(loader, 1)[0], provenance=made), args.out)
