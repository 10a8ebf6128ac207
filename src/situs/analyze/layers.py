"""The patch tokens of a model at every depth: as they enter the blocks, after each block, after the final norm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from situs.backbones.base import Backbone
from situs.core.position import Positions

FIRST, LAST = "embedding", "norm"
"""The depths around the blocks; a block's own is its number, from 1 on."""


class Layer(NamedTuple):
    """depth: "embedding", "1", "2", …, "norm". grid: of these patches. patches: [B, N, D]."""

    depth: str
    grid: tuple[int, int]
    patches: Tensor


def patch_layers(backbone: Backbone, tokens: Tensor, positions: Positions | None) -> Iterator[Layer]:
    """The patch tokens [B, N, D] on their way through the model, one depth at a time.

    A model that does not give its blocks one by one (Swin) shows its embedding and its end, the latter on its own
    coarser grid.
    """
    stream = backbone.assemble(tokens, positions)
    yield Layer(FIRST, backbone.grid, stream.z[:, stream.prefix :])
    if type(backbone).layers is Backbone.layers:
        yield Layer(LAST, backbone.out_grid, backbone.finish(backbone.blocks(stream)).patches)
        return
    after = stream
    for number, after in enumerate(backbone.layers(stream), start=1):
        yield Layer(str(number), backbone.grid, after.z[:, after.prefix :])
    yield Layer(LAST, backbone.out_grid, backbone.finish(after).patches)
