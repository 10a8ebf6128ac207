"""The 15 common corruptions of ImageNet-C, made from any images, at five severities.

Dan Hendrycks and Thomas Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and Perturbations,
ICLR 2019. Written in torch, batched on the images' device. A sample's corruption depends only on (seed, its id,
corruption, severity), not on the batch. Images are [B, C, H, W] in [0, 1]; what a corruption gives may leave that range
and is clipped at the end.

Known differences from the published files: frost is drawn instead of photographed; the noise differs; images are
rounded to 8 bits once, and not saved as JPEG of quality 85.
"""

from __future__ import annotations

import io
import math
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.core.random import normal, uniform
from situs.errors import SitusError, unknown_name

# --- the strength of each severity ----------------------------------------------------------------
# As published by Hendrycks and Dietterich, in three tables, one for each size of the corrupted sets: ImageNet-C (224
# pixels), Tiny-ImageNet-C (64) and CIFAR-C (32). An image takes the table nearest to its shorter side. Amounts
# (noise, contrast, quality, shares) are used unchanged; lengths in pixels (radii, flakes, displacements) are
# multiplied by side ÷ published side, so that a larger picture looks as corrupted as the published one. The two small
# tables are never scaled down: their lengths are one or two pixels already.


SEVERITIES = (1, 2, 3, 4, 5)


_PUBLISHED = tomllib.loads(Path(__file__).with_name("corruptions.toml").read_text(encoding="utf-8"))

GROWTH = {name: tuple(row["grows"]) for name, row in _PUBLISHED.items() if "grows" in row}
"""The power of the side that each parameter grows with, for corruptions that have lengths in pixels."""

ALEXNET = {name: row["alexnet"] for name, row in _PUBLISHED.items()}
"""AlexNet's top-1 error on each corruption of ImageNet-C, the mean over its five severities."""


class SeverityTable(NamedTuple):
    """The parameters of one published set, five for each corruption, for images of `side` pixels; see the functions of
    the corruptions. elastic: the side by which the elastic transform's shares are multiplied."""

    name: str
    side: int
    elastic: int

    @property
    def values(self) -> dict[str, list[tuple[Any, ...]]]:
        """The parameters by corruption, at each severity."""
        rows = {name: row[self.name] for name, row in _PUBLISHED.items()}
        values = {name: [tuple(v) if isinstance(v, list) else (v,) for v in row] for name, row in rows.items()}
        shares = values["elastic_transform"]
        return {**values, "elastic_transform": [tuple(self.elastic * share for share in three) for three in shares]}


# 244 and not 224: the published generator has it so, and its images are what others are measured on.
IMAGENET_C = SeverityTable("ImageNet-C", 224, 244)
TINY_IMAGENET_C = SeverityTable("Tiny-ImageNet-C", 64, 64)
CIFAR_C = SeverityTable("CIFAR-C", 32, 32)


def table_for(side: int) -> SeverityTable:
    """The published table nearest to images whose shorter side is `side` (borders at the geometric means)."""
    return CIFAR_C if side < 46 else TINY_IMAGENET_C if side < 120 else IMAGENET_C


def length_factor(side: int) -> float:
    """The factor of lengths in pixels at this side; 1 at the published sizes."""
    table = table_for(side)
    factor = side / table.side
    return factor if table is IMAGENET_C else max(1.0, factor)


def parameters(name: str, severity: int, side: int) -> tuple[Any, ...]:
    """The parameters of a corruption at a severity, for images whose shorter side is `side`."""
    if severity not in SEVERITIES:
        raise SitusError(f"severity={severity}: must be one of 1, 2, 3, 4, 5", field="severities")
    return scaled(name, table_for(side).values[name][severity - 1], length_factor(side))


def scaled(name: str, values: tuple[Any, ...], factor: float) -> tuple[Any, ...]:
    """Parameters with their lengths multiplied by `factor`; amounts stay."""
    powers = GROWTH.get(name, (0,) * len(values))
    return tuple(value * factor**power if power else value for value, power in zip(values, powers, strict=True))


def describe(side: int) -> str:
    """One line on the source of the parameters for images of this side."""
    table, factor = table_for(side), length_factor(side)
    scale = "lengths as published" if factor == 1.0 else f"lengths × {factor:.3g} for {side} pixels"
    return f"{table.name} ({table.side} pixels), {scale}"


