"""The small models that tests build, in one place. Seeds are the tests' own: nothing here sets one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from situs.backbones import Backbone, create_backbone
from situs.core.tokens import Size
from situs.methods import METHODS, create_method
from situs.methods.base import Method

VIT, SWIN = "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"


def small_vit(
    img_size: Size = 16,
    *,
    name: str = VIT,
    depth: int = 2,
    width: int = 16,
    heads: int = 2,
    patch_size: int | None = 4,
    model_args: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Backbone:
    """A flat transformer of timm, of the family of `name`. model_args, fields: as `create_backbone` has them."""
    shape = {"depth": depth, "embed_dim": width, "num_heads": heads} | dict(model_args or {})
    return create_backbone(name, img_size=img_size, patch_size=patch_size, model_args=shape, **fields)


def small_swin(
    img_size: Size = 32,
    *,
    depths: tuple[int, ...] = (1, 1),
    width: int = 12,
    heads: tuple[int, ...] = (1, 2),
    model_args: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Backbone:
    """A Swin of a few stages."""
    shape = {"depths": depths, "embed_dim": width, "num_heads": heads} | dict(model_args or {})
    return create_backbone(SWIN, img_size=img_size, model_args=shape, **fields)


def small_hf(kind: str, **entries: Any) -> Backbone:
    """A model of transformers by its class, freshly made. entries: of its config."""
    import transformers

    cls = getattr(transformers, kind)
    return create_backbone(cls(cls.config_class(**entries)))


def small_method(name: str, backbone: Backbone | None = None, classes: int = 0, **config: Any) -> Method:
    """A method by name over `backbone`, or over a small ViT."""
    return create_method(name, backbone or small_vit(), METHODS[name].Config(**config), classes)


def leaves(count: int, side: int = 64, seed: int = 0) -> Tensor:
    """Pictures of leaves that cover one another, [count, 3, side, side] in [0, 1]: even inside, with edges of every
    length, as photographs are. Fewer are the first of more."""
    return _leaves(-(-count // 8) * 8, side, seed)[:count].clone()


@cache
def _leaves(count: int, side: int, seed: int) -> Tensor:
    draws = torch.rand(count, 80, 6, generator=torch.Generator().manual_seed(seed)).numpy()
    across, reach = (torch.arange(2 * side) / (2 * side)).numpy(), 0.03 / (0.06 + draws[:, :, 2])
    pictures = np.zeros((count, 3, 2 * side, 2 * side), dtype=np.float32)
    for number, leaf in np.ndindex(count, 80):
        (x, y, _, *colour), far = draws[number, leaf], reach[number, leaf]
        down, along = (slice(max(0, int((at - far) * 2 * side)), int((at + far) * 2 * side) + 2) for at in (y, x))
        inside = np.square(across[down, None] - y) + np.square(across[None, along] - x) < np.square(far)
        pictures[number, :, down, along][:, inside] = np.array(colour)[:, None]
    return torch.nn.functional.avg_pool2d(torch.from_numpy(pictures), 2)  # as a lens blurs
