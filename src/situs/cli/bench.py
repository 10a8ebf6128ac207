"""What a training step costs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from cyclopts import Parameter

from situs.bench.cases import StepConfig
from situs.cli.model_args import OUT, check_folder
from situs.cli.parser.arguments import configured
from situs.cli.parser.flags import POSITIONAL
from situs.cli.result import present
from situs.errors import SitusError
from situs.results import Result


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What a training step costs, for every case × model × batch: the real step of a run on images of noise.

    A case is METHOD or METHOD:FIELD=VALUE,… with fields of the method, or of the flags below for this case alone;
    METHOD may be backbone, the model without any head.

    For example: situs bench supervised mp3:mask_ratio=.3 mp3:mask_ratio=.75,batch=16 --models vit_tiny_patch16_224
    --batches 8,32 --out before
    """

    topics: ClassVar[dict[str, tuple[str, ...]]] = {
        "model": ("img_size", "patch_size", "in_chans", "num_classes", "drop_path", "model_args"),
        "step": ("compile", "graph", "accumulate", "clip", "ema"),
    }

    cases: Annotated[tuple[str, ...], POSITIONAL, Parameter(metavar="CASE…")] = (
        "supervised",
        "mp3",
        "droppos:affinity=visible",
        "mae",
    )
    """METHOD or METHOD:FIELD=VALUE,… (METHOD:RATIO for mask_ratio); backbone: the model alone."""

    compare: Annotated[tuple[Path, ...], Parameter(metavar="BEFORE,AFTER")] = ()
    """Measure nothing: two tables of this verb side by side (step.json), what became faster or slower."""

    at_once: bool = False
    """Compile every case in a process of its own, all at the same time; one at a time is timed."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """cpu, cuda or cuda:N; by default a GPU where there is one."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = OUT
    """For the numbers (.json), kept as they come, and the page (.html); none: not written."""

    profile: bool = False
    """Show the kernels of a step on a GPU, by kind and by name."""

    config: StepConfig = configured(StepConfig)
    """What is measured."""

    def run(self) -> int:
        """1 where a case failed."""
        if self.compare:
            return self._compare()
        from situs.bench import bench_step

        check_folder(self.out, "step")
        found = bench_step(
            self.cases,
            self.config,
            device=self.device,
            at_once=self.at_once,
            profile=self.profile,
            progress=lambda table, line: keep(table, line, self.out),
        )
        present(found, self.out)
        return int(bool(found.failed))

    def _compare(self) -> int:
        from situs.bench import compare_steps

        if len(self.compare) != 2:
            raise SitusError(field="compare", value=",".join(map(str, self.compare)), allowed="two files, BEFORE,AFTER")
        check_folder(self.out, "comparison")
        present(compare_steps(*self.compare), self.out)
        return 0


def keep(found: Result | None, line: str, out: Path | None) -> None:
    """Says how a case went, and writes what there is so far."""
    from situs.pages import write_numbers

    print(line, file=sys.stderr, flush=True)
    if out is not None and found is not None:
        write_numbers(found, out)
