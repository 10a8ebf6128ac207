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
    """Check every image of a data set before training. The check finds broken, grey, CMYK, 16-bit, very large, oddly
    shaped and duplicate images, and images of other splits that are also in the training split (leak). The check also
    finds wrong checksums, and annotations (masks or boxes) that training cannot use.

    If the check finds an issue of a kind listed in --fail-on, the exit status is 3. Otherwise, the exit status is 0.

    For example: situs data check samples --fail-on broken,leak
    """

    data: Annotated[str, POSITIONAL, Parameter(metavar="PATH")]
    """Data set of images, with or without masks or a COCO annotation file. For a packed data set, the checksums are
    also verified."""

    split: tuple[str, ...] = ()
    """Use only these splits, comma-separated. Default: all."""

    multi_label: bool = False
    """Allow several classes per image. The classes come from a table next to the images or, for a data set of parquet
    files, from these files."""

    target: Literal["class", "mask", "objects"] | None = None
    """Kind of labels: class, mask, or objects (a COCO annotation file). Default: the kind that the data has."""

    first: Annotated[int | None, Parameter(metavar="NUMBER")] = None
    """With --target mask: pixel value of the first class in the mask files. Default: 0, or 1 for data with the ADE20K
    class list."""

    void: Annotated[tuple[int, ...] | None, Parameter(metavar="NUMBER,…")] = None
    """With --target mask: pixel values that belong to no class and are ignored. Default: 255. For data with the ADE20K
    class list, the default is 0."""

    fail_on: Annotated[tuple[str, ...], Parameter(metavar="KINDS")] = FAILING
    """Kinds of issues that set the exit status to 3, comma-separated. With --fail-on none, the status is always 0."""

    decode: bool = True
    """Decode every image. With --no-decode, the check reads the headers and bytes of the files, but decodes no
    pixels."""

    huge_mpx: float = 25.0
    """Report images with more than this many million pixels as "huge"."""

    workers: int | None = None
    """Number of worker processes. With 0, the main process does all the work. Default: one worker per core."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = OUT
    """Folder for check.json and check.html, which list every issue. With --out none, no files are written."""

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
    """Pack a data set into parquet or WebDataset shards with checksums. By default, images are shrunk to a short side
    of at most 256 pixels.

    The input can be any image data set that training can read. If packing is interrupted, repeat the same command to
    continue. The result is byte for byte the same as without an interruption. Broken images are skipped. The file
    manifest.json is written last, and lists the skipped images.

    For example: situs data pack samples --short-side 28 --out packed
    """

    data: Annotated[str, POSITIONAL, Parameter(metavar="PATH")]
    """The data set: an image folder, a folder of parquet or tar files, CIFAR batches, or "samples" (the images that
    come with Situs)."""

    out: Annotated[Path, Parameter(metavar="FOLDER")]
    """Output folder: a new or empty folder. To continue an interrupted packing, give its folder."""

    split: tuple[str, ...] = ()
    """Use only these splits, comma-separated. Default: all."""

    workers: int | None = None
    """Number of worker processes. With 0, the main process does all the work. Default: one worker per core."""

    start_over: bool = False
    """Delete what an earlier packing wrote to the --out folder, and start again."""

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
