"""Defences: what a client does so that its gradients tell less, and what an attacker knows of it.

A defence either changes what is trained (`method`: MJP) or what is sent (`upload`: noise, clipping; `withheld`: names
left out). Each says what an attacker knows of it (`known`), because a defence is only worth what it is worth against
someone who has read about it; `noise_level` is that knowledge in numbers.
"""

# ruff: noqa: ARG002  (every defence is given the same arguments)
from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from situs.audit.stem import position_names
from situs.backbones.base import Backbone
from situs.errors import SitusError, unknown_name
from situs.limits import Within
from situs.methods.base import Method
from situs.methods.mjp import MJP, MJPConfig
from situs.methods.mjp.dal import require_table
from situs.methods.supervised import Supervised, SupervisedConfig

Gradients = dict[str, Tensor]
"""Named as `Backbone.named_parameters()` names them; what a method adds, as the method does."""

UNKNOWN = "unknown"
"""E_unk's name in what MJP sends."""

THREAT = {
    "who": "an honest-but-curious server (or whoever reads its traffic) in federated or distributed training",
    "sees": "the gradients, or the weight update, of one client's step, by parameter name",
    "knows": "the architecture, the weights the step began with, how images are normalised, the loss and the defence",
    "does not know": "the images; all it takes for granted is that they are pictures, stored as bytes. Nor the labels: "
    "the closed forms need none, and gradient matching infers them from the classifier's gradient unless it is told",
    "does": "solves linear systems, or searches for images whose gradients match; it changes nothing in the protocol, "
    "so a client cannot notice it",
}
"""The attacker of this audit, for the page's first section."""


@dataclass(frozen=True)
class Defence:
    """What a client does so that its gradients tell less. Fields are its settings."""

    name: ClassVar[str] = "none"
    about: ClassVar[str] = "gradients are sent as they are"
    known: ClassVar[str] = "there is nothing to know"
    per_sample: ClassVar[bool] = False
    """Whether `bound` must see each sample's gradient by itself, before the mean over the batch."""

    @property
    def label(self) -> str:
        """The name with its settings: "noise σ=0.001"."""
        return self.name

    def method(self, backbone: Backbone, seed: int = 0) -> Method:
        """What is trained; what it adds to the backbone is the same for a seed, since the attacker has it too."""
        return Supervised(backbone, SupervisedConfig(label_smoothing=0.0))

    @property
    def hidden_share(self) -> float | None:
        """The share of the patches whose places it hides; None for a defence of another kind."""
        return None

    def refuses(self, backbone: Backbone) -> str | None:
        """None, or the reason why this defence cannot be had on a backbone."""
        return None

    def retrain(self, method: Method, seed: int = 0) -> Method:
        """What is trained where a run brings its own method: that method, unless the defence is one itself."""
        return method

    def bound(self, gradients: Gradients) -> Gradients:
        """One sample's gradient as it enters the mean, where `per_sample` is set; differentiable."""
        return gradients

    def withheld(self, backbone: Backbone) -> set[str]:
        """Names of the gradients that stay with the client."""
        return set()

    def upload(self, gradients: Gradients, batch: int, chance: torch.Generator) -> Gradients:
        """What is sent of the mean gradient over `batch` samples, without what is withheld: with noise on it."""
        sigma = self.noise_level(batch)
        if sigma == 0:
            return gradients
        return {
            name: g + sigma * torch.randn(g.shape, generator=chance, dtype=torch.float32).to(g.device, g.dtype)
            for name, g in gradients.items()
        }

    def noise_level(self, batch: int) -> float:
        """The deviation of the noise on each number sent, which the attacker knows."""
        return 0.0


@dataclass(frozen=True)
class NoDefence(Defence):
    """The gradients as they are."""


@dataclass(frozen=True)
class Noise(Defence):
    """Gaussian noise on every number."""

    sigma: float = 1e-3
    """σ: deviation of the noise, in the gradient's own units."""

    name: ClassVar[str] = "noise"
    about: ClassVar[str] = "Gaussian noise of deviation σ on every number that is sent"
    known: ClassVar[str] = "σ: the attacker damps the directions that the noise drowns (ridge)"

    def __post_init__(self) -> None:
        _check_setting("noise", self.sigma, "[0, inf)")

    @property
    def label(self) -> str:
        return f"noise σ={self.sigma:g}"

    def noise_level(self, batch: int) -> float:
        return self.sigma


