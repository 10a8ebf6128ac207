"""What a training step costs, for every case × model × batch: the real step of a run on images of noise.

A case is METHOD or METHOD:FIELD=VALUE,… with fields of the method, or of the flags below for this case alone; METHOD
may be backbone, the model without any head.

For example: situs bench step supervised mp3:mask_ratio=.3 mp3:mask_ratio=.75,batch=16 --models vit_tiny_patch16_224
--batches 8,32 --out before
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from situs.bench.cases import StepConfig
from situs.cli.parser.arguments import configured
from situs.cli.parser.flags import POSITIONAL
from situs.cli.parser.model_args import check_folder
from situs.cli.result import present
from situs.results import Result


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """How the steps are gone through."""

    at_once: bool = False
    """Compile every case in a process of its own, all at the same time; one at a time is timed."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """cpu, cuda or cuda:N; by default a GPU where there is one."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = None
    """Where the numbers (.json) and the page (.html) go; the numbers are kept as they come."""


@dataclass(frozen=True, kw_only=True)
class Args(Measuring):
    """What a training step costs."""

    cases: Annotated[tuple[str, ...], POSITIONAL, Parameter(metavar="CASE…")] = (
        "supervised",
        "mp3",
        "droppos:affinity=visible",
        "mae",
    )
    """METHOD or METHOD:FIELD=VALUE,… (METHOD:RATIO for mask_ratio); backbone: the model alone."""

    profile: bool = False
    """Show the kernels of a step on a GPU, by kind and by name."""

    config: StepConfig = configured(StepConfig)
    """What is measured."""


def run(args: Args) -> int:
    """Measures, prints the table and writes the page; 1 where a case failed."""
    from situs.bench import bench_step

    check_folder(args.out, "step")
    found = bench_step(
        args.cases,
        args.config,
        device=args.device,
        at_once=args.at_once,
        profile=args.profile,
        progress=lambda table, line: keep(table, line, args.out),
    )
    present(found, args.out)
    return int(bool(found.failed))


def keep(found: Result | None, line: str, out: Path | None) -> None:
    """Says how a case went, and writes what there is so far."""
    from situs.pages import write_numbers

    print(line, file=sys.stderr, flush=True)
    if out is not None and found is not None:
        write_numbers(found, out)
