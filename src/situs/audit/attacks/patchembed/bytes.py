"""Pixels as bytes: an image from a file has one of 256 values in every channel, and the attacker knows which.

The patch-embedding attack leaves the pixels X with a normal posterior whose precision over the N patches is the same
for all K positions in a patch: P = G G^T + 1 after whitening. Where G is nearly singular, the error is large and shared
by all patches. Whole numbers remove it: the patch that is known best is rounded to its bytes, the others are updated
accordingly, and so on (Babai's nearest plane, in the order of the least conditional deviation). A rounding that is not
safe by itself is left open between a few numbers, and later ones decide.

Bytes are accepted only where the equations confirm them: see `Limits`. An image off the lattice (float pixels,
mixtures, augmentation, noise) is recognised by its distances, and its numbers stay as they were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

FLOAT = 2.0**-21
"""The largest distance of a normalised pixel from its byte by float32's rounding, in any order of normalising."""


SHRINK = 16
"""Decisions after which the columns of decided patches are dropped."""


@dataclass(frozen=True)
class Limits:
    """When the bytes of one position in the patch (N numbers, one a patch) are accepted. Distances are in deviations.

    mean_square: of the N distances from the conditional means to the bytes. 1 is expected of bytes, and numbers off the
    lattice have 12 if the step is 12 deviations, 830 if it is 100. Sums in float32 err unevenly, up to 6 was seen:
    where a step is far more than the deviation of the least known patch, its `fine`-th part is allowed, up to
    mean_square_fine. largest: any one distance, growing likewise. margin: by which the next best bytes must fit worse
    (difference of squared distances; 20 is odds of 22,000 to 1). chance: natural logarithm of the probability, at most,
    with which N numbers off the lattice pass the first limit. share: of an image's positions that must pass, else none
    is accepted. safe: deviations a step must have to be rounded at once. width: how many candidates an open rounding
    keeps, and reach: how many bytes up and down it tries; wide, far: the same in a second attempt at the positions that
    did not pass, in a channel of which some did.
    """

    mean_square: float = 6.0
    mean_square_fine: float = 100.0
    fine: float = 50.0
    largest: float = 16.0
    margin: float = 20.0
    chance: float = -20.0
    share: float = 0.5
    safe: float = 12.0
    width: int = 16
    reach: int = 2
    wide: int = 256
    far: int = 5


class ByteReading(NamedTuple):
    """patches [B, N, K]: bytes where they were read, else unchanged. read [B, K]: at which positions of the patch."""

    patches: Tensor
    read: Tensor


class Posterior(NamedTuple):
    """mean [B, N, K], and root [B, N, N] of the covariance root^T root over the patches, the same for all K."""

    mean: Tensor
    root: Tensor


class Order(NamedTuple):
    """index [B, N]: patches in the order of decision. sigma [B, N]: deviation of each, conditional on those before it.

    gain [B, N, N], strictly upper: what a correction of the s-th decided patch adds to the mean of the t-th.
    """

    index: Tensor
    sigma: Tensor
    gain: Tensor


def byte_values(mean: Sequence[float], std: Sequence[float], device: torch.device | None = None) -> Tensor:
    """The 256 values of each channel as a loader makes them in float32, [C, 256] float64."""
    m, s = (torch.tensor(part, dtype=torch.float32, device=device).unsqueeze(1) for part in (mean, std))
    return ((torch.arange(256, dtype=torch.float32, device=device) / 255 - m) / s).double()


def posterior(white: Tensor, right: Tensor, spread: Tensor) -> Posterior:
    """Of X in white^T X = right with errors of deviation spread [B], prior N(0, 1); white [B, N, D], right [B, D, K].

    By QR of the equations with the prior below them: squares would lose the digits of the weakest directions. Only R is
    computed, and the mean by solving with it twice more for the residual, which is as exact as with Q.
    """
    n = white.shape[-2]
    table, side = white / spread[:, None, None], right / spread[:, None, None]
    one = torch.eye(n, dtype=white.dtype, device=white.device).expand(len(white), n, n)
    _, r = torch.linalg.qr(torch.cat([table.mT, one], dim=1), mode="r")
    mean = torch.zeros(len(white), n, right.shape[2], dtype=white.dtype, device=white.device)
    for _ in range(3):
        residual = table @ (side - table.mT @ mean) - mean
        half = torch.linalg.solve_triangular(r.mT, residual, upper=False)
        mean = mean + torch.linalg.solve_triangular(r, half, upper=True)
    return Posterior(mean, torch.linalg.solve_triangular(r.mT, one, upper=False))


