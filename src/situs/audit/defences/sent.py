"""Defences of what is sent: noise, clipping, a coarser type, names left out."""

# ruff: noqa: ARG002  (every defence is given the same arguments)
from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from situs.audit.defences.base import UNKNOWN, Defence, Gradients, Step, setting
from situs.audit.stem import position_names
from situs.backbones.base import Backbone
from situs.errors import SitusError, counted
from situs.limits import Rule

BLOCKS = Rule("a whole number of blocks, 0 or more", lambda value: value >= 0 and value % 1 == 0)


@dataclass(frozen=True)
class Noise(Defence):
    """Gaussian noise on every number."""

    sigma: float = setting(1e-3, "[0, inf)")
    """σ: standard deviation of the noise, in the units of the gradient."""

    name: ClassVar[str] = "noise"
    form: ClassVar[str] = "noise σ={sigma:g}"
    about: ClassVar[str] = (
        "Gaussian noise of standard deviation σ is added to every number that is sent. The same noise hides a small "
        "gradient better than a large one, so audit the weights before and after training"
    )
    known: ClassVar[str] = "σ. The attacker damps the directions in which the noise dominates (ridge regression)"

    def noise_level(self, batch: int) -> float:
        return self.sigma


@dataclass(frozen=True)
class Clip(Defence):
    """DP-SGD's two steps: clip the gradient of each sample to a norm, and add noise in proportion to this norm."""

    norm: float = setting(1.0, "(0, inf)", "clip")
    """C: the largest norm of a sample's gradient, over all parameters together."""

    multiplier: float = setting(0.01, "[0, inf)", "multiplier")
    """The noise on the sum has the standard deviation multiplier · C. This default is weak: DP-SGD usually takes 0.5 or
    more."""

    name: ClassVar[str] = "clip"
    form: ClassVar[str] = "clip C={norm:g}, noise {multiplier:g}·C"
    about: ClassVar[str] = (
        "each sample's gradient is clipped to norm C, and noise of standard deviation multiplier · C is "
        "added, as in DP-SGD"
    )
    known: ClassVar[str] = (
        "C and the noise multiplier. Clipping multiplies all gradients of a sample by the same factor. This factor "
        "does not change the solution of the attack's equations. If MJP is used, the attacker estimates the scaled "
        "gradient of MJP's position loss (DAL) and subtracts it"
    )

    @property
    def per_sample(self) -> bool:
        return True

    def bound(self, gradients: Gradients) -> Gradients:
        return bounded(gradients, self.norm)

    def noise_level(self, batch: int) -> float:
        return self.multiplier * self.norm / batch


def bounded(gradients: Gradients, most: float) -> Gradients:
    """Gradients of a norm over all of them that is no larger than `most`; differentiable."""
    norm = torch.stack([g.double().norm() for g in gradients.values()]).norm()
    factor = (most / norm.clamp(min=1e-30)).clamp(max=1.0)
    return {name: g * factor.to(g.dtype) for name, g in gradients.items()}


@dataclass(frozen=True)
class ClipBatch(Defence):
    """Clip the mean gradient of the batch to a norm, as many trainings do for stability. No noise is added."""

    norm: float = setting(1.0, "(0, inf)")
    """C: the largest norm of the upload, over all parameters together."""

    name: ClassVar[str] = "clip-batch"
    form: ClassVar[str] = "clip-batch C={norm:g}"
    about: ClassVar[str] = "the gradient of the whole batch is clipped to norm C, without noise"
    known: ClassVar[str] = (
        "C. Clipping multiplies all gradients by the same factor. This factor does not change the solution of the "
        "attack's equations, so clipping alone does not protect"
    )

    def upload(self, gradients: Gradients, batch: int, chance: torch.Generator) -> Gradients:
        return bounded(gradients, self.norm)


@dataclass(frozen=True)
class OwnDp(Clip):
    """The defence of a run that was trained with DP-SGD, with the guarantee of the whole run."""

    promise: str = ""
    """The guarantee, ε at δ, as text for the page."""

    name: ClassVar[str] = "dp-sgd"
    form: ClassVar[str] = "dp-sgd C={norm:g}, noise {multiplier:.3g}·C, {promise}"
    about: ClassVar[str] = (
        "the training step of the run: each sample's gradient is clipped to norm C, then noise of "
        "standard deviation multiplier · C is added to the sum. If the audited batch is smaller than the run's batch, "
        "the noise is larger relative to the gradient"
    )


