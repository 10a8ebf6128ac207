"""What a linear classifier reads off frozen features: the place of patches without a position, the class of images, or
the class of each pixel.

For example: situs evaluate probe runs/mp3 --kind position --after runs/ft --train-count 200 --out look
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal

from cyclopts import Parameter

from situs.cli.parser.model_args import open_from, open_one_of
from situs.cli.result import MeasureArgs, asked, present
from situs.errors import SitusError


@dataclass(frozen=True, kw_only=True)
class Args(MeasureArgs):
    """Linear probe on a frozen backbone."""

    kind: Literal["position", "class", "segments"] = "position"
    """What is read: the place of patches whose position was taken away, the class of the image, or of each pixel
    (segments), by data with masks."""

    after: Annotated[str | None, Parameter(metavar="MODEL")] = None
    """A second model on the same page, such as the first one fine-tuned."""

    train_count: Annotated[int, Parameter(metavar="IMAGES")] = 2000
    """At most so many images of the training split to fit to."""

    ratio: Annotated[float, Parameter(metavar="SHARE")] = 0.75
    """position: share of the patches whose position is taken away."""

    pool: Literal["mean", "cls"] = "mean"
    """class: the mean of the patch tokens, or the CLS token."""

    weight_decays: Annotated[tuple[float, ...], Parameter(metavar="λ,λ,…")] = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
    """Weight decays to choose from, on a part of the training split."""

    first: Annotated[int | None, Parameter(metavar="NUMBER")] = None
    """segments: number of the first class in the mask files; by default 0, and 1 where ADE20K's list lies beside."""

    void: Annotated[tuple[int, ...] | None, Parameter(metavar="NUMBER,…")] = None
    """segments: numbers that mean no class; by default 255, and 0 where ADE20K's list lies beside the masks."""

    classes: Annotated[tuple[str, ...], Parameter(metavar="NAME,…")] = ()
    """segments: names of the classes; by default those of a list beside the data, else their numbers."""


_KINDS = {"ratio": "position", "pool": "class", "first": "segments", "void": "segments", "classes": "segments"}
"""flag -> what it is for."""


def run(args: Args) -> None:
    """Fits, scores, prints the table and writes the page."""
    from situs.data.masks import usual_masks
    from situs.measure.probe.classes import evaluate_probe

    for each in fields(args):
        kind = _KINDS.get(each.name, args.kind)
        if kind != args.kind and (value := getattr(args, each.name)) != each.default:
            raise SitusError(f"{each.name}={value}: is for kind={kind}; leave it out", field=(each.name, "kind"))
    model = open_from(args)
    after = None if args.after is None else open_one_of(args.after, args)
    words = asked(args, after=after)
    read = usual_masks(args.data or model.samples.path, words.pop("first"), words.pop("void"))
    words["masks"] = replace(read, classes=words.pop("classes"))
    present(evaluate_probe(model, **words), args.out)
