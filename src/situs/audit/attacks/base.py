"""What every attack is: whether it is ready for what is sent, what it reads of that, and a recovery."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from situs.audit.client import EPS, LEVELS
from situs.audit.deadline import Deadline
from situs.audit.defences import Defence, Gradients, NoDefence, Step
from situs.backbones.base import Backbone
from situs.findings import Certificate, Fact
from situs.methods.base import Method
from situs.methods.measured import HidesPlaces

Normalisation = tuple[Sequence[float], Sequence[float]]
"""Mean and deviation of each channel."""

ROUNDED = 2**-24
"""What float32 rounds off numbers just below 1."""

FAILED = "for some images the equations do not fit the solution: the attack failed, which says nothing of privacy"
"""The verdict of a closed form on what it could not solve."""


@dataclass(frozen=True)
class Knowledge:
    """What the attacker knows beside the gradients: the defence and how the client made its step.

    labels: [uploads, batch], where the server is told them. method: what was trained with its own tokens and heads,
    where it is a run's and not the defence's own. size: height and width of the images, where the model takes any.
    normalisation: mean and deviation of the channels, which bound what a pixel can be. first: the number of the first
    upload that it is given. public: [n, C, H, W], normalised: other images of the same kind that the attacker has; none
    of them is behind an upload.
    """

    defence: Defence = field(default_factory=NoDefence)
    step: Step = field(default_factory=Step)
    labels: Tensor | None = None
    method: Method | None = None
    size: tuple[int, int] | None = None
    normalisation: Normalisation | None = None
    first: int = 0
    public: Tensor | None = None

    def hides(self, backbone: Backbone) -> bool:
        """Whether the places of some patches are hidden."""
        method = self.trained(backbone)
        return isinstance(method, HidesPlaces) and method.hidden_share > 0

    @property
    def blurs(self) -> bool:
        """Whether a number that is 0 may come as another, or another as 0: by noise or even steps."""
        return self.defence.noise_level(self.step.batch) > 0 or self.step.dtype == torch.int8

    def even(self, upload: Gradients, names: Sequence[str]) -> bool:
        """Whether all numbers of gradients are off by one size, by noise or even steps; else in proportion to each."""
        return self.step.dtype == torch.int8 or self.noise_beyond_rounding([upload], names) > 0

    def noise_on(self, gradient: Tensor) -> float:
        """The deviation of what is evenly wrong with the numbers of a gradient, as it was sent."""
        noise = self.defence.noise_level(self.step.batch)
        return math.hypot(noise, steps_off(gradient)) if self.step.dtype == torch.int8 else noise

    def noise_beyond_rounding(self, uploads: Sequence[Gradients], names: Sequence[str] | None = None) -> float:
        """The deviation of the stated noise; 0 where rounding moves the numbers of some gradient more than it does.

        names: of the gradients that are looked at, None for all.
        """
        noise = self.defence.noise_level(self.step.batch)
        read = [g for each in uploads for name, g in each.items() if names is None or name in names]
        return noise if all(noise >= rounded_off(g, self.type_of(g)) for g in read) else 0.0

    def type_of(self, gradient: Tensor) -> torch.dtype:
        """The type whose rounding is in the numbers of a gradient: what was sent, or what it was computed in."""
        coarse = self.step.autocast and torch.finfo(gradient.dtype).eps < torch.finfo(torch.bfloat16).eps
        return torch.bfloat16 if coarse else gradient.dtype

    @property
    def forward(self) -> float | None:
        """The relative error of what layers were fed, beside what the weights say; None for that of float32."""
        return torch.finfo(torch.bfloat16).eps if self.step.autocast else None

    def read(self, upload: Gradients) -> Gradients:
        """The gradients behind an upload: one step of Adam is g / (|g| + ε), which is undone as far as it was not
        rounded off; what is rounded to a whole step (1) stays that."""
        if not (self.step.adam and self.step.local_steps == 1):
            return upload
        return {name: undone(u) for name, u in upload.items()}

    def variance(self, gradient: Tensor) -> Tensor | None:
        """What is wrong with each number of a gradient that `read` made of a step of Adam, squared; else None."""
        if not (self.step.adam and self.step.local_steps == 1):
            return None
        return (ROUNDED * (gradient.double().abs() + EPS) ** 2 / EPS).square()

    def trained(self, backbone: Backbone) -> Method:
        """What made the gradients: the run's own method, or the defence's."""
        return self.defence.method(backbone, self.step.seed) if self.method is None else self.method


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

    @property
    def certificates(self) -> list[Certificate]:
        """Of a closed form, what it can prove of each upload."""
        return [certificate_of(fact) for fact in self.facts]


def certificate_of(fact: Mapping[str, Fact]) -> Certificate:
    """What an attacker can prove of an image, of the facts of a closed form.

    A linear system has one solution where it has as many directions as unknowns (`rank`, `unknowns`); where none was
    solved there is none to miss. sharp: of an attack that does not count them, whether rounding leaves its solution in
    one place. hidden: patches whose places are not known. unseen: numbers that its layer does not see.
    """

    def number(name: str) -> float:
        return float(fact.get(name) or 0)

    residual, expected = (number(name) if name in fact else None for name in ("residual", "expected_residual"))
    unique = fact.get("sharp") is not False and ("rank" not in fact or number("rank") >= number("unknowns"))
    return Certificate(
        fact.get("fits") is True,
        residual,
        expected,
        unique,
        order_known=number("hidden") <= 1,
        unseen=int(number("unseen")),
        verdict=str(fact.get("verdict") or ""),
    )


def joined(found: Sequence[Recovery]) -> Recovery:
    """Recoveries of one upload after the other as one."""
    if len(found) == 1:
        return found[0]
    cut = next((each.partial for each in found if each.partial is not None), None)
    return Recovery(torch.cat([each.images for each in found]), [f for each in found for f in each.facts], partial=cut)


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

    is_bound: ClassVar[bool] = False
    """Whether it is told the images: no attack, but a bound on attacks."""

    knows: ClassVar[str] = "the weights before the step, how it is made, the defence"
    """What the attacker is given beside what is sent, for a reader."""

    paper: ClassVar[str] = "ours"
    difference: ClassVar[str] = ""
    """The paper it stands for, and how ours differs."""

    slow: ClassVar[bool] = False
    """Whether it takes long enough to tell of its progress."""

    def __init__(self, config: Any = None) -> None:
        self.config = self.Config() if config is None else config

    @classmethod
    def proof(cls) -> str:
        """What its result proves, for a reader."""
        if cls.closed_form:
            return "its own success, by the residual of its equations; beneath noise also that it could get no more"
        return "nothing: what a search does not find may still be there"

    @abstractmethod
    def prepare(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> Ready | Refused:
        """Whether one who knows `known` can make it, of gradients of these names."""

    def spoiled(self, known: Knowledge, noise: float) -> str | None:
        """Why what it gets of such a step proves nothing; None where its equations hold. noise: of
        `Knowledge.noise_beyond_rounding`."""
        return spoiled(known, noise) if self.closed_form else None

    @abstractmethod
    def recover(
        self,
        backbone: Backbone,
        uploads: Sequence[Gradients],
        known: Knowledge | None = None,
        deadline: Deadline | None = None,
    ) -> Recovery:
        """The images behind the uploads, all solved together. deadline: what a long attack tells and asks."""


def spoiled(known: Knowledge, noise: float) -> str | None:
    """Why equations between what layers are fed and their weights do not tell all; None where they do.

    noise: its deviation, 0 where rounding moves the numbers more: that follows from the image and is no noise.
    """
    step, why = known.step, []
    coarse = step.dtype in (torch.float16, torch.bfloat16) or step.autocast
    if step.dtype == torch.int8 or (coarse and noise == 0):
        kind = torch.bfloat16 if step.dtype == torch.float32 else step.dtype
        why.append(
            f"rounding to {str(kind).removeprefix('torch.')} is no noise: it follows from the image, and a search for "
            "images that round alike may find more"
        )
    if step.dropout:
        why.append(f"dropout of {step.dropout:g} between the layers, which nobody sees")
    if step.adam:
        k = step.local_steps
        why.append(
            "Adam divides every number by its own size; "
            + (
                "its one step is undone only as far as it was not rounded off"
                if k == 1
                else f"{k} steps are not undone"
            )
        )
    return "; ".join(why) or None


def undone(moved: Tensor) -> Tensor:
    """g of u = g / (|g| + ε), by u's distance to 1."""
    left = (1 - moved.double().abs()).clamp(min=ROUNDED)
    return (EPS * moved.double() / left).float()


