"""The positions of tokens, and the two operations on them: `take` and `forget`.

A model may have several kinds at once (EVA-02 has a table and a rotation), so `Positions` has all three:

- table: a vector added to each token, [N, D], or [B, K, D] once it has been taken per sample;
- rotary: sines and cosines that rotate queries and keys, [L, B, H, N, 2d] with L, B, H = 1 where shared;
- bias: a number added to the attention logit of each pair of tokens (`PairBias`).

Prefix tokens (CLS, registers) are in none of the three and in no index; only a bias has rows for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from situs.core.tokens import Grid, take
from situs.errors import SitusError


@dataclass(frozen=True)
class PairBias:
    """Relative position bias over the whole sequence, computed lazily layer by layer.

    values: [L, H, S, S] with S = prefix + N (L = 1 when all layers share it). rows: [B, K] positions of the selected
    tokens, or None for all in order. known: [B, K] or [K], False for a token with a hidden position: all its biases are
    then 0. Keeping the view instead of the [L, B, H, K, K] result saves memory: only one layer of it exists at a time.
    """

    values: Tensor
    prefix: int
    rows: Tensor | None = None
    known: Tensor | None = None

    def take(self, index: Tensor) -> PairBias:
        rows = index if self.rows is None else _compose(self.rows, index)
        known = None if self.known is None else _compose(self.known, index)
        return replace(self, rows=rows, known=known)

    def forget(self, where: Tensor) -> PairBias:
        known = ~where if self.known is None else self.known & ~where
        return replace(self, known=known)

    def layer(self, depth: int) -> Tensor:
        """The bias of one layer, [1 or B, H, S', S'] with S' = prefix + K."""
        bias = self.values[depth if self.values.shape[0] > 1 else 0]
        if self.rows is not None:
            rows = self._with_prefix(self.rows + self.prefix, torch.arange(self.prefix, device=self.rows.device))
            bias = bias[:, rows.unsqueeze(-1), rows.unsqueeze(-2)]
            bias = bias.movedim(0, -3)
        bias = bias if bias.dim() == 4 else bias.unsqueeze(0)
        if self.known is not None:
            all_known = torch.ones(self.prefix, dtype=torch.bool, device=self.known.device)
            known = self._with_prefix(self.known, all_known)
            both = known.unsqueeze(-1) & known.unsqueeze(-2)
            bias = bias * (both if both.dim() == 3 else both.unsqueeze(0)).unsqueeze(1).to(bias.dtype)
        return bias

    @staticmethod
    def _with_prefix(tokens: Tensor, prefix: Tensor) -> Tensor:
        return torch.cat([prefix.expand(*tokens.shape[:-1], -1), tokens], dim=-1)


@dataclass(frozen=True)
class Positions:
    """The positions of a sequence of patch tokens; `None` instead of a `Positions` removes every kind.

    rigid: why single tokens cannot be selected (a hierarchical model's windows), or None if they can.
    """

    table: Tensor | None = None
    rotary: Tensor | None = None
    bias: PairBias | None = None
    rigid: str | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that are present, among ("table", "rotary", "bias")."""
        named = (("table", self.table), ("rotary", self.rotary), ("bias", self.bias))
        return tuple(name for name, value in named if value is not None)

    def take(self, index: Tensor) -> Positions:
        """The positions of a subset or a permutation of the tokens; index: [K] for all samples, or [B, K]."""
        if self.rigid is not None:
            raise SitusError(f"the positions of individual tokens cannot be selected or reordered: {self.rigid}")
        table = None if self.table is None else _take_rows(self.table, index)
        rotary = None if self.rotary is None else _take_rotary(self.rotary, index)
        bias = None if self.bias is None else self.bias.take(index)
        return Positions(table, rotary, bias)

    def forget(self, where: Tensor, unknown: Tensor | None = None) -> Positions:
        """Hides the positions of the tokens at `where` ([N] or [B, N], bool).

        `unknown` ([D]; None is the zero vector) replaces the table's row. A rotary token is left unrotated *and* gets
        the vector: without the vector it would appear at the top-left corner, whose rotation is the identity. A biased
        token gets no bias and the vector.
        """
        table, rotary, bias = self.table, self.rotary, self.bias
        if table is not None or unknown is not None:
            table = _forget_rows(table, where, unknown)
        if rotary is not None:
            rotary = _forget_rotary(rotary, where)
        if bias is not None:
            bias = bias.forget(where)
        return Positions(table, rotary, bias, self.rigid)


def _compose(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index] where both are [N] or [B, N]."""
    if rows.dim() == 1:
        return rows[index]
    return rows.gather(-1, index.expand(rows.shape[0], index.shape[-1]))


def _take_rows(table: Tensor, index: Tensor) -> Tensor:
    if table.dim() == 2 and index.dim() == 1:
        return table.index_select(0, index)
    return take(table if table.dim() == 3 else table.unsqueeze(0), index)


def _forget_rows(table: Tensor | None, where: Tensor, unknown: Tensor | None) -> Tensor:
    if unknown is None:
        assert table is not None
        unknown = table.new_zeros(table.shape[-1])
    if table is None:
        table = unknown.new_zeros(unknown.shape[-1])
    return torch.where(where.unsqueeze(-1), unknown.to(table.dtype), table)


