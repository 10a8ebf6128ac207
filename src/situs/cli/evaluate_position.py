"""How well a pretrained run knows where its patches were: DropPos's grid of γ × γ_pos, MP3's accuracy over η.

For example: situs evaluate position runs/droppos --out look
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from situs.cli.model_args import ImageArgs, open_from
from situs.cli.result import print_cells, tell_left_out, write_result

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
    from situs.evaluate import position_page as pages
    from situs.evaluate.position import position_accuracy_over, position_grid, position_method
    from situs.methods.droppos import DropPos
    from situs.models.data import load_set, made_with

    model = open_from(args)
    method = position_method(model.method, model.name)
    loader = load_set(model, args.data, args.split, args.batch, model.device, count=args.count, shared=True)
    title = loader.source.name
    if isinstance(method, DropPos):
        shares = args.mask_ratios, args.position_mask_ratios
        grid = position_grid(method, loader, *shares, seed=args.seed, precision=args.precision)
        facts = made_with(model, loader, args.seed, args.precision)
        page, pictures = pages.grid_page(grid, method, model.name, facts)
        print_cells(f"{title}, {grid.count:,} images", *pages.grid_table(grid))
        print(pages.grid_finding(grid))
        numbers = {**asdict(grid), "mean": grid.mean}
    else:
        found = position_accuracy_over(method, loader, args.ratios, seed=args.seed, precision=args.precision)
        count = loader.plan.n
        facts = made_with(model, loader, args.seed, args.precision)
        page, pictures = pages.curve_page(found, count, method, model.name, facts)
        print_cells(f"{title}, {count:,} images", *pages.curve_table(found))
        print(pages.curve_finding(found, method))
        numbers = {"count": count, "accuracy": [{"ratio": key, "accuracy": value} for key, value in found.items()]}
    numbers = {**facts, "places": method.backbone.num_tokens, **numbers}
    tell_left_out(loader)
    print(write_result(args.out, "position", numbers, page, pictures, of=[model]))
