"""Row spaces of gradients: what enters a linear layer lies in the row space of its weight's gradient.

∂W = Σ_t δ_t h_t^T, so with fewer tokens than channels every h_t passes a test that anything else fails: the wrong part
of it sticks out. What rounding and noise let stick out is in the numbers themselves, so a guess is judged without the
truth. The span of a layer behind a norm is one of norm(z): `Norm` has the form of z that lies in it and is linear in z.
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
"""An input fits if no more of it sticks out than this many times what noise explains. At the truth it is about once; a
wrong solution has thousands, and four at least where its gradients are weak."""

TELLING = 1e-2
"""Nor more than this share, whatever noise explains: wrong solutions stick out by little more, and where rounding alone
lets as much stick out (fp16, tokens of weak gradients) nobody can tell them from the right one."""

BULK = 1.5
"""A direction is no noise if it is this many times the largest that noise of the remaining size alone would have."""

SPARE = 4
"""Directions that are left to noise at least where a rank is looked for."""


def whole_rows(gradient: Tensor) -> Tensor:
    """The rows [·, in] of a gradient in which nothing overflowed, in float64: the others span the same."""
    rows = known_numbers(gradient)
    return rows[rows.isfinite().all(dim=1)]


def rank_of(values: Tensor, rows: int, columns: int) -> int:
    """How many singular values [·], in descending order, of a matrix [rows, columns] stand out of even noise.

    The noise is what the others are: r directions leave noise of a known size, whose largest singular value is
    known too (√rows + √columns times its deviation); the largest r counts whose last direction is beyond that. From
    fewer than `SPARE` directions the size of noise cannot be told.
    """
    count = torch.arange(1, len(values) + 1, device=values.device, dtype=values.dtype)
    left = (values.square().flip(0).cumsum(0).flip(0) - values.square()).clamp(min=0)
    high, wide = (rows - count).clamp(min=0), (columns - count).clamp(min=0)
    noise = (left / (high * wide).clamp(min=1)).sqrt()
    edge = BULK * noise * (high.sqrt() + wide.sqrt())
    own = max(rows, columns) * torch.finfo(values.dtype).eps * values[:1]
    stands = (values > torch.maximum(edge, own))[: max(len(values) - SPARE, 0)].nonzero()
    return int(stands[-1]) + 1 if len(stands) else 0


class Span:
    """The row space of one weight's gradient [out, in] of rank `rank`; None for as many directions as stand out of its
    rounding and noise.

    Rows are divided by their size (which leaves the row space as it is) and columns by theirs: rounding errs in
    proportion to each number, so that only then the noise is even and the weakest tokens stand out of it. even: noise
    of one deviation was added to all numbers, and nothing is divided. forward: relative error of the inputs beside what
    the weights say, None for that of float32. `inside` [rank, in] is an orthonormal basis for inputs scaled by
    `column`.
    """

    def __init__(
        self, gradient: Tensor, rank: int | None = None, even: bool = False, forward: float | None = None
    ) -> None:
        self.forward = FORWARD if forward is None else forward
        g = whole_rows(gradient)
        size = g.square().mean(dim=1, keepdim=True).sqrt()
        g = (g / (1.0 if even else size))[size[:, 0] > 0]
        column = g.square().mean(dim=0).sqrt()
        # A unit that is nearly dead says nothing, and dividing by its size would let it speak loudest.
        column = column.clamp(min=1e-2 * float(column.square().mean().sqrt()))
        self.column = torch.ones_like(column) if even else 1 / column
        g = g * self.column
        # A tall one's directions stand in its triangle as well.
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
        """What of scaled inputs [..., in] sticks out, as vectors of the same length."""
        return scaled - (scaled @ self.inside.T) @ self.inside

    def residual(self, inputs: Tensor) -> Tensor:
        """The share of inputs [..., in] that sticks out, [...]."""
        return self.stuck(inputs, inputs)

    def stuck(self, part: Tensor, inputs: Tensor) -> Tensor:
        """What sticks out of a part of inputs [..., in], as a share of them, [...]."""
        return self.outside(part * self.column).norm(dim=-1) / (inputs * self.column).norm(dim=-1)

    def expected(self, inputs: Tensor) -> Tensor:
        """The share that noise alone makes stick out, [...].

        h = Σ_k c_k v_k with ∂W known up to noise η errs outside by η ‖c / σ‖: tokens with weak gradients err most.
        """
        outside = self.column.shape[0] - len(self.inside)
        size = (inputs * self.column).square().sum(dim=-1)
        return (self.astray(inputs).square() * outside / size + self.forward**2).sqrt()

    @property
    def typical(self) -> float:
        """The share that noise makes stick out of an input whose parts are as large as the gradient's own."""
        outside = self.column.shape[0] - len(self.inside)
        return float(self.noise * (self.rank * outside) ** 0.5 / self.values.norm())

    def astray(self, inputs: Tensor) -> Tensor:
        """The deviation of each scaled number outside the span that noise alone makes, [...]: η ‖c / σ‖."""
        return self.noise * (inputs * self.column @ self.inside.T / self.values).norm(dim=-1)

    def carried(self, matrix: Tensor, into: Tensor) -> Tensor:
        """How far one unit of `astray` gets through a matrix [out, in] whose outputs are weighed by `into` [out]."""
        outside = (self.column.shape[0] - len(self.inside)) / self.column.shape[0]
        return (matrix / self.column * into.unsqueeze(-1)).norm() * outside**0.5

    def holds(self, inputs: Tensor) -> Tensor:
        """Whether inputs [..., in] lie in the span as far as its noise lets anyone tell, [...] bool."""
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
        """(z - mean z) / s of what the norm gave [..., D]; channels whose weight is 0 come out as 0."""
        away = normed if self.bias is None else normed - self.bias
        return away if self.weight is None else (away / self.weight).masked_fill(self.weight == 0, 0.0)
