"""Which tokens are kept, masked or shuffled: every sampler is a pure function of uniform noise in [0, 1).

Draw the noise with `core.random.uniform`. Nothing here syncs with the host: on an accelerator no branch depends on a
tensor's content. On the CPU, where such a branch costs nothing, block masks stop early.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from situs.core.kernels import runs_kernels
from situs.core.random import shared_hash, uniform
from situs.core.tokens import take
from situs.errors import SitusError, unknown_name

BlockRule = Literal["paper", "official"]

_MIN_AREA = 8
_MAX_AREA = 75
_LOG_ASPECT = -math.log(0.3)
_ATTEMPTS = 10
_NUMBERS = 4
"""Random numbers per attempt: area, aspect, top, left."""

_MIN_SPAN = 3
SPAN_ROUNDS = 8
"""Most spans per row of tokens, and the shortest span where enough tokens are still wanted."""


def count_of(ratio: float, n: int) -> int:
    """int(ratio · n) without float error: 0.29 of 100 is 29, though floats give 28.999999999999996."""
    return min(n, int(ratio * n + 1e-6))


def kept_of(ratio: float, n: int, *, floor: bool = False) -> int:
    """The number of n positions that remain after the ratio `ratio` is removed: n - int(ratio · n); floor: int((1 -
    ratio) · n)."""
    return count_of(1.0 - ratio, n) if floor else n - count_of(ratio, n)


def kept_each(ratio: float, counts: Tensor, *, floor: bool) -> Tensor:
    """`kept_of` for each of `counts`, integers."""
    return count_each(1.0 - ratio, counts) if floor else counts - count_each(ratio, counts)


def count_each(ratio: float, counts: Tensor) -> Tensor:
    """`count_of` for each of `counts`, integers."""
    return (ratio * counts.double() + 1e-6).long().minimum(counts)


def span_mask(noise: Tensor, real: Tensor, ratio: float, *, num_special_tokens: int) -> Tensor:
    """Masks of whole spans: int(γ n) of each row's real tokens, in spans of 3 or more placed one after the other.

    noise: [B, 2 · `SPAN_ROUNDS` + N]. real: [B, N] bool, the first tokens of each row. ratio: γ of the real tokens
    after the first `num_special_tokens`, which are never masked -> bool [B, N]. A span is no longer than the tokens
    still wanted; those still wanted after the rounds are chosen uniformly at random.
    """
    slot, length = torch.arange(real.shape[1], device=real.device), real.sum(dim=1, keepdim=True)
    first = num_special_tokens
    wanted = count_each(ratio, (length - first).clamp(min=0))
    mask = torch.zeros_like(real)
    for turn in range(SPAN_ROUNDS):
        size = (wanted.clamp(max=_MIN_SPAN) + noise[:, 2 * turn, None] * (wanted - _MIN_SPAN + 1).clamp(min=1)).long()
        size = size.minimum(wanted)
        start = (first + noise[:, 2 * turn + 1, None] * (length - first - size + 1).clamp(min=1)).long()
        new = (slot >= start) & (slot < start + size) & ~mask & real
        mask, wanted = mask | new, wanted - new.sum(dim=1, keepdim=True)
    free = real & ~mask & (slot >= first)
    order = torch.where(free, noise[:, 2 * SPAN_ROUNDS :], 2.0).argsort(dim=1, stable=True)
    return mask | (torch.zeros_like(mask).scatter_(1, order, slot < wanted) & free)


def one_of_cells(noise: Tensor, grid: tuple[int, ...]) -> Tensor:
    """One position of each 2x2 cell at random, the cells in random order: noise [B, N] -> positions [B, N / 4].

    grid: (h, w), both even.
    """
    height, width = grid
    if height % 2 or width % 2:
        raise SitusError(f"grid={grid}: must have even numbers of rows and columns, to be cut into 2x2 cells")
    places = torch.arange(height * width, device=noise.device).view(height // 2, 2, width // 2, 2)
    cells = places.transpose(1, 2).reshape(-1, 4)
    least, pick = noise[:, cells].min(dim=-1)
    chosen = cells.expand(noise.shape[0], -1, -1).gather(2, pick.unsqueeze(-1)).squeeze(-1)
    return chosen.gather(1, least.argsort(dim=1, stable=True))


def jigsaw(mask: Tensor, noise: Tensor) -> Tensor:
    """A uniform random permutation of the masked positions among themselves; the others stay.

    mask: bool [B, N], or [N] for one shuffle of the whole batch; noise: the same shape -> index, the same shape,
    applied as every permutation: y[i] = x[index[i]]. A masked position may keep its own token.
    """
    if mask.dtype != torch.bool or mask.shape != noise.shape:
        raise SitusError(
            f"jigsaw: mask must be torch.bool and have the same shape as noise, {tuple(noise.shape)}, "
            f"but mask is {mask.dtype} of shape {tuple(mask.shape)}"
        )
    # Both lists have the masked positions first, then the others in order: the k-th masked position receives the
    # k-th of the shuffled ones, and each other position itself.
    places = (~mask).to(torch.uint8).argsort(dim=-1, stable=True)
    shuffled = torch.where(mask, noise, 2.0).argsort(dim=-1, stable=True)
    return torch.empty_like(places).scatter_(-1, places, shuffled)


def block_noise_shape(grid: tuple[int, ...], ratio: float, *, rule: BlockRule = "paper") -> tuple[int]:
    """The shape of the noise for one sample's `block_mask`, for `core.random.uniform`."""
    target = _target(grid, ratio, rule)
    return (_rounds(target, rule) * _NUMBERS * _ATTEMPTS + (grid[0] * grid[1] if rule == "paper" else 0),)


