"""How the cost of a step grows with batch, image size, depth and number of patches, beside the line of operations.

Each point is its own shape, which the compiler would take a minute for: so the step is recorded as a CUDA graph but not
compiled, unless --compile (with --at-once) asks for it.

For example: situs bench cost mp3 --model vit_tiny_patch16_224 --out look
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from situs.bench.cost import CostConfig
from situs.cli.bench.step import Measuring, keep
from situs.cli.parser.arguments import configured
from situs.cli.parser.flags import POSITIONAL
from situs.cli.parser.model_args import check_folder
from situs.cli.result import present


@dataclass(frozen=True, kw_only=True)
class Args(Measuring):
    """How the cost of a step grows."""

    case: Annotated[str, POSITIONAL, Parameter(metavar="CASE")] = "supervised"
    """METHOD or METHOD:FIELD=VALUE,…"""

    config: CostConfig = configured(CostConfig)
    """The reference and the axes."""


def run(args: Args) -> int:
    """Measures every point, prints them and writes the page; 1 where a point failed."""
    from situs.bench import bench_cost

    check_folder(args.out, "cost")
    found = bench_cost(
        args.case,
        args.config,
        device=args.device,
        at_once=args.at_once,
        progress=lambda curves, line: keep(curves, line, args.out),
    )
    present(found, args.out)
    return int(bool(found.table.failed))