@dataclass(frozen=True)
class NoPositionGradient(Defence):
    """The gradients of all parameters that hold positions stay with the client."""

    name: ClassVar[str] = "no-pe-gradient"
    about: ClassVar[str] = "the gradients of the parameters that hold positions are not sent"
    known: ClassVar[str] = (
        "which gradients are missing. The gradients of the first block also contain the patches, and the attack "
        "`tokens` recovers these patches, so withholding alone does not protect"
    )

    def refuses(self, backbone: Backbone) -> str | None:
        if position_names(backbone):
            return None
        return f"{backbone.name} has no trained parameter that is known to hold positions, so nothing is withheld"

    def withheld(self, backbone: Backbone) -> set[str]:
        return {*position_names(backbone), UNKNOWN}


@dataclass(frozen=True)
class Withhold(Defence):
    """The gradients of the embedding, of positions and of the first blocks stay with the client."""

    depth: float = setting(0, BLOCKS)
    """Number of blocks whose gradients stay with the client. With 0, only the gradients of embedding and positions
    stay."""

    name: ClassVar[str] = "withhold"
    about: ClassVar[str] = "the gradients of the embedding, the positions and the first blocks are not sent"
    known: ClassVar[str] = "which gradients are missing. The gradients of later blocks are sent"

    @property
    def label(self) -> str:
        return "withhold the embedding" + f" and {self.depth:g} block{'s' * (self.depth > 1)}" * (self.depth > 0)

    def refuses(self, backbone: Backbone) -> str | None:
        if "tokens" in backbone.refusals or not backbone.block_modules():
            return f"it is not known which gradients of {backbone.name} belong to its first blocks"
        if self.depth > len(backbone.block_modules()):
            return f"{backbone.name} has {counted(len(backbone.block_modules()), 'blocks')}"
        return None

    def withheld(self, backbone: Backbone) -> set[str]:
        first = {name for name, role in backbone.roles().items() if role.depth <= self.depth}
        return {*first, *position_names(backbone), UNKNOWN}


@dataclass(frozen=True)
class Exclude(Defence):
    """Gradients whose names match a pattern stay with the client, as with NVFlare's ExcludeVars."""

    pattern: str = r"(^|\.)(head|classifier|fc)\."
    """A regular expression. A name matches if any part of it fits."""

    name: ClassVar[str] = "exclude"
    form: ClassVar[str] = "exclude {pattern}"
    about: ClassVar[str] = "the gradients whose names match a pattern are not sent"
    known: ClassVar[str] = "which names are missing. The gradients that are sent still contain the image"

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            allowed = "a regular expression for names of parameters"
            reason = f"exclude={self.pattern}: {error}; it must be {allowed}"
            raise SitusError(reason, field="defences", value=self.pattern, allowed=allowed) from error

    def refuses(self, backbone: Backbone) -> str | None:
        if self.withheld(backbone):
            return None
        return f"no parameter of {backbone.name} has a name that matches {self.pattern}, so nothing is withheld"

    def withheld(self, backbone: Backbone) -> set[str]:
        return {name for name, _ in backbone.named_parameters() if re.search(self.pattern, name)}


@dataclass(frozen=True)
class Rounded(Defence):
    """What is sent is rounded to a coarser type."""

    sent: ClassVar[torch.dtype] = torch.float16
    exact: ClassVar[bool] = False
    name: ClassVar[str] = "fp16"
    about: ClassVar[str] = "the upload is rounded to float16"
    known: ClassVar[str] = "the type, and therefore the largest rounding error of each number"

    def step(self, step: Step) -> Step:
        return replace(step, dtype=self.sent)


class Bfloat(Rounded):
    """bfloat16."""

    sent: ClassVar[torch.dtype] = torch.bfloat16
    name: ClassVar[str] = "bf16"
    about: ClassVar[str] = "the upload is rounded to bfloat16"


