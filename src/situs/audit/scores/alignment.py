"""PSNR of a recovered picture up to what no one would take for protection: gain, offset, a flip, a shift, two levels.

A factor between two tensors of an upload scales the picture that a closed form solves for; a model may flip, shift or
brighten its images before its first layer; and a blurred page of text is read by a threshold. Each is undone here with
the original in sight: a bound on what somebody sees who looks at the picture. A blind guess is given the same help, so
that a gate compares like with like.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

REACH = 4
"""Shifts are tried up to this part of a side."""


@torch.no_grad()
def aligned_psnr(pictures: Tensor, real: Tensor, best: float = 200.0) -> Tensor:
    """The best PSNR in dB over gain and offset of each channel, flips, shifts, and the same at two levels, [n].

    pictures, real: [n, C, H, W]; the pictures need not lie in [0, 1]. best: what equal pictures get.
    """
    errors = [min(_errors(*pair)) for pair in zip(pictures.double(), real.double(), strict=True)]
    return -10 * torch.tensor(errors, dtype=torch.float64).clamp(min=10 ** (-best / 10)).log10()


def _errors(picture: Tensor, real: Tensor) -> Iterator[float]:
    """Mean squared errors of one picture [C, H, W] under every help."""
    for dims in ((), (1,), (2,), (1, 2)):
        turned = picture.flip(dims) if dims else picture
        for shift in {(0, 0), _shift(turned, real)}:
            part, truth = _overlap(turned, real, shift)
            yield _error(part, truth, real)
            yield _error(two_levels(part), truth, real)


def _error(picture: Tensor, part: Tensor, real: Tensor) -> float:
    """The mean squared error over `real` [C, H, W] of a picture of one part of it [C, h, w], under the gain and offset
    of each channel that make it least there; the rest is taken as the channel's mean."""
    x, y = picture.flatten(1), part.flatten(1)
    x, y = x - x.mean(dim=1, keepdim=True), y - y.mean(dim=1, keepdim=True)
    size = x.square().sum(dim=1)
    gain = torch.where(size > 0, (x * y).sum(dim=1) / size.clamp(min=1e-300), 0.0)
    explained = y.square().sum() - (y - gain.unsqueeze(1) * x).square().sum()
    whole = (real - real.mean(dim=(1, 2), keepdim=True)).square().sum()
    inside = (y - gain.unsqueeze(1) * x).square().sum()
    return float(inside if part.shape == real.shape else whole - explained) / real.numel()


def _shift(picture: Tensor, real: Tensor) -> tuple[int, int]:
    """Rows and columns by which the picture is moved to be most like the original, up to `REACH`-th parts of a side."""
    x, y = (each.mean(dim=0) - each.mean() for each in (picture, real))
    height, width = x.shape
    alike = torch.fft.irfft2(torch.fft.rfft2(y) * torch.fft.rfft2(x).conj(), s=(height, width))
    down, across = height // REACH, width // REACH
    rows, columns = list(range(-down, down + 1)), list(range(-across, across + 1))
    near = alike[torch.tensor(rows) % height][:, torch.tensor(columns) % width]
    at = int(near.argmax())
    return rows[at // len(columns)], columns[at % len(columns)]


def _overlap(picture: Tensor, real: Tensor, shift: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """What of both lies over one another where the picture is moved by a shift."""
    for dim, by in zip((1, 2), shift, strict=True):
        length = picture.shape[dim] - abs(by)
        picture, real = picture.narrow(dim, max(-by, 0), length), real.narrow(dim, max(by, 0), length)
    return picture, real


def two_levels(picture: Tensor) -> Tensor:
    """[C, H, W] as 0 and 1 by one threshold on its mean over channels, the one that splits its values best (Otsu)."""
    grey = picture.mean(dim=0)
    values = grey.flatten().sort().values
    count = torch.arange(1, len(values), dtype=values.dtype, device=values.device)
    low = values.cumsum(0)[:-1]
    between = (low * len(values) - count * values.sum()).square() / (count * (len(values) - count))
    split = int(between.argmax()) if len(between) else 0
    threshold = values[split : split + 2].mean()
    return (grey > threshold).to(picture.dtype).expand_as(picture)
