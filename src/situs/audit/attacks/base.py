"""What every attack is: whether it is ready for what is sent, what it reads of that, and a recovery."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from situs.audit.deadline import Deadline
from situs.audit.defences import Defence, Gradients, NoDefence
from situs.backbones.base import Backbone
from situs.methods.base import Method

Fact = float | int | str | None
Normalisation = tuple[Sequence[float], Sequence[float]]
"""Mean and deviation of each channel."""

FAILED = "for some images the equations do not fit the solution: the attack failed, which says nothing of privacy"
"""The verdict of a closed form on what it could not solve."""


@dataclass(frozen=True)
class Knowledge:
    """What the attacker knows beside the gradients: the defence, the step, what seeded the weights.

    labels: [uploads, batch], where the server is told them. method: what was trained with its own tokens and heads,
    where it is a run's and not the defence's own. local_steps: steps of plain SGD behind an upload. epoch: of the run,
    for the method's schedules. size: height and width of the images, where the model takes any. normalisation: mean and
    deviation of the channels, which bound what a pixel can be. first: the number of the first upload he is given.
    """

    defence: Defence = field(default_factory=NoDefence)
    batch: int = 1
    seed: int = 0
    labels: Tensor | None = None
    method: Method | None = None
    local_steps: int = 1
    epoch: int = 0
    size: tuple[int, int] | None = None
    normalisation: Normalisation | None = None
    first: int = 0

    def trained(self, backbone: Backbone) -> Method:
        """What made the gradients: the run's own method, or the defence's."""
        return self.defence.method(backbone, self.seed) if self.method is None else self.method


@dataclass(frozen=True)
class Recovery:
    """What came back, for the uploads in their order; for the first of them where the attack was stopped.

    images: [n, C, H, W], normalised: one an upload, which then stands for each image behind it, or as many as the batch
    has, in any order within the upload. facts: once an upload, what the attacker himself can say of it; of a closed
    form "residual", "expected_residual" (what the stated noise and precision leave of its equations) and "fits"
    (whether one is the other: where not, the attack has failed, and its picture says nothing about privacy). labels:
    [uploads, batch] as he inferred them. partial: how far he came before he was stopped.
    """

    images: Tensor
    facts: list[dict[str, Fact]]
    labels: Tensor | None = None
    partial: str | None = None


@dataclass(frozen=True)
class Ready:
    """An attack that can be made. reads: names of the gradients it uses, None for all that are sent. caveat: why the
    solution is not exact here; it is made all the same and its figure is reported. seconds: it takes for all images
    together, at most."""

    reads: tuple[str, ...] | None
    caveat: str | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Refused:
    """An attack that cannot be made, and why: one sentence, which says nothing about privacy."""

    reason: str


@dataclass(frozen=True)
class NoConfig:
    """An attack without settings."""


class Attack(ABC):
    """An attack by name. It sees a backbone (weights at the start of the step) and uploads, never an image."""

    Config: ClassVar[type[Any]] = NoConfig
    """Its settings, frozen; the registry makes an attack of one of these and nothing else."""

    name: ClassVar[str]
    about: ClassVar[str]
    closed_form: ClassVar[bool] = False
    """Whether it solves equations whose residual tells if it succeeded; a search that fails tells nothing."""

    separates_hidden: ClassVar[bool] = False
    """Whether it separates patches whose places are hidden from the others, so that its figure is no lower bound."""

    slow: ClassVar[bool] = False
    """Whether it takes long enough to tell of its progress."""

    def __init__(self, config: Any = None) -> None:
        self.config = self.Config() if config is None else config

    @abstractmethod
    def prepare(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> Ready | Refused:
        """Whether one who knows `known` can make it, of gradients of these names."""

    @abstractmethod
    def recover(
        self,
        backbone: Backbone,
        uploads: Sequence[Gradients],
        known: Knowledge | None = None,
        deadline: Deadline | None = None,
    ) -> Recovery:
        """The images behind the uploads, all solved together. deadline: what a long attack tells and asks."""


def absent(sent: Collection[str], names: Sequence[str]) -> Refused | None:
    """None where all these gradients are sent, else the reason."""
    lacking = [name for name in names if name not in sent]
    reason = f"the gradient of {' and '.join(lacking)} is not sent, so there is nothing to solve with"
    return Refused(reason) if lacking else None


def stack(uploads: Sequence[Gradients], name: str) -> Tensor:
    """One gradient of all uploads in float64, [n, ...]; what overflowed its type is NaN: no number, and no zero."""
    return torch.stack([known_numbers(upload[name]) for upload in uploads])


def known_numbers(gradient: Tensor) -> Tensor:
    """A gradient in float64 with NaN where it overflowed its type, be it to infinity or to its largest number."""
    lost = ~(gradient.abs() < torch.finfo(gradient.dtype).max)
    return gradient.double().masked_fill(lost, torch.nan)
