"""A user's own module as the victim of an audit: any `nn.Module` that turns images into logits.

    def victim():
        return adapt(MyViT(), img_size=32, weight="to_patch.weight", table="positions")

    situs audit gradients package.module:victim --images FOLDER

Gradient matching needs nothing but the module. The closed forms need the names of the patch embedding's weight and of
the position table; whether these two do what the names say is not believed but measured, on one backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.audit.stem import Stem, StemBackbone, flat_weight, table_rows
from situs.backbones.base import Features, Stream
from situs.core.position import Positions
from situs.core.tokens import Size, pair, patchify
from situs.errors import SitusError

WHOLE = "it is your own module and runs only as a whole"


class OwnModule(StemBackbone):
    """A module behind the hinge as far as an audit of gradients reaches: `forward`, parameters, and the stem."""

    refusals: ClassVar[dict[str, str]] = dict.fromkeys(("tokens", "context", "take", "rows", "columns"), WHOLE)

    def __init__(self, module: nn.Module, name: str, img_size: tuple[int, int], in_chans: int) -> None:
        super().__init__(module, name, (0, 0), 0, 0, 0)
        self.img_size, self.in_chans = img_size, in_chans
        self.normalisation: tuple[Sequence[float], Sequence[float]] | None = None
        self.stem = "its patch embedding and position table are not named (adapt(…, weight=…, table=…))"

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def embed(self, x: Tensor) -> Tensor:
        self._whole(x)

    def positions(self) -> Positions:
        self._whole()

    def assemble(self, tokens: Tensor, positions: Positions | None, mask: Tensor | None = None) -> Stream:
        self._whole(tokens, positions, mask)

    def run_layers(self, stream: Stream, keys: int | None) -> Tensor:
        self._whole(stream, keys)

    def finish(self, stream: Stream) -> Features:
        self._whole(stream)

    def head(self, features: Features) -> Tensor:
        self._whole(features)

    def _whole(self, *_: object) -> NoReturn:
        raise SitusError(f"{self.name}: {WHOLE}")


def adapt(
    module: nn.Module,
    img_size: Size,
    *,
    in_chans: int = 3,
    weight: str | None = None,
    table: str | None = None,
    name: str = "",
    normalisation: tuple[Sequence[float], Sequence[float]] | None = None,
) -> OwnModule:
    """The module as a victim, in eval mode.

    weight: the patch embedding's weight by its name in the module, a convolution [D, C, P_h, P_w] or a matrix
    [D, P · P · C] over square patches. table: the position table, [..., rows, D], the patches' rows last. Both or
    neither. normalisation: mean and deviation of the channels that the module expects; ImageNet's where None.
    """
    size = pair(img_size)
    backbone = OwnModule(module.eval(), name or type(module).__name__, size, in_chans)
    backbone.normalisation = normalisation
    images = torch.randn(1, in_chans, *size, generator=torch.Generator().manual_seed(0))
    logits = _logits(backbone, images)
    if weight is None and table is None:
        return backbone
    parameters = dict(backbone.named_parameters())
    for flag, given in (("weight", weight), ("table", table)):
        if given is None or f"model.{given}" not in parameters:
            raise SitusError(
                f"{flag}={given}: must name a parameter of {backbone.name}, as both do or neither ({flag})"
            )
    names = f"model.{weight}", f"model.{table}"
    frozen = [each for each in names if not parameters[each].requires_grad]
    if frozen:
        backbone.stem = f"{frozen[0]} is frozen, so its gradient is neither computed nor sent"
        return backbone
    with torch.enable_grad():
        loss = F.cross_entropy(backbone(images.to(logits)), torch.zeros(1, dtype=torch.int64, device=logits.device))
        gradients = torch.autograd.grad(loss, [parameters[each] for each in names], allow_unused=True)
    bias = f"{names[0].removesuffix('weight')}bias"
    _measure_stem(backbone, images, names, gradients, bias if bias in parameters else None)
    return backbone


def _logits(backbone: OwnModule, images: Tensor) -> Tensor:
    """The logits of one image [1, K]; what is none of that is refused."""
    like = next(backbone.parameters())
    try:
        with torch.no_grad():
            found = backbone(images.to(like.device, like.dtype))
    except RuntimeError as error:
        shape = list(images.shape)
        raise SitusError(f"{backbone.name} does not take images {shape}: {error} (img_size, in_chans)") from error
    if not isinstance(found, Tensor) or found.dim() != 2 or found.shape[0] != 1:
        said = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise SitusError(f"{backbone.name} gives {said} for one image: an audit takes logits [1, classes]")
    return found


def _measure_stem(
    backbone: OwnModule,
    images: Tensor,
    names: tuple[str, str],
    gradients: tuple[Tensor | None, ...],
    bias: str | None,
) -> None:
    """Keeps the stem if ∂l/∂W = G^T X holds with G the gradient of the table's last rows; else the reason."""
    weight, table = gradients
    assert backbone.img_size is not None
    backbone.stem = f"{names[0]} and {names[1]} are not those of a patch embedding and of a table for its patches"
    if weight is None or table is None or weight.dim() not in (2, 4) or table.shape[-1] != weight.shape[0]:
        return
    side = math.isqrt(weight[0].numel() // backbone.in_chans)
    size = (weight.shape[2], weight.shape[3]) if weight.dim() == 4 else (side, side)
    values, (height, width) = backbone.in_chans * size[0] * size[1], backbone.img_size
    first = table.numel() // table.shape[-1] - (height // size[0]) * (width // size[1])
    if weight[0].numel() != values or height % size[0] or width % size[1] or first < 0:
        return
    layouts: tuple[Literal["convolution", "pixels", "planes"], ...]
    layouts = ("convolution",) if weight.dim() == 4 else ("pixels", "planes")
    for layout in layouts:
        stem = Stem(names[0], bias, names[1], first, size, layout)
        product = table_rows(table, stem).double().T @ patchify(images, size)[0].to(table.device).double()
        flat = flat_weight(weight, stem).double()
        if float((product - flat).norm()) <= 1e-3 * float(flat.norm()):
            backbone.stem, backbone.dim, backbone.num_prefix = stem, weight.shape[0], first
            backbone.grid = (height // size[0], width // size[1])
            return
    backbone.stem = (
        f"the gradient of {names[0]} is not the product of the table's gradient with the pixels: {names[1]} is not "
        "simply added behind a linear patch embedding"
    )
