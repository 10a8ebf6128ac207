"""The patch-embedding attack: the pixels are the solution of one linear system.

A patch embedding E = X W^T + b followed by an added table has ∂l/∂W = G^T X with G = ∂l/∂E, and ∂l/∂E is also the
gradient of the table's patch rows. Both are in the upload, so X is solved for: attention, labels and loss do not
matter. Exact for one image as long as the N patches are no more than the rank of G, at most D. Local steps on one image
sum both sides over the steps and leave the equation as it is. An attacker who knows how images are normalised also
knows that a pixel is one of 256 values: `bytes` removes the remaining error where the equations confirm them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from situs.audit.attacks.base import (
    FAILED,
    Attack,
    Fact,
    Knowledge,
    Normalisation,
    Ready,
    Recovery,
    Refused,
    absent,
    joined,
    known_numbers,
    spoiled,
    stack,
)
from situs.audit.attacks.equations import Solution, judge, solve_pixels, whiten
from situs.audit.client import known_gradient
from situs.audit.deadline import Deadline
from situs.audit.defences import UNKNOWN, Gradients
from situs.audit.stem import (
    Scaled,
    Stem,
    View,
    fill,
    find_stem,
    flat_weight,
    patch_count,
    require_stem,
    table_rows,
    to_images,
    view_of,
)
from situs.backbones.base import Backbone
from situs.findings import FIT
from situs.methods.base import Method

# ---------------------------------------------------------------------------------------------------------------------
# Pixels as bytes: an image from a file has one of 256 values in every channel, and the attacker knows which.
#
# The patch-embedding attack leaves the pixels X with a normal posterior whose precision over the N patches is the same
# for all K positions in a patch: P = G G^T + 1 after whitening. Where G is nearly singular, the error is large and
# shared by all patches. Whole numbers remove it: the patch that is known best is rounded to its bytes, the others are
# updated accordingly, and so on (Babai's nearest plane, in the order of the least conditional deviation). A rounding
# that is not safe by itself is left open between a few numbers, and later ones decide.
#
# Bytes are accepted only where the equations confirm them: see `Limits`. An image off the lattice (float pixels,
# mixtures, augmentation, noise) is recognised by its distances, and its numbers stay as they were.


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


# ---------------------------------------------------------------------------------------------------------------------
# The patch embedding's equations solved for the image, with its bytes where the equations confirm them.
#
# Where the layer's input are the image's patches, that is `solve_patches`. Where the model transforms the image before
# (`stem.View`), the equations give the layer's input, and `solve_through` goes back from there to the image.


NEAR = 0.25
"""A recovered number counts as a byte if it is no farther from it than this share of the step between bytes."""

UNDONE = 1e-3
"""A transform before the layer counts as undone if the residual is at most this share of the layer's input."""


class System(NamedTuple):
    """∂l/∂W [B, D, K] and G [B, N, D], the type they were sent in, and the deviation of the noise on them."""

    weight: Tensor
    table: Tensor
    sent: torch.dtype
    sigma: float


def solve_patches(
    system: System, normalisation: Normalisation | None, errs: Tensor | None = None
) -> tuple[Solution, list[dict[str, Fact]], Tensor]:
    """The solution, further facts of each upload, and patches [B, N, K] as bytes where these were read.

    Channels are last within K.
    """
    solution = solve_pixels(*system, errs)
    if normalisation is None:
        return solution, [{} for _ in system.weight], solution.patches
    white, right = whiten(*system, errs)
    patches, read = read_bytes(white, right, solution.patches, solution.rank, normalisation)
    shares = read.double().mean(dim=1).tolist()
    return solution, [{"bytes": share == 1, "bytes_share": share} for share in shares], patches


