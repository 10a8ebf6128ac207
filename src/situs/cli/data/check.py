"""Looks at every image before a run does: broken, grey, CMYK, deep, huge, odd and repeated ones, wrong checksums, and
masks and objects that cannot be used.

Exits with 0, or with 3 where something was found that --fail-on names.

For example: situs data check samples --fail-on broken,leak --out look
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from situs.cli.parser.flags import POSITIONAL
from situs.cli.parser.model_args import check_folder
from situs.cli.result import present
from situs.data.check import FAILING, KINDS
from situs.errors import unknown_name
from situs.progress import task

FOUND = 3
"""Exit status where something was found that must not be there; that of an audit's gate."""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Which set, and what must not be in it."""

    data: Annotated[str, POSITIONAL, Parameter(metavar="PATH")]
    """Any set of images, with masks or COCO's json too; in a packed one the checksums are held to its manifest."""

    split: tuple[str, ...] = ()
    """Only these splits, apart by commas; by default all that there are."""

    multi_label: bool = False
    """Any number of classes an image, from a table beside the images or from parquet."""

    target: Literal["class", "mask", "objects"] | None = None
    """What is known of an image: its class, a mask beside it, or objects in COCO's json; by default what lies there."""

    first: Annotated[int | None, Parameter(metavar="NUMBER")] = None
    """mask: number of the first class in the mask files; by default 0, and 1 where ADE20K's list lies beside them."""

    void: Annotated[tuple[int, ...] | None, Parameter(metavar="NUMBER,…")] = None
    """mask: numbers that mean no class; by default 255, and 0 where ADE20K's list lies beside the masks."""

    fail_on: Annotated[tuple[str, ...], Parameter(metavar="KINDS")] = FAILING
    """Apart by commas: what makes the exit status 3. "none": nothing does."""

    decode: bool = True
    """Decode every image; --no-decode reads headers and bytes alone."""

    huge_mpx: float = 25.0
    """Millions of pixels above which an image is huge."""

    workers: int | None = None
    """Processes; by default one a core, 0 for none."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = None
    """Write check.html and check.json there, with the names of all that was found."""


def run(args: Args) -> int:
    """Looks, prints the table, and says by its status whether something was found that must not be there."""
    from situs.data.check import check
    from situs.data.masks import usual_masks

    kinds = () if args.fail_on == ("none",) else args.fail_on
    for kind in kinds:
        if kind not in KINDS:
            raise unknown_name("kind of finding", kind, KINDS, field="fail_on")
    check_folder(args.out, "check")
    with task() as told:
        found = check(
            args.data,
            splits=args.split or None,
            multi_label=args.multi_label,
            target=args.target,
            masks=usual_masks(args.data, args.first, args.void),
            decode_pixels=args.decode,
            huge_mpx=args.huge_mpx,
            workers=args.workers,
            progress=told.count,
        )
    present(found, args.out)
    return FOUND if found.failing(kinds) else 0
