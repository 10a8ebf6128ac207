"""Which tokens are kept, masked or shuffled: every sampler is a pure function of uniform noise in [0, 1).

Draw the noise with `core.random.uniform`. Nothing here makes the host wait: on an accelerator no branch looks at a
tensor's content. On the CPU, where looking is free, block masks stop early.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from situs.core.random import runs_kernels, shared_hash, uniform
from situs.errors import SitusError, unknown_name

BlockRule = Literal["paper", "official"]

_MIN_AREA = 8
_MAX_AREA = 75
_LOG_ASPECT = -math.log(0.3)
_ATTEMPTS = 10
_NUMBERS = 4
"""Numbers an attempt takes: area, aspect, top, left."""

_MIN_SPAN = 3
SPAN_ROUNDS = 8
"""Spans that a row of tokens is given at most, and how long one is at least where so many are wanted."""


class TokenSubset(NamedTuple):
    """A split of the places 0..N-1; `kept` and `dropped` side by side are a permutation."""

    kept: Tensor
    """[B, K], in the order of the noise."""

    dropped: Tensor
    """[B, N - K], likewise."""


def count_of(ratio: float, n: int) -> int:
    """int(ratio · n) as a person reckons it: 0.29 of 100 is 29, though floats make it 28.999999999999996."""
    return min(n, int(ratio * n + 1e-6))


def kept_of(ratio: float, n: int, *, floor: bool = False) -> int:
    """How many of n places stay when `ratio` of them go: n - int(ratio · n), or int((1 - ratio) · n) with `floor`."""
    return count_of(1.0 - ratio, n) if floor else n - count_of(ratio, n)


def kept_each(ratio: float, counts: Tensor, *, floor: bool = False) -> Tensor:
    """`kept_of` for each of `counts`, integers."""
    gone = ((1.0 - ratio if floor else ratio) * counts.double() + 1e-6).long().minimum(counts)
    return gone if floor else counts - gone


def span_mask(noise: Tensor, real: Tensor, ratio: float, *, lead: int = 0) -> Tensor:
    """Masks of whole spans: of each row's real tokens int(γ n), in spans of 3 or more laid one after the other.

    noise: [B, 2 · `SPAN_ROUNDS` + N]. real: [B, N] bool, the first tokens of each row. ratio: γ of the real tokens
    behind the first `lead`, which are never masked -> bool [B, N]. A span is no longer than the tokens still wanted;
    those that are wanted after the rounds are filled uniformly at random.
    """
    slot, length = torch.arange(real.shape[1], device=real.device), real.sum(dim=1, keepdim=True)
    left = (ratio * (length - lead).clamp(min=0).double() + 1e-6).long()
    mask = torch.zeros_like(real)
    for turn in range(SPAN_ROUNDS):
        size = (left.clamp(max=_MIN_SPAN) + noise[:, 2 * turn, None] * (left - _MIN_SPAN + 1).clamp(min=1)).long()
        size = size.minimum(left)
        start = (lead + noise[:, 2 * turn + 1, None] * (length - lead - size + 1).clamp(min=1)).long()
        new = (slot >= start) & (slot < start + size) & ~mask & real
        mask, left = mask | new, left - new.sum(dim=1, keepdim=True)
    free = real & ~mask & (slot >= lead)
    order = torch.where(free, noise[:, 2 * SPAN_ROUNDS :], 2.0).argsort(dim=1, stable=True)
    return mask | (torch.zeros_like(mask).scatter_(1, order, slot < left) & free)


def random_subset(noise: Tensor, ratio: float, *, floor: bool = False, field: str = "ratio") -> TokenSubset:
    """Keep `kept_of(ratio, N)` of N places at random, for each sample.

    noise: [B, N]; field: the ratio's name, for the error.
    """
    if not 0.0 <= ratio < 1.0:
        raise SitusError(field=field, value=ratio, allowed="in [0, 1)")
    n = noise.shape[-1]
    order = noise.argsort(dim=-1, stable=True)
    keep = kept_of(ratio, n, floor=floor)
    return TokenSubset(order[..., :keep], order[..., keep:])


def one_of_cells(noise: Tensor, grid: tuple[int, ...]) -> Tensor:
    """One place of each 2x2 cell at random, the cells in random order: noise [B, N] -> places [B, N / 4].

    grid: (h, w), both even.
    """
    height, width = grid
    if height % 2 or width % 2:
        raise SitusError(f"grid={grid}: must have an even number of rows and of columns to be cut in 2x2 cells")
    places = torch.arange(height * width, device=noise.device).view(height // 2, 2, width // 2, 2)
    cells = places.transpose(1, 2).reshape(-1, 4)
    least, pick = noise[:, cells].min(dim=-1)
    chosen = cells.expand(noise.shape[0], -1, -1).gather(2, pick.unsqueeze(-1)).squeeze(-1)
    return chosen.gather(1, least.argsort(dim=1, stable=True))


def jigsaw(mask: Tensor, noise: Tensor) -> Tensor:
    """A uniform random permutation of the masked places among themselves; the others stay.

    mask: bool [B, N], or [N] for one shuffle of the whole batch; noise: the same shape -> index, the same shape,
    applied as every permutation is: y[i] = x[index[i]]. A masked place may well keep its own token.
    """
    if mask.dtype != torch.bool or mask.shape != noise.shape:
        raise SitusError(
            f"jigsaw: mask is {mask.dtype} of shape {tuple(mask.shape)}, noise has shape {tuple(noise.shape)};"
            " the mask must be torch.bool and both of one shape"
        )
    # Both lists name the masked places first, then the others in order: the k-th masked place receives the
    # k-th of the shuffled ones, and each other place receives itself.
    places = (~mask).to(torch.uint8).argsort(dim=-1, stable=True)
    shuffled = torch.where(mask, noise, 2.0).argsort(dim=-1, stable=True)
    return torch.empty_like(places).scatter_(-1, places, shuffled)


def block_noise_shape(grid: tuple[int, ...], ratio: float, *, rule: BlockRule = "paper") -> tuple[int]:
    """The shape of noise that one sample's `block_mask` takes, to be handed to `core.random.uniform`."""
    target = _target(grid, ratio, rule)
    return (_rounds(target, rule) * _NUMBERS * _ATTEMPTS + (grid[0] * grid[1] if rule == "paper" else 0),)


