"""What a step of split training computes, sends and holds, with rows and columns permuted and without.

For example: situs split cost --model vit_tiny_patch16_224 --batch 2 --out look

Both sides are in one process, and images are random; nothing is timed (python benchmarks/split.py does that).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from situs.cli.parser.arguments import configured
from situs.cli.parser.model_args import check_folder
from situs.cli.result import present
from situs.split.cost import CostConfig


@dataclass(frozen=True, kw_only=True)
class Args:
    """What permutations cost."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """cpu, cuda or cuda:N; by default a GPU where there is one."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = None
    """Where the numbers (.json) and the page (.html) go."""

    config: CostConfig = configured(CostConfig)
    """Whose step it is."""


def run(args: Args) -> None:
    """Measures and prints."""
    from situs.split.cost import split_cost

    check_folder(args.out, "split-cost")
    present(split_cost(args.config, device=args.device), args.out)
