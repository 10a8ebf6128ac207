"""Row permutation: the blocks see every sample's tokens in an order of its own, and never learn which.

blocks(P s) = P blocks(s), so the owner permutes the stream, has the blocks run (elsewhere), and puts the rows back:
outputs, gradients and training are the same, for an encoder whose attention has no other way to tell places apart.
Key-padding masks move with the rows. Refused: causal models, windows, relative bias. A rotary model needs its
coordinates moved too, and whoever runs the blocks can read the order off them: `Rows.leak` says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from situs.backbones.base import Backbone, Features, Stream
from situs.core.permutation import invert, random_permutation
from situs.core.position import Positions
from situs.errors import SitusError

RELATIVE = "its relative bias would have to move along, P B Pᵀ, and that matrix gives the order away"
ROTARY = "RoPE: its coordinates are permuted along with the tokens, so whoever runs the blocks can read the order"


class Rows(NamedTuple):
    """What a pass with permuted rows gives. order: [B, N]; leak: how the order shows all the same, or None."""

    output: Tensor
    order: Tensor
    leak: str | None


def row_refusal(backbone: Backbone) -> str | None:
    """Why this model's rows cannot be permuted, or None where they can."""
    for capability in ("tokens", "rows"):
        if capability in backbone.refusals:
            return backbone.refusals[capability]
    return RELATIVE if backbone.positions().bias is not None else None


def row_leak(backbone: Backbone) -> str | None:
    """How the order shows although the law holds, or None."""
    return ROTARY if backbone.positions().rotary is not None else None


def permuted_blocks(backbone: Backbone, stream: Stream, order: Tensor) -> Stream:
    """The blocks over rows in another order, put back: order [N] or [B, N] of the patch tokens -> the same stream.

    Prefix tokens stay in front; mask and rotation move with their rows.
    """
    moved = backbone.blocks(stream.take(order))
    back = replace(moved, rotary=None, bias=None).take(invert(order))
    return replace(stream, z=back.z)


def moved_order(batch: int, count: int, generator: torch.Generator) -> Tensor:
    """`fresh_order` for a check: no sample keeps its own order, under which every law holds; one token has no other."""
    while True:
        order = fresh_order(batch, count, generator)
        if count < 2 or not (order == torch.arange(count)).all(dim=1).any():
            return order


def fresh_order(batch: int, count: int, generator: torch.Generator | None = None) -> Tensor:
    """A new uniform order for each sample, [B, N]. Never use one twice: two looks at one order can be compared."""
    return random_permutation(torch.rand(batch, count, generator=generator, dtype=torch.float64))


class PermutedRows(nn.Module):
    """A backbone whose blocks see permuted rows, in training as in inference; same outputs, same gradients.

    generator: where the orders come from (a CPU generator; None: torch's own).
    """

    def __init__(self, backbone: Backbone, generator: torch.Generator | None = None) -> None:
        super().__init__()
        reason = row_refusal(backbone)
        if reason is not None:
            raise SitusError(f"{backbone.name} refuses permuting the tokens: {reason}")
        self.backbone = backbone
        self.generator = generator
        self.leak = row_leak(backbone)

    def encode(
        self, tokens: Tensor, positions: Positions | None, mask: Tensor | None = None, order: Tensor | None = None
    ) -> Features:
        """As `Backbone.encode`: tokens [B, N, D], mask [B, N] (False for padding) -> Features in the tokens' order."""
        if order is None:
            order = fresh_order(tokens.shape[0], tokens.shape[1], self.generator).to(tokens.device)
        stream = self.backbone.assemble(tokens, positions, mask)
        return self.backbone.finish(permuted_blocks(self.backbone, stream, order))

    def run(self, x: Tensor, mask: Tensor | None = None, order: Tensor | None = None) -> Rows:
        """Images or ids -> logits, with the order that was used and how it leaks, if it does."""
        tokens = self.backbone.embed(x)
        if order is None:
            order = fresh_order(tokens.shape[0], tokens.shape[1], self.generator).to(tokens.device)
        features = self.encode(tokens, self.backbone.positions(), mask, order)
        return Rows(self.backbone.head(features), order, self.leak)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Images or ids -> logits, a fresh order for each sample."""
        return self.run(x, mask).output