def solve_through(
    view: View, system: System, normalisation: Normalisation | None
) -> tuple[Solution, list[dict[str, Fact]], Tensor]:
    """The solution, further facts of each upload, and images [B, C, H, W]; those of the first uploads if stopped."""
    system, errs = _standardised(view, system)
    columns = None if view.scaled is None or normalisation is None else _by_channel(view.scaled, view.shape)
    if columns is not None and normalisation is not None:
        solution, facts, images = _solve_scaled(view, columns, system, normalisation, errs)
    else:
        solution = solve_pixels(*system, errs)
        unseen = view.unseen() if view.affine else None
        inverted = list[tuple[Tensor, float]]()
        for patches in solution.patches:
            if view.stopped:
                break
            inverted.append(view.image(view.spread * patches + view.centre))
        images = torch.stack([image for image, _ in inverted])
        kind = "affine" if view.affine else "not affine"
        facts = [{"input": kind, "unseen": unseen, "input_residual": residual} for _, residual in inverted]
    for index, fact in enumerate(facts):
        if view.invariant and normalisation is not None:
            images[index] = fill(images[index], view.invariant, normalisation)
        elif normalisation is not None and not fact.get("bytes"):
            rows = slice(index, index + 1)
            one = system._replace(weight=system.weight[rows], table=system.table[rows])
            rounded = _rounded(view, images[index], one, normalisation, errs[rows])
            fact["bytes"] = rounded is not None
            images[index] = images[index] if rounded is None else rounded
        input_residual, residual = fact.get("input_residual"), float(solution.residual[index])
        verdict = None if fact.get("bytes") else _doubt(view, input_residual, residual, system.sigma)
        if verdict is not None:
            fact.update(fits=False, verdict=verdict)
    return solution, facts, images


def see_through(
    patches: Tensor, backbone: Backbone, stem: Stem, known: Knowledge, facts: list[dict[str, Fact]]
) -> Tensor:
    """The images [B, C, H, W] behind patches that another attack recovered, the same number for each of its facts.

    The patches may be right while their layer does not see all of an image: the facts then say so.
    """
    view, normalisation = view_of(backbone, stem), known.normalisation
    if view is None:
        return to_images(patches, backbone, stem)
    noise = known.defence.noise_level(known.step.batch)
    inverted = [view.image(inputs.double()) for inputs in patches]
    unseen, count = view.unseen() if view.affine else None, len(patches) // len(facts)
    for number, fact in enumerate(facts):
        fact["unseen"] = unseen
        residuals = [residual for _, residual in inverted[number * count : (number + 1) * count]]
        doubt = _doubt(view, max(residuals), 0.0, noise)
        if doubt is not None and fact.get("fits"):
            fact.update(dict.fromkeys(fact.keys() & {"proof"}), fits=False, verdict=doubt)
    if view.invariant and normalisation is not None:
        return torch.stack([fill(image, view.invariant, normalisation) for image, _ in inverted])
    return torch.stack([image for image, _ in inverted])


def _standardised(view: View, system: System) -> tuple[System, Tensor]:
    """The equations for the layer's input with mean 0 and deviation 1, as pixels have; and the variance [B, D] that
    this adds to their errors."""
    table = torch.where(system.table.isfinite(), system.table, 0.0)
    moved = (system.weight - table.mT @ view.centre) / view.spread
    step, far = torch.finfo(system.sent).eps / 2, float(view.centre.square().mean()) / view.spread**2
    errs = (step**2 * system.weight.square().nanmean(dim=-1) + system.sigma**2) / view.spread**2
    errs = errs + far * (step**2 * table.square().sum(dim=1) + system.sigma**2 * table.shape[1])
    return system._replace(weight=moved), errs.nan_to_num(0.0)


def _doubt(view: View, input_residual: Fact, residual: float, noise: float) -> str | None:
    """Why an image may be wrong, or one of many, although the layer's input is known. noise: its deviation."""
    if view.invariant:
        whose = "of each channel" if view.invariant == "channel" else "of the image"
        return (
            f"the model's normalisation removes gain and offset {whose}, so the attack cannot recover them. The "
            "picture is therefore scaled from black to white, and its scores understate the leak"
        )
    if not view.affine and isinstance(input_residual, float) and input_residual > max(UNDONE, FIT * residual):
        return "the attack failed, because it could not invert the model's transform before the patch embedding"
    if not view.affine:
        return (
            "the model's transform before the patch embedding is not affine. Several images then give "
            "the patch embedding the same input, and the picture is one of these images"
        )
    if noise and view.scaled is None:
        return (
            "inverting the model's transform before the patch embedding amplifies the noise, so another attack may "
            "come closer to the image"
        )
    return None


