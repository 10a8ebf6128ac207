"""Defences by name, alone or several at once: what clients do so that their gradients reveal less."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from situs.audit.defences.base import (
    THREAT,
    UNKNOWN,
    Defence,
    Gradients,
    NoDefence,
    Step,
    blurred,
    method_of,
    threat_facts,
)
from situs.audit.defences.sent import (
    Bfloat,
    Clip,
    ClipBatch,
    Exclude,
    Int8,
    Noise,
    NoPositionGradient,
    OwnDp,
    Percentile,
    Rounded,
    SparseVector,
    TopK,
    Withhold,
)
from situs.audit.defences.trained import Accumulate, Autocast, Dropout, FedAdam, FedAvg, MaskedJigsaw
from situs.backbones.base import Backbone
from situs.errors import SitusError, unknown_name
from situs.methods.base import Method
from situs.plugins import Plugins

__all__ = [
    "DEFENCES",
    "THREAT",
    "UNKNOWN",
    "Clip",
    "Defence",
    "FedAvg",
    "Gradients",
    "MaskedJigsaw",
    "NoDefence",
    "NoPositionGradient",
    "Noise",
    "OwnDp",
    "Step",
    "Together",
    "Withhold",
    "blurred",
    "create_defence",
    "method_of",
    "threat_facts",
]

ADD_UP = (NoDefence, Noise, NoPositionGradient, Withhold, Exclude)
"""Defences that a client may have several of; of the others the last one would override the rest."""


@dataclass(frozen=True)
class Together(Defence):
    """Several defences at once; the attacker knows them all. They are applied in their order, but clipping of the batch
    first: the deviation of noise that is clipped afterwards would be unknown."""

    parts: tuple[Defence, ...] = ()

    name: ClassVar[str] = "together"

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(sorted(self.parts, key=lambda part: not isinstance(part, ClipBatch))))
        kinds: dict[type[Defence], Defence] = {}
        for part in self.parts:
            kind = next((shared for shared in (Rounded, FedAvg) if isinstance(part, shared)), type(part))
            if kind in kinds and kind not in ADD_UP:
                reason = f"{kinds[kind].label} and {part.label} change the same setting: give one of them"
                raise SitusError(reason, field="defences")
            kinds[kind] = part

    @property
    def label(self) -> str:
        return " + ".join(part.label for part in self.parts)

    @property
    def described(self) -> str:
        return "; ".join(f"{part.name}: {part.described}" for part in self.parts)

    @property
    def per_sample(self) -> bool:
        return any(part.per_sample for part in self.parts)

    @property
    def hidden_share(self) -> float | None:
        return next((part.hidden_share for part in self.parts if part.hidden_share is not None), None)

    @property
    def noiseless(self) -> Defence:
        return replace(self, parts=tuple(part.noiseless for part in self.parts))

    def step(self, step: Step) -> Step:
        for part in self.parts:
            step = part.step(step)
        return step

    def method(self, backbone: Backbone, seed: int = 0) -> Method:
        return self._trains.method(backbone, seed)

    def retrain(self, method: Method, seed: int = 0) -> Method:
        return self._trains.retrain(method, seed)

    @property
    def _trains(self) -> Defence:
        """The part that changes what is trained; the first without one."""
        return next((part for part in self.parts if part.hidden_share is not None), self.parts[0])

    def refuses(self, backbone: Backbone) -> str | None:
        return next((reason for part in self.parts if (reason := part.refuses(backbone))), None)

    def bound(self, gradients: Gradients) -> Gradients:
        for part in self.parts:
            gradients = part.bound(gradients)
        return gradients

    def withheld(self, backbone: Backbone) -> set[str]:
        return set().union(*(part.withheld(backbone) for part in self.parts))

    def upload(self, gradients: Gradients, batch: int, chance: torch.Generator) -> Gradients:
        for part in self.parts:
            gradients = part.upload(gradients, batch, chance)
        return gradients

    def noise_level(self, batch: int) -> float:
        return math.hypot(*(part.noise_level(batch) for part in self.parts))

    @property
    def caveat(self) -> str:
        return "; ".join(dict.fromkeys(part.caveat for part in self.parts if part.caveat))

    def lost(self, gradient: Tensor) -> Tensor | None:
        masks = [mask for part in self.parts if (mask := part.lost(gradient)) is not None]
        return torch.stack(masks).any(dim=0) if masks else None


_KINDS = (
    Accumulate,
    Autocast,
    Bfloat,
    Clip,
    ClipBatch,
    Dropout,
    Exclude,
    FedAdam,
    FedAvg,
    Int8,
    MaskedJigsaw,
    NoDefence,
    NoPositionGradient,
    Noise,
    Percentile,
    Rounded,
    SparseVector,
    TopK,
    Withhold,
)

DEFENCES: Plugins[type[Defence]] = Plugins(
    {kind.name: kind for kind in _KINDS}, "situs.defences", ("name", "about", "upload")
)
"""Every defence by name; `create_defence("noise=1e-4")` sets its first setting."""


def create_defence(text: str | Defence) -> Defence:
    """A defence by name, with its settings behind "=": "noise=1e-4", "clip=0.5:1" (norm, noise multiplier), "mjp=0.27".

    Several at once are joined by "+": "noise=1e-4+no-pe-gradient".
    """
    if isinstance(text, Defence):
        return text
    parts = re.split(r"(?<!\de)\+", text)  # the sign of a number as 1e+3 joins nothing
    if len(parts) > 1:
        return Together(tuple(create_defence(part) for part in parts))
    name, equals, value = text.partition("=")
    if name not in DEFENCES:
        raise unknown_name("defence", name, DEFENCES, field="defences")
    kind = DEFENCES[name]
    if not equals:
        return kind()
    most = len(fields(kind))
    if not most:
        raise SitusError(f"{text}: the defence {name} has no setting; write only {name}", field="defences")
    if fields(kind)[0].type == "str":
        return kind(*[value])
    settings = value.split(":")
    if len(settings) > most:
        raise SitusError(f"{text}: the defence {name} has at most {most} setting{'s' * (most > 1)}", field="defences")
    try:
        numbers = [float(setting) for setting in settings]
    except ValueError:
        raise SitusError(f"{text}: {value!r} is not a number", field="defences") from None
    return kind(*numbers)