def block_mask(noise: Tensor, grid: tuple[int, ...], ratio: float, *, rule: BlockRule = "paper") -> Tensor:
    """Block-wise masks: rectangles placed one after the other until int(γN) positions are covered.

    noise: [B, *block_noise_shape(grid, ratio, rule=rule)]; ratio: γ -> mask: bool [B, N], N = height · width.

    A block's area is uniform between a least and the positions still wanted, its aspect log-uniform in [0.3, 1/0.3];
    it is strictly smaller than the grid both ways. The first of 10 attempts that covers a new position is used.

    `paper`: exactly int(γN) positions. The least area is min(8, wanted); a last block that would overshoot is cut,
    its new positions kept row by row; positions still wanted after the rounds are chosen uniformly at random.

    `official`: as in the published code. The area is between 8 and min(wanted, 75), even if that is less than 8; an
    attempt that would overshoot is refused; the first block whose 10 attempts all fail ends the mask. So γ is an upper
    bound. In the published code a whole batch has one mask: draw it with one sample's noise and expand it.

    One row or column has no strictly smaller block: `official` leaves it empty, `paper` fills it at random.
    """
    target = _target(grid, ratio, rule)
    shape = block_noise_shape(grid, ratio, rule=rule)
    batch, n = noise.shape[0], grid[0] * grid[1]
    if noise.dim() != 2 or noise.shape[1:] != shape:
        raise SitusError(
            f"block_mask: noise has shape {tuple(noise.shape)},"
            f" but for grid={grid}, ratio={ratio}, rule={rule!r} the shape must be [B, {shape[0]}]"
        )
    if target == 0 or (target == n and rule == "paper"):
        return torch.full((batch, n), target > 0, dtype=torch.bool, device=noise.device)
    if runs_kernels(noise):
        return _in_one_kernel(noise, grid, target, rule)
    split = _rounds(target, rule) * _NUMBERS * _ATTEMPTS
    before = free = torch.ones((batch, *grid), device=noise.device)
    wanted = torch.full((batch, 1), float(target), dtype=torch.float64, device=noise.device)
    look = noise.device.type == "cpu" and not torch.compiler.is_compiling()
    for draw in noise[:, :split].view(batch, -1, _NUMBERS, _ATTEMPTS).unbind(1):
        before = torch.where(wanted.unsqueeze(-1) > 0, free, before)
        block, gain = _first_block(draw.double(), free, wanted, rule)
        free = (free - block).relu()
        wanted = (wanted - gain).clamp(min=0) if rule == "paper" else (wanted - gain) * (gain > 0)
        if look and not wanted.any():
            break
    if rule == "official":
        return free.flatten(1) == 0
    return _fill(_cut(before.flatten(1), free.flatten(1), target), wanted, noise[:, split:])


def draw_block_mask(
    seed: int, epoch: int, sample_ids: Tensor, stream: str, grid: tuple[int, ...], ratio: float, *, rule: BlockRule
) -> Tensor:
    """`block_mask` of `core.random.uniform`'s noise: bool [B, N]. sample_ids: [B].

    On a GPU one kernel does both: the mask is the same, and only the noise that it uses is drawn.
    """
    target, n = _target(grid, ratio, rule), grid[0] * grid[1]
    if 0 < target < n + (rule == "official") and runs_kernels(sample_ids):
        return _in_one_kernel(sample_ids, grid, target, rule, shared_hash(seed, epoch, stream))
    noise = uniform(seed, epoch, sample_ids, stream, block_noise_shape(grid, ratio, rule=rule))
    return block_mask(noise, grid, ratio, rule=rule)