# --- filters and their noise ----------------------------------------------------------------------


Edge = Literal["repeat", "mirror", "mirror101"]
"""Beyond the border abcd goes on as dddd, as dcba, or as cba."""


class Draw(NamedTuple):
    """The noise of one corruption at one severity: a pure function of (seed, severity, id, corruption, what for)."""

    seed: int
    severity: int
    ids: Tensor
    corruption: str

    def uniform(self, what: str, *shape: int) -> Tensor:
        """In [0, 1), [B, *shape]."""
        return uniform(self.seed, self.severity, self.ids, f"corruption.{self.corruption}.{what}", shape)

    def normal(self, what: str, *shape: int) -> Tensor:
        """Standard normal, [B, *shape]."""
        return normal(self.seed, self.severity, self.ids, f"corruption.{self.corruption}.{what}", shape)


def beyond(index: Tensor, size: int, edge: Edge) -> Tensor:
    """The pixel in 0 … size − 1 for each index, however far outside."""
    if edge == "repeat" or size == 1:
        return index.clamp(0, size - 1)
    period = 2 * size if edge == "mirror" else 2 * (size - 1)
    folded = index % period
    return torch.where(folded < size, folded, period - int(edge == "mirror") - folded)


def gaussian_matrix(size: int, sigma: float, truncate: float, edge: Edge, device: torch.device) -> Tensor:
    """A Gaussian filter of a line as a matrix [size, size]: row i holds the weights of the pixels that make pixel i.

    The border is in the matrix, so the filter may be wider than the line.
    """
    if sigma <= 0:
        return torch.eye(size, device=device)
    reach = int(truncate * sigma + 0.5)
    offsets = torch.arange(-reach, reach + 1)
    weights = torch.exp(-0.5 * (offsets.double() / sigma) ** 2)
    weights = weights / weights.sum()
    sources = beyond(torch.arange(size)[:, None] + offsets, size, edge)
    matrix = torch.zeros(size, size, dtype=torch.float64).scatter_add_(1, sources, weights.expand(size, -1))
    return matrix.to(device, torch.float32)


def gaussian(images: Tensor, sigma: float, truncate: float = 4.0, edge: Edge = "repeat") -> Tensor:
    """`images` [..., H, W] smoothed along both axes."""
    rows, columns = (
        gaussian_matrix(size, sigma, truncate, edge, images.device) for size in (images.shape[-2], images.shape[-1])
    )
    return rows @ images @ columns.T