def rounded_off(gradient: Tensor, kind: torch.dtype) -> float:
    """The deviation of what a floating type rounds off a gradient; what overflowed is left out.

    Steps between numbers are in proportion to them down to the least that the type holds in full, and even below.
    """
    size = float(known_numbers(gradient).nan_to_num().square().mean().sqrt())
    least = torch.finfo(gradient.dtype)
    return max(size * torch.finfo(kind).eps, least.tiny * least.eps) / math.sqrt(12)


def steps_off(gradient: Tensor) -> float:
    """The deviation of the rounding of a gradient that arrived in even steps, the largest number being 127 of them.

    Numbers fall off from 0 as e^-|x|/b, with b from the share that was rounded to 0: where most were, they are far
    less off than a number somewhere between two steps.
    """
    step = float(gradient.abs().max()) / LEVELS
    share = float((gradient == 0).double().mean())
    if step == 0:
        return 0.0
    rate = min(max(-2 * math.log1p(-min(share, 1 - 1e-9)), 1e-6), 40.0)  # of the fall, a step
    at = torch.linspace(0, 1, 2001, dtype=torch.float64)
    density = torch.exp(-rate * at)
    inner = at <= 0.5  # rounded to 0, from either side; beyond it each step looks the same
    near = float((density * at.square())[inner].sum() / density[inner].sum())
    far = float((density * (at - 0.5).square()).sum() / density.sum())
    return step * math.sqrt(share * near + (1 - share) * far)


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
