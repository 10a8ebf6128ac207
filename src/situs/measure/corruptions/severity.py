"""The strength of each severity of each corruption, as published by Hendrycks and Dietterich, for any image size.

There are three published tables, one for each size of the corrupted sets: ImageNet-C (224 pixels), Tiny-ImageNet-C (64)
and CIFAR-C (32). An image takes the table nearest to its shorter side. Amounts (noise, contrast, quality, shares) are
used unchanged; lengths in pixels (radii, flakes, displacements) are multiplied by side ÷ published side, so that a
larger picture looks as corrupted as the published one. The two small tables are never scaled down: their lengths are
one or two pixels already.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from situs.errors import SitusError

SEVERITIES = (1, 2, 3, 4, 5)


GROWTH = {
    "defocus_blur": (1, 1),
    "glass_blur": (1, 1, 0),
    "motion_blur": (1, 1),
    "snow": (0, 0, 1, 0, 1, 1, 0),
    # Noise smoothed over σ pixels shrinks as 1/σ: the displacements grow with the side only if α does twice.
    "elastic_transform": (2, 1, 1),
}
"""The power of the side that each parameter grows with, for corruptions that have lengths in pixels."""


class SeverityTable(NamedTuple):
    """The parameters of one published set, five for each corruption, for images of `side` pixels; see the functions of
    the corruptions."""

    name: str
    side: int
    values: dict[str, tuple[Any, ...]]


def _elastic(side: int, *shares: tuple[float, float, float]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(side * share for share in triple) for triple in shares)


IMAGENET_C = SeverityTable(
    "ImageNet-C",
    224,
    {
        "gaussian_noise": (0.08, 0.12, 0.18, 0.26, 0.38),
        "shot_noise": (60, 25, 12, 5, 3),
        "impulse_noise": (0.03, 0.06, 0.09, 0.17, 0.27),
        "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
        "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
        "zoom_blur": ((1.11, 0.01), (1.15, 0.01), (1.20, 0.02), (1.24, 0.02), (1.30, 0.03)),
        "snow": (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
        "frost": ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
        "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
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

TINY_IMAGENET_C = SeverityTable(
    "Tiny-ImageNet-C",
    64,
    {
        "gaussian_noise": (0.04, 0.08, 0.12, 0.15, 0.18),
        "shot_noise": (250, 100, 50, 30, 15),
        "impulse_noise": (0.01, 0.02, 0.05, 0.08, 0.14),
        "defocus_blur": ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
        "glass_blur": ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)),
        "motion_blur": ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
        "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.15, 0.01), (1.20, 0.01), (1.25, 0.01)),
        "snow": (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.8),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.8),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
        ),
        "frost": ((1, 0.3), (0.9, 0.4), (0.8, 0.45), (0.75, 0.5), (0.7, 0.55)),
        "fog": ((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)),
        "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),
        "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),
        "elastic_transform": _elastic(
            64, (0, 0, 0.08), (0.05, 0.3, 0.06), (0.1, 0.08, 0.06), (0.1, 0.03, 0.03), (0.16, 0.03, 0.02)
        ),
        "pixelate": (0.9, 0.8, 0.7, 0.6, 0.5),
        "jpeg_compression": (65, 58, 50, 40, 25),
    },
)

CIFAR_C = SeverityTable(
    "CIFAR-C",
    32,
    {
        "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),
        "shot_noise": (500, 250, 100, 75, 50),
        "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),
        "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
        "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
        "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.15, 0.01), (1.20, 0.01), (1.25, 0.01)),
        "snow": (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        "frost": ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
        "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),
        "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
        "elastic_transform": _elastic(
            32, (0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)
        ),
        "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),
        "jpeg_compression": (80, 65, 58, 50, 40),
    },
)


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
    values = table_for(side).values[name][severity - 1]
    return scaled(name, values if isinstance(values, tuple) else (values,), length_factor(side))


def scaled(name: str, values: tuple[Any, ...], factor: float) -> tuple[Any, ...]:
    """Parameters with their lengths multiplied by `factor`; amounts stay."""
    powers = GROWTH.get(name, (0,) * len(values))
    return tuple(value * factor**power if power else value for value, power in zip(values, powers, strict=True))


def describe(side: int) -> str:
    """One line on the source of the parameters for images of this side."""
    table, factor = table_for(side), length_factor(side)
    scale = "lengths as published" if factor == 1.0 else f"lengths × {factor:.3g} for {side} pixels"
    return f"{table.name} ({table.side} pixels), {scale}"
