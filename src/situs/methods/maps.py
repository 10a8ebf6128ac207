"""Feature maps for dense tasks: the depths of a plain transformer, or the stages of a hierarchical one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from situs.backbones.base import Backbone, Level


def level_maps(backbone: Backbone, inputs: Tensor, levels: Sequence[Level], norms: nn.ModuleList) -> list[Tensor]:
    """The maps of inputs [B, C, H, W] at some levels of a backbone, [B, D_i, h_i, w_i].

    norms: for the first levels, which the model's own final norm does not fit; the others go through the final norm.
    """
    tokens, positions, grid = backbone.embed_sized(inputs)
    stream = backbone.assemble(tokens, positions)
    outputs: dict[int, Tensor] = {}
    blocks = {level.block for level in levels}

    def tap(block: int, z: Tensor) -> None:
        if block in blocks:
            outputs[block] = z

    backbone.run_layers(stream, None, (tap,))
    maps = []
    for number, level in enumerate(levels):
        z = outputs[level.block]
        patches = norms[number](z) if number < len(norms) else backbone.finish(replace(stream, z=z)).patches
        sides = [-(-side // 2**level.halved) for side in grid]
        # Contiguous: else a convolution's result has strides that the compiler does not foresee.
        maps.append(patches.transpose(1, 2).unflatten(2, sides).contiguous())
    return maps


def own_norms(levels: Sequence[Level]) -> nn.ModuleList:
    """Norms for the levels that a hierarchical model's final norm does not fit; none for a plain one."""
    return nn.ModuleList([nn.LayerNorm(level.dim) for level in levels[:-1] if levels[-1].halved])