def decision_order(root: Tensor) -> Tensor:
    """The patch of least deviation first, then that of least conditional deviation, and so on, [B, N]."""
    batch, n = root.shape[:2]
    left = torch.arange(n, device=root.device).expand(batch, n)  # the patches of root's columns
    index, done = [], torch.zeros_like(left, dtype=torch.bool)
    for step in range(n):
        if step and step % SHRINK == 0:
            rest = (~done).nonzero()[:, 1].view(batch, n - step)
            left, root = left.gather(1, rest), root.gather(2, rest.unsqueeze(1).expand(-1, n, -1))
            done = torch.zeros_like(left, dtype=torch.bool)
        least, chosen = root.norm(dim=1).masked_fill(done, torch.inf).min(dim=1, keepdim=True)
        axis = root.gather(2, chosen.unsqueeze(1).expand(-1, n, -1)) / least.unsqueeze(1)
        root = torch.baddbmm(root, axis, axis.mT @ root, alpha=-1)
        done.scatter_(1, chosen, True)
        index.append(left.gather(1, chosen))
    return torch.cat(index, dim=1)


def in_order(root: Tensor, index: Tensor) -> Order:
    """Deviations and gains of patches decided in a given order [B, N]; root: [B, N, N]."""
    r = torch.linalg.qr(root.gather(2, index.unsqueeze(1).expand_as(root)), mode="r")[1]
    diagonal = r.diagonal(dim1=1, dim2=2)
    return Order(index, diagonal.abs(), (r / diagonal.unsqueeze(2)).triu(1))


