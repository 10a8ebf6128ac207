"""Every token of a place from linear equations alone, all places at once.

The unknowns of a token are x in S_x, o in S_o and the deviations s1, s2 of its norms. norm1's form of E x + base_i lies
in S1 and norm2's form of that + A o + b in S2: the left sides are the same at every place, so one decomposition serves
all of them (`family_of`). Where it leaves nothing open, the pixels stand there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from situs.audit.attacks.patchembed.equations import svd
from situs.audit.attacks.spans import Norm, Span, whole_rows
from situs.audit.attacks.tokens.block import Block
from situs.audit.attacks.tokens.count import Counts
from situs.audit.defences import Gradients
from situs.audit.stem import flat_weight


class Spans(NamedTuple):
    """Row spaces of the gradients that were sent; None for those that say nothing (x: every patch is in it)."""

    x: Span | None
    qkv: Span | None
    proj: Span
    fc1: Span


def read_spans(block: Block, upload: Gradients, counts: Counts, even: bool = False) -> Spans:
    """The row spaces of one upload, of the ranks that were counted. even: as in `Span`."""
    stem, layers = block.stem, block.layers
    x = None
    if counts.x < block.weight.shape[1]:
        x = Span(flat_weight(upload[stem.weight], stem), counts.x, even)
    qkv, fc1 = (torch.cat([whole_rows(upload[name]) for name in names]) for names in (layers.qkv, layers.fc1))
    first = Span(qkv, counts.qkv, even) if counts.informs else None
    return Spans(x, first, Span(upload[layers.proj], counts.proj, even), Span(fc1, counts.fc1, even))


class Tokens(NamedTuple):
    """Patches x [Q, K], what their attention's last layer gets o [Q, ·], and their streams z and m [Q, D]."""

    x: Tensor
    o: Tensor
    z: Tensor
    m: Tensor

    def at(self, index: Tensor | int) -> Tokens:
        return Tokens(*(part[index] for part in self))


class Family(NamedTuple):
    """What the linear equations leave at place i: fixed[i] + φ along for φ [f], of every part of `Tokens`.

    values: singular values of the equations, in descending order; the last f of them are left out.
    """

    fixed: Tokens
    along: Tokens
    values: Tensor

    def tokens(self, places: Tensor, phi: Tensor) -> Tokens:
        """The tokens for φ [Q, f] at places [Q]."""
        parts = zip(self.fixed, self.along, strict=True)
        return Tokens(*(fixed[places] + phi @ along for fixed, along in parts))

    def phi(self, places: Tensor, x: Tensor) -> Tensor:
        """The φ whose patches are nearest to x [Q, K]; of those with the same patches the shortest."""
        return (x - self.fixed.x[places]) @ torch.linalg.pinv(self.along.x, rtol=1e-9)


class Weights(NamedTuple):
    """What one unit of each group of equations is worth: the inverse of its expected error."""

    first: float = 1.0
    second: float = 1.0


def family_of(block: Block, spans: Spans, free: int, weights: Weights | None = None) -> Family:
    """The family with `free` open directions."""
    weights = weights or Weights()
    values = block.weight.shape[1]
    x = torch.eye(values).to(block.weight) if spans.x is None else _basis(spans.x)
    o = _basis(spans.proj)
    z, mixing = x @ block.weight.T, o @ block.into
    first = _Group(block.norm1, spans.qkv, weights.first)
    second = _Group(block.norm2, spans.fc1, weights.second)
    rows = [torch.cat([first(z), second(z)], dim=1), torch.cat([0 * first(mixing), second(mixing)], dim=1)]
    rows += [torch.cat([first.scale, 0 * second.scale]), torch.cat([0 * first.scale, second.scale])]
    rows = [row.view(-1, rows[0].shape[1]) for row in rows]
    matrix = torch.cat([row for row in rows if bool(row.any())])
    size = matrix.norm(dim=1, keepdim=True).clamp(min=1e-300)
    left, values, right = svd(matrix / size)
    rank = len(matrix) - free
    given = torch.cat([first(block.base), second(block.base + block.shift)], dim=1)
    solved = -(given @ right[:rank].T / values[:rank]) @ left[:, :rank].T / size.T
    # More unknowns than equations: what no equation mentions is open as well.
    flat = svd(matrix / size, full=True)[0][:, rank:] if len(matrix) > len(values) else left[:, rank:]
    k, width = len(x), len(o)

    def made(found: Tensor, base: Tensor, streams: Tensor) -> Tokens:
        cx, co = found[:, :k], found[:, k : k + width]
        patches, mixed = cx @ x, co @ o
        token = base + cx @ z
        return Tokens(patches, mixed, token, streams + cx @ z + co @ mixing)

    none = torch.zeros_like(block.base[:1])
    along = made((flat / size).T, none, none)
    # φ in units of patches: the open directions by how far they move one.
    return Family(made(solved, block.base, block.base + block.shift), along, values)


