"""Several defences at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from situs.audit.defences.base import Defence, Gradients, NoDefence, Step
from situs.audit.defences.sent import ClipBatch, Noise, NoPositionGradient, Rounded, Withhold
from situs.audit.defences.trained import FedAvg
from situs.backbones.base import Backbone
from situs.errors import SitusError
from situs.methods.base import Method

ADD_UP = (NoDefence, Noise, NoPositionGradient, Withhold)
"""Those of which a client may have several; of all others the last would be the only one."""


@dataclass(frozen=True)
class Together(Defence):
    """Several defences at once: the attacker knows them all. They are applied in their order, clipping of the batch
    first: noise that is clipped behind it has a deviation that nobody could tell the attacker."""

    parts: tuple[Defence, ...] = ()

    name: ClassVar[str] = "together"

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(sorted(self.parts, key=lambda part: not isinstance(part, ClipBatch))))
        kinds: dict[type[Defence], Defence] = {}
        for part in self.parts:
            kind = next((shared for shared in (Rounded, FedAvg) if isinstance(part, shared)), type(part))
            if kind in kinds and kind not in ADD_UP:
                reason = f"{kinds[kind].label} and {part.label} set the same thing: give one of them"
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
        """The part that changes what is trained, or any."""
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
