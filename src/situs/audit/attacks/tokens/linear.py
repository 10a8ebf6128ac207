"""The tokens of all places from linear equations alone.

The unknowns of a token are x in S_x, o in S_o and the deviations s1, s2 of its norms. norm1's form of E x + base_i lies
in S1 and norm2's form of that + A o + b in S2: the left sides are the same at every place, so one decomposition serves
all of them (`family_of`). Where it leaves no direction open, that gives the pixels.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from situs.audit.attacks.equations import svd
from situs.audit.attacks.solver import Family, Flat, Group, Norm, Span, Tokens, whole_rows
from situs.audit.attacks.tokens.block import Block
from situs.audit.defences import Gradients
from situs.audit.stem import flat_weight
from situs.errors import counted

# ---------------------------------------------------------------------------------------------------------------------
# What linear equations determine: ranks of the first block's gradients and the dimensions that they leave open.
#
# N patches and p prefix tokens an image, B images, n = B (N + p) tokens, D channels, K values a patch. A token at
# place i is E x + base_i with x in the span S_x of the patches, k = min(K, BN) wide. All ranks follow from those
# numbers and from r_PE, the rank of the base vectors modulo E S_x. They cannot be read off float32 gradients, whose
# weakest directions drown in rounding.


class Counts(NamedTuple):
    """Ranks by layer (x: the patch embedding's), r_PE as `table`, and the numbers of open directions.

    informs: whether the span of queries, keys and values was sent and says more than the weights do. second: whether
    those of the attention's last and the MLP's first layer were sent. full: why every input fits, "" where not.
    structural: combinations of tokens whose places add up to one place pass every linear test. general: unknowns beyond
    the equations. work: products of one step of a search at all places. times: as in `count`.
    """

    x: int
    qkv: int
    proj: int
    fc1: int
    fc2: int
    table: int
    informs: bool
    second: bool
    full: str
    structural: int
    general: int
    work: float
    times: int = 1

    @property
    def open(self) -> int:
        """f, the predicted number of open directions at each place."""
        return max(self.structural, self.general, 0)

    @property
    def reason(self) -> str:
        """Why directions are open: one sentence; "" where none are."""
        if not self.open:
            return ""
        if self.structural >= self.general:
            return (
                f"linear equations leave {self.open} directions of each token open, because combinations of other "
                f"tokens also fit the equations (the position embeddings span only {counted(self.table, 'directions')} "
                "that the pixels do not span)"
            )
        return f"each token has {self.open} more unknowns than linear equations"


def count(block: Block, batch: int, sent: Collection[str] | None = None, times: int = 1) -> Counts:
    """The ranks and open directions of a batch. sent: names of the gradients that were sent; None for all.

    times: at how many weights, one after the other, the gradients were taken (local steps): a layer's inputs differ
    between them, and so do all of their places, so that no sum of others passes for a token. The patches stay the same.
    """
    layers = block.layers
    patches_sent = sent is None or block.stem.weight in sent
    first_sent = sent is None or all(name in sent for name in layers.qkv)
    second = sent is None or all(name in sent for name in (layers.proj, *layers.fc1))
    places, prefix = block.places, len(block.prefix)
    dim, values = block.weight.shape
    width, hidden = block.into.shape[0], block.late(block.base[:1]).shape[-1]
    tokens = batch * (places + prefix)
    k = min(values, batch * places) if patches_sent else min(values, dim)
    table = table_rank(block, k)
    scaled = block.norm0 is not None  # one more unknown, and its bias one more direction
    added = scaled and block.norm0 is not None and block.norm0.biased
    distinct = times * (batch * places + prefix)
    weights_alone = times * (k + table + prefix + block.norm1.biased + added)
    bound, fed = _space(block.norm1, dim), times * tokens
    qkv = min(distinct, weights_alone, bound)
    proj, fc1, fc2 = min(fed, width), min(fed, _space(block.norm2, dim)), min(fed, hidden)
    informs = first_sent and qkv < min(weights_alone, bound)
    first = _equations(block.norm1, dim, qkv) if informs else 0
    general = k + scaled - first + (proj - _equations(block.norm2, dim, fc1) if second else 0)
    full = (
        f"there are at least as many tokens ({fed}) as channels ({dim}), so every token fits the equations"
        if fed >= dim
        else ""
    )
    if not full and not patches_sent and values >= dim:
        full = (
            f"the gradient of {block.stem.weight} is not sent, and a patch has at least as many values "
            f"({values}) as there are channels ({dim}), so every token fits every position"
        )
    ranks = (k, qkv, proj, fc1, fc2, table)
    structural = tokens - table - prefix
    free = max(structural, general, 0)
    work = float(places * free * hidden * (4 * fc2 + free))
    return Counts(*ranks, informs, second, full, structural, general, work, times)


def table_rank(block: Block, k: int, rows: Tensor | None = None) -> int:
    """r_PE: the rank of the base vectors, or of some of them [·, D], modulo what k directions of patches make."""
    dim, values = block.weight.shape
    whole = block.enter(block.base)
    rows = whole if rows is None else block.enter(rows)
    if k == values:
        inside = svd(block.enter(block.weight.T).T)[0]
        rows = rows - (rows @ inside) @ inside.T
    return min(_rank(rows, whole), dim - k if dim > k else 0)


def _rank(rows: Tensor, whole: Tensor) -> int:
    values = svd(rows)[1]
    size = float(torch.linalg.matrix_norm(whole, 2))
    return int((values > 1e-6 * size).sum())


def _space(norm: Norm, dim: int) -> int:
    """The dimension of the norm's outputs."""
    return dim - norm.centred + (norm.centred and norm.biased)


def _equations(norm: Norm, dim: int, rank: int) -> int:
    """Equations on a token from the span behind a norm, less the unknown scale."""
    return max(dim - rank - (norm.centred or norm.biased), 0)


# --- the equations ---------------------------------------------------------------------------------------------------


STEPS = 3
"""Gauss-Newton steps: the first solution is near."""


class Spans(NamedTuple):
    """Row spaces of the gradients that were sent; None for those that were not, or that hold no information (x: every
    patch is in it). proj and fc1: both or none."""

    x: Span | None
    qkv: Span | None
    proj: Span | None
    fc1: Span | None


def read_spans(
    block: Block, upload: Gradients, counts: Counts, even: bool = False, forward: float | None = None
) -> Spans:
    """The row spaces of one upload, of the counted ranks. even, forward: as in `Span`."""
    stem, layers, errors = block.stem, block.layers, (even, forward)
    x = None
    if counts.x < block.weight.shape[1]:
        x = Span(flat_weight(upload[stem.weight], stem), counts.x, *errors)

    def joined(names: Sequence[str], rank: int) -> Span:
        return Span(torch.cat([whole_rows(upload[name]) for name in names]), rank, *errors)

    first = joined(layers.qkv, counts.qkv) if counts.informs else None
    if not counts.second:
        return Spans(x, first, None, None)
    return Spans(x, first, joined([layers.proj], counts.proj), joined(layers.fc1, counts.fc1))


class Equations:
    """All linear equations on the tokens of one upload: [unknowns, equations], one row for each unknown.

    The unknowns are coordinates of x and o in their spans, and scales: the deviations of norm1 and norm2 where these
    have a bias, and that of a norm before the first block, which then multiplies o and the other two.
    """

    def __init__(self, block: Block, spans: Spans, weight: float = 1.0) -> None:
        """weight: of the equations behind norm1, beside those behind norm2."""
        self.block = block
        values = block.weight.shape[1]
        self.x = torch.eye(values).to(block.weight) if spans.x is None else _basis(spans.x)
        self.o = block.into.new_zeros(0, len(block.into)) if spans.proj is None else _basis(spans.proj)
        self.first = Group(block.norm1, spans.qkv, weight)
        self.second = Group(block.norm2, spans.fc1)
        self.z, self.mixing = block.enter(self.x @ block.weight.T), self.o @ block.into
        self.base = block.enter(block.base)
        self.constant = self._row(self.base, self.base + (0 if block.norm0 else block.shift))
        content = [self._row(self.z, self.z), self._row(0 * self.mixing, self.mixing)]
        self.content = torch.cat(content)
        zero = torch.zeros_like(block.shift)
        biases = [norm.bias if norm.biased and norm.bias is not None else zero for norm in (block.norm1, block.norm2)]
        rows = [self.first.added(biases[0]), self.second.added(biases[1])]
        scales = [torch.cat([rows[0], 0 * rows[1]]), torch.cat([0 * rows[0], rows[1]])]
        if block.norm0:
            start = zero if block.norm0.bias is None else block.norm0.bias
            scales.append(self._row(start, start + block.shift))
        self.scales = torch.stack(scales)  # [2 or 3, equations]

    def _row(self, z: Tensor, m: Tensor) -> Tensor:
        return torch.cat([self.first(z), self.second(m)], dim=-1)

    def family(self, free: int) -> Family:
        """The solutions with `free` open directions, the scales being unknowns like any other."""
        present = self.scales.any(dim=1)
        matrix = torch.cat([self.content, self.scales[present]])
        size = matrix.norm(dim=1, keepdim=True).clamp(min=1e-300)
        flat = Flat(matrix / size, len(matrix) - free)
        start, first = self.block.norm0, len(self.content)
        fixed, moved = flat.least(self.constant) / size.T, flat.free / size.T
        scales: tuple[Any, Any] = (1.0, 0.0)
        if start is not None and bool(present[-1]):
            scales = (fixed[:, -1:], moved[:, -1:])
        elif start is not None:  # its deviation is in no equation
            u = fixed[:, : len(self.x)] @ self.x @ self.block.weight.T + self.block.base
            scales = (start.size(u), torch.zeros_like(moved[:, :1]))
        fixed, along = (
            self._tokens(solution[:, :first], scale, constant)
            for solution, scale, constant in ((fixed, scales[0], 1.0), (moved, scales[1], 0.0))
        )
        scale = None if start is None else scales
        return Family(fixed, along, flat.values, scale)

    def _tokens(self, content: Tensor, scale: Tensor | float, constant: float) -> Tokens:
        """Tokens of coordinates; with a norm before the first block times its deviation, which is `scale`."""
        cx, co = content[..., : len(self.x)], content[..., len(self.x) :]
        z = cx @ self.z + constant * (self.base if constant else self.base[:1])
        if (start := self.block.norm0) and start.bias is not None:
            z = z + scale * start.bias
        return Tokens(cx @ self.x, co @ self.o, z, z + co @ self.mixing + scale * self.block.shift)

    def tied(self, solution: Tokens) -> Tokens:
        """Tokens [N, ·] near a solution whose scales are the true deviations of their streams: Gauss-Newton.

        As free unknowns the scales have errors of their own. In the coordinates of the decomposition J = 1 + b w^T with
        as many columns as there are scales: every step is solved exactly.
        """
        block, size = self.block, self.content.norm(dim=1).clamp(min=1e-300)
        left, values, right = svd(self.content / size.unsqueeze(-1))
        scales = self.scales.T  # [E, T]
        b, across = right @ scales, scales - right.T @ (right @ scales)
        cx, co = solution.x @ self.x.T, solution.o @ self.o.T
        if block.norm0:
            co = co * block.norm0.size(solution.x @ block.weight.T + block.base)
        y = torch.cat([cx, co], dim=1)
        for _ in range(STEPS):
            s, slope = self._ties(y)  # [N, T], [N, T, U]
            off = self.constant + y @ self.content + s @ self.scales
            w = (slope / size) @ left / values  # [N, T, U]
            inside = off @ right.T
            gram = torch.linalg.inv(w @ w.mT)
            turn = torch.eye(len(self.scales)).to(b) + w @ b
            normal = turn.mT @ gram @ turn + across.T @ across
            right_side = turn.mT @ gram @ (w @ inside.unsqueeze(-1)) + (off @ across).unsqueeze(-1)
            t = -torch.linalg.lstsq(normal, right_side, driver="gels" if normal.is_cuda else "gelsd").solution
            push = gram @ (turn @ t + w @ inside.unsqueeze(-1))
            step = (w.mT @ push).squeeze(-1) - (b @ t).squeeze(-1) - inside
            y = y + (step / values) @ left.T / size
        scale = self._ties(y)[0][:, -1:] if block.norm0 else 1.0
        tokens = self._tokens(y, scale, 1.0)
        return Tokens(tokens.x, tokens.o / scale, tokens.z / scale, tokens.m / scale)

    def _ties(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The scales of tokens y [N, U] at their places, [N, T], and their derivatives, [N, T, U]."""
        with torch.enable_grad():

            def deviations(content: Tensor, base: Tensor) -> Tensor:
                block, cx = self.block, content[: len(self.x)]
                start = block.norm0
                u = base + cx @ self.x @ block.weight.T
                scale = torch.ones_like(u[:1]) if start is None else start.size(u)
                z = u if start is None else start.form(u) + (0 if start.bias is None else scale * start.bias)
                m = z + content[len(self.x) :] @ self.mixing + scale * block.shift
                sizes = [norm.size(part / scale) * scale for norm, part in ((block.norm1, z), (block.norm2, m))]
                return torch.cat([*sizes, scale] if start else sizes)

            return vmap(deviations)(y, self.block.base), vmap(jacrev(deviations))(y, self.block.base)


def family_of(block: Block, spans: Spans, free: int) -> Family:
    """The family with `free` open directions."""
    return Equations(block, spans).family(free)


def solve(block: Block, spans: Spans, counts: Counts) -> Tokens:
    """The tokens of all places where no direction is open: a first solution gives the weights of the equations, a
    second one with these weights is the start of a third, whose norms divide by their true deviations."""
    everywhere = torch.arange(block.places, device=block.weight.device)

    def plain(equations: Equations) -> Tokens:
        family = equations.family(counts.open)
        return family.tokens(everywhere, family.along.x.new_zeros(block.places, counts.open))

    equations = Equations(block, spans, _weigh(block, spans, plain(Equations(block, spans))))
    solution = plain(equations)
    if not bool(equations.scales.any()):
        return solution
    better = equations.tied(solution)
    return better if bool(torch.isfinite(better.x).all()) else solution


def _basis(span: Span) -> Tensor:
    """An orthonormal basis of the inputs themselves, [rank, in]."""
    return torch.linalg.qr((span.inside / span.column).T)[0].T


# --- whether tokens are right ---------------------------------------------------------------------------------------


class Misfit(NamedTuple):
    """Residuals of h1 and h2, and the residuals that rounding and noise explain, [Q] each."""

    first: Tensor
    first_expected: Tensor
    second: Tensor
    second_expected: Tensor

    @property
    def worst(self) -> Tensor:
        """The larger ratio of a residual to what noise explains, [Q]."""
        return torch.maximum(self.first / self.first_expected, self.second / self.second_expected).nan_to_num(torch.inf)

    @property
    def share(self) -> Tensor:
        """The larger residual, [Q]."""
        return torch.maximum(self.first, self.second)


def misfit(block: Block, spans: Spans, tokens: Tokens) -> Misfit:
    """How well tokens meet the linear spans, which needs no truth."""
    none = torch.zeros_like(tokens.x[:, 0]), torch.ones_like(tokens.x[:, 0])
    patch = (spans.x, tokens.x, block.weight)
    if (start := block.norm0) is not None:  # its deviation, from its outputs
        away = tokens.z if start.bias is None else tokens.z - start.bias
        size = (tokens.x @ block.weight.T).norm(dim=1, keepdim=True) / away.norm(dim=1, keepdim=True)
        patch = (
            spans.x,
            tokens.x / size,
            block.weight if start.weight is None else block.weight * start.weight[:, None],
        )
    first = _residuals(block.norm1, spans.qkv, tokens.z, [patch])
    second = _residuals(block.norm2, spans.fc1, tokens.m, [patch, (spans.proj, tokens.o, block.into.T)])
    return Misfit(*(first or none), *(second or none))


def _residuals(
    norm: Norm, span: Span | None, z: Tensor, parts: Sequence[tuple[Span | None, Tensor, Tensor]]
) -> tuple[Tensor, Tensor] | None:
    """The residual of norm(z), and the expected one.

    parts: (span, inputs, matrix) that z is made of: a basis that noise has turned moves z as well.
    """
    if span is None:
        return None
    h = norm.apply(z)
    weight = span.column if norm.weight is None else span.column * norm.weight.abs()
    moved = [part.deviation(inputs) * part.gain(matrix, weight) for part, inputs, matrix in parts if part is not None]
    away = sum((distance.square() for distance in moved), torch.zeros_like(z[:, 0])).sqrt()
    away = away / (norm.size(z)[:, 0] * (h * span.column).norm(dim=1))
    return span.residual(h), (span.expected(h).square() + away.square()).sqrt()


def _weigh(block: Block, spans: Spans, tokens: Tokens) -> float:
    """The weight of the first equations beside the second: the inverse of the residuals that rounding and noise
    explain, of tokens that are nearly right."""
    residuals = misfit(block, spans, tokens)
    errors = []
    for norm, span, z, expected in (
        (block.norm1, spans.qkv, tokens.z, residuals.first_expected),
        (block.norm2, spans.fc1, tokens.m, residuals.second_expected),
    ):
        if span is None:
            errors.append(1.0)
            continue
        size = (norm.apply(z) * norm.size(z) * span.column).norm(dim=1)
        errors.append(float((size * expected).median()) / max(len(span.column) - span.rank, 1) ** 0.5)
    return errors[1] / errors[0] if errors[0] > 0 else 1.0
