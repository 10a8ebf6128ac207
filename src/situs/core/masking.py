"""Which tokens are kept, masked or shuffled: every sampler is a pure function of uniform noise in [0, 1).

Draw the noise with `core.random.uniform` (or `uniform_from`). Nothing here waits for the device: on an accelerator
there is no branch on a tensor's content. On the CPU, where looking is free, the block sampler stops early.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from situs.errors import SitusError, unknown_name

BlockRule = Literal["paper", "official"]

_MIN_AREA = 8
_MAX_AREA = 75
_LOG_ASPECT = -math.log(0.3)
_ATTEMPTS = 10
_NUMBERS = 4
"""Numbers an attempt takes: area, aspect, top, left."""


class Subset(NamedTuple):
    """A split of the places 0..N-1; `kept` and `dropped` side by side are a permutation."""

    kept: Tensor
    """[B, K], in the order of the noise."""
    dropped: Tensor
    """[B, N - K], likewise."""


def count_of(ratio: float, n: int) -> int:
    """int(ratio · n) as a person reckons it: 0.29 of 100 is 29, though 0.29 * 100 is 28.999999999999996 in floats."""
    return min(n, int(ratio * n + 1e-6))


def random_subset(noise: Tensor, ratio: float, *, flag: str = "--ratio") -> Subset:
    """Drop int(ratio · N) of N places at random, for each sample.

    noise: [B, N]; flag: the command line's name of the ratio, for the error.
    """
    if not 0.0 <= ratio < 1.0:
        raise SitusError(f"{_name(flag)}={ratio}: must be in [0, 1) ({flag})")
    n = noise.shape[-1]
    order = noise.argsort(dim=-1, stable=True)
    keep = n - count_of(ratio, n)
    return Subset(order[..., :keep], order[..., keep:])


def jigsaw(mask: Tensor, noise: Tensor) -> Tensor:
    """A uniform random permutation of the masked places among themselves; the others stay. Fixed points may happen.

    mask: bool [B, N], or [N] for one shuffle of the whole batch; noise: the same shape -> index like mask.
    """
    if mask.dtype != torch.bool or mask.shape != noise.shape:
        raise SitusError(
            f"jigsaw: mask is {mask.dtype} of shape {tuple(mask.shape)} and noise has shape {tuple(noise.shape)};"
            " the mask must be torch.bool and both of one shape"
        )
    # Both lists name the masked places first, then the others in order: the k-th masked place receives the
    # k-th of the shuffled ones, and each other place receives itself.
    places = (~mask).to(torch.uint8).argsort(dim=-1, stable=True)
    shuffled = torch.where(mask, noise, 2.0).argsort(dim=-1, stable=True)
    return torch.empty_like(places).scatter_(-1, places, shuffled)


def block_noise_shape(grid: tuple[int, int], ratio: float, *, rule: BlockRule = "paper") -> tuple[int]:
    """The shape of noise one sample's `block_mask` takes: `uniform(seed, epoch, ids, stream, block_noise_shape(...))`."""
    target = _target(grid, ratio, rule)
    return (_rounds(target, rule) * _NUMBERS * _ATTEMPTS + (grid[0] * grid[1] if rule == "paper" else 0),)


