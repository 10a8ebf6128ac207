"""How well a pretrained run knows where its patches were: DropPos's grid of γ × γ_pos, MP3's accuracy over η.

For example: situs evaluate position runs/droppos --out look
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from cyclopts import Parameter

from situs.cli.model_args import ImageArgs, open_from
from situs.cli.result import present

_Ratios = Annotated[tuple[float, ...], Parameter(metavar="SHARE,…")]


@dataclass(frozen=True, kw_only=True)
class Args(ImageArgs):
    """Position accuracy of a run with a position head."""

    mask_ratios: _Ratios = (0.0, 0.25, 0.5, 0.75)
    """DropPos: γ, shares of the patches that are not seen."""

    position_mask_ratios: _Ratios = (0.25, 0.5, 0.75, 0.95)
    """DropPos: γ_pos, shares of the seen patches whose place is dropped."""

    ratios: _Ratios = (0.0, 0.25, 0.5, 0.75, 0.9)
    """MP3: η, shares of the patches that are no keys."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward."""


def run(args: Args) -> None:
    """Measures, prints the table and writes the page."""
    from situs.evaluate.position import position_curve, position_grid, position_method
    from situs.methods.droppos import DropPos
    from situs.models.data import load_set, made_with

    model = open_from(args)
    method = position_method(model.method, model.name)
    loader = load_set(model, args.data, split=args.split, batch=args.batch, count=args.count, shared=True)
    draws = {"seed": args.seed, "precision": args.precision}
    if isinstance(method, DropPos):
        found = position_grid(method, loader, args.mask_ratios, args.position_mask_ratios, **draws)
    else:
        found = position_curve(method, loader, args.ratios, **draws)
    present(replace(found, provenance=made_with(model, loader, args.seed, args.precision)), args.out)