class Int8(Rounded):
    """One scale a tensor."""

    sent: ClassVar[torch.dtype] = torch.int8
    name: ClassVar[str] = "int8"
    about: ClassVar[str] = "the upload is rounded to 8 bits: 127 steps from 0 to the largest magnitude in a tensor"
    known: ClassVar[str] = "the scale of each tensor, and therefore the step between its values"


# ---------------------------------------------------------------------------------------------------------------------
# Filters of federated engines as defences: most numbers of an upload are left out, or cut off and noised.
#
# NVFlare's PercentilePrivacy ("share the largest", Shokri and Shmatikov, CCS 2015) and SVTPrivacy (the sparse vector
# technique, a choice and noise by Laplace), and top-k as compressors of uploads have it. Limits are in units of the
# gradient. An attacker sees which numbers were left out, and solves without them.


LEFT_OUT = "the image decides which numbers are left out. This choice is not random noise, and a search may exploit it"
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

    known: ClassVar[str] = (
        "the settings, and which numbers are zeros. The attacker does not use equations with these zeros"
    )

    @property
    def caveat(self) -> str:
        return LEFT_OUT

    def lost(self, gradient: Tensor) -> Tensor:
        return gradient == 0


@dataclass(frozen=True)
class TopK(Filter):
    """Only the largest numbers of an upload are sent, over all tensors together."""

    share: float = setting(0.1, "(0, 1]")
    """The share of all numbers that is sent."""

    name: ClassVar[str] = "topk"
    form: ClassVar[str] = "topk {share:g}"
    about: ClassVar[str] = "the largest numbers of all tensors together are sent, and all others are replaced by zeros"

    def upload(self, gradients: Gradients, batch: int, chance: torch.Generator) -> Gradients:
        numbers = flat(gradients)
        kept = numbers.abs().topk(math.ceil(self.share * len(numbers))).indices
        return shaped(torch.zeros_like(numbers).index_copy(0, kept, numbers[kept]), gradients)


@dataclass(frozen=True)
class Percentile(Filter):
    """NVFlare's PercentilePrivacy: small numbers become zero, and the others are clipped to ±γ."""

    percentile: float = setting(10.0, "[0, 100]")
    """Numbers whose absolute value is below this percentile become zero."""

    gamma: float = setting(0.01, "(0, inf)", "percentile: γ")
    """γ: the largest absolute value of a number."""

    name: ClassVar[str] = "percentile"
    form: ClassVar[str] = "percentile {percentile:g}, γ={gamma:g}"
    about: ClassVar[str] = (
        "numbers whose magnitude is below a percentile are left out, and the others are clipped at ±γ"
    )

    def upload(self, gradients: Gradients, batch: int, chance: torch.Generator) -> Gradients:
        cutoff = float(np.percentile(flat(gradients).abs().cpu().numpy(), self.percentile))
        return {
            name: torch.where(g.abs() < cutoff, 0.0, g).clamp(-self.gamma, self.gamma) for name, g in gradients.items()
        }

    def lost(self, gradient: Tensor) -> Tensor:
        return (gradient == 0) | (gradient.abs() >= self.gamma * (1 - 1e-6))


@dataclass(frozen=True)
class SparseVector(Filter):
    """NVFlare's SVTPrivacy. It sends a share of the numbers, drawn from those above a noisy threshold. They are
    clipped, and noise is added."""

    share: float = setting(0.1, "(0, 1]")
    """The share of all numbers that is sent. Numbers are drawn with repetition, as in NVFlare by default."""

    epsilon: float = setting(0.1, "(0, inf)", "svt: ε")
    """ε of the choice. Threshold and numbers share it in the ratio 1 : (2c)^⅔ for c numbers."""

    noise: float = setting(0.1, "(0, inf)", "svt: noise")
    """NVFlare's `noise_var`. The Laplace noise on the sent numbers has the scale 2 γ / noise."""

    gamma: float = setting(1e-5, "(0, inf)", "svt: γ")
    """γ: the largest absolute value of a number before noise is added."""

    tau: float = 1e-6
    """τ: the threshold before noise is added."""

    name: ClassVar[str] = "svt"
    form: ClassVar[str] = "svt {share:g}, noise {noise:g}, γ={gamma:g}"
    about: ClassVar[str] = (
        "the sparse vector technique: numbers above a noisy threshold are selected and clipped at ±γ, and Laplace "
        "noise is added to them"
    )

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
