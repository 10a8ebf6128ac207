"""What every attack is: names of gradients it reads, the reason where it does not apply, and a recovery."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from situs.audit.threat import Defence, Gradients, NoDefence
from situs.backbones.base import Backbone

Fact = float | int | str | None


@dataclass(frozen=True)
class Knowledge:
    """What the attacker knows beside the gradients: the defence, the batch size, what seeded the weights."""

    defence: Defence = field(default_factory=NoDefence)
    batch: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Recovery:
    """images: [n, C, H, W], normalised, one an upload. facts: n times what the attacker himself can say of it."""

    images: Tensor
    facts: list[dict[str, Fact]]


class Attack(ABC):
    """An attack by name. It sees a backbone (weights at the start of the step) and uploads, never an image."""

    name: ClassVar[str]
    about: ClassVar[str]

    @abstractmethod
    def applies(self, backbone: Backbone) -> str | None:
        """None, or the reason why there is nothing to solve: one sentence."""

    @abstractmethod
    def reads(self, backbone: Backbone) -> tuple[str, ...]:
        """Names of the gradients it needs; `applies` must have said None."""

    @abstractmethod
    def caveat(self, backbone: Backbone, batch: int) -> str | None:
        """None, or why the solution is not exact here: it is made all the same and its figure is reported."""

    @abstractmethod
    def recover(self, backbone: Backbone, uploads: Sequence[Gradients], known: Knowledge | None = None) -> Recovery:
        """The images behind the uploads, all solved together."""

    def missing(self, backbone: Backbone, upload: Gradients) -> str | None:
        """None, or the reason why an upload cannot be used."""
        absent = [name for name in self.reads(backbone) if name not in upload]
        return (
            f"the gradient of {' and '.join(absent)} is not sent, so there is nothing to solve with" if absent else None
        )


def stack(uploads: Sequence[Gradients], name: str) -> Tensor:
    """One gradient of all uploads in float64, [n, ...]; what overflowed its type is 0."""
    return torch.stack([upload[name].double() for upload in uploads]).nan_to_num(0.0, 0.0, 0.0)