def _rounded(view: View, image: Tensor, system: System, normalisation: Normalisation, errs: Tensor) -> Tensor | None:
    """The image [C, H, W] as bytes, if all its numbers are near bytes, the layer sees all, and the equations fit."""
    values = byte_values(*normalisation, device=image.device)
    low, step = values[:, :1, None], ((values[:, 255] - values[:, 0]) / 255)[:, None, None]
    number = ((image - low) / step).round().clamp(0, 255)
    rounded = values.gather(1, number.long().flatten(1)).view_as(image)
    if float(((image - rounded) / step).abs().max()) > NEAR:
        return None
    inputs, _, against = view.feed.derivative(rounded.unsqueeze(0))
    generator = torch.Generator().manual_seed(0)
    if not bool(against(torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype).to(inputs.device)).all()):
        return None  # what the layer does not see is left at 0, which may be a byte by chance
    white, right = whiten(*system, errs)
    return rounded if bool(judge(white, right, (inputs - view.centre) / view.spread, system.sent).fits) else None


# --- maps that only move and scale: bytes are read as from plain patches --------------------------------------------


class _Columns(NamedTuple):
    """Numbers of a patch, [K], in an order with the channels last, and factor and offset of each in that order."""

    order: Tensor
    scale: Tensor
    shift: Tensor


def _by_channel(scaled: Scaled, shape: tuple[int, int, int]) -> _Columns | None:
    """The columns, if each holds one channel with the same factor and offset in every patch, and every channel has as
    many; else None."""
    channel = scaled.index // (shape[1] * shape[2])
    same = bool((channel == channel[:1]).all())
    for part in (scaled.scale, scaled.shift):
        same = same and bool((part - part[:1]).abs().max() <= 1e-9 * part.abs().max())
    scale, owner = scaled.scale[0], channel[0]
    counts = torch.bincount(owner, minlength=shape[0])
    if not same or not bool((scale != 0).all()) or not bool((counts == counts[0]).all()):
        return None
    rank = torch.zeros_like(owner)
    for c in range(shape[0]):
        rank[owner == c] = torch.arange(int(counts[0]), device=owner.device)
    order = (rank * shape[0] + owner).argsort()
    return _Columns(order, scale[order], scaled.shift[0][order])


def _solve_scaled(
    view: View, columns: _Columns, system: System, normalisation: Normalisation, errs: Tensor
) -> tuple[Solution, list[dict[str, Fact]], Tensor]:
    """As `solve_through`, with the pixels themselves as unknowns."""
    assert view.scaled is not None
    factor = columns.scale / view.spread
    pixels = system._replace(weight=system.weight[..., columns.order] / factor)
    errs = errs / float(factor.abs().min()) ** 2
    solution, facts, patches = solve_patches(pixels, normalisation, errs)
    where = view.scaled.index[:, columns.order].flatten()
    size = int(torch.tensor(view.shape).prod())
    images = patches.new_zeros(len(patches), size).index_add_(1, where, patches.flatten(1))
    times = torch.bincount(where, minlength=size).to(images)
    images = (images / times.clamp(min=1)).view(-1, *view.shape)
    unseen = int((times == 0).sum())
    facts = [fact | {"input": "affine", "unseen": unseen, "bytes": fact["bytes"] and not unseen} for fact in facts]
    return solution, facts, images


# --- the attack ------------------------------------------------------------------------------------------------------


THROUGH = 120.0
"""Seconds for all images together where the transform before the patch embedding is undone step by step."""


