"""Row spaces of gradients: the input of a linear layer lies in the row space of its weight's gradient.

∂W = Σ_t δ_t h_t^T, so with fewer tokens than channels every h_t passes a test that anything else fails: its residual
outside the row space is 0. How large a residual rounding and noise explain follows from the gradient itself, so a guess
is judged without the truth. The span of a layer behind a norm is one of norm(z): `Norm` has the form of z that lies in
it and is linear in z.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from situs.audit.attacks.base import known_numbers
from situs.audit.attacks.patchembed.equations import svd

FORWARD = 3e-6
"""Relative error of the victim's own forward pass in float32: its h is not exactly ours."""

SOLVED = 3.0
"""An input fits if its residual is at most this many times what noise explains. At the truth the ratio is about 1; a
wrong solution has thousands, and at least 4 where its gradients are weak."""

TELLING = 1e-2
"""Largest residual that still tells right from wrong, whatever noise explains: wrong solutions have little more, and
where rounding alone explains as much (fp16, tokens of weak gradients) nobody can tell them from the right one."""

BULK = 1.5
"""A direction is no noise if it is this many times the largest that noise of the remaining size alone would have."""

SPARE = 4
"""Directions that are left to noise at least where a rank is estimated."""


def whole_rows(gradient: Tensor) -> Tensor:
    """The rows [·, in] of a gradient without overflow, in float64: they span the same space."""
    rows = known_numbers(gradient)
    return rows[rows.isfinite().all(dim=1)]


def rank_of(values: Tensor, rows: int, columns: int) -> int:
    """How many singular values [·], in descending order, of a matrix [rows, columns] exceed uniform noise.

    The others are the noise: r directions leave noise of a known size, whose largest singular value is known too
    (√rows + √columns times its deviation); the result is the largest r whose last direction exceeds that. From fewer
    than `SPARE` directions the size of noise cannot be estimated.
    """
    count = torch.arange(1, len(values) + 1, device=values.device, dtype=values.dtype)
    left = (values.square().flip(0).cumsum(0).flip(0) - values.square()).clamp(min=0)
    high, wide = (rows - count).clamp(min=0), (columns - count).clamp(min=0)
    noise = (left / (high * wide).clamp(min=1)).sqrt()
    edge = BULK * noise * (high.sqrt() + wide.sqrt())
    rounding = max(rows, columns) * torch.finfo(values.dtype).eps * values[:1]
    above = (values > torch.maximum(edge, rounding))[: max(len(values) - SPARE, 0)].nonzero()
    return int(above[-1]) + 1 if len(above) else 0


