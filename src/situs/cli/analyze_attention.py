"""Where a model's heads look: maps over images, by relative offset, and entropy layer by head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from situs.cli.model_args import ImageArgs, open_from
from situs.cli.result import tell_left_out, write_result


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
    from situs.analyze.attention import check_layer, image_maps, survey
    from situs.analyze.attention_page import LAYER_HEADER, Shown, attention_numbers, attention_page, layer_rows
    from situs.backbones.attention_maps import check_attention_maps, has_cls
    from situs.cli.tables import print_table
    from situs.config import check_range
    from situs.data.augment import denormalise
    from situs.models.data import load_set, made_with

    check_range("show", args.show, 1, flag="--show")
    model = open_from(args)
    backbone = model.backbone
    check_attention_maps(backbone)
    layer = check_layer(backbone, args.layer)
    loader = load_set(model, args.data, args.split, args.batch, model.device, count=args.count)
    found = survey(backbone, loader, positions=model.positions)
    images = next(iter(loader)).inputs[: args.show]
    shown = Shown(
        images=denormalise(images, loader.mean, loader.std).cpu(),
        maps=image_maps(backbone, images, layer, positions=model.positions),
        layer=layer,
        cls=has_cls(backbone),
        positions=model.positions,
    )
    facts = made_with(model, loader, args.seed)
    page, pictures = attention_page(model.name, found, shown, facts)
    numbers = {**facts, **attention_numbers(found, shown)}
    print_table(f"{model.name}: attention over {found.images:,} images", [LAYER_HEADER, *layer_rows(found)])
    print(page.lead)
    tell_left_out(loader)
    print(write_result(args.out, "attention", numbers, page, pictures, of=[model]))
