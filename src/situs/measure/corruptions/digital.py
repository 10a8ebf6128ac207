"""Contrast, elastic transform, pixelation and JPEG. Images are [B, C, H, W] in [0, 1]."""

from __future__ import annotations

import io

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.measure.corruptions.filters import Draw, gaussian


def contrast(images: Tensor, draw: Draw, share: float) -> Tensor:  # noqa: ARG001
    """Each channel moved towards its mean; `share` of the distance remains."""
    mean = images.mean((2, 3), keepdim=True)
    return (images - mean) * share + mean


def pixelate(images: Tensor, draw: Draw, share: float) -> Tensor:  # noqa: ARG001
    """Shrunk to `share` of each side and enlarged again, both by Pillow's box filter."""
    for axis in (2, 3):
        size = images.shape[axis]
        small = max(1, int(size * share))
        matrix = box_matrix(small, size) @ box_matrix(size, small)
        matrix = matrix.to(images.device, torch.float32)
        images = matrix @ images if axis == 2 else images @ matrix.T
    return images


def box_matrix(size: int, new: int) -> Tensor:
    """A line of `size` pixels resized to `new` by the rule of Pillow's BOX filter: weights [new, size] float64.

    A pixel counts wholly if its centre lies in the box, so that neighbouring boxes may differ by a pixel.
    """
    scale = size / new
    support = max(1.0, scale) / 2
    centre = (torch.arange(new, dtype=torch.float64) + 0.5)[:, None] * scale
    first, last = (centre - support + 0.5).long().clamp(min=0), (centre + support + 0.5).long().clamp(max=size)
    pixel = torch.arange(size)
    distance = (pixel + 0.5 - centre) / (2 * support)
    inside = (pixel >= first) & (pixel < last) & (distance > -0.5) & (distance <= 0.5)
    return inside.double() / inside.sum(1, keepdim=True)


def jpeg_compression(images: Tensor, draw: Draw, quality: int) -> Tensor:  # noqa: ARG001
    """Through a JPEG file of that quality and back, one image after the other on the CPU."""
    levels = (images * 255.0).round().to(torch.uint8).cpu()
    if images.shape[1] not in (1, 3):  # JPEG knows grey and RGB; other channels go one by one
        single = [_through_jpeg(channel[None], quality) for channel in levels.flatten(0, 1)]
        whole = torch.stack(single).view_as(levels)
    else:
        whole = torch.stack([_through_jpeg(image, quality) for image in levels])
    return whole.to(images.device).float() / 255.0


def _through_jpeg(image: Tensor, quality: int) -> Tensor:
    """[C, H, W] uint8, C = 1 or 3, encoded and decoded by Pillow."""
    from PIL import Image

    channels, height, width = image.shape
    mode = "L" if channels == 1 else "RGB"
    raw = image.permute(1, 2, 0).contiguous().numpy().tobytes()
    file = io.BytesIO()
    Image.frombytes(mode, (width, height), raw).save(file, "JPEG", quality=quality)
    with Image.open(file) as opened:
        back = torch.frombuffer(bytearray(opened.tobytes()), dtype=torch.uint8)
    return back.view(height, width, channels).permute(2, 0, 1)


def elastic_transform(images: Tensor, draw: Draw, alpha: float, sigma: float, affine: float) -> Tensor:
    """A random affine change, then every pixel displaced by smooth noise.

    alpha: factor of the displacements. sigma: of their smoothing. affine: how far three points are moved, pixels.
    """
    height, width = images.shape[-2:]
    moved = sample(images, *_affine(affine, (height, width), draw), corners=True)
    if alpha == 0:
        return moved
    noise = 2.0 * draw.uniform("displacement", 2, height, width) - 1.0
    dx, dy = (alpha * gaussian(noise, sigma, 3.0, "mirror")).unbind(1)
    x = torch.arange(width, device=images.device) + dx
    y = torch.arange(height, device=images.device)[:, None] + dy
    return sample(moved, x, y, corners=False)


def _affine(shift: float, size: tuple[int, int], draw: Draw) -> tuple[Tensor, Tensor]:
    """Where each pixel comes from, x and y [B, H, W], when three points of a centred square move by up to `shift`."""
    height, width = size
    noise = (2.0 * draw.uniform("affine", 3, 2) - 1.0) * shift
    x, y, arm = width // 2, height // 2, min(size) // 3
    old = torch.tensor([(x + arm, y + arm), (x + arm, y - arm), (x - arm, y - arm)], dtype=torch.float32)
    old = old.to(noise.device)
    new = old + noise
    # The map that takes the new points to the old ones, from the two edges of the triangle.
    (a, c), (b, d) = ((new[:, i] - new[:, 0]).unbind(1) for i in (1, 2))
    area = a * d - b * c
    least = 1e-3 * arm * arm + 1e-6  # a triangle that has fallen flat has no such map
    area = torch.where(area.abs() < least, torch.where(area < 0, -least, least), area)
    inverse = torch.stack([d, -b, -c, a], dim=1).view(-1, 2, 2) / area.view(-1, 1, 1)
    edges = torch.stack([old[1] - old[0], old[2] - old[0]], dim=1)
    matrix = edges @ inverse
    start = old[0] - (matrix @ new[:, 0, :, None])[..., 0]
    px = torch.arange(width, device=noise.device, dtype=torch.float32)
    py = torch.arange(height, device=noise.device, dtype=torch.float32)[:, None]
    m = matrix.view(-1, 4, 1, 1)
    return m[:, 0] * px + m[:, 1] * py + start[:, :1, None], m[:, 2] * px + m[:, 3] * py + start[:, 1:, None]


def sample(images: Tensor, x: Tensor, y: Tensor, *, corners: bool) -> Tensor:
    """`images` at the pixel coordinates x, y [B, H, W], bilinear. corners: mirrored at the centres of the border's
    pixels (abc|ba), else at their outer edges (abc|cba)."""
    height, width = images.shape[-2:]
    if corners:
        grid = torch.stack([2 * x / max(width - 1, 1) - 1, 2 * y / max(height - 1, 1) - 1], dim=-1)
    else:
        grid = torch.stack([(2 * x + 1) / width - 1, (2 * y + 1) / height - 1], dim=-1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=corners)