class Span:
    """The row space of one weight's gradient [out, in] of rank `rank`; None for as many directions as exceed its
    rounding and noise.

    Rows are divided by their size (which leaves the row space as it is) and columns by theirs: rounding errs in
    proportion to each number, so that only then the noise is uniform and even the weakest tokens exceed it. even: noise
    of one deviation was added to all numbers, and nothing is divided. forward: relative error of the layer's inputs in
    the victim's forward pass, None for that of float32. `inside` [rank, in] is an orthonormal basis for inputs scaled
    by `column`.
    """

    def __init__(
        self, gradient: Tensor, rank: int | None = None, even: bool = False, forward: float | None = None
    ) -> None:
        self.forward = FORWARD if forward is None else forward
        g = whole_rows(gradient)
        size = g.square().mean(dim=1, keepdim=True).sqrt()
        g = (g / (1.0 if even else size))[size[:, 0] > 0]
        column = g.square().mean(dim=0).sqrt()
        # A unit that is nearly dead carries no information, and dividing by its size would give it the most weight.
        column = column.clamp(min=1e-2 * float(column.square().mean().sqrt()))
        self.column = torch.ones_like(column) if even else 1 / column
        g = g * self.column
        # The triangle of a tall matrix has the same directions.
        _, values, vectors = svd(torch.linalg.qr(g, mode="r")[1] if g.shape[0] > g.shape[1] else g)
        self.rank = rank_of(values, *g.shape) if rank is None else rank
        free = (g.shape[0] - self.rank) * (g.shape[1] - self.rank)
        noise = (values[self.rank :].square().sum() / max(free, 1)).sqrt()
        self.values, self.inside, self.noise = values[: self.rank], vectors[: self.rank].contiguous(), noise

    @staticmethod
    def exists(gradient: Tensor, rank: int) -> bool:
        """Whether the gradient has directions outside of a row space of this rank."""
        rows = whole_rows(gradient)
        return min(rows.shape) > rank and bool(rows.any())

    def outside(self, scaled: Tensor) -> Tensor:
        """The part of scaled inputs [..., in] outside the span, as vectors of the same length."""
        return scaled - (scaled @ self.inside.T) @ self.inside

    def residual(self, inputs: Tensor) -> Tensor:
        """The share of inputs [..., in] that lies outside the span, [...]."""
        scaled = inputs * self.column
        return self.outside(scaled).norm(dim=-1) / scaled.norm(dim=-1)

    def expected(self, inputs: Tensor) -> Tensor:
        """The residual that noise alone explains, [...].

        h = Σ_k c_k v_k with ∂W known up to noise η errs outside by η ‖c / σ‖: tokens with weak gradients err most.
        """
        outside = self.column.shape[0] - len(self.inside)
        size = (inputs * self.column).square().sum(dim=-1)
        return (self.deviation(inputs).square() * outside / size + self.forward**2).sqrt()

    def deviation(self, inputs: Tensor) -> Tensor:
        """The deviation of each scaled number outside the span by noise alone, [...]: η ‖c / σ‖."""
        return self.noise * (inputs * self.column @ self.inside.T / self.values).norm(dim=-1)

    def gain(self, matrix: Tensor, into: Tensor) -> Tensor:
        """By how much a matrix [out, in] with outputs weighed by `into` [out] multiplies one unit of `deviation`."""
        outside = (self.column.shape[0] - len(self.inside)) / self.column.shape[0]
        return (matrix / self.column * into.unsqueeze(-1)).norm() * outside**0.5

    def holds(self, inputs: Tensor) -> Tensor:
        """Whether inputs [..., in] lie in the span as far as noise lets one tell, [...] bool."""
        residual = self.residual(inputs)
        return (residual <= SOLVED * self.expected(inputs)) & (residual <= TELLING)


class Norm(NamedTuple):
    """A layer norm, or an RMS norm (not centred): norm(z) = weight · (z - mean z) / s + bias, s the deviation of z.

    Times s that is linear in z and in s: `form(z) + s · bias` lies in the span of the layer behind the norm, with one
    unknown a token where there is a bias and none where there is not.
    """

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool = True

    @property
    def biased(self) -> bool:
        """Whether it adds anything."""
        return self.bias is not None and bool(self.bias.any())

    def form(self, z: Tensor) -> Tensor:
        """weight · (z - mean z) of tokens z [..., D]."""
        away = z - z.mean(dim=-1, keepdim=True) if self.centred else z
        return away if self.weight is None else away * self.weight

    def size(self, z: Tensor) -> Tensor:
        """s of tokens z [..., D]: [..., 1]."""
        away = z - z.mean(dim=-1, keepdim=True) if self.centred else z
        return (away.square().mean(dim=-1, keepdim=True) + self.eps).sqrt()

    def apply(self, z: Tensor) -> Tensor:
        """norm(z)."""
        normed = self.form(z) / self.size(z)
        return normed if self.bias is None else normed + self.bias

    def undo(self, normed: Tensor) -> Tensor:
        """(z - mean z) / s of the norm's outputs [..., D]; channels whose weight is 0 come out as 0."""
        away = normed if self.bias is None else normed - self.bias
        return away if self.weight is None else (away / self.weight).masked_fill(self.weight == 0, 0.0)