def block_mask(noise: Tensor, grid: tuple[int, ...], ratio: float, *, rule: BlockRule = "paper") -> Tensor:
    """Block-wise masks: rectangles laid one after the other until int(γN) places are covered.

    noise: [B, *block_noise_shape(grid, ratio, rule=rule)]; ratio: γ -> mask: bool [B, N], N = height · width.

    A block's area is uniform between a least and the places still wanted, its aspect log-uniform in [0.3, 1/0.3];
    it is strictly smaller than the grid both ways. Of 10 attempts the first that adds a place is laid.

    `paper`: exactly int(γN) places. The least area is min(8, wanted); a last block that would overshoot is cut,
    its new places kept row by row; places still wanted after the rounds are filled uniformly at random.

    `official`: as the published code does. The area lies between 8 and min(wanted, 75), also where that is less;
    an attempt that would overshoot is refused; the first block whose 10 attempts all fail ends the mask. So γ is
    an upper bound. There one mask serves a whole batch: draw it with one sample's noise and expand it.

    One row or column has no strictly smaller block: `official` leaves it empty, `paper` fills it at random.
    """
    target = _target(grid, ratio, rule)
    shape = block_noise_shape(grid, ratio, rule=rule)
    batch, n = noise.shape[0], grid[0] * grid[1]
    if noise.dim() != 2 or noise.shape[1:] != shape:
        raise SitusError(
            f"block_mask: noise has shape {tuple(noise.shape)};"
            f" for grid={grid}, ratio={ratio}, rule={rule!r} it must be [B, {shape[0]}]"
        )
    if target == 0 or (target == n and rule == "paper"):
        return torch.full((batch, n), target > 0, dtype=torch.bool, device=noise.device)
    if runs_kernels(noise):
        return _in_one_kernel(noise, grid, target, rule)
    rounds = _rounds(target, rule)
    split = rounds * _NUMBERS * _ATTEMPTS
    empty = torch.ones((batch, *grid), device=noise.device)
    wanted = torch.full((batch, 1), float(target), dtype=torch.float64, device=noise.device)
    numbers = noise[:, :split].view(batch, -1, _NUMBERS, _ATTEMPTS)
    laid = _lay_blocks(numbers, _Laid(empty, empty, wanted), _Tables.of(grid, noise.device), rule)
    if rule == "official":
        return laid.free.flatten(1) == 0
    mask = _cut(laid.before.flatten(1), laid.free.flatten(1), target)
    return _fill(mask, laid.wanted, noise[:, split:])


