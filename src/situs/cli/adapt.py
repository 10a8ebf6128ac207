"""The best classifier that public weights, your images and few labels give, chosen by cross-validation.

For example: situs adapt runs/mp3 --data samples --minutes 2 --out runs/adapted

Class means, a linear probe, the head, LoRA and all layers are compared on the training labels; the test images, your
test split or a fifth that is set aside first, are looked at once, at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from situs.cli.parser.flags import POSITIONAL
from situs.cli.shell import beside, next_line


@dataclass(frozen=True, kw_only=True)
class Args:
    """Adapt a model to own images."""

    model: Annotated[str, POSITIONAL, Parameter(metavar="MODEL")]
    """The pretrained model: a run, an export, a model's folder, a locked one with its --key, or a timm name (NAME=FILE,
    NAME=pretrained)."""

    data: Annotated[str, Parameter(metavar="PATH")]
    """Images with labels, in a folder a class, with or without splits."""

    out: Annotated[Path, Parameter(metavar="FOLDER")]
    """A new folder for the run, its export and the page."""

    unlabelled: Annotated[str | None, Parameter(metavar="PATH")] = None
    """More images for --method, without labels."""

    method: Literal["droppos", "mp3", "mae", "none"] = "none"
    """Pretrain on the own images too, and try every way from there as well."""

    minutes: float = 30.0
    """How long it may take; what fits into that is said beforehand."""

    img_size: Annotated[int | tuple[int, int] | None, Parameter(metavar="SIDE|HEIGHT,WIDTH")] = None
    """In pixels, where not the model's own: smaller is faster."""

    patch_size: Annotated[int | tuple[int, int] | None, Parameter(metavar="SIDE|HEIGHT,WIDTH")] = None
    """For a timm name: in pixels, where not the model's own."""

    model_args: dict[str, Any] = field(default_factory=dict)
    """For a timm name: further arguments of the model."""

    held_out: Annotated[float | None, Parameter(metavar="SHARE")] = None
    """Share to set aside for the test, of data that has no such split; by default 0.2."""

    batch: int | None = None
    """Images a step; by default 256, or a tenth of a smaller set, and 8 at least."""

    seed: int = 0
    """Seed of folds, order and augmentation."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """cpu, cuda or cuda:N; by default a GPU where there is one."""

    key: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The key of a locked folder."""

    withheld: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The owner's second file, where parts of that folder were withheld."""


def run(args: Args) -> None:
    """Adapts, prints the table of all, and says where the run, its export and the page are."""
    from situs.api import adapt
    from situs.cli.locks.passphrase import read_key
    from situs.cli.result import present

    data = {"path": args.data, "img_size": args.img_size, "held_out": args.held_out}
    names = ("out", "unlabelled", "method", "minutes", "batch", "seed", "device", "withheld")
    asked = {name: getattr(args, name) for name in names}
    key = None if args.key is None else read_key(args.key)
    given = {name: value for name, value in data.items() if value is not None}
    shape = {"patch_size": args.patch_size, "model_args": args.model_args}
    backbone = {name: value for name, value in shape.items() if value}
    present(adapt(args.model, data=given, key=key, backbone=backbone, **asked), None)
    print(f"{args.out / 'adapt.html'}")
    print(
        next_line(["evaluate", "accuracy", args.out], ["predict", args.out, "--out", beside(args.out, "predicted.csv")])
    )
