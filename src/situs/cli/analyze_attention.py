"""Where a model's heads look: maps over images, by relative offset, and entropy layer by head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from situs.cli.model_args import ImageArgs, open_from
from situs.cli.result import present


@dataclass(frozen=True, kw_only=True)
class Args(ImageArgs):
    """Where a model's heads look."""

    count: Annotated[int | None, Parameter(metavar="IMAGES")] = 64
    """So many of the images, chosen at random and the same every time."""

    layer: int | None = None
    """The layer whose maps are laid over images, 1 for the first; the last where nothing is said."""

    show: int = 6
    """How many images are shown."""

    batch: int = 32
    """Images at a time."""


def run(args: Args) -> None:
    """Looks, prints a line for each layer, and writes the page."""
    from situs.analyze.attention import Attention, Shown, check_layer, image_maps, survey
    from situs.backbones.attention_maps import check_attention_maps, has_cls
    from situs.config import check_range
    from situs.data.augment.recipes import denormalise
    from situs.models.data import load_set, made_with

    check_range("show", args.show, 1, flag="--show")
    model = open_from(args)
    backbone = model.backbone
    check_attention_maps(backbone)
    layer = check_layer(backbone, args.layer)
    loader = load_set(model, args.data, split=args.split, batch=args.batch, count=args.count)
    found = survey(backbone, loader, positions=model.positions)
    images = next(iter(loader)).inputs[: args.show]
    shown = Shown(
        images=denormalise(images, loader.mean, loader.std).cpu(),
        maps=image_maps(backbone, images, layer, positions=model.positions),
        layer=layer,
        cls=has_cls(backbone),
        positions=model.positions,
    )
    present(Attention(found, shown, provenance=made_with(model, loader, args.seed)), args.out)