def block_mask(noise: Tensor, grid: tuple[int, int], ratio: float, *, rule: BlockRule = "paper") -> Tensor:
    """Block-wise masks: rectangles laid one after the other until int(γN) places are covered.

    noise: [B, *block_noise_shape(grid, ratio, rule=rule)] -> mask: bool [B, N], N = grid height · width. ratio: γ.

    A block's area is uniform between a least and the places still wanted, its aspect log-uniform in [0.3, 1/0.3], it
    is strictly smaller than the grid in both directions, and of 10 attempts the first that adds a new place is laid.

    `paper`: exactly int(γN) places. The least area is min(8, wanted); a last block that would overshoot is cut, its new
    places kept row by row; places still wanted after the rounds are filled uniformly at random.
    `official`: as the published code does. The area lies between 8 and min(wanted, 75), also when that is below 8; a
    block that would overshoot is refused; the first block whose 10 attempts all fail ends the mask. So γ is an upper
    bound. There one mask serves a whole batch: draw it with one sample's noise and expand it.

    A grid of one row or column has no strictly smaller block: `official` leaves it empty, `paper` fills at random.
    """
    target = _target(grid, ratio, rule)
    rounds, n = _rounds(target, rule), grid[0] * grid[1]
    if noise.dim() != 2 or noise.shape[1:] != block_noise_shape(grid, ratio, rule=rule):
        raise SitusError(
            f"block_mask: noise has shape {tuple(noise.shape)}; for grid={grid}, ratio={ratio}, rule={rule!r} it must be"
            f" [B, {block_noise_shape(grid, ratio, rule=rule)[0]}]"
        )
    if target == 0 or (target == n and rule == "paper"):
        return torch.full((noise.shape[0], n), target > 0, dtype=torch.bool, device=noise.device)
    size = rounds * _NUMBERS * _ATTEMPTS
    numbers = noise[:, :size].view(-1, rounds, _NUMBERS, _ATTEMPTS)
    empty = torch.ones((noise.shape[0], *grid), device=noise.device)
    wanted = torch.full((noise.shape[0], 1), float(target), dtype=torch.float64, device=noise.device)
    laid = _lay_blocks(numbers, _Laid(empty, empty, wanted), rule)
    if rule == "official":
        return laid.free.flatten(1) == 0
    mask = _cut(laid.before.flatten(1), laid.free.flatten(1), target)
    return _fill(mask, laid.wanted, noise[:, size:])


class _Laid(NamedTuple):
    """Where the blocks stand after some rounds."""

    before: Tensor
    """float [B, H, W]: 1 where a place was not covered before the sample's last round."""
    free: Tensor
    """float [B, H, W]: 1 where a place is not covered. `paper` lays blocks whole, so the last may overshoot."""
    wanted: Tensor
    """float64 [B, 1]: how many places are still to cover."""


def _lay_blocks(numbers: Tensor, laid: _Laid, rule: BlockRule) -> _Laid:
    """One block a round for each sample that still wants places. numbers: [B, R, 4, A]."""
    look = numbers.device.type == "cpu" and not torch.compiler.is_compiling()
    table = _interval_table(max(laid.free.shape[1:]), numbers.device)
    for index, draw in enumerate(numbers.unbind(1)):
        laid = _lay_block(draw.double(), laid, table, rule)
        if look:
            live = laid.wanted.flatten().nonzero().flatten()
            if 2 * len(live) <= len(numbers):
                # Most samples are done: go on with the others alone. Halving keeps the copies cheap.
                if len(live) == 0 or index + 1 == numbers.shape[1]:
                    return laid
                rest = _lay_blocks(numbers[live, index + 1 :], _Laid(*(part[live] for part in laid)), rule)
                return _Laid(*(part.index_copy_(0, live, new) for part, new in zip(laid, rest, strict=True)))
    return laid


