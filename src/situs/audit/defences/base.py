"""Defences: what a client does so that its gradients reveal less, and what an attacker knows of it.

A defence changes what is trained (`method`: MJP), how the step is made (`step`: local steps, dropout, a type) or what
is sent (`upload`: noise, clipping; `withheld`: names left out). Each says what an attacker knows of it (`known`),
because a defence is only worth what it is worth against an informed attacker; `noise_level` is that knowledge in
numbers.
"""

# ruff: noqa: ARG002  (every defence is given the same arguments)
from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.core.when import START, When
from situs.errors import SitusError
from situs.findings import ACTIVE, ThreatModel
from situs.limits import Rule, Within, check_value
from situs.methods.base import Method
from situs.methods.measured import HidesPlaces
from situs.methods.supervised import Supervised, SupervisedConfig

Gradients = dict[str, Tensor]
"""By the names of `Backbone.named_parameters()`; parameters that a method adds, by the method's own names."""

UNKNOWN = "unknown"
"""E_unk's name in what MJP sends."""

THREAT = {
    "who": "an honest-but-curious server (or a reader of its traffic) in federated or distributed training",
    "sees": "the gradients or the weight update of one client's step, by parameter name",
    "knows": "the architecture, the weights before the step, the normalisation of images, the loss and "
    "the defence. Attacks that remove noise also know some other images of the same kind",
    "does not know": "the images and the labels. The attacker assumes only that every pixel value is a byte (0 to "
    "255). The closed-form attacks need no labels; gradient matching infers the labels from the "
    "classifier's gradient",
    "does": "solves linear systems, or searches for images whose gradients match. The attacker follows the protocol, "
    "so a client cannot notice the attack",
}
"""The threat model of audits of gradients, for pages."""

CHOOSES = {
    "who": (
        "a malicious server (or somebody who replaces the weights in transit) in federated or distributed training"
    ),
    "does": "chooses the weights that the client gets, so that the upload reveals single samples. Only the values of "
    "the weights change. Their names, shapes and types, the architecture and the protocol stay the same. A "
    "client that inspects the weights may notice the attack",
}
"""What differs where the server chooses the weights."""


def threat_facts(threat: ThreatModel) -> dict[str, str]:
    """The threat model of an audit of gradients for a reader."""
    return {"model": f"{threat.name}: {threat.about}", **THREAT, **(CHOOSES if threat == ACTIVE else {})}


@dataclass(frozen=True)
class Step:
    """What a client does for one upload. The attacker knows all of it but what chance draws.

    batch: samples behind the upload. local_steps: more than one sends the change of the weights (FedAvg) in place of a
    gradient. dtype: the type of what is sent; gradients are computed in float32. labels_known: whether the attacker is
    told the labels. when: of the run, for its method's draws and schedules. lr: of the local steps; adam: whether they
    are Adam's, else plain SGD's. parts: batches that the samples make; their gradients are added up, or local steps
    take one after the other. dropout: rate of every dropout layer. autocast: whether the client computes in bfloat16.
    """

    batch: int = 1
    local_steps: int = 1
    dtype: torch.dtype = torch.float32
    seed: int = 0
    labels_known: bool = False
    when: When = START
    lr: float = 0.01
    adam: bool = False
    parts: int = 1
    dropout: float = 0.0
    autocast: bool = False

    def __post_init__(self) -> None:
        check_value("batch", self.batch, ">= 1")
        check_value("local_steps", self.local_steps, ">= 1")


WHOLE = Rule("a whole number, 1 or more", lambda value: value >= 1 and value % 1 == 0)
"""A count, as "fedavg=4" gives it."""


def setting(default: float, ends: str | Rule, called: str = "") -> Any:
    """A setting of a defence, a number within limits. called: its name in an error, by default the defence's."""
    return field(default=default, metadata={"rule": Within(ends) if isinstance(ends, str) else ends, "called": called})


@dataclass(frozen=True)
class Defence:
    """What a client does so that its gradients reveal less. Its fields are its settings (`setting`)."""

    name: ClassVar[str] = "none"
    about: ClassVar[str] = "gradients are sent unchanged"
    known: ClassVar[str] = "no setting exists"
    form: ClassVar[str] = "{name}"
    """The label as a format of the name and the settings."""

    exact: ClassVar[bool] = True
    """Whether the attacker can compute what is sent but for its noise: nothing is rounded or dropped."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value, rule = getattr(self, one.name), one.metadata.get("rule")
            if rule is not None and not rule.holds(value):
                shown = f"{value:g}" if rule.allowed.startswith("a whole number") else value
                reason = f"{one.metadata['called'] or self.name}={shown}: must be {rule.allowed}"
                raise SitusError(reason, field="defences", value=value, allowed=rule.allowed)

    @property
    def label(self) -> str:
        """The name with its settings: "noise σ=0.001"."""
        return self.form.format(name=self.name, **vars(self))

    @property
    def described(self) -> str:
        """What is done, and what the attacker knows of it, for a reader."""
        return f"{self.about}. The attacker knows: {self.known}"

    @property
    def per_sample(self) -> bool:
        """Whether `bound` takes each sample's gradient, before the mean over the batch."""
        return False

    def step(self, step: Step) -> Step:
        """The step as this defence changes it."""
        return step

    @property
    def noiseless(self) -> Defence:
        """The same without noise, rounding and dropout, for the control of an attack's equations."""
        return self if self.exact and not self.noise_level(1) else NoDefence()

    def method(self, backbone: Backbone, seed: int = 0) -> Method:
        """What is trained; what it adds to the backbone depends on the seed alone, since the attacker has it too."""
        return Supervised(backbone, SupervisedConfig(label_smoothing=0.0))

    @property
    def hidden_share(self) -> float | None:
        """The share of the patches whose places it hides; None for a defence of another kind."""
        return None

    def refuses(self, backbone: Backbone) -> str | None:
        """Why this defence does not apply to a backbone; None where it does."""
        return None

    def retrain(self, method: Method, seed: int = 0) -> Method:
        """What is trained in place of a run's own method: that method, unless the defence is a method itself."""
        return method

    def bound(self, gradients: Gradients) -> Gradients:
        """One sample's gradient as it enters the mean, where `per_sample` is set; differentiable."""
        return gradients

    def withheld(self, backbone: Backbone) -> set[str]:
        """Names of the gradients that stay with the client."""
        return set()

    def upload(self, gradients: Gradients, batch: int, chance: torch.Generator) -> Gradients:
        """What is sent in place of the mean gradient over `batch` samples, from which withheld names are gone."""
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

    @property
    def caveat(self) -> str:
        """Why what an attack does not recover under it proves nothing; "" where it may."""
        return ""

    def lost(self, gradient: Tensor) -> Tensor | None:
        """Which numbers of a gradient as it was sent say nothing of their value; None where all do."""
        return None


@dataclass(frozen=True)
class NoDefence(Defence):
    """The gradients as they are."""


def method_of(defence: Defence, victim: Backbone | Method, seed: int = 0) -> Method:
    """What is trained under a defence: on a backbone cross entropy or the defence's method, else the run's method."""
    return defence.method(victim, seed) if isinstance(victim, Backbone) else defence.retrain(victim, seed)


def blurred(method: Method) -> str:
    """Why an attack that does not separate hidden patches gives a lower bound only; "" where none are hidden."""
    if not isinstance(method, HidesPlaces):
        return ""
    return (
        f"this result is a lower bound on the leak, and does not show that {type(method).__name__} protects. This "
        "attack mixes the gradients of hidden patches with those of all other patches; only the attack `adaptive-mjp` "
        "separates them"
    )
