"""Row permutation: the blocks see every sample's tokens in an order of its own, and never learn which.

blocks(P s) = P blocks(s), so the owner permutes the stream, has the blocks run (elsewhere), and puts the rows back:
outputs, gradients and training are the same, for an encoder whose attention has no other way to tell places apart.
Key-padding masks move with the rows. Refused: causal models, windows, relative bias. A rotary model needs its
coordinates moved too, and whoever runs the blocks can read the order off them: `row_leak` says so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.core.permutation import random_permutation

RELATIVE = "its relative bias would have to move along, P B Pᵀ, and that matrix gives the order away"
ROTARY = "RoPE: its coordinates are permuted along with the tokens, so whoever runs the blocks can read the order"


def row_refusal(backbone: Backbone) -> str | None:
    """Why this model's rows cannot be permuted, or None where they can."""
    for capability in ("tokens", "rows"):
        if capability in backbone.refusals:
            return backbone.refusals[capability]
    return RELATIVE if backbone.positions().bias is not None else None


def row_leak(backbone: Backbone) -> str | None:
    """How the order shows although the law holds, or None."""
    return ROTARY if backbone.positions().rotary is not None else None


def moved_order(batch: int, count: int, generator: torch.Generator) -> Tensor:
    """`fresh_order` for a check: no sample keeps its own order, under which every law holds; one token has no other."""
    while True:
        order = fresh_order(batch, count, generator)
        if count < 2 or not (order == torch.arange(count)).all(dim=1).any():
            return order


def fresh_order(batch: int, count: int, generator: torch.Generator | None = None) -> Tensor:
    """A new uniform order for each sample, [B, N]. Never use one twice: two looks at one order can be compared."""
    return random_permutation(torch.rand(batch, count, generator=generator, dtype=torch.float64))
