"""Filters of federated engines as defences: most numbers of an upload are left out, or cut off and noised.

NVFlare's PercentilePrivacy ("share the largest", Shokri and Shmatikov, CCS 2015) and SVTPrivacy (the sparse vector
technique, a choice and noise by Laplace), and top-k as compressors of uploads have it. Limits are in units of the
gradient. An attacker sees which numbers were left out, and solves without them.
"""

# ruff: noqa: ARG002  (every defence is given the same arguments)
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from situs.audit.defences.base import Defence, Gradients, NoDefence, check_setting

LEFT_OUT = "numbers that are left out follow from the image: that is not random noise, and a search may use it"
"""Why no filter proves privacy."""


def flat(gradients: Gradients) -> Tensor:
    """All numbers, [n]."""
    return torch.cat([g.flatten() for g in gradients.values()])


def shaped(numbers: Tensor, like: Gradients) -> Gradients:
    """Numbers [n] as gradients of these names and shapes."""
    parts = numbers.split([g.numel() for g in like.values()])
    return {name: part.view(g.shape) for (name, g), part in zip(like.items(), parts, strict=True)}


@dataclass(frozen=True)
class Filter(Defence):
    """Leaves numbers out, which are sent as zeros."""

    known: ClassVar[str] = "the settings, and which numbers are zeros: equations with such a number are not used"

    @property
    def caveat(self) -> str:
        return LEFT_OUT

    def lost(self, gradient: Tensor) -> Tensor:
        return gradient == 0


@dataclass(frozen=True)
class TopK(Filter):
    """The largest numbers of an upload, over all tensors together."""

    share: float = 0.1
    """The share of all numbers that is sent."""

    name: ClassVar[str] = "topk"
    about: ClassVar[str] = "the largest numbers are sent, over all tensors together, and zeros instead of all others"

    def __post_init__(self) -> None:
        check_setting("topk", self.share, "(0, 1]")

    @property
    def label(self) -> str:
        return f"topk {self.share:g}"

    def upload(self, gradients: Gradients, batch: int, chance: torch.Generator) -> Gradients:
        numbers = flat(gradients)
        kept = numbers.abs().topk(max(1, math.ceil(self.share * len(numbers)))).indices
        return shaped(torch.zeros_like(numbers).index_copy(0, kept, numbers[kept]), gradients)


@dataclass(frozen=True)
class Percentile(Filter):
    """NVFlare's PercentilePrivacy: numbers below a percentile are zeros, the others are cut off at γ."""

    percentile: float = 10.0
    """Of the sizes of all numbers; smaller ones are left out."""

    gamma: float = 0.01
    """γ: the largest size of a number."""

    name: ClassVar[str] = "percentile"
    about: ClassVar[str] = "numbers below a percentile of all sizes are left out, and the others are cut off at ±γ"

    def __post_init__(self) -> None:
        check_setting("percentile", self.percentile, "[0, 100]")
        check_setting("percentile: γ", self.gamma, "(0, inf)")

    @property
    def label(self) -> str:
        return f"percentile {self.percentile:g}, γ={self.gamma:g}"

    def upload(self, gradients: Gradients, batch: int, chance: torch.Generator) -> Gradients:
        cutoff = float(np.percentile(flat(gradients).abs().cpu().numpy(), self.percentile))
        return {
            name: torch.where(g.abs() < cutoff, 0.0, g).clamp(-self.gamma, self.gamma) for name, g in gradients.items()
        }

    def lost(self, gradient: Tensor) -> Tensor:
        return (gradient == 0) | (gradient.abs() >= self.gamma * (1 - 1e-6))


@dataclass(frozen=True)
class SparseVector(Filter):
    """NVFlare's SVTPrivacy: a share of the numbers, drawn from those above a noisy threshold, cut off and noised."""

    share: float = 0.1
    """The share of all numbers that is sent; drawn with repetition, as there by default."""

    epsilon: float = 0.1
    """ε of the choice, divided between threshold and numbers as 1 : (2c)^⅔ for c numbers."""

    noise: float = 0.1
    """`noise_var` there: Laplace noise on what is sent has the scale 2 γ / noise."""

    gamma: float = 1e-5
    """γ: the largest size of a number before noise."""

    tau: float = 1e-6
    """τ: the threshold before noise."""

    name: ClassVar[str] = "svt"
    about: ClassVar[str] = (
        "the sparse vector technique: numbers above a noisy threshold are drawn, cut off at ±γ and get Laplace noise"
    )

    def __post_init__(self) -> None:
        check_setting("svt", self.share, "(0, 1]")
        for setting, value in (("ε", self.epsilon), ("noise", self.noise), ("γ", self.gamma)):
            check_setting(f"svt: {setting}", value, "(0, inf)")

    @property
    def label(self) -> str:
        return f"svt {self.share:g}, noise {self.noise:g}, γ={self.gamma:g}"

    @property
    def noiseless(self) -> Defence:
        return NoDefence()

    def noise_level(self, batch: int) -> float:
        return math.sqrt(2) * 2 * self.gamma / self.noise

    def upload(self, gradients: Gradients, batch: int, chance: torch.Generator) -> Gradients:
        numbers = flat(gradients).double().cpu()
        count = math.ceil(self.share * len(numbers))
        for_threshold = self.epsilon / (1 + (2 * count) ** (2 / 3))
        threshold = self.tau + float(laplace(self.gamma / for_threshold, 1, chance))
        scale = 2 * self.gamma * count / (self.epsilon - for_threshold)
        cut = numbers.clamp(-self.gamma, self.gamma)
        accepted = torch.zeros(len(numbers), dtype=torch.bool)
        while int(accepted.sum()) < count:  # each number that is not accepted is asked again, with new noise
            accepted |= cut.abs() + laplace(scale, len(cut), chance) >= threshold
        candidates = accepted.nonzero().flatten()
        drawn = candidates[torch.randint(len(candidates), (count,), generator=chance)]
        sent = torch.zeros_like(numbers)
        sent[drawn] = cut[drawn] + laplace(2 * self.gamma / self.noise, count, chance)
        like = flat(gradients)
        return shaped(sent.to(like.device, like.dtype), gradients)


def laplace(scale: float, count: int, chance: torch.Generator) -> Tensor:
    """Laplace noise, [count], in float64."""
    uniform = torch.rand(count, generator=chance, dtype=torch.float64) - 0.5
    return -scale * uniform.sign() * torch.log1p(-2 * uniform.abs())
