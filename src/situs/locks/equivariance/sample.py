"""The inputs of an experiment: given or random, the tokens that take part, and their orders.

Row permutation: the blocks get every sample's tokens in a secret order. It is refused for causal models, windows and
relative bias. Padding masks move with the rows, and so do the coordinates of a rotary model, which reveal the order to
whoever runs the blocks (`row_leak`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.core.permutation import random_permutation
from situs.core.tokens import take
from situs.errors import SitusError

RELATIVE = "the model's relative bias would have to be permuted too (P B Pᵀ), and the permuted bias reveals the order"
ROTARY = "RoPE: its coordinates are permuted with the tokens, so whoever runs the blocks can read the order"


@dataclass(frozen=True)
class Sample:
    """The inputs of both runs. index: the patch tokens that take part ([K]; None: all). mask: [B, K] or None."""

    x: Tensor
    index: Tensor | None = None
    mask: Tensor | None = None


def check_input(backbone: Backbone, x: Tensor | None) -> None:
    """Refuses inputs that are empty, of the wrong kind, or ids outside the vocabulary."""
    if x is None or "tokens" in backbone.refusals:
        return
    kind = "integer ids [B, N]" if backbone.input.shape is None else "floating-point images [B, C, H, W]"
    if not x.numel() or x.is_floating_point() == (backbone.input.shape is None):
        raise SitusError(f"x has the shape {list(x.shape)} and the dtype {x.dtype}, but {backbone.name} takes {kind}")
    if backbone.input.shape is None and not 0 <= int(x.min()) <= int(x.max()) < backbone.model.config.vocab_size:
        largest = backbone.model.config.vocab_size - 1
        raise SitusError(f"x contains ids that {backbone.name} does not know; allowed: 0 to {largest}")


def sample_of(backbone: Backbone, x: Tensor | None, tokens: int, generator: torch.Generator) -> Sample:
    """The inputs, random if None; at most `tokens` of their tokens if the model supports a subset."""
    if x is None:
        x = random_inputs(backbone, 2, tokens, generator)
    elif x.is_floating_point():
        x = x.to(own_dtype(backbone))
    if x.dim() == 2:  # ids: padding is tested too if the model supports it
        mask = torch.ones(x.shape, dtype=torch.bool, device=x.device)
        if x.shape[1] > 4 and "rows" not in backbone.refusals:
            mask[-1, -3:] = False
        return Sample(x, mask=mask)
    if "take" in backbone.refusals or backbone.num_tokens <= tokens:
        return Sample(x)
    index = torch.randperm(backbone.num_tokens, generator=generator)[:tokens].sort().values
    return Sample(x, index.to(x.device))


def random_inputs(backbone: Backbone, count: int, tokens: int, generator: torch.Generator) -> Tensor:
    """`count` images of noise, or texts of at most `tokens` random words, on the model's device."""
    weight = next(backbone.model.parameters())
    if backbone.input.shape is not None:
        images = torch.randn(count, backbone.input.channels, *backbone.input.shape, generator=generator)
        return images.to(weight.device, weight.dtype)
    words = backbone.model.config.vocab_size
    return torch.randint(words, (count, min(backbone.num_tokens, tokens)), generator=generator).to(weight.device)


def own_dtype(backbone: Backbone) -> torch.dtype:
    """The dtype of the model's weights."""
    return next(p.dtype for p in backbone.model.parameters() if p.is_floating_point())


def embedded(backbone: Backbone, sample: Sample, dtype: torch.dtype) -> Tensor:
    """The patch tokens of the sample, [B, K, D]."""
    with torch.no_grad():
        tokens = backbone.embed(sample.x).to(dtype)
    return tokens if sample.index is None else take(tokens, sample.index)


def row_refusal(backbone: Backbone) -> str | None:
    """Why this model's rows cannot be permuted; None if they can."""
    for capability in ("tokens", "rows"):
        if capability in backbone.refusals:
            return backbone.refusals[capability]
    return RELATIVE if backbone.positions().bias is not None else None


def row_leak(backbone: Backbone) -> str | None:
    """How the order is revealed although the law holds; None if it is not."""
    return ROTARY if backbone.positions().rotary is not None else None


def moved_order(batch: int, count: int, generator: torch.Generator) -> Tensor:
    """A uniform random order for each sample, [B, N], not the identity if N > 1 (under it every law holds)."""
    while True:
        order = random_permutation(torch.rand(batch, count, generator=generator, dtype=torch.float64))
        if count < 2 or not (order == torch.arange(count)).all(dim=1).any():
            return order
