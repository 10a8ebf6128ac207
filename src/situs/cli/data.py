"""Verbs about sets of images, before a run reads them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from situs.cli.model_args import OUT, check_folder
from situs.cli.parser.flags import POSITIONAL
from situs.cli.result import present
from situs.data.check import FAILING, KINDS
from situs.data.pack.shards import PackConfig
from situs.errors import unknown_name
from situs.progress import task

FOUND = 3
"""Exit status where something was found that must not be there; that of an audit's gate."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Looks at every image before a run does: broken, grey, CMYK, deep, huge, odd and repeated ones, wrong checksums,
    and masks and objects that cannot be used.

    Exits with 0, or with 3 where something was found that --fail-on names.

    For example: situs data check samples --fail-on broken,leak
    """

    data: Annotated[str, POSITIONAL, Parameter(metavar="PATH")]
    """Any set of images, with masks or COCO's json too; in a packed one the checksums are held to its manifest."""

    split: tuple[str, ...] = ()
    """Only these splits, comma-separated; by default all that there are."""

    multi_label: bool = False
    """Any number of classes an image, from a table beside the images or from parquet."""

    target: Literal["class", "mask", "objects"] | None = None
    """What is known of an image: its class, a mask beside it, or objects in COCO's json; by default what lies there."""

    first: Annotated[int | None, Parameter(metavar="NUMBER")] = None
    """mask: number of the first class in the mask files; by default 0, and 1 where ADE20K's list lies beside them."""

    void: Annotated[tuple[int, ...] | None, Parameter(metavar="NUMBER,…")] = None
    """mask: numbers that mean no class; by default 255, and 0 where ADE20K's list lies beside the masks."""

    fail_on: Annotated[tuple[str, ...], Parameter(metavar="KINDS")] = FAILING
    """Comma-separated: what makes the exit status 3. "none": nothing does."""

    decode: bool = True
    """Decode every image; --no-decode reads headers and bytes alone."""

    huge_mpx: float = 25.0
    """Millions of pixels above which an image is huge."""

    workers: int | None = None
    """Processes; by default one a core, 0 for none."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = OUT
    """For check.json and check.html, with the names of all that was found; none: not written."""

    def run(self) -> int:
        """Looks, prints the table, and says by its status whether something was found that must not be there."""
        from situs.data.check import check
        from situs.data.masks import usual_masks

        kinds = () if self.fail_on == ("none",) else self.fail_on
        for kind in kinds:
            if kind not in KINDS:
                raise unknown_name("kind of issue", kind, KINDS, field="fail_on")
        check_folder(self.out, "check")
        with task() as told:
            found = check(
                self.data,
                splits=self.split or None,
                multi_label=self.multi_label,
                target=self.target,
                masks=usual_masks(self.data, self.first, self.void),
                decode_pixels=self.decode,
                huge_mpx=self.huge_mpx,
                workers=self.workers,
                progress=told.count,
            )
        present(found, self.out)
        return FOUND if found.failing(kinds) else 0


@dataclass(frozen=True, kw_only=True)
class Pack(PackConfig):
    """Packs a set of images into shards ahead of a run: shrunk to a short side of 256, parquet or WebDataset,
    checksummed.

    Any set that the other verbs read. A packing that was stopped goes on when the command is given again, and gives the
    same bytes. Broken images are left out and listed in manifest.json, which is written last.

    For example: situs data pack samples --short-side 28 --out packed
    """

    data: Annotated[str, POSITIONAL, Parameter(metavar="PATH")]
    """Image folder, folder of parquet or tar files, CIFAR batches, "samples"."""

    out: Annotated[Path, Parameter(metavar="FOLDER")]
    """An empty folder, or one that a packing was begun in."""

    split: tuple[str, ...] = ()
    """Only these splits, comma-separated; by default all that there are."""

    workers: int | None = None
    """Processes; by default one a core, 0 for none."""

    start_over: bool = False
    """Take away what an earlier packing left there."""

    def run(self) -> None:
        """Packs, and prints what was packed and what was left out."""
        from situs.data.pack import pack

        config = PackConfig(**{each.name: getattr(self, each.name) for each in fields(PackConfig)})
        with task() as told:
            packed = pack(
                self.data,
                self.out,
                config,
                splits=self.split or None,
                workers=self.workers,
                start_over=self.start_over,
                progress=told.count,
            )
        present(packed, None)
        print(self.out)