def _in_one_kernel(
    source: Tensor, grid: tuple[int, ...], target: int, rule: BlockRule, shared: int | None = None
) -> Tensor:
    from situs.core.kernels.gpu.masks import sample_blocks

    areas, official = (_MIN_AREA, _MAX_AREA), rule == "official"
    return sample_blocks(source, grid, target, _rounds(target, rule), _ATTEMPTS, areas, _LOG_ASPECT, official, shared)


def _first_block(draw: Tensor, free: Tensor, wanted: Tensor, rule: BlockRule) -> tuple[Tensor, Tensor]:
    """The first of a round's attempts that covers a new position: its block [B, H, W], and how many it adds [B, 1].

    draw: float64 [B, 4, A], so that a side is rounded the same way on every device. free: [B, H, W], 1 where a position
    is not covered. wanted: [B, 1], how many are still to cover.
    """
    paper = rule == "paper"
    least = wanted.clamp(max=_MIN_AREA) if paper else torch.full_like(wanted, _MIN_AREA)
    most = wanted if paper else wanted.clamp(max=_MAX_AREA)
    area = torch.lerp(least, most, draw[:, 0])
    sides: list[Tensor] = []
    for axis, (limit, sign) in enumerate(zip(free.shape[1:], (1.0, -1.0), strict=True)):  # a tall block is narrow
        aspect = ((2.0 * draw[:, 1] - 1.0) * (sign * _LOG_ASPECT)).exp()
        length = (area * aspect).sqrt().round().clamp(max=limit).unsqueeze(-1)
        start = (draw[:, 2 + axis].unsqueeze(-1) * (limit + 1.0 - length)).floor()
        cells = torch.arange(limit, device=draw.device)
        sides.append(((cells >= start) & (cells < start + length) & (length < limit)).to(free.dtype))
    rows, columns = sides
    gain = (rows @ free * columns).sum(dim=-1)
    if not paper:
        gain = gain * (gain <= most)
    # `max` of booleans would give value and index at once, but compiled for CUDA its index is not the first.
    first = (gain > 0).to(torch.uint8).argmax(dim=1, keepdim=True)
    gain = gain.gather(1, first)
    return take(rows, first).mT * take(columns, first) * (gain > 0).unsqueeze(-1), gain


def _cut(before: Tensor, free: Tensor, target: int) -> Tensor:
    """The mask with the last block cut to the target, row by row. before, free: [B, N] -> bool [B, N]."""
    last = before - free
    left = target - (1.0 - before).sum(dim=1, keepdim=True)
    return (before == 0) | ((last > 0) & (last.cumsum(dim=1) <= left))


def _fill(mask: Tensor, wanted: Tensor, noise: Tensor) -> Tensor:
    """Adds the `wanted` [B, 1] positions that are still missing: the free ones with the smallest noise [B, N]."""
    if mask.device.type == "cpu" and not torch.compiler.is_compiling() and not wanted.any():
        return mask
    order = torch.where(mask, 2.0, noise).argsort(dim=1, stable=True)
    chosen = torch.arange(mask.shape[1], device=mask.device) < wanted
    return mask | torch.zeros_like(mask).scatter_(1, order, chosen)


def _target(grid: tuple[int, ...], ratio: float, rule: BlockRule) -> int:
    if rule not in ("paper", "official"):
        raise unknown_name("block rule", rule, ("paper", "official"))
    if not 0.0 <= ratio <= 1.0:
        raise SitusError(f"ratio={ratio}: must be in [0, 1]")
    if min(grid) < 1:
        raise SitusError(f"grid={grid}: must have at least one row and one column")
    return count_of(ratio, grid[0] * grid[1])


def _rounds(target: int, rule: BlockRule) -> int:
    """Most blocks of a mask. Measured with 10⁴ to 10⁶ masks per case on grids from 3×20 to 64×64.

    `official`: no bound on a fair draw. A block adds a position or ends the mask, so `target` rounds always do; and the
    most ever used were 37 of the 52 allowed here (14×14, γ=1, 10⁶ masks), 24 of 30 (8×8), 91 of 190 (32×32).
    `paper`: on 14×14 fewer than one mask in 10⁴ needs more up to γ=.9; past that the rest is filled at random.
    """
    return min(32, 6 + target // 6) if rule == "paper" else min(target, 20 + target // 6)