def _lay_block(draw: Tensor, laid: _Laid, table: Tensor, rule: BlockRule) -> _Laid:
    """The first valid attempt of one round. draw: float64 [B, 4, A]; table: `_interval_table`."""
    before, free, wanted = laid
    height, width = free.shape[1:]
    if rule == "paper":
        before = torch.where(wanted.unsqueeze(-1) > 0, free, before)
        least, most = wanted.clamp(max=_MIN_AREA), wanted
    else:
        least, most = torch.full_like(wanted, _MIN_AREA), wanted.clamp(max=_MAX_AREA)
    code, valid = _boxes(draw, least, most, (height, width))
    rows, columns = functional.embedding(code, table).unbind(1)
    gain = torch.linalg.vecdot(rows[..., :height] @ free, columns[..., :width])
    valid = valid & (gain > 0)
    if rule == "official":
        valid = valid & (gain <= most)
    first = valid.to(torch.uint8).argmax(dim=1, keepdim=True)
    gain = (gain * valid).gather(1, first)
    # Code 0 is the empty interval: where no attempt is valid, nothing is laid.
    chosen = (code * valid.unsqueeze(1)).gather(2, first.unsqueeze(1).expand(-1, 2, -1))
    rows, columns = functional.embedding(chosen.squeeze(2), table).unbind(1)
    free = (free - rows[:, :height, None] * columns[:, None, :width]).relu()
    wanted = (wanted - gain).clamp(min=0) if rule == "paper" else (wanted - gain) * (gain > 0)
    return _Laid(before, free, wanted)


def _boxes(draw: Tensor, least: Tensor, most: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The boxes of one round's attempts: draw [B, 4, A], least and most area [B, 1] -> (codes of the row and the
    column interval [B, 2, A], whether the box is strictly smaller than the grid [B, A]).

    In float64: a rounding then falls the same way on every device and in any language.
    """
    height, width = grid
    area = least + (most - least) * draw[:, 0]
    aspect = ((2.0 * draw[:, 1] - 1.0) * _LOG_ASPECT).exp()
    tall = (area * aspect).sqrt().round()
    wide = (area / aspect).sqrt().round()
    inside = (tall < height) & (wide < width)
    # A box that is too large would have no place: it counts as empty, and is not valid.
    tall, wide = tall * inside, wide * inside
    top = (draw[:, 2] * (height + 1.0 - tall)).floor()
    left = (draw[:, 3] * (width + 1.0 - wide)).floor()
    stride = max(grid) + 1
    return torch.stack((top * stride + tall, left * stride + wide), dim=1).long(), inside


def _interval_table(size: int, device: torch.device) -> Tensor:
    """Row `start · (size + 1) + length` has ones on start, ..., start + length - 1: [(size + 1)², size]."""
    steps = torch.arange(size + 1, device=device)
    past = torch.arange(size, device=device) - steps[:, None, None]
    return ((past >= 0) & (past < steps[:, None])).float().flatten(0, 1)


def _cut(before: Tensor, free: Tensor, target: int) -> Tensor:
    """The mask with the last block cut to the target, row by row. before, free: [B, N] floats -> bool [B, N]."""
    last = before - free
    room = target - (1.0 - before).sum(dim=1, keepdim=True)
    return (before == 0) | ((last > 0) & (last.cumsum(dim=1) <= room))


def _fill(mask: Tensor, wanted: Tensor, noise: Tensor) -> Tensor:
    """Adds the `wanted` [B, 1] places that are still missing, those of the least noise [B, N]."""
    if mask.device.type == "cpu" and not torch.compiler.is_compiling() and not wanted.any():
        return mask
    order = torch.where(mask, 2.0, noise).argsort(dim=1, stable=True)
    chosen = torch.arange(mask.shape[1], device=mask.device) < wanted
    return mask | torch.zeros_like(mask).scatter_(1, order, chosen)


def _target(grid: tuple[int, int], ratio: float, rule: BlockRule) -> int:
    if rule not in ("paper", "official"):
        raise unknown_name("block rule", rule, ("paper", "official"))
    if not 0.0 <= ratio <= 1.0:
        raise SitusError(f"ratio={ratio}: must be in [0, 1]")
    if min(grid) < 1:
        raise SitusError(f"grid={grid}: must have at least one row and one column")
    return count_of(ratio, grid[0] * grid[1])


def _rounds(target: int, rule: BlockRule) -> int:
    rounds = 8 + target // 4
    return min(32, rounds) if rule == "paper" else rounds


def _name(flag: str) -> str:
    return flag.rsplit(".", 1)[-1].lstrip("-").replace("-", "_")
