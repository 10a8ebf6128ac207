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
from situs.data.pack import PackConfig
from situs.errors import unknown_name
from situs.progress import task

FAILED = 3
"""Exit status if --fail-on names a finding; the same as that of an audit's gate."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Check every image before a run. Findings: broken, grey, CMYK, 16-bit, huge, odd and duplicate images, wrong
    checksums, and unusable masks and objects.

    The exit status is 3 if a finding is of a kind in --fail-on; otherwise it is 0.

    For example: situs data check samples --fail-on broken,leak
    """

    data: Annotated[str, POSITIONAL, Parameter(metavar="PATH")]
    """A data set of images, also with masks or COCO's json. If the data set was packed, its checksums are compared
    too."""

    split: tuple[str, ...] = ()
    """Only these splits, comma-separated. Default: all."""

    multi_label: bool = False
    """Images may have several classes, listed in a table beside the images or in parquet."""

    target: Literal["class", "mask", "objects"] | None = None
    """Labels of an image: its class, a mask, or objects in COCO's json. Default: the labels that the data has."""

    first: Annotated[int | None, Parameter(metavar="NUMBER")] = None
    """With --target mask: pixel value of the first class in the mask files. Default: 0; with ADE20K's class list, 1."""

    void: Annotated[tuple[int, ...] | None, Parameter(metavar="NUMBER,…")] = None
    """With --target mask: pixel values without a class. Default: 255; with ADE20K's class list, also 0."""

    fail_on: Annotated[tuple[str, ...], Parameter(metavar="KINDS")] = FAILING
    """Kinds of findings, comma-separated, that set the exit status to 3. none: the status stays 0."""

    decode: bool = True
    """Decode every image. --no-decode reads only headers and bytes."""

    huge_mpx: float = 25.0
    """Report an image with more than this many million pixels as huge."""

    workers: int | None = None
    """Number of worker processes; 0 uses the main process. Default: one per core."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = OUT
    """Output folder for check.json and check.html, which list every finding; none writes nothing."""

    def run(self) -> int:
        """Prints the findings; the exit status says whether --fail-on names one of them."""
        from situs.data.check import check
        from situs.data.modalities.mask import usual_masks

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
    """Pack a data set into parquet or WebDataset shards with checksums. Images are resized to a short side of 256.

    The verb takes the same data as training. After an interruption, repeat the command: it continues, and the result
    is the same to the byte. Broken images are skipped and listed in manifest.json. This file is written last.

    For example: situs data pack samples --short-side 28 --out packed
    """

    data: Annotated[str, POSITIONAL, Parameter(metavar="PATH")]
    """The data set: an image folder, a folder of parquet or tar files, CIFAR batches, or "samples"."""

    out: Annotated[Path, Parameter(metavar="FOLDER")]
    """Output folder: empty, or with an unfinished packing that then continues."""

    split: tuple[str, ...] = ()
    """Only these splits, comma-separated. Default: all."""

    workers: int | None = None
    """Number of worker processes; 0 uses the main process. Default: one per core."""

    start_over: bool = False
    """Delete the files of an unfinished packing, and start over."""

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
