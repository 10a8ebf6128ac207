"""Feature maps for dense tasks: the depths of a plain transformer, or the stages of a hierarchical one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from situs.backbones.base import Backbone, Level


def level_maps(backbone: Backbone, inputs: Tensor, levels: Sequence[Level], norms: nn.ModuleList) -> list[Tensor]:
    """The maps of inputs [B, C, H, W] at some levels of a backbone, [B, D_i, h_i, w_i].

    norms: of the first levels, which the model's own final norm does not fit; the others go through that one.
    """
    tokens, positions, grid = backbone.embed_sized(inputs)
    stream = backbone.assemble(tokens, positions)
    taken: dict[int, Tensor] = {}
    wanted = {level.block for level in levels}

    def look(block: int, z: Tensor) -> None:
        if block in wanted:
            taken[block] = z

    backbone.run_layers(stream, None, (look,))
    found = []
    for number, level in enumerate(levels):
        z = taken[level.block]
        patches = norms[number](z) if number < len(norms) else backbone.finish(replace(stream, z=z)).patches
        sides = [-(-side // 2**level.halved) for side in grid]
        # Contiguous: of other strides a convolution's result has strides that the compiler does not foresee.
        found.append(patches.transpose(1, 2).unflatten(2, sides).contiguous())
    return found


def own_norms(levels: Sequence[Level]) -> nn.ModuleList:
    """Norms for the levels that a hierarchical model's final norm does not fit; none for a plain one."""
    return nn.ModuleList([nn.LayerNorm(level.dim) for level in levels[:-1] if levels[-1].halved])