def _take_rotary(rotary: Tensor, index: Tensor) -> Tensor:
    if index.dim() == 1:
        return rotary.index_select(-2, index)
    layers, _, heads, _, width = rotary.shape
    batch, count = index.shape
    full = index.view(1, batch, 1, count, 1).expand(layers, batch, heads, count, width)
    return rotary.expand(layers, batch, heads, -1, width).gather(-2, full)


def _forget_rotary(rotary: Tensor, where: Tensor) -> Tensor:
    """No rotation: sine 0, cosine 1."""
    half = rotary.shape[-1] // 2
    still = torch.cat([rotary.new_zeros(half), rotary.new_ones(half)])
    where = where if where.dim() == 2 else where.unsqueeze(0)
    return torch.where(where[None, :, None, :, None], still, rotary)


def sincos(grid: Grid, dim: int) -> Tensor:
    """Fixed sine-cosine positions of a grid with any number of sides, [N, dim] float32.

    Each side has an equal part of the channels, sines then cosines, the last side first: on an image the column and
    then the row. The published weights of MAE and DropPos have the same order, so they load unchanged. A side of
    length 1 has no share: 98 frames on a grid of (98, 1) get the table of (98,).
    """
    grid = tuple(side for side in grid if side > 1) or (1,)
    if dim % (2 * len(grid)):
        raise SitusError(
            f"dim={dim}: must be divisible by {2 * len(grid)} for sine-cosine positions on a grid of {len(grid)} axes"
        )
    half = dim // len(grid) // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = [axis[:, None] * frequency for axis in coordinates(grid).double().unbind(-1)]
    return torch.cat([wave for angle in reversed(angles) for wave in (angle.sin(), angle.cos())], dim=-1).float()


def coordinates(grid: Grid, device: torch.device | None = None) -> Tensor:
    """The coordinates of each position, [N, sides] int64, counted from 0: (row, column) on an image."""
    place = torch.arange(math.prod(grid), device=device)
    axes: list[Tensor] = []
    for side in reversed(grid):
        axes.append(place % side)
        place = place // side
    return torch.stack(axes[::-1], dim=-1)


def distances(grid: Grid) -> Tensor:
    """Euclidean distance between any two positions in patches, [N, N] float64."""
    places = coordinates(grid).double()
    return (places[:, None] - places[None]).square().sum(-1).sqrt()


def smoothed_targets(grid: Grid, sigma: float | Tensor, *, squared: bool = False) -> Tensor:
    """DropPos's smoothed position targets w, [N, N] float32: w[i, j] ∝ exp(-dist(i, j) / σ²), rows sum to 1.

    sigma: σ; 0 is the one-hot target. A tensor σ keeps a schedule out of the compiled graph. squared: squared
    distances, as in the published code, instead of the paper's Euclidean ones.
    """
    device = sigma.device if isinstance(sigma, Tensor) else None
    place = coordinates(grid, device).double()
    distance = (place[:, None] - place[None, :]).square().sum(-1)
    if not squared:
        distance = distance.sqrt()
    variance = torch.as_tensor(sigma, device=device, dtype=torch.float64) ** 2
    # -inf off the diagonal is the limit σ -> 0; the clamp keeps 0/0 out of the diagonal, and x/tiny underflows to 0.
    logits = -distance / variance.clamp(min=1e-12)
    return logits.softmax(dim=-1).float()


def cut_targets(count: int, grid: Grid, sigma: float | Tensor) -> Tensor:
    """Smoothed targets as DropPos's published code builds them, [count, count] float32; rows need not sum to 1.

    The map is made for a grid of its own (16x16 there, for 14x14 tokens), its *columns* are normalised, and only the
    first `count` rows and columns of it are used: at σ = 1 its rows sum to .66 to 1.11 on 14x14.
    """
    if count > math.prod(grid):
        raise SitusError(f"target_grid={grid}: must have at least {count} positions", field="target_grid")
    # The weights are symmetric, so normalising columns is the transpose of normalising rows.
    return smoothed_targets(grid, sigma, squared=True).T[:count, :count]


def relative_index(grid: Grid, device: torch.device | None = None) -> Tensor:
    """Relative position index, [N, N] int64 in [0, (2h-1)(2w-1)): one number for each (Δrow, Δcolumn)."""
    place = coordinates(grid, device)
    delta = place[:, None] - place[None, :]
    index = torch.zeros_like(delta[..., 0])
    for axis, side in enumerate(grid):
        index = index * (2 * side - 1) + delta[..., axis] + side - 1
    return index


def resample_table(table: Tensor, old: Grid, new: Grid) -> Tensor:
    """A position table of one grid on another: [h*w, D] -> [h'*w', D], bicubic, antialiased when it shrinks.

    A sequence is a grid of one row.
    """
    if old == new:
        return table
    count, dim = table.shape
    if count != math.prod(old):
        raise SitusError(f"a position table of {count} rows does not fill a grid of {'x'.join(map(str, old))}")
    if len(old) != len(new) or len(old) > 2:
        raise SitusError(f"grid={new}: must have as many axes as the grid {old} of the position table, and at most 2")
    old, new = ((1, *grid)[-2:] for grid in (old, new))
    picture = table.float().T.reshape(1, dim, *old)
    picture = torch.nn.functional.interpolate(picture, size=new, mode="bicubic", antialias=True, align_corners=False)
    return picture.reshape(dim, -1).T.to(table.dtype)
