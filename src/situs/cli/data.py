"""Verbs that check and pack a data set before a run."""

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

FAILED = 3
"""Exit status if --fail-on names a finding; the same as that of an audit's gate."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Check every image before a run: broken, grey, CMYK, 16-bit, huge, odd and duplicate images, wrong checksums, and
    unusable masks and objects.

    The exit status is 3 if there are findings that --fail-on names, else 0.

    For example: situs data check samples --fail-on broken,leak
    """

    data: Annotated[str, POSITIONAL, Parameter(metavar="PATH")]
    """Any data set of images, also with masks or COCO's json. The checksums of a packed set are compared too."""

    split: tuple[str, ...] = ()
    """Only these splits, comma-separated. Default: all."""

    multi_label: bool = False
    """Images may have several classes, listed in a table beside the images or in parquet."""

    target: Literal["class", "mask", "objects"] | None = None
    """Labels of an image: its class, a mask, or objects in COCO's json. Default: what the data has."""

    first: Annotated[int | None, Parameter(metavar="NUMBER")] = None
    """With --target mask: number of the first class in the mask files. Default: 0; with ADE20K's class list, 1."""

    void: Annotated[tuple[int, ...] | None, Parameter(metavar="NUMBER,…")] = None
    """With --target mask: numbers that mean no class. Default: 255; with ADE20K's class list, also 0."""

    fail_on: Annotated[tuple[str, ...], Parameter(metavar="KINDS")] = FAILING
    """Comma-separated kinds of findings that make the exit status 3; none: no finding does."""

    decode: bool = True
    """Decode every image; --no-decode reads only headers and bytes."""

    huge_mpx: float = 25.0
    """An image with more than this many million pixels is huge."""

    workers: int | None = None
    """Worker processes; 0: none. Default: one per core."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = OUT
    """Folder for check.json and check.html, which name every finding; none: write nothing."""

    def run(self) -> int:
        """Prints the findings; the exit status says whether --fail-on names one of them."""
        from situs.data.check import check
        from situs.data.masks import usual_masks

        kinds = () if self.fail_on == ("none",) else self.fail_on
        for kind in kinds:
            if kind not in KINDS:
                raise unknown_name("kind of issue", kind, KINDS, field="fail_on")
        check_folder(self.out, "check")
        with task() as progress:
            findings = check(
                self.data,
                splits=self.split or None,
                multi_label=self.multi_label,
                target=self.target,
                masks=usual_masks(self.data, self.first, self.void),
                decode_pixels=self.decode,
                huge_mpx=self.huge_mpx,
                workers=self.workers,
                progress=progress.count,
            )
        present(findings, self.out)
        return FAILED if findings.failing(kinds) else 0


@dataclass(frozen=True, kw_only=True)
class Pack(PackConfig):
    """Pack a data set into parquet or WebDataset shards with checksums, its images resized to a short side of 256.

    Takes any data that the other verbs read. If it was stopped, the same command continues and gives the same bytes.
    Broken images are skipped and listed in manifest.json, which is written last.

    For example: situs data pack samples --short-side 28 --out packed
    """

    data: Annotated[str, POSITIONAL, Parameter(metavar="PATH")]
    """Image folder, folder of parquet or tar files, CIFAR batches, "samples"."""

    out: Annotated[Path, Parameter(metavar="FOLDER")]
    """An empty folder, or one with an unfinished packing."""

    split: tuple[str, ...] = ()
    """Only these splits, comma-separated. Default: all."""

    workers: int | None = None
    """Worker processes; 0: none. Default: one per core."""

    start_over: bool = False
    """Delete what an earlier packing left there."""

    def run(self) -> None:
        """Packs, and prints what was packed and what was skipped."""
        from situs.data.pack import pack

        config = PackConfig(**{field.name: getattr(self, field.name) for field in fields(PackConfig)})
        with task() as progress:
            packed = pack(
                self.data,
                self.out,
                config,
                splits=self.split or None,
                workers=self.workers,
                start_over=self.start_over,
                progress=progress.count,
            )
        present(packed, None)
        print(self.out)