def draw_block_mask(
    seed: int, epoch: int, sample_ids: Tensor, stream: str, grid: tuple[int, ...], ratio: float, *, rule: BlockRule
) -> Tensor:
    """`block_mask` of `core.random.uniform`'s noise: bool [B, N]. sample_ids: [B].

    On a GPU both are one kernel: the mask is the same, and of its noise only what it uses is drawn.
    """
    target, n = _target(grid, ratio, rule), grid[0] * grid[1]
    if 0 < target < n + (rule == "official") and runs_kernels(sample_ids):
        return _in_one_kernel(sample_ids, grid, target, rule, shared_hash(seed, epoch, stream))
    noise = uniform(seed, epoch, sample_ids, stream, block_noise_shape(grid, ratio, rule=rule))
    return block_mask(noise, grid, ratio, rule=rule)


def _in_one_kernel(
    source: Tensor, grid: tuple[int, ...], target: int, rule: BlockRule, shared: int | None = None
) -> Tensor:
    from situs.core.block_kernel import sample_blocks

    areas, official = (_MIN_AREA, _MAX_AREA), rule == "official"
    return sample_blocks(source, grid, target, _rounds(target, rule), _ATTEMPTS, areas, _LOG_ASPECT, official, shared)


class _Laid(NamedTuple):
    """Where the blocks stand after some rounds."""

    before: Tensor
    """float [B, H, W]: 1 where a place was not covered before the sample's last round (`paper` only)."""

    free: Tensor
    """float [B, H, W]: 1 where a place is not covered. `paper` lays blocks whole: the last may overshoot."""

    wanted: Tensor
    """float64 [B, 1]: how many places are still to cover."""


class _Tables(NamedTuple):
    """Constants of a grid. Axis 0 is the rows, axis 1 the columns; an interval of cells on either has a code."""

    limit: Tensor
    """float64 [2, 1]: the cells an axis has."""

    origin: Tensor
    """float64 [2, 1]: what an axis adds to the start of its intervals, so that the two do not share codes."""

    log_aspect: Tensor
    """float64 [2, 1]: ±log(1 / 0.3): a tall block is narrow."""

    stride: int
    """The code of an interval is (origin + start) · stride + length."""

    cover: Tensor
    """float [codes, S]: ones on an interval's cells. None where it is as long as its axis, as no block may be."""

    @staticmethod
    def of(grid: tuple[int, ...], device: torch.device) -> _Tables:
        stride = max(grid) + 1
        limit = _column(grid[0], grid[1], device)
        steps = torch.arange(stride, device=device)
        past = steps[:-1] - steps[:, None, None]
        cover = (past >= 0) & (past < steps[:, None]) & (steps[:, None] < limit[:, :, None, None])
        origin, log_aspect = _column(0, stride, device), _column(_LOG_ASPECT, -_LOG_ASPECT, device)
        return _Tables(limit, origin, log_aspect, stride, cover.float().flatten(0, 2))


def _column(a: float, b: float, device: torch.device) -> Tensor:
    """[[a], [b]] in float64, made on the device: copying numbers there would make the host wait."""
    return torch.cat([torch.full((1, 1), float(x), dtype=torch.float64, device=device) for x in (a, b)])


