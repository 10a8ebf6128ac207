"""What the vectors that stand for a model's places hold: pictures, spectrum, and what a linear map reads off them.

Several models stand side by side on one page. A timm name carries its weights behind "=" or takes those of --weights:
situs analyze positions runs/mjp vit_small_patch14_dinov2=dino.safetensors

For example: situs analyze positions runs/ft --out look
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from situs.cli.parser.flags import POSITIONAL
from situs.cli.parser.model_args import LookArgs
from situs.cli.result import open_each, present


@dataclass(frozen=True, kw_only=True)
class Args(LookArgs):
    """Position vectors of one or several models."""

    model: Annotated[tuple[str, ...], POSITIONAL, Parameter(metavar="MODEL …")]  # pyright: ignore[reportIncompatibleVariableOverride]
    """Runs, exports and other folders, timm names; a name's weights may follow it: NAME=FILE, NAME=pretrained."""

    folds: int = 5
    """Folds of the cross-validated regression."""

    seed: int = 0
    """Seed of the folds, of UMAP and of random weights."""


def run(args: Args) -> None:
    """Looks at every model's table and rotation, prints a line for each, and writes the page."""
    from situs.measure.position.vectors import analyze_positions

    present(analyze_positions(open_each(args.model, args), folds=args.folds, seed=args.seed), args.out)
