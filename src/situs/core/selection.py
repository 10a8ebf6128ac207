"""Which tokens of each sample are used, in which order, and which of them are real: images, clips and sentences alike.

The samples of a batch may differ in length; shorter ones are padded. A share of the tokens is then a different number
for each sample: a slice for images is a mask for sentences. Methods that select tokens here need not know which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from situs.core.masking import SPAN_ROUNDS, count_of, draw_block_mask, kept_each, kept_of, span_mask
from situs.core.permutation import random_permutation
from situs.core.random import uniform
from situs.core.tokens import Grid


class Tokens(NamedTuple):
    """The tokens of a batch.

    total: N, length of the longest sample. real: [B, N] bool, False for padding; None: all are real. special: how many
    tokens at the front are the model's own ([CLS] of BERT): always selected, never predicted.
    """

    total: int
    real: Tensor | None = None
    special: int = 0

    def shuffled(self, noise: Tensor) -> Tensor:
        """A random order of each sample's tokens, [B, N]: the special ones first, padding last.

        noise: [B, N] in [0, 1).
        """
        if self.real is not None:
            noise = noise.masked_fill(~self.real, 1.0)  # noise is below 1, and equal numbers keep their order
        if self.special:
            noise = torch.cat([torch.full_like(noise[:, : self.special], -1.0), noise[:, self.special :]], dim=1)
        return random_permutation(noise)

    def select(self, order: Tensor, hidden: float = 0.0, *, floor: bool = False) -> Selection:
        """The first tokens of an order [B, N], without the last share `hidden` of each sample's.

        floor: how a share is rounded, see `kept_of`.
        """
        width = max(self.special, kept_of(hidden, self.total, floor=floor))
        length = None if self.real is None else self.real.sum(dim=1, keepdim=True)
        if length is not None and hidden:
            length = kept_each(hidden, length, floor=floor).clamp(min=self.special)
        return Selection(order[:, :width], length, self.special)

    def or_missing(self, mask: Tensor) -> Tensor:
        """A mask [B, N] with padding added."""
        return mask if self.real is None else mask | ~self.real


def draw_region(seed: int, epoch: int, ids: Tensor, stream: str, tokens: Tokens, grid: Grid, ratio: float) -> Tensor:
    """The share `ratio` of each sample's tokens in a few regions, [B, N] bool: blocks of a grid, or spans in samples
    that differ in length. ids: [B]."""
    if tokens.real is None:
        return draw_block_mask(seed, epoch, ids, stream, grid, ratio, rule="paper")
    noise = uniform(seed, epoch, ids, stream, (2 * SPAN_ROUNDS + tokens.total,))
    return span_mask(noise, tokens.real, ratio, num_special_tokens=tokens.special)


class Context(NamedTuple):
    """The tokens that are keys and values. size: they are among the first `size` tokens. keys: [B, K] bool, which of
    those; None: all."""

    size: int
    keys: Tensor | None


@dataclass(frozen=True)  # no tuple: the compiler of torch 2.9 reads no property of those
class Selection:
    """Selected tokens. order: [B, K], their positions. length: [B, 1], how many of each sample's are real, which come
    first; None: all. special: see `Tokens`."""

    order: Tensor
    length: Tensor | None = None
    special: int = 0

    @property
    def slots(self) -> Tensor:
        """0 to K - 1."""
        return torch.arange(self.order.shape[1], device=self.order.device)

    @property
    def real(self) -> Tensor | None:
        """[B, K] bool: False for padding. None: all are real."""
        return None if self.length is None else self.slots < self.length

    def or_nothing(self, scores: Tensor) -> Tensor:
        """Scores [B, K] of the tokens, -∞ for padding."""
        return scores if self.real is None else scores.masked_fill(~self.real, -torch.inf)

    def kept(self, ratio: float, *, floor: bool = False) -> int | Tensor:
        """How many tokens remain without the share `ratio`: a number, or one per sample, [B, 1]."""
        if self.length is None:
            return kept_of(ratio, self.order.shape[1], floor=floor)
        return kept_each(ratio, self.length, floor=floor).clamp(min=self.special)

    def context(self, ratio: float) -> Context:
        """The first tokens, without the share `ratio`, as keys and values."""
        keys = None if self.length is None else self.slots < self.kept(ratio)
        return Context(kept_of(ratio, self.order.shape[1]), keys)

    def behind(self, first: int | Tensor) -> tuple[int, Tensor | None]:
        """The tokens after the first `first`, without special ones: their first index, and a mask [B, K] from there on;
        None: all."""
        first = max(first, self.special) if isinstance(first, int) else first.clamp(min=self.special)
        if isinstance(first, int) and self.length is None:
            return first, None
        return 0, (self.slots >= first) & (self.slots < (self.order.shape[1] if self.length is None else self.length))

    def some(self, noise: Tensor, ratio: float) -> Tensor:
        """The share `ratio` of the tokens at random, [B, K] bool; special ones are included, and padded samples have at
        least one. noise: [B, K]."""
        count = self.order.shape[1]
        if self.length is None:
            chosen = random_permutation(noise) < count_of(ratio, count)
        else:
            ranks = random_permutation(random_permutation(torch.where(self.slots < self.length, noise, 2.0)))
            chosen = ranks < (ratio * self.length + 1e-6).long().clamp(min=1)
        return chosen | (self.slots < self.special)
