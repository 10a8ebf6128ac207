"""Tokens that linear equations leave open: what the MLP's activation tells apart, and when a token is believed.

A token's a = late(m) must lie in the row space of the gradient of the MLP's last layer. Sums of tokens pass every
linear test and not this one. Paths are followed in what the tokens found so far leave (`peel`), where fewer directions
are open; whether an end is a token is judged by the gradients themselves, all of them and in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.audit.attacks.spans import SOLVED, TELLING, Span
from situs.audit.attacks.tokens.block import Block
from situs.audit.attacks.tokens.count import Counts, table_rank
from situs.audit.attacks.tokens.descent import Activation, Descent, Range, blur
from situs.audit.attacks.tokens.linear import Spans, Tokens, family_of, misfit
from situs.audit.attacks.tokens.peel import Peel
from situs.audit.defences import Gradients
from situs.audit.stem import patches_of

SHARP = 3e-2
"""A token proves nothing if noise alone moves its pixels by more than this, in units of normalised pixels."""

UNITS = 1.4
"""Units that a path is followed with, for each unknown and each direction of the span; a quarter of them at least."""

SPARE = 32
"""Units beyond the directions of the span, at least."""

POLISH = 12
"""Steps at most from the end of a path to the token."""

SMOOTH = (2, 3, 4, 6, 8)
"""Sides of the noise that smooth pictures are drawn from: what tokens are like."""

CONTRAST = 2.0
"""Of the pictures that tell how much a unit bends, beside those that paths begin with."""


@dataclass(frozen=True)
class Effort:
    """How long it tries: rounds of starts, steps of a path."""

    rounds: int = 200
    steps: int = 30
    loose: int = 0
    """Weak directions that are searched beside those that are open."""


class Found(NamedTuple):
    """Tokens [Q] and fit [Q]: how many times more of a token sticks out than noise explains."""

    tokens: Tokens
    fit: Tensor


class Search:
    """What stays the same while one upload is searched, and the tokens that were taken out of it."""

    def __init__(
        self,
        block: Block,
        upload: Gradients,
        spans: Spans,
        counts: Counts,
        pixels: Range,
        effort: Effort | None = None,
        stop: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = lambda _: None,
        blur: tuple[bool, float | None] = (False, None),
    ) -> None:
        self.block, self.spans, self.counts, self.pixels = block, spans, counts, pixels
        self.effort, self.stop, self.say = effort or Effort(), stop, say
        self.chance = torch.Generator().manual_seed(0)
        self.span = Span(upload[block.layers.fc2], counts.fc2, *blur)
        self.peel = Peel(block, upload, spans, self.span, blur)
        self.family = family_of(block, spans, counts.open + self.effort.loose)
        self.activation = Activation(block)
        self._whole = Descent(self.activation, self.family, self.span, pixels)
        self._calm = self._bends().argsort()

    def stage(self, present: Tensor) -> Descent:
        """The system of the tokens that were not taken out; present: the places that have some."""
        block, counts, taken = self.block, self.counts, len(self.peel.first)
        spans, late, known = self.peel.left()
        table = table_rank(block, counts.x, block.base[present])
        tokens = counts.structural + counts.table - taken
        free = max(tokens - table, counts.general - taken, 1) + self.effort.loose
        family = family_of(block, spans, free) if taken else self.family
        if not self.activation.plain:
            return Descent(self.activation, family, late, self.pixels, known=known)
        directions = late.rank - taken + family.along.x.shape[0]
        count = max(int(UNITS * directions), late.rank + SPARE, self.activation.hidden // 4)
        units = self._calm[:count].sort().values
        return Descent(self.activation, family, late, self.pixels, units, torch.float32, known)

    def polished(self, places: Tensor, tokens: Tokens) -> Found:
        """The tokens that others [Q] are nearly, by the whole gradients."""
        rest = self._whole.run(places, self._whole.start(places, tokens), POLISH)
        ended = self.family.tokens(places, rest.phi)
        return Found(ended, self.fit(ended, rest.normal))

    def fit(self, tokens: Tokens, normal: Tensor) -> Tensor:
        """How many times more of tokens sticks out than noise explains, [Q]; far more where that proves nothing."""
        a = self.block.late(tokens.m)
        linear = misfit(self.block, self.spans, tokens)
        residual = self.span.residual(a)
        # What the linear spans leave uncertain of a token goes through the MLP as well.
        expected = (self.span.expected(a).square() + linear.second_expected.square()).sqrt()
        fit = (residual / expected).nan_to_num(torch.inf)
        over = torch.maximum(tokens.x - self.pixels.high, self.pixels.low - tokens.x).amax(dim=1)
        span = self.pixels.width
        along = self.family.along.x
        moved = expected * blur(normal, along, self.span) / along.shape[1] ** 0.5
        proves = (residual <= TELLING) & (over <= span / 4) & (moved <= SHARP * span)
        return torch.where(proves, fit, SOLVED * (2 + fit))

    def _bends(self) -> Tensor:
        """How much each of the MLP's units bends over what tokens of pictures can be, [H]; 0 where it is not plain."""
        block = self.block
        if not self.activation.plain:
            return block.weight.new_zeros(self.activation.hidden)
        m = torch.cat([block.middle(self.smooth(1, side, CONTRAST))[0][0] for side in SMOOTH])
        weight, bias = block.entry()
        u = block.norm2.apply(m) @ weight.T + bias
        slopes = self.activation.slopes(u)[1]
        return (slopes.std(dim=0) * u.unflatten(1, slopes.shape[1:]).std(dim=0)).square().sum(dim=0)

    def smooth(self, count: int, side: int, contrast: float = 1.0) -> Tensor:
        """Patches [count, N, K] of pictures of smooth colours, noise of `side` x `side` numbers grown to their size."""
        backbone, shape = self.block.backbone, self.block.backbone.input.shape
        assert shape is not None
        drawn = torch.randn(count, backbone.input.channels + 1, side, side, generator=self.chance, dtype=torch.float64)
        mixed = 0.4 * drawn[:, :1] + 0.2 * drawn[:, 1:]  # brightness, and what is left to colour
        grown = F.interpolate(mixed, size=tuple(shape), mode="bilinear", align_corners=True).to(self.block.weight)
        middle, width = (self.pixels.low + self.pixels.high) / 2, (self.pixels.high - self.pixels.low) / 2
        return middle + contrast * width * patches_of(grown, backbone, self.block.stem)