def convolve(images: Tensor, kernels: Tensor, edge: Edge) -> Tensor:
    """Each image [B, C, H, W] convolved with its kernel; kernels: [B or 1, C or 1, k, k], k odd, centred.

    By Fourier transform: a kernel for each sample, and any radius, at the price of one. One channel and several kernels
    give a channel for each kernel.
    """
    reach = kernels.shape[-1] // 2
    height, width = images.shape[-2:]
    y, x = (beyond(torch.arange(-reach, size + reach, device=images.device), size, edge) for size in (height, width))
    padded = images[..., y, :][..., x]
    sizes = [-(-side // 8) * 8 for side in padded.shape[-2:]]  # lengths that the transform is fast on
    spectrum = torch.fft.rfft2(padded, s=sizes) * torch.fft.rfft2(kernels, s=sizes)
    whole = torch.fft.irfft2(spectrum, s=sizes)
    # What the transform wraps round from the other side falls on the first 2 · reach rows and columns only.
    return whole[..., 2 * reach : 2 * reach + height, 2 * reach : 2 * reach + width]


def disk_kernel(radius: float, soft: float, device: torch.device) -> Tensor:
    """A disk of equal weights, its border smoothed by a Gaussian of sigma `soft` over 3 or 5 pixels: [1, 1, k, k]."""
    edge = 1 if radius <= 8 else 2
    reach = math.floor(radius) + edge
    line = torch.arange(-reach, reach + 1, dtype=torch.float64)
    inside = (line[:, None] ** 2 + line**2 <= radius**2).double()
    taps = torch.exp(-0.5 * (torch.arange(-edge, edge + 1, dtype=torch.float64) / max(soft, 1e-3)) ** 2)
    taps = taps / taps.sum()
    smooth = F.conv2d(inside[None, None], (taps[:, None] * taps)[None, None], padding=edge)
    return (smooth / smooth.sum()).to(device, torch.float32)


def trail_kernels(angles: Tensor, radius: float, sigma: float) -> Tensor:
    """Kernels of motion trails: points one pixel apart, from the centre along `angles` [B] (radians): [B, k, k].

    There are 2 · radius + 1 points whose weights fall as a Gaussian; each is shared among the four pixels around it.
    """
    count = min(2 * math.ceil(radius) + 1, math.ceil(5 * sigma) + 1)  # beyond five sigma the weights are below 4e-6
    steps = torch.arange(count, device=angles.device, dtype=torch.float32)
    weights = torch.exp(-0.5 * (steps / sigma) ** 2)
    weights = weights / weights.sum()
    side = 2 * count + 1
    x = count - steps * torch.cos(angles)[:, None]
    y = count - steps * torch.sin(angles)[:, None]
    kernels = torch.zeros(len(angles), side * side, device=angles.device)
    left, top = x.floor(), y.floor()
    for dy in (0, 1):
        for dx in (0, 1):
            share = (1 - (x - left - dx).abs()) * (1 - (y - top - dy).abs()) * weights
            kernels.scatter_add_(1, ((top + dy) * side + left + dx).long(), share)
    return kernels.view(-1, side, side)


def trail(images: Tensor, angles: Tensor, radius: float, sigma: float) -> Tensor:
    """`images` [B, C, H, W] blurred along `angles` [B] as by a motion that fades."""
    return convolve(images, trail_kernels(angles, radius, sigma)[:, None], "repeat")


def zoom(images: Tensor, factor: float) -> Tensor:
    """The centre of `images` [B, C, H, W] enlarged `factor` times (bilinear), at the size they had."""
    sizes = images.shape[-2:]
    kept = [math.ceil(size / factor) for size in sizes]
    top, left = ((size - keep) // 2 for size, keep in zip(sizes, kept, strict=True))
    centre = images[..., top : top + kept[0], left : left + kept[1]]
    large = [round(keep * factor) for keep in kept]
    grown = F.interpolate(centre, size=large, mode="bilinear", align_corners=True)
    top, left = ((have - size) // 2 for size, have in zip(sizes, large, strict=True))
    return grown[..., top : top + sizes[0], left : left + sizes[1]]


def clouds(draw: Draw, what: str, size: tuple[int, int], decay: float) -> Tensor:
    """Random clouds (plasma) from 0 to 1, [B, 1, H, W]. decay: 1 is rough at every scale, larger is smoother.

    The diamond-square rule on a torus whose side is a power of two: each round puts a point between any four, at their
    mean with some noise, whose amplitude falls by decay² from round to round.
    """
    rounds = max(1, math.ceil(math.log2(max(size))))
    device = draw.ids.device
    map_ = torch.zeros(len(draw.ids), 1, 1, device=device)
    amplitude = 1.0
    for number in range(rounds):
        side = map_.shape[-1]
        noise = (2.0 * draw.uniform(f"{what}.{number}", 3, side, side) - 1.0) * amplitude
        below, right = map_.roll(-1, 1), map_.roll(-1, 2)
        centre = (map_ + below + right + below.roll(-1, 2)) / 4 + noise[:, 0]
        across = (map_ + right + centre + centre.roll(1, 1)) / 4 + noise[:, 1]
        down = (map_ + below + centre + centre.roll(1, 2)) / 4 + noise[:, 2]
        rows = torch.stack([torch.stack([map_, across], dim=3), torch.stack([down, centre], dim=3)], dim=2)
        map_ = rows.reshape(-1, 2 * side, 2 * side)
        amplitude /= decay**2
    low, high = map_.amin((1, 2), keepdim=True), map_.amax((1, 2), keepdim=True)
    return ((map_ - low) / (high - low).clamp(min=1e-12))[:, None, : size[0], : size[1]]


def luma(images: Tensor) -> Tensor:
    """Luma [B, 1, H, W]: Rec. 601 for RGB, the mean for any other number of channels."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    red, green, blue = images.unbind(1)
    return (0.299 * red + 0.587 * green + 0.114 * blue)[:, None]


# --- noise ----------------------------------------------------------------------------------------


LEVELS = 256


def gaussian_noise(images: Tensor, draw: Draw, sigma: float) -> Tensor:
    """Each value with its own normal noise of deviation `sigma`."""
    return images + sigma * draw.normal("noise", *images.shape[1:])


def shot_noise(images: Tensor, draw: Draw, photons: float) -> Tensor:
    """Light counted in photons: a Poisson number whose mean is value · `photons`, over `photons`."""
    counts = poisson((images * (LEVELS - 1)).round(), photons, draw.uniform("photons", *images.shape[1:]))
    return counts / photons


def impulse_noise(images: Tensor, draw: Draw, amount: float) -> Tensor:
    """A share `amount` of the values, each channel for itself, becomes 0 or 1 with equal chance."""
    noise = draw.uniform("place", *images.shape[1:])
    salt = draw.uniform("colour", *images.shape[1:]) < 0.5
    return torch.where(noise < amount, salt.to(images.dtype), images)


def poisson(levels: Tensor, photons: float, noise: Tensor) -> Tensor:
    """Poisson numbers of mean level / 255 · `photons` by inversion of their distribution, exact.

    levels: whole numbers in 0..255. noise: uniform in [0, 1), of the same shape. As there are only 256 means, their
    distributions are one table; level + noise is looked up in all of them at once, laid end to end.
    """
    most, ends = _distributions(photons)
    index = torch.searchsorted(ends.to(levels.device), (levels.double() + noise.double()).contiguous(), right=True)
    return (index - levels.long() * most).clamp(0, most).to(torch.float32)


@cache
def _distributions(photons: float) -> tuple[int, Tensor]:
    """How many counts there are, and the chance of at most k = 0, 1, … for each level, plus the level: sorted."""
    most = math.ceil(photons + 10 * math.sqrt(photons) + 10)  # more has less chance than 1e-9, the noise 6e-8
    level = torch.arange(LEVELS, dtype=torch.float64)[:, None]
    means = (level * (photons / (LEVELS - 1))).expand(-1, most)
    chance = torch.special.gammaincc(torch.arange(1, most + 1, dtype=torch.float64).expand_as(means), means)
    return most, (chance + level).flatten()


# --- blur -----------------------------------------------------------------------------------------


def defocus_blur(images: Tensor, draw: Draw, radius: float, soft: float) -> Tensor:  # noqa: ARG001
    """Every point becomes a disk, as with a lens out of focus. soft: sigma that smooths its border."""
    return convolve(images, disk_kernel(radius, soft, images.device), "mirror101")


def motion_blur(images: Tensor, draw: Draw, radius: float, sigma: float) -> Tensor:
    """A trail in one direction within 45° of the horizontal: 2 · radius + 1 points with Gaussian weights."""
    angles = (draw.uniform("angle") - 0.5) * (math.pi / 2)
    return trail(images, angles, radius, sigma)


def zoom_blur(images: Tensor, draw: Draw, largest: float, step: float) -> Tensor:  # noqa: ARG001
    """The mean of the image and its enlargements by 1, 1 + step, … up to `largest`, as with a moving camera."""
    count = round((largest - 1) / step)
    total = images
    for number in range(count + 1):
        total = total + zoom(images, 1 + number * step)
    return total / (count + 2)


def glass_blur(images: Tensor, draw: Draw, sigma: float, reach: float, rounds: int) -> Tensor:
    """Smoothed, pixels replaced by random near ones, smoothed again: as through frosted glass.

    The paper swaps pixels; the published generator overwrites one before it reads it, so its images hold copies. So do
    ours, because published numbers are for those images. sigma: of the blur before and after. reach: the largest
    distance of a replacement. rounds: how often.
    """
    height, width = images.shape[-2:]
    smooth = gaussian(images, sigma)
    places = torch.arange(height * width, device=images.device).repeat(len(images), 1)
    for number in range(rounds):
        places = fetch(
            places, (height, width), max(1, round(reach)), draw.uniform(f"offsets.{number}", 2, height, width)
        )
    index = places[:, None].expand(-1, images.shape[1], -1)
    moved = smooth.flatten(2).gather(2, index).view_as(images)
    return gaussian(moved, sigma)


def fetch(places: Tensor, size: tuple[int, int], reach: int, noise: Tensor) -> Tensor:
    """Replaces every pixel, from the last to the first, by the current pixel at a random offset in [−reach, reach).

    places: [B, H · W], the source of each pixel. noise: [B, 2, H, W] uniform, one (y, x) per pixel. A pixel reads what
    later pixels have become, so the order matters; but pixels 2 · reach columns apart in neighbouring rows do not meet,
    and all of one slanted line are replaced at once with the same result.
    """
    width = size[1]
    places = places.clone()
    offsets = (noise * (2 * reach)).floor().long() - reach
    jumps = (offsets[:, 0] * width + offsets[:, 1]).flatten(1)
    for line in _slanted_lines(size, reach, places.device):
        places[:, line] = places.gather(1, line + jumps[:, line])
    return places


def _slanted_lines(size: tuple[int, int], reach: int, device: torch.device) -> tuple[Tensor, ...]:
    """The pixels at least `reach` from the border, as flat indices, in lines that may be replaced at once."""
    height, width = size
    if min(size) <= 2 * reach:
        return ()
    y = torch.arange(height - reach, reach, -1)
    x = torch.arange(width - reach, reach, -1)
    step = (y[0] - y)[:, None] * (2 * reach) + (x[0] - x)
    flat = (y[:, None] * width + x).flatten()[step.flatten().argsort(stable=True)]
    return flat.to(device).split([count for count in torch.bincount(step.flatten()).tolist() if count])


# --- weather --------------------------------------------------------------------------------------


# Frost, by eye and by the mean, spread and tint of photographs of frosted windows.
_NEEDLE = 0.035  # half the length of an ice needle, of the shorter side
_CRYSTAL = 0.05  # sigma of the fields that part one crystal from the next, of the shorter side
_DIRECTIONS = 6
_SEEDS = 0.07  # share of pixels where a needle starts
_TINT = (0.90, 1.02, 1.08)


def brightness(images: Tensor, draw: Draw, amount: float) -> Tensor:  # noqa: ARG001
    """The value V of hue, saturation and value raised by `amount`; hue and saturation stay.

    With both fixed, all channels are proportional to V. What is black has no hue and becomes grey.
    """
    value = images.amax(1, keepdim=True)
    raised = (value + amount).clamp(max=1.0)
    return torch.where(value > 0, images * (raised / value.clamp(min=1e-6)), raised)


def fog(images: Tensor, draw: Draw, thickness: float, decay: float) -> Tensor:
    """Clouds added, then all made darker so that the brightest value stays the same.

    thickness: the fog's largest value, of white. decay: how fast its structure fades from coarse to fine.
    """
    height, width = images.shape[-2:]
    brightest = images.amax((1, 2, 3), keepdim=True)
    layer = clouds(draw, "clouds", (height, width), decay)
    return (images + thickness * layer) * (brightest / (brightest + thickness))


def snow(
    images: Tensor,
    draw: Draw,
    mean: float,
    std: float,
    size: float,
    threshold: float,
    radius: float,
    sigma: float,
    keep: float,
) -> Tensor:
    """Falling flakes over a paler image.

    mean, std: of the noise that becomes flakes. size: their enlargement. threshold: below it there is no flake. radius,
    sigma: the trail of their fall. keep: share of the image's colour that is kept.
    """
    height, width = images.shape[-2:]
    noise = mean + std * draw.normal("flakes", 1, height, width)
    flakes = zoom(noise, max(1.0, size))
    flakes = torch.where(flakes < threshold, torch.zeros_like(flakes), flakes.clamp(0.0, 1.0))
    angles = -math.pi / 2 + (draw.uniform("angle") - 0.5) * (math.pi / 2)
    flakes = trail(flakes, angles, radius, sigma).clamp(0.0, 1.0)
    pale = torch.maximum(images, 1.5 * luma(images) + 0.5)
    return keep * images + (1 - keep) * pale + flakes + flakes.flip(2, 3)


def frost(images: Tensor, draw: Draw, keep: float, amount: float) -> Tensor:
    """keep · image + amount · ice. The ice is drawn here; the published images use parts of six photographs."""
    layer = ice(draw, (images.shape[2], images.shape[3]))
    if images.shape[1] == 3:
        layer = layer * torch.tensor(_TINT, device=images.device).view(1, 3, 1, 1)
    return keep * images + amount * layer.clamp(0.0, 1.0)


def ice(draw: Draw, size: tuple[int, int]) -> Tensor:
    """Frost on a window, [B, 1, H, W] about [0, 1]: crystals, each of needles in one direction, over haze."""
    height, width = size
    side = min(size)
    shade = 0.40 + 0.46 * draw.uniform("shade").view(-1, 1, 1, 1)  # windows differ in how white they are
    angles = math.pi * draw.uniform("angles", _DIRECTIONS)
    fields = gaussian(draw.uniform("crystals", _DIRECTIONS, height, width), _CRYSTAL * side, 3.0, "mirror")
    owner = fields.argmax(1, keepdim=True)
    tone = draw.uniform("tone", _DIRECTIONS).gather(1, owner.flatten(1)).view_as(owner) - 0.5
    seeds = (draw.uniform("seeds", 1, height, width) < _SEEDS).float() * draw.uniform("height", 1, height, width)
    length = max(1.5, _NEEDLE * side)
    one_way = trail_kernels(angles.flatten(), length, length / 1.5)
    both = (one_way + one_way.flip(1, 2)).view(-1, _DIRECTIONS, *one_way.shape[1:]) / 2
    needles = convolve(seeds, both, "mirror").gather(1, owner)
    spread = needles.std((2, 3), keepdim=True).clamp(min=1e-6)
    relief = (needles - needles.mean((2, 3), keepdim=True)) / spread
    haze = clouds(draw, "haze", size, 1.7) - 0.5
    return shade + 0.08 * relief + 0.12 * tone + 0.25 * haze


# --- digital --------------------------------------------------------------------------------------


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


# --- the list of all ------------------------------------------------------------------------------


Corruption = Callable[..., Tensor]
"""(images [B, C, H, W] in [0, 1], noise, *parameters) -> images, not yet clipped to [0, 1]."""


def _named(*corruptions: Any) -> dict[str, Corruption]:
    return {corruption.__name__: corruption for corruption in corruptions}


GROUPS: dict[str, dict[str, Corruption]] = {
    "noise": _named(gaussian_noise, shot_noise, impulse_noise),
    "blur": _named(defocus_blur, glass_blur, motion_blur, zoom_blur),
    "weather": _named(snow, frost, fog, brightness),
    "digital": _named(contrast, elastic_transform, pixelate, jpeg_compression),
}
"""The paper's four kinds, each with its corruptions under the names of ImageNet-C's folders."""

CORRUPTIONS: dict[str, Corruption] = {name: change for group in GROUPS.values() for name, change in group.items()}
"""All 15, in the paper's order."""


def corrupt(images: Tensor, name: str, severity: int, ids: Tensor, *, seed: int = 0) -> Tensor:
    """`images` [B, C, H, W] in [0, 1] corrupted, in [0, 1] on 256 levels, as in an 8-bit file.

    ids: [B] integers that identify the samples. The same (seed, id, name, severity) always gives the same noise.
    """
    if name not in CORRUPTIONS:
        raise unknown_name("corruption", name, CORRUPTIONS)
    strength = parameters(name, severity, min(images.shape[-2:]))
    draw = Draw(seed, severity, ids.to(images.device), name)
    changed = CORRUPTIONS[name](images.to(torch.float32), draw, *strength)
    return (changed.clamp(0.0, 1.0) * 255.0).round() / 255.0


def find_corruptions(words: Sequence[str]) -> tuple[str, ...]:
    """Corruptions in the paper's order: "all", "none", a kind ("blur") or single ones."""
    wanted: set[str] = set()
    known = {**{name: {name} for name in CORRUPTIONS}, **GROUPS, "all": CORRUPTIONS, "none": ()}
    for word in words:
        if word not in known:
            choices = ", ".join(["all", "none", *GROUPS, *CORRUPTIONS])
            raise SitusError(f"unknown corruption {word!r}; choose from: {choices}", field="corruptions")
        wanted |= set(known[word])
    return tuple(name for name in CORRUPTIONS if name in wanted)


def find_severities(levels: Sequence[int]) -> tuple[int, ...]:
    """Severities ascending, each once."""
    for level in levels or [None]:
        if level not in SEVERITIES:
            raise SitusError(field="severities", value=level, allowed="one or more of 1, 2, 3, 4, 5")
    return tuple(sorted(set(levels)))
