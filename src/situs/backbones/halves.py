"""A backbone cut around its blocks: what enters them, the blocks alone, and logits from what leaves them.

The client of split learning has `enter` and `leave` (embedding, table of positions, final norm, head), its server
`through`: the blocks, with rotations and relative bias, which follow from the number of tokens alone.

    leave(b, through(b, *enter(b, x, mask)), mask) == b(x, mask)

A causal model also continues a sequence: `enter` with `start`, `extend` instead of `through`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from situs.backbones.base import Backbone, Features, Past
from situs.backbones.block import Stream, Taps
from situs.core.position import Positions


class Entering(NamedTuple):
    """What enters the blocks. z: [B, p + N, D]. mask: [B, p + N] bool, False for padding; None: there is none."""

    z: Tensor
    mask: Tensor | None = None


def enter(backbone: Backbone, x: Tensor, mask: Tensor | None = None, start: int = 0) -> Entering:
    """Inputs (images, ids [B, N]) -> what enters the blocks. mask: [B, N] bool, False for padding. start: the position
    of a text's first token."""
    stream = backbone.assemble(backbone.embed(x), places(backbone, x.shape[-1], start), mask)
    return Entering(stream.z, stream.mask)


def through(backbone: Backbone, z: Tensor, mask: Tensor | None = None, taps: Taps = ()) -> Tensor:
    """The blocks alone: z [B, p + N, D] -> the last block's output. taps: called after each block, as `Taps` says."""
    here = places(backbone, z.shape[1])
    stream = Stream(z, backbone.num_prefix, here.rotary, here.bias, mask)
    return backbone.run_layers(stream, None, taps) if taps else backbone.blocks(stream).z


def extend(backbone: Backbone, z: Tensor, past: Past) -> Tensor:
    """The blocks alone, for tokens z [B, n, D] that follow those of `past`, to which theirs are added: [B, n, D]."""
    here = places(backbone, z.shape[1], past.length)
    return backbone.extend(Stream(z, 0, here.rotary, here.bias), past)


def leave(backbone: Backbone, z: Tensor, mask: Tensor | None = None) -> Tensor:
    """The last block's output [B, p + N, D] -> logits: the final norm and the head. mask: [B, N], of the inputs."""
    features: Features = backbone.finish(Stream(z, backbone.num_prefix))
    return backbone.classify(features if mask is None else features._replace(real=mask))


def places(backbone: Backbone, count: int, start: int = 0) -> Positions:
    """The positions of `count` tokens of a text, from `start` on; of an image all."""
    if not start:
        return backbone.positions((count,) if backbone.input.shape is None else None)
    whole = backbone.positions((start + count,))
    kept = whole.table if whole.table is not None else whole.rotary
    device = None if kept is None else kept.device
    return whole.take(torch.arange(start, start + count, device=device))
