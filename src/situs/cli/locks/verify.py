"""Measures, on a model itself, which permutations of its tokens and channels it obeys, and what breaks the others.

Row: the order of the tokens (private split learning). Column: the order of the channels (locked models). Each is run
forward, backward and through optimiser steps, in float64 and in the model's own dtype. A part that is refused is a
finding, not an error.

For example: situs verify vit_tiny_patch16_224 --out look
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from situs.cli.parser.model_args import ModelArgs, check_folder, open_from
from situs.cli.result import present


@dataclass(frozen=True, kw_only=True)
class Args(ModelArgs):
    """Which permutations a model obeys."""

    steps: int = 3
    """Steps of AdamW after which the two trainings are compared; 0 for none."""

    tokens: int = 32
    """How many patch tokens take part at most, where the model allows a subset."""

    seed: int = 0
    """Of the weights (where none are given), the inputs and the keys."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = None
    """Write verify.html and verify.json there."""


def run(args: Args) -> None:
    """Opens the model, verifies it and prints what was found."""
    from situs.locks import verify

    check_folder(args.out)
    found = verify(open_from(args, any_weights=True), steps=args.steps, tokens=args.tokens, seed=args.seed)
    present(found, args.out)
