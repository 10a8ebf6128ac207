"""The config of `create_backbone`: which model, at which size, with which positions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from situs.config import Checked
from situs.limits import Within

PositionKind = Literal["learned", "sincos", "learned_sincos", "relative", "none"]


@dataclass(frozen=True)
class BackboneConfig(Checked):
    """Which model, at which size. Every field but `name` may be left to the model's own default."""

    name: str = "vit_small_patch16_224"
    """A timm model name; or a folder with a timm or transformers config.json (an export)."""

    img_size: int | tuple[int, int] | None = None
    """Side of the square images, or their height and width; for clips, coefficients per frame and frames."""

    patch_size: int | tuple[int, int] | None = None
    """Side of a patch in pixels (ViT-S/4 on 32 px is vit_small_patch16_224 with patch_size 4), or its height and width:
    (40, 1) makes each frame of 40 coefficients a token."""

    in_chans: int = 3
    """Channels of the images; training takes them from the data."""

    num_classes: int | None = None
    """Classes of the head, 0 for none; training takes them from the data."""

    positions: PositionKind | None = None
    """Replaces the model's kind of positions: learned (random at first), sincos (fixed), learned_sincos (sincos at
    first), relative (2-D bias, zero at first) or none."""

    drop_path: Annotated[float, Within("[0, 1)")] = 0.0
    """Rate of stochastic depth in the last block; it rises linearly from 0 in the first."""

    weights: str | None = None
    """A safetensors or torch file, or a folder with one."""

    model_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the model's own constructor."""

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width of the images; None: the model's own."""
        return (self.img_size, self.img_size) if isinstance(self.img_size, int) else self.img_size