@dataclass(frozen=True)
class Clip(Defence):
    """DP-SGD's two steps: each sample's whole gradient is clipped to a norm, and noise in its proportion is added."""

    norm: float = 1.0
    """C: the largest norm a sample's gradient may have, over all parameters together."""

    multiplier: float = 0.01
    """Noise on the sum has deviation multiplier · C. DP-SGD is commonly run with 0.5 and more; this default is weak."""

    name: ClassVar[str] = "clip"
    about: ClassVar[str] = (
        "each sample's gradient clipped to norm C, then noise of deviation multiplier · C (DP-SGD's form)"
    )
    known: ClassVar[str] = (
        "C and the noise multiplier; a common factor on all gradients changes no solution, and what it leaves of a "
        "loss on the position table (DAL) is found and subtracted"
    )
    per_sample: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_setting("clip", self.norm, "(0, inf)")
        _check_setting("multiplier", self.multiplier, "[0, inf)")

    @property
    def label(self) -> str:
        return f"clip C={self.norm:g}, noise {self.multiplier:g}·C"

    def bound(self, gradients: Gradients) -> Gradients:
        norm = torch.stack([g.double().norm() for g in gradients.values()]).norm()
        factor = (self.norm / norm.clamp(min=1e-30)).clamp(max=1.0)
        return {name: g * factor.to(g.dtype) for name, g in gradients.items()}

    def noise_level(self, batch: int) -> float:
        return self.multiplier * self.norm / batch


@dataclass(frozen=True)
class OwnDp(Clip):
    """What a run of DP-SGD does in each of its steps, with what the whole run promises."""

    promise: str = ""
    """ε at δ, for a reader."""

    name: ClassVar[str] = "dp-sgd"
    about: ClassVar[str] = (
        "the run's own step: each sample's gradient clipped to norm C, then noise of deviation multiplier · C on their "
        "sum. Over a batch smaller than the run's the noise counts for more"
    )

    @property
    def label(self) -> str:
        return f"dp-sgd C={self.norm:g}, noise {self.multiplier:.3g}·C, {self.promise}"


@dataclass(frozen=True)
class NoPositionGradient(Defence):
    """The gradients of everything that holds positions stay with the client."""

    name: ClassVar[str] = "no-pe-gradient"
    about: ClassVar[str] = "the gradients of the parameters that hold positions are not sent"
    known: ClassVar[str] = (
        "which names are missing: the patches stand in the gradients of the first block as well (tokens), so that "
        "this defends nothing by itself"
    )

    def refuses(self, backbone: Backbone) -> str | None:
        if position_names(backbone):
            return None
        return f"{backbone.name} has no trained parameter that is known to hold positions, so nothing is withheld"

    def withheld(self, backbone: Backbone) -> set[str]:
        return {*position_names(backbone), UNKNOWN}


@dataclass(frozen=True)
class Withhold(Defence):
    """The gradients of the embedding, of all that holds positions and of the first blocks stay with the client."""

    depth: float = 0
    """How many blocks; 0: the embedding and the positions alone."""

    name: ClassVar[str] = "withhold"
    about: ClassVar[str] = "the gradients of the embedding, the positions and the first blocks are not sent"
    known: ClassVar[str] = "which names are missing; later blocks have gradients of their own"

    def __post_init__(self) -> None:
        if not (self.depth >= 0 and self.depth % 1 == 0):
            said = "a whole number of blocks, 0 or more"
            raise SitusError(
                f"withhold={self.depth:g}: must be {said}", field="defences", value=self.depth, allowed=said
            )

    @property
    def label(self) -> str:
        return "withhold the embedding" + f" and {self.depth:g} block{'s' * (self.depth > 1)}" * (self.depth > 0)

    def refuses(self, backbone: Backbone) -> str | None:
        if "tokens" in backbone.refusals or not backbone.block_modules():
            return f"which gradients of {backbone.name} belong to its first blocks is not known"
        if self.depth > len(backbone.block_modules()):
            return f"{backbone.name} has {len(backbone.block_modules())} blocks"
        return None

    def withheld(self, backbone: Backbone) -> set[str]:
        first = {name for name, role in backbone.roles().items() if role.depth <= self.depth}
        return {*first, *position_names(backbone), UNKNOWN}


