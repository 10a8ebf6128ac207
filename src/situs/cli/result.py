"""What the verbs that look at a model share: how it is named on the command line, and where their result goes.

A result is a folder: NAME.json with every number, NAME.html to read, NAME-PICTURE.png for each figure.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from situs.data.loader import Loader
    from situs.evaluate.subject import Subject
    from situs.report.html import Cell, Page


@dataclass(frozen=True, kw_only=True)
class Looking:
    """What every look at a model takes."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL_OR_RUN")]
    """A run folder, an export folder, or a timm name with --weights."""

    weights: Annotated[str | None, tyro.conf.arg(metavar="FILE|pretrained|random")] = None
    """For a timm name: a weight file, those timm publishes, or none."""

    img_size: Annotated[int | tuple[int, int] | None, tyro.conf.arg(metavar="SIDE|HEIGHT WIDTH")] = None
    """For a timm name: image size in pixels, where it differs from the model's own."""

    ema: bool = True
    """For a run: the mean of the weights where there is one, or the weights themselves."""

    device: str | None = None
    """cpu, cuda or cuda:N; a GPU where there is one."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("look")
    """Where the numbers (.json), the page (.html) and the figures (.png) go."""


@dataclass(frozen=True, kw_only=True)
class LookingAtImages(Looking):
    """What every look at a model through images takes."""

    data: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """The images; by default those a run was trained on."""

    split: str | None = None
    """train, val or test; val and test stand in for each other. By default val, or all of data that is not split."""

    held_out: Annotated[float | None, tyro.conf.arg(metavar="SHARE")] = None
    """Share of data without val and test that is held out as both; by default what a run held out."""

    count: Annotated[int | None, tyro.conf.arg(metavar="IMAGES")] = None
    """So many of the images, chosen at random and the same every time; all where nothing is said."""

    batch: int = 256
    """Images at a time."""

    seed: int = 0
    """Seed of every draw."""


def open_looked_at(args: Looking) -> Subject:
    """The model that the flags name, on its device and in eval mode."""
    from situs.core.tokens import pair
    from situs.evaluate.subject import open_subject
    from situs.train.distributed import start

    size = None if args.img_size is None else pair(args.img_size)
    ema = None if args.ema else False
    device = start(args.device).device
    subject = open_subject(args.model, weights=args.weights, img_size=size, ema=ema, device=device)
    held = args.held_out if isinstance(args, LookingAtImages) else None
    return subject if held is None else subject.holding_out(held)


def tell_left_out(*loaders: Loader) -> None:
    """Says what the evaluation did not see: files that are no images, images that are broken. By the first rank."""
    from situs.train import distributed

    if not distributed.rank():
        for said in dict.fromkeys(said for loader in loaders for said in loader.source.left_out()):
            print(f"situs: {said}", file=sys.stderr)


def print_cells(title: str, header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """A page's table on the terminal."""
    from situs.cli.tables import print_table
    from situs.report.html import show

    print_table(title, [tuple(header), *(tuple(map(show, row)) for row in rows)])


def write_result(
    folder: Path, name: str, numbers: Mapping[str, Any], page: Page, pictures: Mapping[str, bytes] | None = None
) -> Path:
    """Writes NAME.json, NAME-PICTURE.png for each picture, and NAME.html last; gives the page's path.

    Where several ranks have come to the result, the first one writes it.
    """
    from situs.config import write_bytes
    from situs.errors import SitusError
    from situs.train import distributed

    if distributed.rank():
        return folder / f"{name}.html"
    text = json.dumps(numbers, indent=2, ensure_ascii=False) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture, content in (pictures or {}).items():
            write_bytes(folder / f"{name}-{picture}.png", content)
        write_bytes(folder / f"{name}.json", text.encode())
    except OSError as error:
        raise SitusError(f"{folder}: could not be written: {(error.strerror or str(error)).lower()} (--out)") from error
    return page.write(folder / f"{name}.html")
