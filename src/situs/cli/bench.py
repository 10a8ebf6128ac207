"""Time and memory of a training step."""

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
    """Measure time and memory of a training step on random images, for every combination of case, model and batch size.

    A case is the name of a training method, such as mp3, or "backbone" (the model without a head). To change settings
    of the method (such as mask_ratio) or of the step (such as batch), write METHOD:FIELD=VALUE,… instead. These
    settings override the flags: a case with batch=16 ignores --batches.

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
    """Cases: METHOD, METHOD:FIELD=VALUE,… or METHOD:RATIO. RATIO sets mask_ratio."""

    compare: Annotated[tuple[Path, ...], Parameter(metavar="BEFORE,AFTER")] = ()
    """Instead of measuring, compare two earlier results (step.json files). The output shows which cases became faster
    or slower."""

    at_once: bool = False
    """Compile all cases at the same time, each in its own process. The cases are still timed one by one."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """cpu, cuda, cuda:N or mps. Default: cuda if available, otherwise cpu."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = OUT
    """Folder for the results (JSON and HTML), which are saved after each case. With --out none, no files are
    written."""

    profile: bool = False
    """List the GPU kernels of a step, by kind and by name."""

    config: StepConfig = configured(StepConfig)
    """What is measured."""

    def run(self) -> int:
        """The exit status is 1 if a case failed."""
        if self.compare:
            return self._compare()
        from situs.bench import bench_step

        check_folder(self.out, "step")
        table = bench_step(
            self.cases,
            self.config,
            device=self.device,
            at_once=self.at_once,
            profile=self.profile,
            progress=lambda part, line: _save_part(part, line, self.out),
        )
        present(table, self.out)
        return int(bool(table.failed))

    def _compare(self) -> int:
        from situs.bench import compare_steps

        if len(self.compare) != 2:
            raise SitusError(field="compare", value=",".join(map(str, self.compare)), allowed="two files, BEFORE,AFTER")
        check_folder(self.out, "comparison")
        present(compare_steps(*self.compare), self.out)
        return 0


def _save_part(table: Result, line: str, out: Path | None) -> None:
    """Prints the line of a case, and writes the table so far."""
    from situs.pages import write_numbers

    print(line, file=sys.stderr, flush=True)
    if out is not None:
        write_numbers(table, out)
