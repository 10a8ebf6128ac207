"""Similarity of a recovered image to the original: per image, then a mean with its 95 % interval.

Images are floats [n, C, H, W] in [0, 1] (`denormalise` gives them); anything else is refused. Beside the usual metrics
there are three that a permutation of patches cannot fool: best-match PSNR per patch, order accuracy and
re-identification in a gallery.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from situs.audit.scores.alignment import aligned_psnr
from situs.core.tokens import Size, patchify
from situs.errors import SitusError

BEST_PSNR = 200.0
"""What PSNR says of equal images, in dB: a mean over images must stay a number."""

LOWER_IS_CLOSER = ("mse", "fft2d", "lpips")
HIGHER_IS_CLOSER = ("psnr", "aligned_psnr", "ssim", "patch_psnr", "order_accuracy", "reidentified")
"""The metrics by the direction in which they tell of a leak."""


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


def check_pictures(images: Tensor, what: str) -> None:
    """Refuses what is not [n, C, H, W] of floats in [0, 1], with what is probably wrong."""
    if images.dim() != 4:
        raise SitusError(f"{what} of shape {list(images.shape)}: metrics take [n, C, H, W]")
    if not images.is_floating_point():
        raise SitusError(f"{what} are {images.dtype}: metrics take floats in [0, 1]; divide grey levels by 255")
    if not images.numel():
        raise SitusError(f"{what} of shape {list(images.shape)}: there is nothing to measure")
    if not bool(images.isfinite().all()):
        raise SitusError(f"{what} hold NaN or infinity: metrics take floats in [0, 1]")
    low, high = float(images.min()), float(images.max())
    if low < -1e-6 or high > 1 + 1e-6:
        hint = "divide grey levels by 255" if high > 30 else "they look normalised: denormalise them first"
        raise SitusError(f"{what} reach from {low:.3g} to {high:.3g}: metrics take floats in [0, 1]; {hint}")


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


def assign(recovered: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Mean squared errors [N, N] of patches [N, K], and which found one each real one has so that they are least."""
    from scipy.optimize import linear_sum_assignment

    real, recovered = real.double(), recovered.double()
    error = torch.cdist(real, recovered, compute_mode="donot_use_mm_for_euclid_dist").square() / real.shape[-1]
    far = error.cpu().nan_to_num(1e6, 1e6)  # pictures lie in [0, 1]; one of no numbers must not hide another's place
    _, columns = linear_sum_assignment(far.numpy())  # its rows are 0, 1, 2 …
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
    check_pictures(recovered, "recovered images")
    real = gallery[first : first + len(recovered)]
    check_pictures(real, "original images")
    if recovered.shape != real.shape:
        raise SitusError(f"recovered {list(recovered.shape)} and original {list(gallery.shape)} images differ in shape")
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
    check_pictures(real[span], "original images")
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