@dataclass(frozen=True)
class MaskedJigsaw(Defence):
    """MJP's training step: shuffled patches lose their places, and DAL regresses places from the table."""

    mask_ratio: float = 0.03
    """γ: share of the patches that are shuffled and lose their place."""

    name: ClassVar[str] = "mjp"
    about: ClassVar[str] = (
        "masked jigsaw training (MJP): the share γ of the patches is shuffled and shares one position"
    )
    known: ClassVar[str] = (
        "the method and its λ: rows of the table without a gradient reveal the mask, and the gradient of DAL on the "
        "other rows is computed and subtracted"
    )

    def __post_init__(self) -> None:
        _check_setting("mjp", self.mask_ratio, "[0, 1]")

    @property
    def label(self) -> str:
        return f"mjp γ={self.mask_ratio:g}"

    def method(self, backbone: Backbone, seed: int = 0) -> Method:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            method = MJP(backbone, replace(MJPConfig(), mask_ratio=self.mask_ratio, label_smoothing=0.0))
        like = next(backbone.parameters())
        return method.to(like.device, like.dtype)

    def refuses(self, backbone: Backbone) -> str | None:
        if "tokens" in backbone.refusals:
            return f"no masked jigsaw is played with {backbone.name}: {backbone.refusals['tokens']}"
        try:
            require_table(backbone)
        except SitusError as error:
            return str(error)
        return None

    def retrain(self, method: Method, seed: int = 0) -> Method:
        """MJP with this γ: over a run of MJP its own trained tokens and heads, over another's backbone new ones."""
        return method.at_hidden_share(self.mask_ratio) or self.method(method.backbone, seed)

    @property
    def hidden_share(self) -> float:
        return self.mask_ratio


def method_of(defence: Defence, victim: Backbone | Method, seed: int = 0) -> Method:
    """What is trained under a defence: cross entropy or the defence's own on a backbone, else a run's own method."""
    return defence.method(victim, seed) if isinstance(victim, Backbone) else defence.retrain(victim, seed)


def blurred(method: Method) -> str:
    """Why the figure of an attack that does not separate hidden patches is a lower bound; "" where none are hidden."""
    if method.hidden_share is None:
        return ""
    return (
        f"a lower bound, and no credit to {type(method).__name__}: the gradients of the hidden patches blur all "
        "others, and this attack does not separate them; adaptive-mjp does"
    )


def _check_setting(name: str, value: float, ends: str) -> None:
    rule = Within(ends)
    if not rule.holds(value):
        raise SitusError(f"{name}={value}: must be {rule.allowed}", field="defences", value=value, allowed=rule.allowed)


DEFENCES: dict[str, type[Defence]] = {
    "clip": Clip,
    "mjp": MaskedJigsaw,
    "no-pe-gradient": NoPositionGradient,
    "noise": Noise,
    "none": NoDefence,
    "withhold": Withhold,
}
"""Every defence by name; `create_defence("noise=1e-4")` sets its first setting."""


def create_defence(text: str | Defence) -> Defence:
    """A defence by name, with its first setting behind "=": "noise=1e-4", "clip=0.5", "mjp=0.27"."""
    if isinstance(text, Defence):
        return text
    name, equals, value = text.partition("=")
    if name not in DEFENCES:
        raise unknown_name("defence", name, DEFENCES, field="defences")
    kind = DEFENCES[name]
    if not equals:
        return kind()
    if not fields(kind):
        raise SitusError(f"{text}: {name} has no setting", field="defences")
    try:
        number = float(value)
    except ValueError:
        raise SitusError(f"{text}: {value!r} is no number", field="defences") from None
    return kind(*[number])
