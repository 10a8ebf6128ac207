"""How alike the features of two places are, in one image and in two: whether a model's features keep their position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from situs.cli.result import LookingAtImages

NAME = "correlation"


@dataclass(frozen=True, kw_only=True)
class Args(LookingAtImages):
    """Correlation between places."""

    count: Annotated[int | None, tyro.conf.arg(metavar="IMAGES")] = 64
    """So many of the images, chosen at random and the same every time."""

    batch: int = 16
    """Images at a time."""

    depth: str = "norm"
    """The maps to draw: of "embedding", a block's number, or "norm", the model's end."""


def run(args: Args) -> None:
    """Runs the images through the model, prints the means of every depth, and writes the page."""
    from situs.analyze.correlation import correlate
    from situs.analyze.correlation_page import in_words, make_page, overview, to_json
    from situs.cli.result import open_looked_at, tell_left_out, write_result
    from situs.cli.tables import print_table
    from situs.errors import unknown_name
    from situs.evaluate.subject import load_set, made_with
    from situs.results import show

    subject = open_looked_at(args)
    loader = load_set(subject, args.data, args.split, args.batch, subject.device, count=args.count)
    found = correlate(subject.backbone, loader, positions=subject.positions)
    if args.depth not in found:
        raise unknown_name("depth", args.depth, found)
    facts = made_with(subject, loader, args.seed)
    if not subject.positions:
        facts["positions"] = "left out, as in its training"
    page, pictures = make_page(subject.name, found, facts, args.depth)
    header, rows = overview(found)
    print_table(
        f"{loader.source.name}, {found[args.depth].images} images",
        [[show(cell) for cell in row] for row in (header, *rows)],
    )
    print(in_words(found))
    numbers = {**facts, **to_json(found)}
    tell_left_out(loader)
    print(write_result(args.out, NAME, numbers, page, pictures, of=[subject]))
