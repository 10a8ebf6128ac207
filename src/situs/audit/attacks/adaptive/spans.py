"""Inputs of a linear layer lie in the row space of its weight's gradient: ∂W = Σ_t δ_t h_t^T.

With fewer tokens than channels that is a test any guess of a token must pass by itself: the wrong part of h is what
sticks out of the row space. What the gradient's own rounding lets stick out is known, so a guess can be judged.
"""

from __future__ import annotations

from torch import Tensor

from situs.audit.attacks.base import known_numbers
from situs.audit.attacks.patchembed.equations import svd

FORWARD = 3e-6
"""Relative error of the victim's own forward pass in float32: its h is not exactly ours."""


def _whole_rows(gradient: Tensor) -> Tensor:
    """The rows [·, in] of a gradient in which nothing overflowed: the others span the same."""
    rows = known_numbers(gradient)
    return rows[rows.isfinite().all(dim=1)]


class Span:
    """The row space of one weight's gradient [out, in] of rank `tokens`.

    Rows are divided by their size (which leaves the row space as it is) and columns by theirs: rounding errs in
    proportion to each number, so that only then the noise is even and the weakest tokens stand out of it. `inside`
    [tokens, in] is an orthonormal basis for inputs scaled by `column`.
    """

    def __init__(self, gradient: Tensor, tokens: int) -> None:
        g = _whole_rows(gradient)
        size = g.square().mean(dim=1, keepdim=True).sqrt()
        g = (g / size)[size[:, 0] > 0]
        column = g.square().mean(dim=0).sqrt()
        # A unit that is nearly dead says nothing, and dividing by its size would let it speak loudest.
        self.column = 1 / column.clamp(min=1e-2 * float(column.square().mean().sqrt()))
        _, values, vectors = svd(g * self.column)
        free = (g.shape[0] - tokens) * (g.shape[1] - tokens)
        noise = (values[tokens:].square().sum() / max(free, 1)).sqrt()
        self.values, self.inside, self.noise = values[:tokens], vectors[:tokens].contiguous(), noise

    @staticmethod
    def exists(gradient: Tensor, tokens: int) -> bool:
        """Whether the gradient leaves room outside of its row space."""
        rows = _whole_rows(gradient)
        return min(rows.shape) > tokens and bool(rows.any())

    def outside(self, scaled: Tensor) -> Tensor:
        """What of scaled inputs [..., in] sticks out, as vectors of the same length."""
        return scaled - (scaled @ self.inside.T) @ self.inside

    def residual(self, inputs: Tensor) -> Tensor:
        """The share of inputs [T, in] that sticks out, [T]."""
        scaled = inputs * self.column
        return self.outside(scaled).norm(dim=-1) / scaled.norm(dim=-1)

    def expected(self, inputs: Tensor) -> Tensor:
        """The share that noise alone makes stick out, [T].

        h = Σ_k c_k v_k with ∂W known up to noise η errs outside by η ‖c / σ‖: tokens with weak gradients err most.
        """
        scaled = inputs * self.column
        own = (scaled @ self.inside.T / self.values).square().sum(dim=-1)
        room = self.column.shape[0] - len(self.inside)
        return (self.noise**2 * own * room / scaled.square().sum(dim=-1) + FORWARD**2).sqrt()
