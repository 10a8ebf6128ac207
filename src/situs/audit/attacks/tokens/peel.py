"""What a token that was found takes out of the gradients: the spans of those that are left are narrower by it.

The MLP's gradients are ∂W1 = Σ_t δ1_t h_t^T and ∂W2 = Σ_t δ2_t a_t^T, and δ1_t follows from δ2_t and the token: through
W2 and the activation's derivative. Both lie in the column spaces of those gradients, which is a linear system for δ2_t
with one solution, up to its size, at a token that is there and none at any other. In coordinates of the row space,
h_t = c_t V and δ1_s = (∂W1 V^T) y_s, the c of one token and the y of another are orthogonal (the δ and the h are
inverses of each other), so that every token that is left has c · y_s = 0. Each token that is found closes one open
direction of all others; with one left at each place, linear equations do the rest.

Rounding turns the y. In the first layer's span that moves no other token by what matters: there y_s is taken out. In
the last layer's, other tokens would stick out as far as places of rest do that are none, once many are taken out of a
batch whose tokens are nearly as many as channels. There c · y_s = 0 is one more equation, and worth as much as it holds
for the tokens that were found.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor
from torch.func import vjp

from situs.audit.attacks.spans import SOLVED, Span
from situs.audit.attacks.tokens.block import Block
from situs.audit.attacks.tokens.linear import Spans
from situs.audit.defences import Gradients


class Peel:
    """The spans of one upload less the tokens that were found.

    first, last [·, n]: the y of those tokens, as coordinates in the spans of the MLP's first and last layers; found
    [·, n]: their c in the latter, of length 1.
    """

    def __init__(
        self, block: Block, upload: Gradients, spans: Spans, late: Span, blur: tuple[bool, float | None]
    ) -> None:
        assert spans.fc1 is not None
        self.block, self.spans, self.first_span, self.late = block, spans, spans.fc1, late
        own = dict(block.backbone.named_parameters())
        one, two = torch.cat([upload[name].double() for name in block.layers.fc1]), upload[block.layers.fc2].double()
        self.first, self.last = late.inside.new_zeros(0, spans.fc1.rank), late.inside.new_zeros(0, late.rank)
        self.found = self.last
        self.whole = bool(one.isfinite().all() and two.isfinite().all())  # what overflowed is not known
        if not self.whole:
            return
        self._column = Span(one.T, spans.fc1.rank, *blur)
        back = Span(two.T, late.rank, *blur)
        self._basis = torch.linalg.qr((back.inside / back.column).T)[0].T  # [n, D], of the δ2
        self._given = self._basis @ own[block.layers.fc2]  # [n, H], what they are before the last layer
        self._into = [_coordinates(g, span, blur[0]) for g, span in ((one, spans.fc1), (two, late))]

    def take(self, m: Tensor) -> Tensor:
        """Takes tokens with streams m [Q, D] out, and tells which could be, [Q] bool."""
        taken = torch.zeros(len(m), dtype=torch.bool, device=m.device)
        if not self.whole:
            return taken
        weight, bias = self.block.entry()
        entered = self.block.norm2.apply(m) @ weight.T + bias
        for number, u in enumerate(entered):
            found = self._backward(u)
            if found is None:
                continue
            taken[number] = True
            self.first, self.last = torch.cat([self.first, found[0]]), torch.cat([self.last, found[1]])
        c = (self.block.late(m[taken]) * self.late.column) @ self.late.inside.T
        self.found = torch.cat([self.found, c / c.norm(dim=1, keepdim=True)])
        return taken

    def left(self) -> tuple[Spans, Span, Tensor]:
        """The spans of the tokens that are left, and what the last directions of the second are to one of these: 0, as
        far as the matrix [k, k] says that is known, whose rows times independent numbers of deviation 1 they are."""
        if not len(self.first):
            return self.spans, self.late, self.last[:, :0]
        late, lower = _turned(self.late, self.last)
        off = (self.found @ self.last.T).fill_diagonal_(0.0).square().mean(dim=0).sqrt()
        known = torch.linalg.solve_triangular(lower, torch.diag(off), upper=False)
        return self.spans._replace(fc1=_less(self.first_span, self.first)), late, known

    def _backward(self, u: Tensor) -> tuple[Tensor, Tensor] | None:
        """The y [1, n] of a token whose MLP's first layers give u [H'], or None where rounding hides it."""
        count = len(self._given)
        every = vjp(self.block.tail, u.expand(count, -1))[1](self._given)[0]
        out = self._column.outside(every * self._column.column)
        vectors = torch.linalg.eigh(out @ out.T)[1]
        best = vectors[:, :2].T @ every
        fits = self._column.residual(best) <= SOLVED * self._column.expected(best)
        if fits.tolist() != [True, False]:  # where another direction fits as well, neither is known
            return None
        deltas = best[0], vectors[:, 0] @ self._basis
        one, two = (
            (into @ (delta * weight)).unsqueeze(0) for (into, weight), delta in zip(self._into, deltas, strict=True)
        )
        return one / one.norm(), two / two.norm()


def _coordinates(gradient: Tensor, span: Span, even: bool) -> tuple[Tensor, Tensor]:
    """What makes y of δ: a pseudo-inverse [n, out] of ∂W V^T, and a weight for each output."""
    size = gradient.norm(dim=1)
    weight = torch.ones_like(size) if even else torch.where(size > 0, 1 / size, 0.0)
    return torch.linalg.pinv((gradient * span.column) @ span.inside.T * weight.unsqueeze(1)), weight


def _less(span: Span, taken: Tensor) -> Span:
    """The part of a span whose coordinates are orthogonal to those taken [k, n]."""
    left = _turned(span, taken)[0]
    left.rank -= len(taken)
    left.inside = left.inside[: left.rank].contiguous()
    return left


def _turned(span: Span, taken: Tensor) -> tuple[Span, Tensor]:
    """A span with other axes: the last k span the taken [k, n], which are the matrix [k, k] times these."""
    axes, upper = torch.linalg.qr(taken.T, mode="complete")
    turned = copy(span)
    turned.inside = (axes.roll(-len(taken), dims=1).T @ span.inside).contiguous()
    return turned, upper[: len(taken)].T