class _Group:
    """The equations of one norm and the span behind it: what of a norm's form sticks out."""

    def __init__(self, norm: Norm, span: Span | None, weight: float) -> None:
        self.norm, self.span, self.weight = norm, span, weight

    def __call__(self, tokens: Tensor) -> Tensor:
        if self.span is None:
            return tokens[:, :0]
        return self.weight * self.span.outside(self.norm.form(tokens) * self.span.column)

    @property
    def scale(self) -> Tensor:
        """What one unit of the norm's deviation adds: its bias, where it has one."""
        if self.span is None:
            return torch.zeros(0, dtype=torch.float64)
        bias = self.norm.bias if self.norm.biased else None
        bias = torch.zeros_like(self.span.column) if bias is None else bias
        return self.weight * self.span.outside(bias * self.span.column)


def _basis(span: Span) -> Tensor:
    """An orthonormal basis of the inputs themselves, [rank, in]."""
    return torch.linalg.qr((span.inside / span.column).T)[0].T


# --- whether tokens are right ---------------------------------------------------------------------------------------


class Misfit(NamedTuple):
    """Shares of h1 and h2 that stick out, and what rounding and noise explain of them, [Q] each."""

    first: Tensor
    first_expected: Tensor
    second: Tensor
    second_expected: Tensor

    @property
    def worst(self) -> Tensor:
        """How many times more sticks out than noise explains, [Q]."""
        return torch.maximum(self.first / self.first_expected, self.second / self.second_expected).nan_to_num(torch.inf)

    @property
    def share(self) -> Tensor:
        """The larger share that sticks out, [Q]."""
        return torch.maximum(self.first, self.second)


def misfit(block: Block, spans: Spans, tokens: Tokens) -> Misfit:
    """How well tokens meet the linear spans: known without the truth."""
    patch = torch.zeros_like(tokens.x[:, 0])
    if spans.x is not None:  # a basis that noise has turned moves the tokens
        moved = spans.x.expected(tokens.x) * (tokens.x @ block.weight.T).norm(dim=1)
        patch = moved
    mixed = spans.proj.expected(tokens.o) * (tokens.o @ block.into).norm(dim=1)
    nothing = torch.zeros_like(patch)
    first, first_expected = nothing, torch.ones_like(patch)
    if spans.qkv is not None:
        h = block.norm1.apply(tokens.z)
        away = patch / (block.norm1.size(tokens.z)[:, 0] * tokens.z.shape[1] ** 0.5)
        first, first_expected = spans.qkv.residual(h), (spans.qkv.expected(h) ** 2 + away**2).sqrt()
    h = block.norm2.apply(tokens.m)
    away = (patch**2 + mixed**2).sqrt() / (block.norm2.size(tokens.m)[:, 0] * tokens.m.shape[1] ** 0.5)
    return Misfit(first, first_expected, spans.fc1.residual(h), (spans.fc1.expected(h) ** 2 + away**2).sqrt())


def weigh(block: Block, spans: Spans, tokens: Tokens) -> Weights:
    """Each group by what rounding and noise are expected to leave of it, of tokens that are nearly right."""
    found = misfit(block, spans, tokens)
    errors = []
    for norm, span, z, expected in (
        (block.norm1, spans.qkv, tokens.z, found.first_expected),
        (block.norm2, spans.fc1, tokens.m, found.second_expected),
    ):
        if span is None:
            errors.append(1.0)
            continue
        size = (norm.apply(z) * norm.size(z) * span.column).norm(dim=1)
        errors.append(float((size * expected).median()) / max(len(span.column) - span.rank, 1) ** 0.5)
    return Weights(*(errors[1] / error if error > 0 else 1.0 for error in errors))
