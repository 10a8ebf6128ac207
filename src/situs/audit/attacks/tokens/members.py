"""Which tokens are of one image, from the attention of the first block alone.

What attention gives token i is a mean over the tokens of its image, head by head:

    o_i = Σ_j y_ij a_ij v_j / Σ_j y_ij a_ij    with a_ij = exp(q_i · k_j / √d) and y_ij = 1 within an image, else 0

Queries, keys and values follow from the tokens, so that Σ_j y_ij a_ij (v_j - o_i) = 0 is linear in y_i: as many
equations as channels for as many unknowns as tokens, of which attention needs fewer. Least squares near y = 1 / batch
give every token's company, also where some tokens were not found.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from situs.audit.attacks.tokens.block import LOOSE, Block
from situs.audit.attacks.tokens.roots import Roots

MISSED = 0.1
"""Share of o that may be of tokens that were not found: what the equations are weighed by."""


class Heads(NamedTuple):
    """Weight [3 D, D] and bias [3 D] of queries, keys and values, one below the other, and how many heads they have."""

    weight: Tensor
    bias: Tensor
    count: int

    def split(self, entered: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [heads, T, d] of what enters their layers [T, D]."""
        parts = (entered @ self.weight.T + self.bias).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.count, -1)).transpose(0, 1) for part in parts)
        return q, k, v


def read_heads(block: Block) -> Heads | None:
    """The plain attention that gives what the block's own gives, found by trying; None where it is of another kind."""
    own = dict(block.backbone.named_parameters())
    weights: list[Tensor] = [own[name] for name in block.layers.qkv]
    biases = [own.get(f"{name.removesuffix('weight')}bias") for name in block.layers.qkv]
    pairs = zip(weights, biases, strict=True)
    bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs])
    patches = torch.randn(1, block.places, block.weight.shape[1], generator=torch.Generator().manual_seed(0))
    entered, given = block.attended(patches.to(block.weight))
    width = given.shape[-1]
    if len(bias) != 3 * width:
        return None
    for count in (number for number in range(1, width + 1) if width % number == 0):
        heads = Heads(torch.cat(weights), bias, count)
        made = scaled_dot_product_attention(*heads.split(entered[0])).transpose(0, 1).flatten(1)
        if float((made - given[0]).norm()) <= LOOSE * float(given.norm()):
            return heads
    return None


def company(block: Block, roots: Roots, batch: int) -> Tensor | None:
    """How far tokens are of one image [T, T], near 1 or 0; None where the attention is not a plain one.

    Two of one place are of different images, unless places share their equations.
    """
    heads = read_heads(block)
    if heads is None:
        return None
    tokens, first, count = roots.tokens, len(block.prefix), len(roots.place)
    q, k, v = heads.split(block.norm1.apply(torch.cat([block.prefix, tokens.z])))
    scores = q[:, first:] @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    paid = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    o = tokens.o.unflatten(-1, (heads.count, -1)).transpose(0, 1)
    links = torch.eye(count).to(o)
    alone = roots.wanted[roots.place] <= batch
    for number in range(count):
        pull = (paid[:, number, :, None] * (v - o[:, number, None])).transpose(0, 1).flatten(1)
        apart = (roots.place == roots.place[number]) & alone
        apart[number] = True
        others = (~apart).nonzero()[:, 0]
        scale = MISSED * float(paid[:, number].sum(dim=-1).mean()) / batch * float(o[:, number].std())
        columns = pull[first + others].T / scale
        left = -(pull[:first].sum(dim=0) + pull[first + number]) / scale - columns.sum(dim=1) / batch
        normal = columns.T @ columns + torch.eye(len(others)).to(columns)
        links[number, others] = 1 / batch + torch.linalg.solve(normal, columns.T @ left)
    return (links + links.T) / 2