def _verdict(fact: dict[str, Fact], eps: float, exact: bool) -> str | None:
    """Why a solution may not be exact: its equations do not fit, or G is singular up to the rounding of the upload.

    exact: whether it should be, since no caveat applies.
    """
    if fact.get("bytes"):
        return None
    if not fact["fits"]:
        return FAILED
    if not exact:
        return None
    if fact["rank"] != fact["unknowns"]:
        return (
            "for some images rounding and noise make the rank of G (the gradient of the position table) lower than "
            "the number of patches, so the solution is not unique"
        )
    if isinstance(fact["condition"], float) and fact["condition"] * eps > 0.1:
        return (
            "for some images the gradient of the position table, G, is nearly singular (condition number above "
            f"{0.1 / eps:.0e}): weak directions are lost to rounding"
        )
    return None


def _caveat(backbone: Backbone, stem: Stem, known: Knowledge) -> str | None:
    if known.step.batch > 1:
        return (
            f"in a batch of {known.step.batch}, the rows of the position table's gradient are sums over the images, "
            "and no linear system separates the images. All images of the batch get the same solution"
        )
    patches = patch_count(backbone, stem)
    if patches > backbone.dim:
        return (
            f"there are more patches ({patches}) than channels ({backbone.dim}), so the system is "
            "under-determined. The solution of least norm is shown"
            + ". But if only one solution has whole numbers from 0 to 255 in all pixels, this solution is shown"
            * (known.normalisation is not None)
        )
    return None


