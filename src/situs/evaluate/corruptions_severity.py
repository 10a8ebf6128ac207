"""How strong each severity of each corruption is: the numbers that Hendrycks and Dietterich published, for any size.

There are three published tables, one for each size that corrupted sets were made at: ImageNet-C (224 pixels),
Tiny-ImageNet-C (64) and CIFAR-C (32). An image takes the table nearest to its shorter side. Amounts (noise, contrast,
quality, shares) are used as they are; lengths in pixels (radii, flakes, displacements) are multiplied by side ÷
published side, so that a larger picture looks as corrupted as the published one. The two small tables are never
scaled down: their lengths are of one or two pixels, and less than one pixel is nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from situs.errors import SitusError

SEVERITIES = (1, 2, 3, 4, 5)


class Glass(NamedTuple):
    """sigma: of the blur before and after. reach: how far a pixel is fetched from, pixels. rounds: how often."""

    sigma: float
    reach: int
    rounds: int


class Disk(NamedTuple):
    """radius: of the disk that each point becomes, pixels. soft: sigma that its border is smoothed with."""

    radius: float
    soft: float


class Motion(NamedTuple):
    """radius: the trail has 2 · radius + 1 points, a pixel apart. sigma: their weights fall as a Gaussian."""

    radius: float
    sigma: float


class Zoom(NamedTuple):
    """The zooms averaged: 1, 1 + step, … up to `largest`."""

    largest: float
    step: float


class Snow(NamedTuple):
    """mean, std: of the noise that becomes flakes. zoom: their size. threshold: what is below is no flake.

    radius, sigma: the trail of their fall. keep: how much of the image's own colour is left.
    """

    mean: float
    std: float
    zoom: float
    threshold: float
    radius: float
    sigma: float
    keep: float


class Frost(NamedTuple):
    """keep · image + ice · frost."""

    keep: float
    ice: float


class Fog(NamedTuple):
    """thickness: the fog's largest value, of white. decay: how fast its structure fades from coarse to fine."""

    thickness: float
    decay: float


class Elastic(NamedTuple):
    """alpha: factor of the displacements. sigma: of their smoothing. affine: how far three points are moved, pixels."""

    alpha: float
    sigma: float
    affine: float


class Table(NamedTuple):
    """The parameters of one published set, five for each corruption, made for images of `side` pixels."""

    name: str
    side: int
    values: dict[str, tuple[Any, ...]]


def _elastic(side: int, *shares: tuple[float, float, float]) -> tuple[Elastic, ...]:
    return tuple(Elastic(*(side * share for share in each)) for each in shares)


