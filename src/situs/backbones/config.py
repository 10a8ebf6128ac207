"""The config of `create_backbone`: which model, at which size, with which positions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from situs.config import Checked
from situs.limits import Within

PositionKind = Literal["learned", "sincos", "learned_sincos", "relative", "none"]


@dataclass(frozen=True)
class BackboneConfig(Checked):
    """The model and its size. All fields except `name` default to the model's values."""

    name: str = "vit_small_patch16_224"
    """A timm model name; or a folder with a timm or transformers config.json (an export)."""

    img_size: int | tuple[int, int] | None = None
    """Image size in pixels: the side of square images, or height and width. For clips: the number of
    MFCCs (or mel bands) per frame, and the number of frames."""

    patch_size: int | tuple[int, int] | None = None
    """Patch size in pixels: a side, or height and width. For ViT-S/4 on 32 px, use vit_small_patch16_224 with
    patch_size 4. For clips with 40 MFCCs, (40, 1) makes each frame a token."""

    in_chans: int = 3
    """Channels of the images. Training sets this value from the data."""

    num_classes: int | None = None
    """Number of classes of the head. With 0, there is no head. Training sets this value from the data."""

    positions: PositionKind | None = None
    """Position embedding. learned: starts at random. sincos: fixed. learned_sincos: starts as sincos. relative: 2-D
    bias, starts at zero. none: no positions. Default: the model's."""

    drop_path: Annotated[float, Within("[0, 1)")] = 0.0
    """Rate of stochastic depth in the last block. The rate rises linearly from 0 in the first block."""

    weights: str | None = None
    """A safetensors or torch file, or a folder that contains such a file."""

    model_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the model's constructor."""

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width of the images; None: the model's own."""
        return (self.img_size, self.img_size) if isinstance(self.img_size, int) else self.img_size