class PatchEmbedding(Attack):
    """∂l/∂W_patch = G^T X, solved for X."""

    needs: ClassVar[str] = "gradients of the patch embedding and of a learned position table"
    difference: ClassVar[str] = (
        "puts the position table's gradient into the equation of the patch embedding. This equation holds for any "
        "kind of block. APRIL puts the table's gradient into the equation of the first attention"
    )
    measured: ClassVar[str] = "benchmarks/gradients.py"
    name: ClassVar[str] = "patchembed"
    about: ClassVar[str] = "one linear solve with the gradients of the patch embedding and of the position table"
    closed_form: ClassVar[bool] = True

    def spoiled(self, known: Knowledge, noise: float) -> str | None:
        """Whatever is dropped behind the table leaves both of its sides as they are."""
        return spoiled(replace(known, step=replace(known.step, dropout=0.0)), noise)

    def prepare(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> Ready | Refused:
        stem = find_stem(backbone)
        if isinstance(stem, str):
            return Refused(stem)
        bias, view = () if stem.bias is None else (stem.bias,), view_of(backbone, stem)
        limit = None if view is None or view.affine else THROUGH
        reads = tuple(dict.fromkeys((stem.weight, stem.table, *bias, UNKNOWN)))
        return absent(sent, (stem.weight, stem.table)) or Ready(reads, _caveat(backbone, stem, known), limit)

    def recover(
        self, backbone: Backbone, uploads: Sequence[Gradients], known: Knowledge, deadline: Deadline
    ) -> Recovery:
        uploads = [known.without_lost(upload) for upload in uploads]
        # int8: every upload has a scale of its own.
        groups = [[upload] for upload in uploads] if known.step.dtype == torch.int8 else [uploads]
        parts: list[Recovery] = []
        for group in groups:
            if parts and parts[-1].partial is not None:
                break
            parts.append(self.recover_shown(backbone, group, known, deadline))
        recovery = joined(parts)
        if known.hides(backbone):
            for fact in recovery.facts:  # hidden patches are no part of these equations, whatever noise explains
                fact.update(fits=False, verdict=FAILED)
        return recovery

    def recover_shown(
        self,
        backbone: Backbone,
        uploads: Sequence[Gradients],
        known: Knowledge,
        deadline: Deadline,
    ) -> Recovery:
        """The images behind uploads without hidden patches; of the first uploads where the deadline ends before the
        transform before the patch embedding is undone for all."""
        stem, trained = require_stem(backbone), known.trained(backbone)
        table = torch.stack([patch_rows(trained, stem, upload, known) for upload in uploads])
        weight = flat_weight(stack(uploads, stem.weight), stem)
        sent, sigma = _errors(uploads[0], stem, known, table.shape[1])
        system = System(weight, table, sent, sigma)
        view = view_of(backbone, stem)
        normalisation = known.normalisation if known.step.batch == 1 else None
        if view is None:
            errs = [known.variance(part) for part in (weight, table)]
            variance = None if errs[0] is None or errs[1] is None else errs[0].mean(dim=2) + errs[1].sum(dim=1)
            solution, more, patches = solve_patches(system, normalisation, variance)
            images = to_images(patches, backbone, stem)
        else:
            view.stop = deadline.over
            solution, more, images = solve_through(view, system, normalisation)
        exact = _caveat(backbone, stem, known) is None
        facts: list[dict[str, Fact]] = []
        for index, further in enumerate(more):
            fact = facts_of(solution, index, table.shape[1]) | further
            # The rows of a batch are sums: noise may explain the misfit of a solution that cannot be right.
            fact["fits"] = known.step.batch == 1 and bool(fact["fits"] or fact.get("bytes"))
            fact["verdict"] = further.get("verdict") or _verdict(fact, torch.finfo(system.sent).eps, exact)
            facts.append(fact)
        cut = "a part of inverting the transform before the patch embedding, for the image that was attacked last"
        return Recovery(images.float(), facts, partial=cut if view is not None and view.stopped else None)


def _errors(upload: Gradients, stem: Stem, known: Knowledge, patches: int) -> tuple[torch.dtype, float]:
    """The type of the upload, and the deviation of uniform errors on its numbers.

    An equation has one number of the weight's gradient and as many of the table's as there are patches.
    """
    weight, table = (known.noise_on(upload[name]) for name in (stem.weight, stem.table))
    return known.type_of(upload[stem.table]), math.sqrt((weight**2 + patches * table**2) / (1 + patches))


def facts_of(solution: Solution, index: int, unknowns: int) -> dict[str, Fact]:
    """What the attacker can say of the solution of one upload."""
    condition = float(solution.condition[index])
    return {
        "rank": int(solution.rank[index]),
        "unknowns": unknowns,
        "condition": condition if math.isfinite(condition) else None,
        "residual": float(solution.residual[index]),
        "expected_residual": float(solution.expected[index]),
        "fits": bool(solution.fits[index]),
        "open": float(solution.open[index]),
    }


# --- the table's gradient without what a loss on the table adds -----------------------------------------------------
# DAL, MJP's loss on the table, has a gradient that the attacker computes. Clipping shrinks it by the factor that it
# leaves on all gradients; the attacker does not know it and estimates it.


def patch_rows(method: Method, stem: Stem, upload: Gradients, known: Knowledge) -> Tensor:
    """∂l/∂E_pos on the patch rows of one upload in float64, [N, D]; NaN where it overflowed."""
    rows = known_numbers(table_rows(upload[stem.table], stem))
    extra = known_gradient(method, stem, upload, known.step.when._replace(seed=known.step.seed))
    if extra is None:
        return rows
    extra = extra.double()
    return rows - _factor(extra, rows, stem, upload, known) * extra


def _factor(extra: Tensor, rows: Tensor, stem: Stem, upload: Gradients, known: Knowledge) -> float:
    """What clipping left of DAL's gradient `extra` [N, D]: a factor in [0, 1], taken as 1 where no bias tells it.

    The gradient of the patch embedding's bias is the sum over all tokens; what the table and E_unk have beyond it is
    DAL's.
    """
    if not known.defence.per_sample or stem.bias is None or stem.bias not in upload:
        return 1.0
    whole = extra.sum(dim=0)
    hidden = upload.get(UNKNOWN, torch.zeros_like(upload[stem.bias]))
    left = rows.sum(dim=0) + known_numbers(hidden) - known_numbers(upload[stem.bias])
    finite = left.isfinite()
    whole, left = whole[finite], left[finite]
    return float((whole @ left / (whole @ whole).clamp(min=1e-300)).clamp(0, 1))
