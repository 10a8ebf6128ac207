"""Train a method on your images: a preset, a TOML file and flags, each laid over the one before.

A first run: situs pretrain --preset samples-mp3 --out runs/mp3

On many GPUs: torchrun --nproc-per-node 8 -m situs pretrain and the same flags.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from situs.cli.arguments import Recipe, configured
from situs.methods import METHODS
from situs.train.contract import Result
from situs.train.run import Hooks, RunConfig, train_run

SHORT = {
    "data": ("data.path",),
    "epochs": ("train.epochs",),
    "steps": ("train.max_steps",),
    "batch": ("data.batch",),
    "seed": ("train.seed", "data.seed"),
    "parallel": ("train.parallel",),
}
"""Everyday flags, each for fields of the run's config."""


@dataclass(frozen=True, kw_only=True)
class Training(Recipe):
    """What every training verb takes."""

    out: Annotated[Path | None, Parameter(metavar="DIR")] = None
    """A new folder for the run."""

    resume: Annotated[Path | None, Parameter(metavar="DIR")] = None
    """A run to go on with, after a crash, a Ctrl-C or a full disk; --epochs or --steps makes it longer."""

    start_over: bool = False
    """With --resume, where no checkpoint is whole: begin again, the rest set aside."""

    key: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The key of a locked folder that the training starts from."""

    withheld: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The owner's second file, where parts of that folder were withheld."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """cpu, cuda or cuda:N; by default a GPU where there is one."""


@dataclass(frozen=True, kw_only=True)
class Args(Training):
    """Pretrain a backbone."""

    config: RunConfig = configured(RunConfig, run_flag="resume", short=SHORT)


def run(args: Args) -> int:
    """Trains; exit status 130 where it was interrupted (and can be resumed)."""
    from situs.evaluate.hooks import probe_hooks

    return train(args, args.config, probe_hooks)


def train(args: Training, config: RunConfig, hooks: Hooks) -> int:
    """Runs the training and says how it ended."""
    from situs.cli.model_args import unlock_of
    from situs.models.initialise import starting

    locked = None if config.init is None else unlock_of(config.init, args.key, args.withheld)
    result = train_run(
        config,
        out=args.out,
        resume=args.resume,
        device=args.device,
        start_over=args.start_over,
        hooks=hooks,
        start=starting(locked),
        say=_say,
    )
    if result.interrupted:
        return 130
    if os.environ.get("RANK", "0") == "0":
        for line in ending(config, result, args.out or args.resume):
            _say(line)
    return 0


def ending(config: RunConfig, result: Result, run: Path | None) -> list[str]:
    """What was reached and what can be done with it."""
    told = {name: value for name, value in result.metrics.items() if name != "gradient_norm"}
    facts = "".join(f", {name.replace('_', ' ')} {value:.4g}" for name, value in told.items())
    follow = f"situs finetune --from {run} --data PATH --out DIR"
    if "label" in METHODS[config.method_name].needs_targets:
        follow = f"situs evaluate accuracy {run}"
    return [
        f"done: {result.step} steps{facts}; the run is in {run}",
        f"next: {follow}, or situs export {run} --out DIR",
    ]


def _say(line: str) -> None:
    try:
        print(line, flush=True)
    except BrokenPipeError:
        raise
    except OSError:  # the terminal is gone, and the run is saved or goes on
        pass