IMAGENET_C = Table(
    "ImageNet-C",
    224,
    {
        "gaussian_noise": (0.08, 0.12, 0.18, 0.26, 0.38),
        "shot_noise": (60, 25, 12, 5, 3),
        "impulse_noise": (0.03, 0.06, 0.09, 0.17, 0.27),
        "defocus_blur": (Disk(3, 0.1), Disk(4, 0.5), Disk(6, 0.5), Disk(8, 0.5), Disk(10, 0.5)),
        "glass_blur": (Glass(0.7, 1, 2), Glass(0.9, 2, 1), Glass(1, 2, 3), Glass(1.1, 3, 2), Glass(1.5, 4, 2)),
        "motion_blur": (Motion(10, 3), Motion(15, 5), Motion(15, 8), Motion(15, 12), Motion(20, 15)),
        "zoom_blur": (Zoom(1.11, 0.01), Zoom(1.15, 0.01), Zoom(1.20, 0.02), Zoom(1.24, 0.02), Zoom(1.30, 0.03)),
        "snow": (
            Snow(0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            Snow(0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            Snow(0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            Snow(0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            Snow(0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
        "frost": (Frost(1, 0.4), Frost(0.8, 0.6), Frost(0.7, 0.7), Frost(0.65, 0.7), Frost(0.6, 0.75)),
        "fog": (Fog(1.5, 2), Fog(2, 2), Fog(2.5, 1.7), Fog(2.5, 1.5), Fog(3, 1.4)),
        "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),
        "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),
        # 244 and not 224: the published generator has it so, and its images are what others are measured on.
        "elastic_transform": _elastic(
            244, (2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)
        ),
        "pixelate": (0.6, 0.5, 0.4, 0.3, 0.25),
        "jpeg_compression": (25, 18, 15, 10, 7),
    },
)

TINY_IMAGENET_C = Table(
    "Tiny-ImageNet-C",
    64,
    {
        "gaussian_noise": (0.04, 0.08, 0.12, 0.15, 0.18),
        "shot_noise": (250, 100, 50, 30, 15),
        "impulse_noise": (0.01, 0.02, 0.05, 0.08, 0.14),
        "defocus_blur": (Disk(0.5, 0.6), Disk(1, 0.1), Disk(1.5, 0.1), Disk(2.5, 0.01), Disk(3, 0.1)),
        "glass_blur": (Glass(0.1, 1, 1), Glass(0.5, 1, 1), Glass(0.6, 1, 2), Glass(0.7, 2, 1), Glass(0.9, 2, 2)),
        "motion_blur": (Motion(10, 1), Motion(10, 1.5), Motion(10, 2), Motion(10, 2.5), Motion(12, 3)),
        "zoom_blur": (Zoom(1.06, 0.01), Zoom(1.11, 0.01), Zoom(1.15, 0.01), Zoom(1.20, 0.01), Zoom(1.25, 0.01)),
        "snow": (
            Snow(0.1, 0.2, 1, 0.6, 8, 3, 0.8),
            Snow(0.1, 0.2, 1, 0.5, 10, 4, 0.8),
            Snow(0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
            Snow(0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
            Snow(0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
        ),
        "frost": (Frost(1, 0.3), Frost(0.9, 0.4), Frost(0.8, 0.45), Frost(0.75, 0.5), Frost(0.7, 0.55)),
        "fog": (Fog(0.4, 3), Fog(0.7, 3), Fog(1, 2.5), Fog(1.5, 2), Fog(2, 1.75)),
        "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),
        "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),
        "elastic_transform": _elastic(
            64, (0, 0, 0.08), (0.05, 0.3, 0.06), (0.1, 0.08, 0.06), (0.1, 0.03, 0.03), (0.16, 0.03, 0.02)
        ),
        "pixelate": (0.9, 0.8, 0.7, 0.6, 0.5),
        "jpeg_compression": (65, 58, 50, 40, 25),
    },
)

CIFAR_C = Table(
    "CIFAR-C",
    32,
    {
        "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),
        "shot_noise": (500, 250, 100, 75, 50),
        "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),
        "defocus_blur": (Disk(0.3, 0.4), Disk(0.4, 0.5), Disk(0.5, 0.6), Disk(1, 0.2), Disk(1.5, 0.1)),
        "glass_blur": (Glass(0.05, 1, 1), Glass(0.25, 1, 1), Glass(0.4, 1, 1), Glass(0.25, 1, 2), Glass(0.4, 1, 2)),
        "motion_blur": (Motion(6, 1), Motion(6, 1.5), Motion(6, 2), Motion(8, 2), Motion(9, 2.5)),
        "zoom_blur": (Zoom(1.06, 0.01), Zoom(1.11, 0.01), Zoom(1.15, 0.01), Zoom(1.20, 0.01), Zoom(1.25, 0.01)),
        "snow": (
            Snow(0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            Snow(0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            Snow(0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            Snow(0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            Snow(0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        "frost": (Frost(1, 0.2), Frost(1, 0.3), Frost(0.9, 0.4), Frost(0.85, 0.4), Frost(0.75, 0.45)),
        "fog": (Fog(0.2, 3), Fog(0.5, 3), Fog(0.75, 2.5), Fog(1, 2), Fog(1.5, 1.75)),
        "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),
        "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
        "elastic_transform": _elastic(
            32, (0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)
        ),
        "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),
        "jpeg_compression": (80, 65, 58, 50, 40),
    },
)


def table_for(side: int) -> Table:
    """The published table nearest to images whose shorter side is `side` (borders at the geometric means)."""
    return CIFAR_C if side < 46 else TINY_IMAGENET_C if side < 120 else IMAGENET_C


def length_factor(side: int) -> float:
    """What lengths in pixels are multiplied by at this side; 1 at the published sizes."""
    table = table_for(side)
    factor = side / table.side
    return factor if table is IMAGENET_C else max(1.0, factor)


def parameters(name: str, severity: int, side: int) -> Any:
    """The parameters of a corruption at a severity, for images whose shorter side is `side`."""
    if severity not in SEVERITIES:
        raise SitusError(f"severity={severity}: must be one of 1, 2, 3, 4, 5", field="severities")
    return scaled(table_for(side).values[name][severity - 1], length_factor(side))


def scaled(value: Any, factor: float) -> Any:
    """`value` with its lengths multiplied by `factor`; amounts stay."""
    match value:
        case Glass(sigma, reach, rounds):
            return Glass(sigma * factor, max(1, round(reach * factor)), rounds)
        case Disk(radius, soft):
            return Disk(radius * factor, soft * factor)
        case Motion(radius, sigma):
            return Motion(radius * factor, sigma * factor)
        case Snow():
            lengths = {"zoom": max(1.0, value.zoom * factor), "radius": value.radius * factor}
            return value._replace(**lengths, sigma=value.sigma * factor)
        case Elastic(alpha, sigma, affine):
            # Noise smoothed over σ pixels shrinks as 1/σ: the displacements grow with the side only if α does twice.
            return Elastic(alpha * factor**2, sigma * factor, affine * factor)
    return value


def describe(side: int) -> str:
    """One line on where the parameters of images of this side come from."""
    table, factor = table_for(side), length_factor(side)
    scale = "lengths as published" if factor == 1.0 else f"lengths × {factor:.3g} for {side} pixels"
    return f"{table.name} ({table.side} pixels), {scale}"
