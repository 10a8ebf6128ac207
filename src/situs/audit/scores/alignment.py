"""PSNR of a recovered picture up to changes that protect nobody: gain, offset, a flip, a shift, two levels.

A factor between two tensors of an upload scales the picture that a closed form solves for; a model may flip, shift or
brighten its images before its first layer; and a blurred page of text becomes readable by a threshold. Each is undone
here with the original at hand, which bounds what a viewer recognises. Blind guesses get the same help, so that a gate
compares like with like.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    enough, many = 10 ** (-best / 10), max(1, AT_ONCE // max(1, real[:1].numel()))
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
    gain = torch.where(size > 0, (x * y).sum(dim=(-2, -1), keepdim=True) / size.clamp(min=1e-300), 0.0)
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
