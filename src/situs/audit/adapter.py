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
from copy import deepcopy
from typing import ClassVar, NoReturn

import torch
from torch import Tensor, nn

from situs.audit.stem import Stem, StemBackbone
from situs.audit.stem_search import search_stem
from situs.backbones.base import CAPABILITIES, Features, Stream, Taps
from situs.core.position import Positions
from situs.core.tokens import Grid, Size, pair
from situs.errors import SitusError

WHOLE = "it is your own module and runs only as a whole"


class OwnModule(StemBackbone):
    """A module behind the hinge as far as an audit of gradients reaches: `forward`, parameters, and the stem."""

    refusals: ClassVar[dict[str, str]] = dict.fromkeys([name for name in CAPABILITIES if name != "images"], WHOLE)

    def __init__(self, module: nn.Module, name: str, img_size: tuple[int, int], in_chans: int) -> None:
        super().__init__(module, name, (0, 0), 0, 0, 0)
        self.img_size, self.in_chans = img_size, in_chans
        self.normalisation: tuple[Sequence[float], Sequence[float]] | None = None
        self.held: str | None = None
        """The type its weights were held in, where that is less than float32."""
        self.stem = "its patch embedding and position table were not looked for"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.model(x) if mask is None else self._whole(mask)

    def embed(self, x: Tensor) -> Tensor:
        self._whole(x)

    def positions(self, grid: Grid | None = None) -> Positions:
        self._whole(grid)

    def assemble(self, tokens: Tensor, positions: Positions | None, mask: Tensor | None = None) -> Stream:
        self._whole(tokens, positions, mask)

    def run_layers(self, stream: Stream, keys: int | None, taps: Taps = ()) -> Tensor:
        self._whole(stream, keys, taps)

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
    """The module as a victim, in eval mode; one in half precision is copied to float32, in which the step is made.

    weight: the patch embedding's weight by its name in the module. table: the position table. Where they are not named,
    they are looked for. normalisation: mean and deviation of the channels that the module expects; ImageNet's where
    None.
    """
    size = pair(img_size)
    module, held = _promoted(module)
    backbone = OwnModule(module.eval(), name or type(module).__name__, size, in_chans)
    backbone.normalisation, backbone.held = normalisation, held
    images = torch.randn(1, in_chans, *size, generator=torch.Generator().manual_seed(0))
    _check_logits(backbone, images)
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
        backbone.grid = _grid(found.count, size)
    return backbone


def _promoted(module: nn.Module) -> tuple[nn.Module, str | None]:
    """The module in float32 where it was held in less, and the type it was held in."""
    types = [p.dtype for p in module.parameters()]
    if not types:
        raise SitusError(f"{type(module).__name__} has no parameters, so there is no gradient to audit (module)")
    less = [each for each in types if each.is_floating_point and torch.finfo(each).bits < 32]
    if not less:
        return module, None
    return deepcopy(module).float(), str(less[0]).removeprefix("torch.")


def _grid(count: int, size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of so many patches on an image of a size; (0, 0) where no even cut gives them."""
    able = [(h, count // h) for h in range(1, count + 1) if count % h == 0]
    able = [(h, w) for h, w in able if size[0] % h == 0 and size[1] % w == 0]
    return min(able, key=lambda grid: abs(size[0] / grid[0] - size[1] / grid[1]), default=(0, 0))


def _check_logits(backbone: OwnModule, images: Tensor) -> None:
    """Refuses what does not give logits [1, K] for one image."""
    like = next(backbone.parameters())
    try:
        with torch.no_grad():
            found = backbone(images.to(like.device, like.dtype))
    except Exception as error:  # whatever the user's own code raises
        shape = list(images.shape)
        said = error if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
        raise SitusError(f"{backbone.name} does not take images {shape}: {said} (img_size, in_chans)") from error
    if not isinstance(found, Tensor) or found.dim() != 2 or found.shape[0] != 1:
        said = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise SitusError(f"{backbone.name} gives {said} for one image: an audit takes logits [1, classes]")
