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
    enough = 10 ** (-best / 10)
    errors = [_least_error(*pair, enough) for pair in zip(pictures.double(), real.double(), strict=True)]
    return -10 * torch.tensor(errors, dtype=torch.float64).clamp(min=enough).log10()


def _least_error(picture: Tensor, real: Tensor, enough: float) -> float:
    """The least mean squared error of one picture [C, H, W] under any help; none is tried beyond one that is enough."""
    errors = []
    for error in _errors(picture, real):
        errors.append(error)
        if error <= enough:
            break
    return min(errors)


def _errors(picture: Tensor, real: Tensor) -> Iterator[float]:
    """Mean squared errors of one picture [C, H, W] under every help."""
    y, count = _centred(real), real.numel()
    whole, levels, spectrum = y.square().sum(), two_levels(picture), _spectrum(real)
    for dims in ((), (1,), (2,), (1, 2)):
        turned = picture.flip(dims) if dims else picture
        yield float(_residual(turned, y)) / count
        yield float(_residual(levels.flip(dims) if dims else levels, y)) / count
        if (shift := _shift(turned, spectrum)) != (0, 0):
            part, truth = _overlap(turned, real, shift)
            z = _centred(truth)
            inside = z.square().sum()
            for seen in (part, two_levels(part)):
                # what is moved out of the picture is taken as the channel's mean
                yield float(whole - (inside - _residual(seen, z))) / count


def _centred(image: Tensor) -> Tensor:
    """Each channel of [C, H, W] around its mean, [C, HW]."""
    flat = image.flatten(1)
    return flat - flat.mean(dim=1, keepdim=True)


def _residual(picture: Tensor, y: Tensor) -> Tensor:
    """The squared error against y, centred [C, hw], under the gain and offset of each channel that make it least."""
    x = _centred(picture)
    size = x.square().sum(dim=1)
    gain = torch.where(size > 0, (x * y).sum(dim=1) / size.clamp(min=1e-300), 0.0)
    return (y - gain.unsqueeze(1) * x).square().sum()


def _spectrum(image: Tensor) -> Tensor:
    """Of its mean over channels, around its mean, [H, W // 2 + 1]."""
    return torch.fft.rfft2(image.mean(dim=0) - image.mean())


def _shift(picture: Tensor, real: Tensor) -> tuple[int, int]:
    """Rows and columns by which the picture is moved to be most like the original, up to `REACH`-th parts of a side.

    real: the original's spectrum.
    """
    height, width = picture.shape[1:]
    alike = torch.fft.irfft2(real * _spectrum(picture).conj(), s=(height, width))
    down, across = height // REACH, width // REACH
    # a window around no shift, as two rolls give it
    near = alike.roll((down, across), (0, 1))[: 2 * down + 1, : 2 * across + 1]
    at = int(near.argmax())
    return at // near.shape[1] - down, at % near.shape[1] - across


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
