"""The 15 common corruptions of ImageNet-C, made from any images, at five severities.

Dan Hendrycks and Thomas Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and Perturbations,
ICLR 2019. Written in torch, batched on the images' device; the strengths are the published ones
(`corruptions.severity`). A sample's corruption depends only on (seed, its id, corruption, severity).

Known differences from the published files: frost is drawn instead of photographed; the noise differs; images are
rounded to 8 bits once, and not saved as JPEG of quality 85.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from situs.errors import SitusError, unknown_name
from situs.measure.corruptions import blur, digital, noise, weather
from situs.measure.corruptions.filters import Draw
from situs.measure.corruptions.severity import SEVERITIES, parameters

Corruption = Callable[..., Tensor]
"""(images [B, C, H, W] in [0, 1], noise, *parameters) -> images, not yet clipped to [0, 1]."""


def _named(*corruptions: Any) -> dict[str, Corruption]:
    return {corruption.__name__: corruption for corruption in corruptions}


GROUPS: dict[str, dict[str, Corruption]] = {
    "noise": _named(noise.gaussian_noise, noise.shot_noise, noise.impulse_noise),
    "blur": _named(blur.defocus_blur, blur.glass_blur, blur.motion_blur, blur.zoom_blur),
    "weather": _named(weather.snow, weather.frost, weather.fog, weather.brightness),
    "digital": _named(digital.contrast, digital.elastic_transform, digital.pixelate, digital.jpeg_compression),
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
            raise SitusError(field="severities", value=level, allowed="some of 1, 2, 3, 4, 5")
    return tuple(sorted(set(levels)))
