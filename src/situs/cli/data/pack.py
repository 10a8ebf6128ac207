"""Packs a set of images into shards ahead of a run: shrunk to a short side of 256, parquet or WebDataset, checksummed.

Any set that the other verbs read. A packing that was stopped goes on when the command is given again, and gives the
same bytes. Broken images are left out and listed in manifest.json, which is written last.

For example: situs data pack samples --short-side 28 --out packed
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from situs.cli.parser.flags import POSITIONAL
from situs.cli.result import present
from situs.data.pack.shards import PackConfig
from situs.progress import task


@dataclass(frozen=True, kw_only=True)
class Args(PackConfig):
    """Which set, and where its shards go."""

    data: Annotated[str, POSITIONAL, Parameter(metavar="PATH")]
    """Image folder, folder of parquet or tar files, CIFAR batches, "samples"."""

    out: Annotated[Path, Parameter(metavar="DIR")]
    """An empty folder, or one that a packing was begun in."""

    split: tuple[str, ...] = ()
    """Only these splits, apart by commas; by default all that there are."""

    workers: int | None = None
    """Processes; by default one a core, 0 for none."""

    start_over: bool = False
    """Take away what an earlier packing left there."""


def run(args: Args) -> None:
    """Packs, and prints what was packed and what was left out."""
    from situs.data.pack import pack

    config = PackConfig(**{each.name: getattr(args, each.name) for each in fields(PackConfig)})
    with task() as told:
        packed = pack(
            args.data,
            args.out,
            config,
            splits=args.split or None,
            workers=args.workers,
            start_over=args.start_over,
            progress=told.count,
        )
    present(packed, None)
    print(args.out)