def _lay_blocks(numbers: Tensor, laid: _Laid, tables: _Tables, rule: BlockRule) -> _Laid:
    """One block a round for each sample that still wants places. numbers: [B, R, 4, A]."""
    look = numbers.device.type == "cpu" and not torch.compiler.is_compiling()
    for index, draw in enumerate(numbers.unbind(1)):
        laid = _lay_block(draw.double(), laid, tables, rule)
        if not look:
            continue
        live = laid.wanted.flatten().nonzero().flatten()
        if len(live) == 0 or index + 1 == numbers.shape[1]:
            break
        if 2 * len(live) <= len(numbers):
            # Most samples are done: go on with the others alone. Halving keeps the copies cheap.
            rest = _Laid(*(part[live] for part in laid))
            rest = _lay_blocks(numbers[live, index + 1 :], rest, tables, rule)
            return _Laid(*(part.index_copy_(0, live, new) for part, new in zip(laid, rest, strict=True)))
    return laid


def _lay_block(draw: Tensor, laid: _Laid, tables: _Tables, rule: BlockRule) -> _Laid:
    """The first valid attempt of one round. draw: float64 [B, 4, A]."""
    before, free, wanted = laid
    height, width = free.shape[1:]
    if rule == "paper":
        before = torch.where(wanted.unsqueeze(-1) > 0, free, before)
        least, most = wanted.clamp(max=_MIN_AREA), wanted
    else:
        least, most = torch.full_like(wanted, _MIN_AREA), wanted.clamp(max=_MAX_AREA)
    code = _intervals(draw, least, most, tables)
    rows, columns = functional.embedding(code, tables.cover).unbind(1)
    gain = (rows[..., :height] @ free * columns[..., :width]).sum(dim=-1)
    if rule == "official":
        gain = gain * (gain <= most)
    # `max` of booleans would give value and index at once, but compiled for CUDA its index is not the first.
    first = (gain > 0).to(torch.uint8).argmax(dim=1, keepdim=True)
    gain = gain.gather(1, first)
    # Code 0 is an empty interval: where no attempt is valid, nothing is laid.
    chosen = code.gather(2, first.unsqueeze(1).expand(-1, 2, -1)).squeeze(2) * (gain > 0)
    rows, columns = functional.embedding(chosen, tables.cover).unbind(1)
    free = (free - rows[:, :height, None] * columns[:, None, :width]).relu()
    wanted = (wanted - gain).clamp(min=0) if rule == "paper" else (wanted - gain) * (gain > 0)
    return _Laid(before, free, wanted)


def _intervals(draw: Tensor, least: Tensor, most: Tensor, tables: _Tables) -> Tensor:
    """The row and column intervals of one round's boxes: draw [B, 4, A], areas [B, 1] -> codes [B, 2, A].

    In float64, so that a side is rounded the same way on every device.
    """
    area = torch.lerp(least, most, draw[:, 0]).unsqueeze(1)
    aspect = ((2.0 * draw[:, 1:2] - 1.0) * tables.log_aspect).exp()
    length = (area * aspect).sqrt().round().minimum(tables.limit)
    start = torch.addcmul(tables.origin, draw[:, 2:], tables.limit + 1.0 - length).floor()
    return (start * tables.stride + length).long()


def _cut(before: Tensor, free: Tensor, target: int) -> Tensor:
    """The mask with the last block cut to the target, row by row. before, free: [B, N] -> bool [B, N]."""
    last = before - free
    left = target - (1.0 - before).sum(dim=1, keepdim=True)
    return (before == 0) | ((last > 0) & (last.cumsum(dim=1) <= left))


def _fill(mask: Tensor, wanted: Tensor, noise: Tensor) -> Tensor:
    """Adds the `wanted` [B, 1] places that are still missing: the free ones of the least noise [B, N]."""
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
    """How many blocks a mask may take. Measured with 10⁴ to 10⁶ masks a case on grids from 3×20 to 64×64.

    `official`: no bound on a fair draw. A block adds a place or ends the mask, so `target` rounds always do; and the
    most ever used were 37 of the 52 allowed here (14×14, γ=1, 10⁶ masks), 24 of 30 (8×8), 91 of 190 (32×32).
    `paper`: on 14×14 fewer than one mask in 10⁴ needs more up to γ=.9; past that the rest is filled at random.
    """
    return min(32, 6 + target // 6) if rule == "paper" else min(target, 20 + target // 6)