def read_bytes(
    white: Tensor,
    right: Tensor,
    patches: Tensor,
    rank: Tensor,
    normalisation: tuple[Sequence[float], Sequence[float]],
    limits: Limits | None = None,
) -> ByteReading:
    """The bytes of images from their whitened equations, where these confirm them; else `patches` as they are.

    white [B, N, D] and right [B, D, K]: equations white^T X = right, errors of deviation near 1. patches [B, N, K]:
    their solution in real numbers, channels last within K. rank [B]: of white. The size of the errors is estimated from
    the redundant equations, for each channel by itself: sums in float32 err with the brightness.
    """
    limits = Limits() if limits is None else limits
    values = byte_values(*normalisation, device=white.device)
    result = patches.clone()
    read = torch.zeros(len(white), patches.shape[2], dtype=torch.bool, device=white.device)
    at_once = max(1, 2**27 // (patches[0].numel() * limits.width))
    for rows in torch.arange(len(white), device=white.device).split(at_once):
        bytes_, fits = _read_channels(white[rows], right[rows], patches[rows], rank[rows], values, limits)
        fits &= fits.double().mean(dim=1, keepdim=True) >= limits.share
        result[rows] = torch.where(fits.unsqueeze(1), bytes_, patches[rows])
        read[rows] = fits
    return ByteReading(result, read)


def _read_channels(
    white: Tensor, right: Tensor, patches: Tensor, rank: Tensor, values: Tensor, limits: Limits
) -> tuple[Tensor, Tensor]:
    """Bytes [B, N, K] and where they fit [B, K], each channel a system of its own; values: [C, 256]."""
    channels = len(values)
    right, patches = (_apart(part, channels) for part in (right, patches))
    white, rank, values = (
        white.repeat_interleave(channels, 0),
        rank.repeat_interleave(channels),
        values.repeat(len(white), 1),
    )
    used = (white != 0).any(dim=1).sum(dim=1)  # an overflowed number makes no equation
    spare = (used - rank).clamp(min=0) * right.shape[2]
    residual = (right - white.mT @ patches).square().sum(dim=(1, 2))
    normal = posterior(white, right, ((residual + 1) / (spare + 1)).sqrt())
    # Channels differ in the size of their errors alone: one order serves all of an image.
    order = in_order(normal.root, decision_order(normal.root[::channels]).repeat_interleave(channels, 0))
    fits = torch.zeros_like(patches[:, 0], dtype=torch.bool)
    rows = _hopeful(order.sigma, _step(values), limits).nonzero().flatten()
    if len(rows):
        part = Order(*(field[rows] for field in order))
        where = part.index.unsqueeze(2).expand(-1, -1, patches.shape[2])
        mean = normal.mean[rows].gather(1, where)
        bytes_, fitted = nearest_bytes(mean, part, values[rows], limits)
        _try_again(bytes_, fitted, mean, part, values[rows], limits)
        fits[rows] = fitted
        patches[rows] = torch.empty_like(bytes_).scatter_(1, where, bytes_)
    return _together(patches, channels), _together(fits.unsqueeze(1), channels).squeeze(1)


def _try_again(bytes_: Tensor, fits: Tensor, mean: Tensor, order: Order, values: Tensor, limits: Limits) -> None:
    """A wider search at the positions that did not pass, written into bytes_ [B, N, K] and fits [B, K]."""
    wider = replace(limits, width=limits.wide, reach=limits.far)
    share = fits.double().mean(dim=1)
    for i in ((share >= 0.05) & (share < 1)).nonzero().flatten().tolist():
        one, failed = slice(i, i + 1), (~fits[i]).nonzero().flatten()
        part = Order(*(field[one] for field in order))
        wider_bytes, fitted = nearest_bytes(mean[one, :, failed], part, values[one], wider)
        bytes_[i, :, failed] = wider_bytes[0]
        fits[i, failed] = fitted[0]


def _apart(numbers: Tensor, channels: int) -> Tensor:
    """[B, M, K] with channels last within K -> a copy [B · C, M, K / C]."""
    return numbers.unflatten(2, (-1, channels)).movedim(3, 1).flatten(0, 1).clone()


def _together(numbers: Tensor, channels: int) -> Tensor:
    """The way back: [B · C, M, K / C] -> [B, M, K]."""
    return numbers.unflatten(0, (-1, channels)).movedim(1, 3).flatten(2)


def _hopeful(sigma: Tensor, step: Tensor, limits: Limits) -> Tensor:
    """Where safe roundings can tell bytes from other numbers and the open ones are few enough, [B] bool; step: [B].

    The probability is that of a uniform point in a cell to lie in the ball of `mean_square`, whose volume is at most
    (2πe · mean_square)^(n/2) with the deviations as units.
    """
    n, step = sigma.shape[1], step.unsqueeze(1)
    sigma = (sigma.square() + FLOAT**2).sqrt()
    safe = sigma * limits.safe <= step
    count = safe.sum(dim=1, keepdim=True).clamp(min=1)
    ball = (2 * math.pi * math.e * limits.mean_square * n / count).sqrt()
    chance = (sigma * ball / step).log().where(safe, 0.0).sum(dim=1) + math.log(limits.wide)
    # A normal number of deviation sigma is about as open as (2πe)^(1/2) sigma / step equally likely bytes.
    numbers = ((2 * math.pi * math.e) ** 0.5 * sigma / step).clamp(min=1).log().where(~safe, 0.0).sum(dim=1)
    return (chance <= limits.chance) & (numbers <= math.log(50 * limits.wide))


class _Lines(NamedTuple):
    """The candidates that are still tried, L for each position in the patch.

    moved [B, L, N, K]: corrections so far. bytes [B, L, N, K] uint8. cost [B, L, K]: sum of squared distances. peak
    [B, L, K]: the largest distance. margin [B, L, K]: least cost of any other choice at a safe rounding.
    """

    moved: Tensor
    bytes: Tensor
    cost: Tensor
    peak: Tensor
    margin: Tensor


def nearest_bytes(mean: Tensor, order: Order, values: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    """Values on the lattice [B, N, K] in the order of decision, and where they pass all limits but `share` [B, K].

    mean: [B, N, K], the posterior's, in the order of decision. values: [B, 256], of the bytes.
    """
    batch, n, k = mean.shape
    low, step = values[:, :1, None], _step(values)[:, None, None]
    sigma = (order.sigma.square() + FLOAT**2).sqrt()
    is_open = (sigma * limits.safe > step.squeeze(2)).any(dim=0).tolist()
    none = mean.new_zeros(batch, 1, k)
    empty = mean.new_zeros(batch, 1, n, k)
    lines = _Lines(empty, empty.to(torch.uint8), none, none, none + torch.inf)
    for t in range(n):
        known = order.gain[:, None, None, :t, t] @ lines.moved[:, :, :t]
        centre = mean[:, None, t] + known.squeeze(2)
        nearest = ((centre - low) / step).round().clamp(0, 255).long()
        decide = _open if is_open[t] else _close
        lines = decide(lines, t, centre, nearest, values, sigma[:, t, None, None], limits)
    best = lines.cost.argmin(dim=1, keepdim=True)
    others = lines.cost.scatter(1, best, torch.inf).amin(dim=1)
    cost, peak, margin = (part.gather(1, best).squeeze(1) for part in (lines.cost, lines.peak, lines.margin))
    chosen = lines.bytes.gather(1, best.unsqueeze(2).expand(-1, -1, n, -1)).squeeze(1)
    square = (step.squeeze(2) / sigma.amax(dim=1, keepdim=True) / limits.fine).square()
    square = square.clamp(limits.mean_square, limits.mean_square_fine)
    fits = (cost <= n * square) & (peak <= limits.largest * (square / limits.mean_square).sqrt())
    fits &= torch.minimum(margin, others - cost) >= limits.margin
    return _look_up(values, chosen.long()), fits


def _step(values: Tensor) -> Tensor:
    """Between bytes, [B], of values [B, 256]; over the whole range, since each is rounded to float32."""
    return (values[:, 255] - values[:, 0]) / 255


def _look_up(values: Tensor, bytes_: Tensor) -> Tensor:
    """The values [B, ...] of bytes [B, ...]; values: [B, 256]."""
    return values.gather(1, bytes_.flatten(1)).view(bytes_.shape)


def _close(
    lines: _Lines,
    t: int,
    centre: Tensor,
    nearest: Tensor,
    values: Tensor,
    sigma: Tensor,
    limits: Limits,  # noqa: ARG001
) -> _Lines:
    """The t-th patch rounded to the nearest bytes."""
    step = _step(values)[:, None, None]
    moved = _look_up(values, nearest) - centre
    lines.moved[:, :, t] = moved
    lines.bytes[:, :, t] = nearest.to(torch.uint8)
    distance = moved.abs()
    # The next byte lies on the mean's side of this one, unless that is beyond 0 or 255.
    beyond = ((moved > 0) & (nearest == 0)) | ((moved < 0) & (nearest == 255))
    other = torch.where(beyond, step + distance, step - distance)
    margin = (other.square() - distance.square()) / sigma.square()
    distance = distance / sigma
    return _Lines(
        lines.moved,
        lines.bytes,
        lines.cost + distance.square(),
        torch.maximum(lines.peak, distance),
        torch.minimum(lines.margin, margin),
    )


def _open(
    lines: _Lines, t: int, centre: Tensor, nearest: Tensor, values: Tensor, sigma: Tensor, limits: Limits
) -> _Lines:
    """The t-th patch with each of the bytes around the nearest; the `width` cheapest candidates go on."""
    tried = 2 * limits.reach + 1
    offsets = torch.arange(tried, device=nearest.device).view(1, 1, tried, 1) - limits.reach
    numbers = nearest.unsqueeze(2) + offsets
    outside = (numbers < 0) | (numbers > 255)
    numbers = numbers.clamp(0, 255)
    moved = _look_up(values, numbers) - centre.unsqueeze(2)
    distance = moved.abs() / sigma.unsqueeze(2)
    cost = (lines.cost.unsqueeze(2) + distance.square()).masked_fill(outside, torch.inf).flatten(1, 2)
    cost, cheapest = cost.topk(min(limits.width, cost.shape[1]), dim=1, largest=False)
    parent = cheapest // tried
    moved, numbers, distance = (part.flatten(1, 2).gather(1, cheapest) for part in (moved, numbers, distance))
    n = lines.moved.shape[2]
    history = parent.unsqueeze(2).expand(-1, -1, n, -1)
    longer = _Lines(
        lines.moved.gather(1, history),
        lines.bytes.gather(1, history),
        cost,
        torch.maximum(lines.peak.gather(1, parent), distance),
        lines.margin.gather(1, parent),
    )
    longer.moved[:, :, t] = moved
    longer.bytes[:, :, t] = numbers.to(torch.uint8)
    return longer
