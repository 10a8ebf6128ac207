"""situs pretrain: train a method without labels (or with them) from a preset, a TOML file and flags."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from situs.cli.arguments import Recipe, configured
from situs.train.run import Hooks, RunConfig, train_run


@dataclass(frozen=True, kw_only=True)
class Training(Recipe):
    """What every training verb takes; the short flags say what the longer ones below say too."""

    data: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """The images: folder, parquet files, WebDataset tars, CIFAR batches, or "samples" for the embedded set."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """A new folder for the run."""

    resume: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """A run to go on with, after a crash, a Ctrl-C or a full disk; other flags may extend it (--epochs)."""

    epochs: int | None = None
    """Passes over the data (--train.epochs)."""

    steps: int | None = None
    """Stop after so many updates (--train.max-steps)."""

    batch: int | None = None
    """Images a step over all ranks (--data.batch)."""

    seed: int | None = None
    """Of order, augmentation, draws and initial weights (--train.seed, --data.seed)."""

    parallel: Literal["ddp", "fsdp"] | None = None
    """ddp or fsdp, under torchrun (--train.parallel)."""

    device: str | None = None
    """cpu, cuda or cuda:N; a GPU where there is one."""


@dataclass(frozen=True, kw_only=True)
class Args(Training):
    """Pretrain a backbone."""

    config: RunConfig = configured(RunConfig, run_flag="resume")


def run(args: Args) -> int:
    """Trains; exit status 130 where it was interrupted (and can be resumed)."""
    from situs.evaluate.hooks import probe_hooks

    return train(args, shortened(args, args.config), probe_hooks)


def shortened(args: Training, config: RunConfig) -> RunConfig:
    """The config with what the short flags say."""
    train, data = config.train, config.data
    if args.epochs is not None:
        train = replace(train, epochs=args.epochs)
    if args.steps is not None:
        train = replace(train, max_steps=args.steps)
    if args.parallel is not None:
        train = replace(train, parallel=args.parallel)
    if args.seed is not None:
        train, data = replace(train, seed=args.seed), replace(data, seed=args.seed)
    if args.batch is not None:
        data = replace(data, batch=args.batch)
    if args.data is not None:
        data = replace(data, path=args.data)
    return replace(config, train=train, data=data)


def train(args: Training, config: RunConfig, hooks: Hooks) -> int:
    """Runs the training and says how it ended."""
    result = train_run(config, out=args.out, resume=args.resume, device=args.device, hooks=hooks, say=_say)
    if result.interrupted:
        return 130
    _say(f"done: {result.step} steps in {args.out or args.resume}")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)
