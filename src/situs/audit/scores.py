"""Similarity of a recovered image to the original: per image, then a mean with its 95 % interval.

Images are floats [n, C, H, W] in [0, 1] (`denormalise` gives them). Beside the usual metrics there are three that a
permutation of patches cannot fool: best-match PSNR per patch, order accuracy and re-identification in a gallery.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load
from torch import Tensor

from situs.audit.attacks.base import Fact, Normalisation, Recovery
from situs.backbones.base import Backbone
from situs.core.tokens import Size, patchify
from situs.errors import SitusError, counted
from situs.findings import Exposure, Finding, Metric, Remark

# ---------------------------------------------------------------------------------------------------------------------
# PSNR of a recovered picture up to changes that protect nobody: gain, offset, a flip, a shift, two levels.
#
# A factor between two tensors of an upload scales the picture that a closed form solves for; a model may flip, shift or
# brighten its images before its first layer; and a blurred page of text becomes readable by a threshold. Each is undone
# here with the original at hand, which bounds what a viewer recognises. Blind guesses get the same help, so that a gate
# compares like with like.


REACH = 4
"""Shifts are tried up to this part of a side."""

FLIPS = ((), (-1,), (-2,), (-1, -2))
AT_ONCE = 2**16
"""The most numbers of pictures that are compared at a time."""


@torch.no_grad()
def aligned_psnr(pictures: Tensor, real: Tensor, best: float = 200.0) -> Tensor:
    """The best PSNR in dB over gain and offset of each channel, flips, shifts, and the same at two levels, [n].

    pictures, real: [n, C, H, W]; the pictures need not lie in [0, 1]. best: what equal pictures get.
    """
    enough, many = 10 ** (-best / 10), max(1, AT_ONCE // real.shape[1:].numel())
    parts = zip(pictures.double().split(many), real.double().split(many), strict=True)
    errors = torch.cat([_errors(*part, enough) for part in parts])
    return -10 * errors.cpu().clamp(min=enough).log10()


def _errors(pictures: Tensor, real: Tensor, enough: float) -> Tensor:
    """The least mean squared errors of pictures [n, C, H, W] under any help, [n]; where they are enough as they are,
    none is tried."""
    count = real.shape[1:].numel()
    errors = _residual(pictures, _centred(real)) / count
    if bool((rest := errors > enough).any()):
        errors[rest] = torch.minimum(errors[rest], _helped(pictures[rest], real[rest]) / count)
    return errors


def _helped(pictures: Tensor, real: Tensor) -> Tensor:
    """The least squared errors of pictures [n, C, H, W] that are flipped, moved or brought to two levels, [n]."""
    turned = torch.stack([pictures.flip(dims) for dims in FLIPS])
    levels = two_levels(pictures)
    y = _centred(real)
    plain = _residual(torch.cat([turned, torch.stack([levels.flip(dims) for dims in FLIPS])]), y)
    moved, mask = _moved(turned, real)
    z = _centred(real, mask)
    # what is moved out of the picture is taken as the channel's mean
    outside = _size(y) - _size(z)
    errors = [outside + _residual(pictures, z, mask) for pictures in (moved, two_levels(moved, mask))]
    errors = torch.where(mask.flatten(2).all(dim=2), torch.inf, torch.stack(errors))  # it was not moved at all
    return torch.cat([plain, errors.flatten(0, 1)]).amin(dim=0)


def _size(images: Tensor) -> Tensor:
    """Σ x² of [..., C, H, W]."""
    return images.square().sum(dim=(-3, -2, -1))


def _centred(images: Tensor, mask: Tensor | None = None) -> Tensor:
    """Each channel of [..., C, H, W] around its mean; of the part that a mask [..., 1, H, W] shows, and 0 elsewhere."""
    if mask is None:
        return images - images.mean(dim=(-2, -1), keepdim=True)
    mean = (images * mask).sum(dim=(-2, -1), keepdim=True) / mask.sum(dim=(-2, -1), keepdim=True)
    return (images - mean) * mask


def _residual(pictures: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
    """The least squared errors [...] of [..., C, H, W] against y, centred, under a gain and offset of each channel."""
    x = _centred(pictures, mask)
    size = x.square().sum(dim=(-2, -1), keepdim=True)
    gain = (x * y).sum(dim=(-2, -1), keepdim=True) / size.clamp(min=1e-300)
    return _size(y - gain * x)


def _moved(pictures: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Pictures [f, n, C, H, W], each moved by rows and columns to be most like the originals [n, C, H, W], up to
    `REACH`-th parts of a side; and where there is something of them then, [f, n, 1, H, W]."""
    height, width = real.shape[-2:]
    x, y = (
        images.mean(dim=-3) - images.mean(dim=(-3, -2, -1)).view(*images.shape[:-3], 1, 1)
        for images in (pictures, real)
    )
    alike = torch.fft.irfft2(torch.fft.rfft2(y) * torch.fft.rfft2(x).conj(), s=(height, width))
    down, across = height // REACH, width // REACH
    near = alike.roll((down, across), (-2, -1))[..., : 2 * down + 1, : 2 * across + 1]
    at = near.flatten(2).argmax(dim=2)
    places, inside = [], []
    for length, by in ((height, at // near.shape[-1] - down), (width, at % near.shape[-1] - across)):
        place = torch.arange(length, device=at.device) - by.unsqueeze(-1)
        places.append(place % length)
        inside.append((place >= 0) & (place < length))
    index = places[0].unsqueeze(-1) * width + places[1].unsqueeze(-2)
    moved = pictures.flatten(3).gather(3, index.flatten(2).unsqueeze(2).expand(*pictures.shape[:3], -1))
    return moved.view_as(pictures), (inside[0].unsqueeze(-1) & inside[1].unsqueeze(-2)).unsqueeze(2)


def two_levels(pictures: Tensor, mask: Tensor | None = None) -> Tensor:
    """[..., C, H, W] as 0 and 1 by one threshold on the mean over channels, the one that splits its values best (Otsu).

    mask [..., 1, H, W]: of which values; all by default.
    """
    grey = pictures.mean(dim=-3)
    values = grey.flatten(-2)
    whole = torch.full_like(values[..., :1], values.shape[-1])
    if mask is not None:
        shown = mask.squeeze(-3).flatten(-2)
        values, whole = torch.where(shown, values, torch.inf), shown.sum(dim=-1, keepdim=True).to(values)
    values = values.sort(dim=-1).values
    low = torch.where(values.isinf(), 0.0, values).cumsum(-1)
    count = torch.arange(1, values.shape[-1], dtype=values.dtype, device=values.device)
    between = (low[..., :-1] * whole - count * low[..., -1:]).square() / (count * (whole - count))
    between = torch.where(count < whole, between, -1.0)
    split = between.argmax(dim=-1, keepdim=True) if len(count) else torch.zeros_like(whole).long()
    threshold = (values.gather(-1, split) + values.gather(-1, (split + 1).clamp(max=values.shape[-1] - 1))) / 2
    return (grey > threshold.unsqueeze(-1)).to(pictures.dtype).unsqueeze(-3).expand_as(pictures)


BEST_PSNR = 200.0
"""What PSNR says of equal images, in dB: a mean over images must stay a number."""

LOWER_IS_CLOSER = ("mse", "fft2d", "lpips")
"""The metrics that are distances; all others rise with the leak."""


class Mean(NamedTuple):
    """A mean over images and the ends of its 95 % interval (None for a single image)."""

    mean: float
    low: float | None
    high: float | None


def denormalise(images: Tensor, mean: Sequence[float], std: Sequence[float], clip: bool = True) -> Tensor:
    """Normalised [n, C, H, W] -> float64 in [0, 1]; clip: what an attack gave outside is cut off, as in any picture."""
    shape = (1, -1, 1, 1)
    m, s = (torch.tensor(part, dtype=torch.float64, device=images.device).view(shape) for part in (mean, std))
    pictures = images.double() * s + m
    return pictures.clamp(0.0, 1.0) if clip else pictures


def mse(recovered: Tensor, real: Tensor) -> Tensor:
    """Mean squared error, [n]."""
    return (recovered.double() - real.double()).square().flatten(1).mean(dim=1)


def psnr(recovered: Tensor, real: Tensor) -> Tensor:
    """10 log10(1 / MSE) in dB, [n], at most `BEST_PSNR`."""
    return _decibels(mse(recovered, real))


def _decibels(error: Tensor) -> Tensor:
    return -10 * error.clamp(min=10 ** (-BEST_PSNR / 10)).log10()


def ssim(recovered: Tensor, real: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Structural similarity in a Gaussian window of 11 × 11, σ = 1.5, over edges mirrored, [n]. float32 is quicker.

    torchmetrics has the same, and takes seconds to import every library of language models.
    """
    x, y = F.pad(torch.stack([recovered.to(dtype), real.to(dtype)]).flatten(1, 2), (5, 5, 5, 5), mode="reflect")
    window = torch.exp(-torch.arange(-5, 6, dtype=dtype, device=recovered.device).square() / (2 * 1.5**2))
    window = window / window.sum()
    means = torch.stack([x, y, x * x, y * y, x * y]).flatten(0, 1).unsqueeze(1)
    for shape in ((1, 1, 11, 1), (1, 1, 1, 11)):
        means = F.conv2d(means, window.view(shape))
    x, y, xx, yy, xy = means.view(5, len(recovered), -1)
    variances = (xx - x * x).clamp(min=0) + (yy - y * y).clamp(min=0)  # rounding may leave less than none
    near = (2 * x * y + 0.01**2) * (2 * (xy - x * y) + 0.03**2)
    return (near / ((x * x + y * y + 0.01**2) * (variances + 0.03**2))).mean(dim=1)


def fft2d(recovered: Tensor, real: Tensor) -> Tensor:
    """|1 - u·v / √(u·u v·v)| of the flattened 2-D spectra u, v, without conjugation, as published; [n].

    Without conjugation u·v = Σ x(p) y(-p): each image is compared with the other one turned by half a circle. With it,
    u·v would be the plain cosine of the pixels (Parseval). Where a spectrum has no length (a black image) it is 0
    for equal images and 1 for others: 0 / 0 would be no number.
    """
    u, v = (torch.fft.fft2(images.double()).flatten(1) for images in (recovered, real))
    uv, uu, vv = ((a * b).sum(dim=1) for a, b in ((u, v), (u, u), (v, v)))
    distance = (1 - uv / (uu * vv).sqrt()).abs()
    differ = (recovered != real).flatten(1).any(dim=1).to(distance.dtype)
    return torch.where((uu == 0) | (vv == 0), differ, distance)


class Matched(NamedTuple):
    """psnr [n]: mean over patches of the best one-to-one match. order [n]: share of patches found at their place."""

    psnr: Tensor
    order: Tensor


def match_patches(recovered: Tensor, real: Tensor, patch_size: Size) -> Matched:
    """Recovered patches matched to the original ones so that the squared error is least.

    A patch counts as in order if no swap explains it better: its own place is as good as the place it was matched to.
    Where several recovered patches are as good for different originals, it counts for its share of them: a picture of
    one grey says nothing of any place.
    """
    recovered, real = patchify(recovered.double(), patch_size), patchify(real.double(), patch_size)
    scores, orders = [], []
    for f, r in zip(recovered, real, strict=True):
        error, columns = assign(f, r)
        scores.append(_decibels(error.gather(1, columns.unsqueeze(1)).squeeze(1)).mean())
        orders.append((in_order(error, columns) / _ties(error, r)).mean())
    return Matched(torch.stack(scores), torch.stack(orders))


def assign(recovered: Tensor, real: Tensor, *, by_psnr: bool = False) -> tuple[Tensor, Tensor]:
    """Mean squared errors [N, N] of patches [N, K], and which found one each real one has so that they are least.

    by_psnr: so that the mean PSNR (at most `BEST_PSNR`) is largest."""
    from scipy.optimize import linear_sum_assignment

    real, recovered = real.double(), recovered.double()
    error = torch.cdist(real, recovered, compute_mode="donot_use_mm_for_euclid_dist").square() / real.shape[-1]
    far = error.cpu().nan_to_num(1e6, 1e6)  # pictures lie in [0, 1]; one of no numbers must not hide another's place
    cost = far.clamp(min=10 ** (-BEST_PSNR / 10)).log10() if by_psnr else far
    _, columns = linear_sum_assignment(cost.numpy())  # its rows are 0, 1, 2 …
    return error, torch.from_numpy(columns).to(error.device)


def in_order(error: Tensor, columns: Tensor) -> Tensor:
    """Which patches are at their place, [N]: as good there as where they were matched to."""
    return error.diagonal() <= error.gather(1, columns.unsqueeze(1)).squeeze(1) + 1e-12


def _ties(error: Tensor, real: Tensor) -> Tensor:
    """[N]: how many places fit a patch as well as its own, places with equal originals aside."""
    same = torch.cdist(real, real, compute_mode="donot_use_mm_for_euclid_dist").square() / real.shape[-1] <= 1e-12
    return ((error <= error.diagonal().unsqueeze(1) + 1e-12) & ~same).sum(dim=1) + 1


def reidentify(recovered: Tensor, gallery: Tensor, index: Tensor) -> Tensor:
    """Whether the nearest image of the gallery [m, C, H, W] is the right one: found[i] is gallery[index[i]]; [n].

    An image that is twice in the gallery is right at both places.
    """
    recovered, gallery = recovered.double().flatten(1), gallery.double().flatten(1)
    index = index.to(gallery.device)
    distance, to_original = torch.cdist(recovered, gallery), (recovered - gallery[index]).norm(dim=1)
    nearest, where = distance.min(dim=1)
    return ((where == index) | (to_original <= nearest * (1 + 1e-9))).double()


def measure_all(
    recovered: Tensor,
    gallery: Tensor,
    patch_size: Size,
    lpips: Callable[[Tensor, Tensor], Tensor] | None = None,
    first: int = 0,
    raw: Tensor | None = None,
) -> dict[str, list[float] | None]:
    """Every metric per image: found[i] against gallery[first + i]. raw: the found ones before they were clipped.

    Re-identification looks through the whole gallery; in one of a single image whatever is found is its nearest, so
    that None is reported; and so it is for the SSIM of images below 6 pixels. lpips: a verified network, or None.
    """
    real = gallery[first : first + len(recovered)]
    if recovered.shape != real.shape:
        raise SitusError(
            f"the recovered images have the shape {list(recovered.shape)}, but the original images have the shape "
            f"{list(gallery.shape)}"
        )
    matched, aligned = match_patches(recovered, real, patch_size), aligned_psnr(recovered, real, BEST_PSNR)
    if raw is not None and not torch.equal(raw, recovered):
        aligned = torch.maximum(aligned, aligned_psnr(raw, real, BEST_PSNR))
    values = {
        "mse": mse(recovered, real),
        "psnr": psnr(recovered, real),
        "aligned_psnr": aligned,
        "ssim": ssim(recovered, real) if min(recovered.shape[-2:]) > 5 else None,  # half of its window
        "fft2d": fft2d(recovered, real),
        "lpips": None if lpips is None else lpips(recovered, real),
        "patch_psnr": matched.psnr,
        "order_accuracy": matched.order,
        "reidentified": reidentify(recovered, gallery, torch.arange(first, first + len(recovered)))
        if len(gallery) > 1
        else None,
    }
    return {name: None if value is None else value.tolist() for name, value in values.items()}


def baselines(real: Tensor, span: slice = slice(None), grey: Tensor | float = 0.5) -> dict[str, Tensor]:
    """Blind guesses, which saw no gradient: one grey, the mean of the other images, and another image of the set.

    span: the images to guess. grey: its level, one number or one for each channel, [C, 1, 1].
    """
    count, plain = real.shape[0], torch.zeros_like(real[span]) + torch.as_tensor(grey).to(real)
    if count == 1:
        return {"grey": plain}
    others = (real.sum(dim=0, keepdim=True) - real[span]) / (count - 1)
    before = torch.arange(count, device=real.device)[span] - 1
    return {"grey": plain, "mean image": others.clamp(0.0, 1.0), "random pair": real[before]}


def mean_of(values: Sequence[float], *, share: bool = False) -> Mean:
    """The mean with its 95 % interval: Student's, or Wilson's for a share of yes and no."""
    from scipy.special import ndtri, stdtrit  # scipy.stats takes a second to import

    count, mean = len(values), math.fsum(values) / len(values)
    if share:
        z = float(ndtri(0.975))
        centre = (mean + z * z / (2 * count)) / (1 + z * z / count)
        half = z / (1 + z * z / count) * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
        # At the ends the interval touches them, up to rounding.
        return Mean(mean, centre - half if mean > 0 else 0.0, centre + half if mean < 1 else 1.0)
    if count < 2:
        return Mean(mean, None, None)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)
    half = float(stdtrit(count - 1, 0.975)) * spread
    low = mean - half
    return Mean(mean, max(0.0, low) if min(values) >= 0 else low, mean + half)


def means_of(scores: Mapping[str, Sequence[float] | None]) -> dict[str, Mean | None]:
    """Each metric's mean over the images with its 95 % interval, which ends where the metric does."""
    means = {name: None if v is None else mean_of(v, share=name == "reidentified") for name, v in scores.items()}
    ends = {"ssim": 1.0, "order_accuracy": 1.0, **dict.fromkeys(("psnr", "aligned_psnr", "patch_psnr"), BEST_PSNR)}
    for name, end in ends.items():
        mean = means.get(name)
        if mean is not None and mean.high is not None:
            means[name] = mean._replace(high=min(end, mean.high))
    return means


# ---------------------------------------------------------------------------------------------------------------------
# LPIPS v0.1 with AlexNet (Zhang et al., CVPR 2018), from a weight file whose sha256 is known; else there is none.
#
# A distance on random features is no LPIPS, so nothing here works without the file.


ALEXNET_SHA256 = "567f8e3fab61abcb606d978f4ee466da7b2efd5152c6b1bf1a018a33a71186a0"
"""Of a safetensors file with `features.*` and `lin0…4.weight`, checked against the published reference pair."""

_SHIFT = (-0.030, -0.088, -0.188)
_SCALE = (0.458, 0.448, 0.450)


# AlexNet's convolutions: name, stride, padding, and whether the input is first pooled.
_LAYERS = (
    ("features.0", 4, 2, False),
    ("features.3", 1, 2, True),
    ("features.6", 1, 1, True),
    ("features.8", 1, 1, False),
    ("features.10", 1, 1, False),
)


class Lpips:
    """`Lpips(path)(found, real)` -> distances [n] of images [n, 3, H, W] in [0, 1]."""

    def __init__(self, path: str | Path, sha256: str = ALEXNET_SHA256) -> None:
        path = Path(path).expanduser()
        if not path.is_file():
            raise SitusError(f"lpips={path}: no such file", field="lpips")
        data = path.read_bytes()
        got = hashlib.sha256(data).hexdigest()
        if got != sha256:
            reason = f"lpips={path}: its sha256 must be {sha256[:16]}…, but is {got[:16]}…, so the file is not used"
            raise SitusError(reason, field="lpips")
        self.weights = load(data)

    def check(self, images: Tensor) -> None:
        """Refuses images [n, C, H, W] that it cannot measure."""
        if images.shape[1] != 3 or min(images.shape[-2:]) < 32:
            reason = f"LPIPS takes images with 3 channels and at least 32 × 32 pixels, not {list(images.shape[1:])}"
            raise SitusError(reason, field="lpips")

    @torch.no_grad()
    def __call__(self, recovered: Tensor, real: Tensor) -> Tensor:
        self.check(real)
        total = torch.zeros(real.shape[0], device=real.device)
        for index, (a, b) in enumerate(zip(self._features(recovered), self._features(real), strict=True)):
            weight = self.weights[f"lin{index}.weight"].to(real.device)
            total = total + F.conv2d((_unit(a) - _unit(b)).square(), weight).mean(dim=(1, 2, 3))
        return total

    def _features(self, images: Tensor) -> list[Tensor]:
        shift, scale = (torch.tensor(part, device=images.device).view(1, 3, 1, 1) for part in (_SHIFT, _SCALE))
        x = (2 * images.float() - 1 - shift) / scale
        features = []
        for name, stride, padding, pool in _LAYERS:
            x = F.max_pool2d(x, 3, 2) if pool else x
            weight, bias = (self.weights[f"{name}.{part}"].to(x.device) for part in ("weight", "bias"))
            x = F.relu(F.conv2d(x, weight, bias, stride, padding))
            features.append(x)
        return features


def _unit(x: Tensor) -> Tensor:
    return x / (x.norm(dim=1, keepdim=True) + 1e-10)


# ---------------------------------------------------------------------------------------------------------------------
# What a gate reads of pictures: each image under each metric, with the best blind guess at it.
#
# Four metrics count together: PSNR up to gain, offset, flips, shifts and two levels; SSIM; the order of patches; and
# how many images are re-identified among the others. Each is compared with blind guesses, which saw no gradient.


AnyScores = Mapping[str, Sequence[float] | None]
Blind = Mapping[str, AnyScores]
"""AnyScores of blind guesses, by name."""

METRICS = {
    metric.name: metric
    for metric in (
        Metric("aligned_psnr", 3.0, 1.0, 3.0, BEST_PSNR, "dB"),  # half the squared error
        Metric("ssim", 0.15, scale=0.15),
        Metric("order_accuracy"),  # its margin follows from the number of patches
        Metric("psnr", None, 1.0, 1.0, BEST_PSNR, "dB"),
        Metric("patch_psnr", None, 1.0, 1.0, BEST_PSNR, "dB"),
        Metric("reidentified"),
        *(Metric(name, rises=False) for name in LOWER_IS_CLOSER),
    )
}
"""What a gate may limit, and by how much an image may come back closer than the best blind guess at it."""

CHANCE = 1e-3
"""Images are re-identified more often than by chance where chance finds so many with less than this probability."""


def exposures_of(
    scores: AnyScores, names: Sequence[str], numbers: Sequence[int], blind: Blind, patches: int, chance: float
) -> list[Exposure]:
    """Every image under every metric that rises with the leak. names: of all images; numbers: of those attacked.
    chance: to find an image again among all."""
    rows = []
    for metric in METRICS.values():
        if metric.name == "order_accuracy":  # four deviations of as many throws of a coin as there are patches
            metric = metric._replace(margin=2 / math.sqrt(max(1, patches)))
        values = scores.get(metric.name) if metric.rises else None
        if not values:
            continue
        if metric.name == "reidentified":  # one image is found again or not
            rows.append(Exposure("a share of them", metric, sum(values) / len(numbers)))
            rows += _found_again(values, names, numbers, metric, chance)
            continue
        rows += [
            Exposure(names[number], metric, value, blind_at(blind, metric.name, number))
            for number, value in zip(numbers, values, strict=True)
        ]
    return rows


def _found_again(
    again: Sequence[float], names: Sequence[str], numbers: Sequence[int], metric: Metric, chance: float
) -> list[Exposure]:
    """The images that are found again among the others, where those are more than chance finds."""
    if tail(round(sum(again)), len(again), chance) >= CHANCE:
        return []
    hits = [number for number, value in zip(numbers, again, strict=True) if value > 0]
    among = f"{len(hits)} of {len(again)}"
    return [Exposure(names[number], metric, 1.0, chance, above=True, among=among) for number in hits]


def blind_at(blind: Blind, metric: str, number: int) -> float | None:
    """The best blind guess at one image."""
    values = [scores.get(metric) or () for scores in blind.values()]
    return max((guess[number] for guess in values if number < len(guess)), default=None)


def gaps_of(finding: Finding, count: int) -> list[Remark]:
    """What is missing of the numbers of `count` images: pictures that held NaN, and metrics that are not defined."""
    broken = sum(fact.get("broken") is True for fact in finding.facts)
    nan = Remark("gap", f"{finding.attack} returned NaN for {broken} of {counted(count, 'images')}")
    return [nan] * (broken > 0) + [
        Remark("gap", f"{metric.name} is not defined for so few images or such small images")
        for metric in METRICS.values()
        if metric.margin is not None and finding.scores.get(metric.name) is None
    ]


def too_few(count: int, batch: int) -> bool:
    """Whether chance may find every one of so many images again, so that nothing can pass."""
    return tail(count, count, min(1.0, batch / count)) >= CHANCE


def tail(successes: int, trials: int, chance: float) -> float:
    """The probability of so many successes or more."""
    from scipy.special import bdtrc

    return 1.0 if successes <= 0 or chance >= 1 else float(bdtrc(successes - 1, trials, chance))


# ---------------------------------------------------------------------------------------------------------------------
# Recovered images against the originals: which is which within an upload, and every metric of each.
#
# Attack and truth meet only here. An attack gives the images of an upload in any order, because a sum over a batch does
# not hold it; they are matched to the originals so that the mean PSNR is largest: an exact image is never given up.


Scores = dict[str, list[float] | None]


def pictures_of(recovery: Recovery, real: Tensor, batch: int, normalisation: Normalisation) -> Tensor:
    """The recovered pictures in the order of the originals, [uploads · batch, C, H, W]: black is 0 and white 1, and
    what lies beyond is not cut off."""
    uploads, pictures = len(recovery.facts), denormalise(recovery.images, *normalisation, clip=False)
    if pictures.shape[0] == uploads and batch > 1:  # one solution, which stands for each image of its batch
        return pictures.repeat_interleave(batch, dim=0)
    assert pictures.shape[0] == uploads * batch, "an attack gives one image for each upload, or all images"
    parts = zip(pictures.split(batch), real.split(batch), strict=False)  # fewer, where it was stopped
    orders = [assign(part.clamp(0, 1).flatten(1), truth.flatten(1), by_psnr=True)[1] for part, truth in parts]
    return torch.cat([part[order] for part, order in zip(pictures.split(batch), orders, strict=False)])


def facts_of(recovery: Recovery, labels: Tensor, batch: int) -> list[dict[str, Fact]]:
    """The attack's facts, once for each image; of inferred labels, how many of the batch are right.

    Where a picture of an upload holds NaN, the attack has failed there, whatever its facts say: `broken`.
    """
    facts = [dict(fact) for fact in recovery.facts]
    share = len(recovery.images) // max(1, len(facts))
    for fact, images in zip(facts, recovery.images.split(max(1, share)), strict=False):
        if bool(images.isnan().any()):
            fact |= {
                "broken": True,
                "fits": False,
                "verdict": "the recovered image contains NaN, which counts as black",
            }
    if recovery.labels is not None:
        for fact, guess, truth in zip(facts, recovery.labels, labels.split(batch), strict=False):
            right = Counter(guess.tolist()) & Counter(truth.tolist())
            fact["labels_inferred"] = ", ".join(str(label) for label in guess.tolist())
            fact["labels_right"] = right.total()
    return [fact for fact in facts for _ in range(batch)]


def measure(pictures: Tensor, real: Tensor, backbone: Backbone, lpips: Lpips | None, first: int = 0) -> Scores:
    """Every metric per image, against those of `real` from number `first` on; all of `real` are the gallery.

    pictures: need not lie in [0, 1].
    """
    height, width = real.shape[2:]
    size = patch_size_of(backbone, (height, width))
    return measure_all(pictures.clamp(0, 1), real, size, lpips, first, raw=pictures)


def closer(scores: Scores, others: Scores) -> Scores:
    """The closer of two scores of the same pictures, against two references, for each image and metric."""
    best: Scores = {}
    for name, values in scores.items():
        more, pick = others.get(name), min if name in LOWER_IS_CLOSER else max
        if values is None or more is None:
            best[name] = values
        else:
            best[name] = [pick(pair) for pair in zip(values, more, strict=True)]
    return best


def measure_guesses(
    real: Tensor, backbone: Backbone, lpips: Lpips | None, normalisation: Normalisation | None = None
) -> dict[str, Scores]:
    """The scores of blind guesses by name, computed a few images at a time.

    The grey is the mean of the normalisation, which everyone has; 0.5 without one.
    """
    zero = real.new_zeros(1, real.shape[1], 1, 1)
    grey = 0.5 if normalisation is None else denormalise(zero, *normalisation)[0]
    scores: dict[str, Scores] = {}
    for first in range(0, len(real), 8):
        for name, guess in baselines(real, slice(first, first + 8), grey).items():
            extend(scores.setdefault(name, {}), measure(guess, real, backbone, lpips, first))
    return scores


def extend(scores: Scores, more: Scores) -> None:
    """Adds the values of more images; a metric that one of them lacks is None for all."""
    for name, values in more.items():
        before = scores.get(name, [])
        scores[name] = None if before is None or values is None else [*before, *values]


def measure_parts(pictures: Tensor, real: Tensor, mask: Tensor, backbone: Backbone) -> Scores:
    """Shown and hidden patches apart, per image. mask: [n, N], the hidden ones.

    shown_psnr: over the shown patches. hidden_psnr: over the hidden ones matched to the recovered ones whatever their
    order. hidden_order: the share of them at its place. The last two are None where an image has nothing hidden.
    """
    height, width = real.shape[2:]
    size = (height // backbone.grid[0], width // backbone.grid[1])
    recovered, truth = (patchify(part.double(), size) for part in (pictures, real))
    shown, hidden, order = [], [], []
    for f, t, m in zip(recovered, truth, mask, strict=True):
        shown.append(float(psnr(f[~m].unsqueeze(0), t[~m].unsqueeze(0))))
        if m.any():
            error, columns = assign(f[m], t[m])
            hidden.append(float(psnr(f[m][columns].unsqueeze(0), t[m].unsqueeze(0))))
            order.append(float(in_order(error, columns).double().mean()))
    whole = len(hidden) == len(shown)
    return {"shown_psnr": shown, "hidden_psnr": hidden if whole else None, "hidden_order": order if whole else None}


def patch_size_of(backbone: Backbone, size: tuple[int, int]) -> tuple[int, int]:
    """The size of the patches by which order and best matches are measured: the model's own.

    Small squares where it has none, or more than 1,024: matching Swin's 3,136 patches takes minutes.
    """
    height, width = size
    if 0 < backbone.num_tokens <= 1024:
        return height // backbone.grid[0], width // backbone.grid[1]
    side = next(side for side in (16, 8, 4, 2, 1) if height % side == width % side == 0)
    return side, side
