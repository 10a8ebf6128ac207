"""The patch tokens of a model at every depth: as they enter the blocks, after each block, after the final norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from situs.backbones.base import Backbone
from situs.core.position import Positions

FIRST, LAST = "embedding", "norm"
"""The depths around the blocks; a block's own is its number, from 1 on."""


class Layer(NamedTuple):
    """depth: "embedding", "1", "2", …, "norm". grid: of these patches. patches: [B, N, D]."""

    depth: str
    grid: tuple[int, ...]
    patches: Tensor


def patch_layers(backbone: Backbone, tokens: Tensor, positions: Positions | None, see: Callable[[Layer], None]) -> None:
    """Shows the patch tokens [B, N, D] on their way through the model to `see`, one depth at a time.

    A model whose depths are not alike (Swin) shows its embedding and its end, the latter on its own coarser grid.
    """
    stream = backbone.assemble(tokens, positions)
    see(Layer(FIRST, backbone.grid, stream.z[:, stream.prefix :]))

    def tap(number: int, z: Tensor) -> None:
        see(Layer(str(number), backbone.grid, z[:, stream.prefix :]))

    z = backbone.run_layers(stream, None, () if "depths" in backbone.refusals else (tap,))
    see(Layer(LAST, backbone.out_grid, backbone.finish(replace(stream, z=z)).patches))
