"""A user's own module as the victim of an audit: any `nn.Module` that turns images into logits.

    def victim():
        return adapt(MyViT(), img_size=32, weight="to_patch.weight", table="positions")

    situs audit gradients package.module:victim --images FOLDER

Gradient matching needs nothing but the module. The closed forms need a layer that is fed the image and a position table
that is added behind it: both are found by one backward pass, among all parameters or among those that are named. What
the module does to an image before that layer, be it a factor or several layers, is undone (`inverse`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from situs.audit.stem import Stem, StemBackbone
from situs.audit.stem.search import search_stem
from situs.core.tokens import Size, pair
from situs.errors import SitusError
from situs.models.module import wrap_module


def adapt(
    module: nn.Module,
    img_size: Size,
    *,
    in_chans: int = 3,
    weight: str | None = None,
    table: str | None = None,
    name: str = "",
    normalisation: tuple[Sequence[float], Sequence[float]] | None = None,
) -> StemBackbone:
    """The module as a victim, in eval mode; one in half precision is copied to float32, in which the step is made.

    weight: the patch embedding's weight by its name in the module. table: the position table. Where they are not named,
    they are looked for. normalisation: mean and deviation of the channels that the module expects; ImageNet's where
    None.
    """
    if next(module.parameters(), None) is None:
        raise SitusError(f"{type(module).__name__} has no parameters, so there is no gradient to audit (module)")
    asked = {"in_chans": in_chans, "name": name, "normalisation": normalisation}
    backbone = wrap_module(module, img_size, kind=StemBackbone, **asked)
    assert isinstance(backbone, StemBackbone)
    size = pair(img_size)
    images = torch.randn(1, in_chans, *size, generator=torch.Generator().manual_seed(0))
    parameters = dict(backbone.named_parameters(remove_duplicate=False))
    for flag, given in (("weight", weight), ("table", table)):
        if given is not None and f"model.{given}" not in parameters:
            raise SitusError(f"{flag}={given}: must name a parameter of {backbone.name} ({flag})")
    names = [None if given is None else f"model.{given}" for given in (weight, table)]
    backbone.table = names[1]
    frozen = [each for each in names if each is not None and not parameters[each].requires_grad]
    if frozen:
        backbone.stem = f"{frozen[0]} is frozen, so its gradient is neither computed nor sent"
        return backbone
    backbone.stem = found = search_stem(backbone, images, *names)
    if isinstance(found, Stem):
        backbone.dim, backbone.num_prefix = parameters[found.table].shape[found.channels], found.first
        backbone.grid = (h, w) = _grid(found.count, size)
        backbone.input = backbone.input._replace(patch=(size[0] // h, size[1] // w) if h else None)
    return backbone


def _grid(count: int, size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of so many patches on an image of a size; (0, 0) where no even cut gives them."""
    able = [(h, count // h) for h in range(1, count + 1) if count % h == 0]
    able = [(h, w) for h, w in able if size[0] % h == 0 and size[1] % w == 0]
    return min(able, key=lambda grid: abs(size[0] / grid[0] - size[1] / grid[1]), default=(0, 0))
