"""The interface of every attack: whether it applies to an upload, which gradients it reads, and the recovery."""

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
from situs.errors import SitusError
from situs.findings import ACTIVE, HONEST, Certificate, Fact, ThreatModel
from situs.methods.base import Method
from situs.methods.measured import HidesPlaces

Normalisation = tuple[Sequence[float], Sequence[float]]
"""Mean and deviation of each channel."""

ROUNDED = 2**-24
"""Rounding of float32 for numbers just below 1."""

FAILED = (
    "for some images the solution does not satisfy the equations. This attack failed for these images, "
    "but another attack may succeed"
)
"""The verdict of a closed form whose equations do not fit."""


@dataclass(frozen=True)
class Knowledge:
    """What the attacker knows beside the gradients: the defence and how the client made its step.

    labels: [uploads, batch], where the server knows them. method: the run's own training method, None for the
    defence's. size: height and width of the images, where the model takes any. normalisation: mean and deviation of the
    channels, which bound the pixels. first: the number of the first upload. public: [n, C, H, W], normalised: the
    attacker's own images of the same kind; none of them is behind an upload.
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
        """Whether a 0 may arrive as another number, or another as 0: by noise or by rounding to even steps."""
        return self.defence.noise_level(self.step.batch) > 0 or self.step.dtype == torch.int8

    def even(self, upload: Gradients, names: Sequence[str]) -> bool:
        """Whether all numbers err by the same size, by noise or even steps; else in proportion to each number."""
        return self.step.dtype == torch.int8 or self.noise_beyond_rounding([upload], names) > 0

    def noise_on(self, gradient: Tensor) -> float:
        """The deviation of the uniform error on the numbers of a gradient, as it was sent."""
        noise = self.defence.noise_level(self.step.batch)
        return math.hypot(noise, steps_off(gradient)) if self.step.dtype == torch.int8 else noise

    def noise_beyond_rounding(self, uploads: Sequence[Gradients], names: Sequence[str] | None = None) -> float:
        """The deviation of the stated noise; 0 where rounding moves the numbers of some gradient by more.

        names: of the gradients that are read, None for all.
        """
        noise = self.defence.noise_level(self.step.batch)
        read = [g for upload in uploads for name, g in upload.items() if names is None or name in names]
        return noise if all(noise >= rounded_off(g, self.type_of(g)) for g in read) else 0.0

    def type_of(self, gradient: Tensor) -> torch.dtype:
        """The type whose rounding is in the numbers of a gradient: that of the upload, or of the computation."""
        coarse = self.step.autocast and torch.finfo(gradient.dtype).eps < torch.finfo(torch.bfloat16).eps
        return torch.bfloat16 if coarse else gradient.dtype

    @property
    def forward(self) -> float | None:
        """The relative error of layers' inputs in the victim's forward pass; None for that of float32."""
        return torch.finfo(torch.bfloat16).eps if self.step.autocast else None

    def read(self, upload: Gradients) -> Gradients:
        """The gradients behind an upload: one step of Adam is g / (|g| + ε), which is undone up to rounding; numbers
        that were rounded to a whole step (1) stay so."""
        if not (self.step.adam and self.step.local_steps == 1):
            return upload
        return {name: undo_adam(u) for name, u in upload.items()}

    def without_lost(self, upload: Gradients) -> Gradients:
        """The upload with NaN for numbers that the defence left out or cut off, for equations that do without them."""
        masks = {name: self.defence.lost(g) for name, g in upload.items()}
        return {
            name: g if (mask := masks[name]) is None else g.masked_fill(mask, torch.nan) for name, g in upload.items()
        }

    def variance(self, gradient: Tensor) -> Tensor | None:
        """The squared error of each number of a gradient that `read` computed from a step of Adam; else None."""
        if not (self.step.adam and self.step.local_steps == 1):
            return None
        return (ROUNDED * (gradient.double().abs() + EPS) ** 2 / EPS).square()

    def trained(self, backbone: Backbone) -> Method:
        """The method that made the gradients: the run's own, or the defence's."""
        return self.defence.method(backbone, self.step.seed) if self.method is None else self.method


@dataclass(frozen=True)
class Recovery:
    """What an attack recovered, for the uploads in their order; for the first of them where it was stopped.

    images: [n, C, H, W], normalised: one an upload, which then stands for each image behind it, or as many as the batch
    has, in any order within the upload. facts: one dict an upload, what the attacker can say of it without the truth;
    of a closed form "residual", "expected_residual" (by the stated noise and precision) and "fits" (whether the one is
    explained by the other: if not, the attack has failed, and its picture says nothing about privacy). labels:
    [uploads, batch] as inferred. partial: how far the attack came before it was stopped.
    """

    images: Tensor
    facts: list[dict[str, Fact]]
    labels: Tensor | None = None
    partial: str | None = None

    @property
    def certificates(self) -> list[Certificate]:
        """What a closed form can prove of each upload."""
        return [certificate_of(fact) for fact in self.facts]


def certificate_of(fact: Mapping[str, Fact]) -> Certificate:
    """What an attacker can prove of an image, by the facts of a closed form.

    A linear system has one solution where it has as many directions as unknowns (`rank`, `unknowns`; absent where no
    system was solved). sharp: of an attack that does not count them, whether its solution stays in place under
    rounding. hidden: patches whose places are not known. unseen: numbers of the image that the layer does not see.
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


def joined(parts: Sequence[Recovery]) -> Recovery:
    """Recoveries of successive uploads as one."""
    if len(parts) == 1:
        return parts[0]
    cut = next((part.partial for part in parts if part.partial is not None), None)
    return Recovery(torch.cat([part.images for part in parts]), [f for part in parts for f in part.facts], partial=cut)


@dataclass(frozen=True)
class Ready:
    """An attack that applies. reads: names of the gradients it uses, None for all that are sent. caveat: why the
    solution is not exact here; the attack is run all the same and its figure is reported. seconds: at most, for all
    images together."""

    reads: tuple[str, ...] | None
    caveat: str | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Refused:
    """An attack that does not apply, and why: one sentence, which says nothing about privacy."""

    reason: str


@dataclass(frozen=True)
class NoConfig:
    """An attack without settings."""


class Attack(ABC):
    """An attack. It sees the weights at the start of the step and the uploads, but never an image."""

    Config: ClassVar[type[Any]] = NoConfig
    """The type of its settings (a frozen dataclass). The constructor takes one object of this type."""

    name: ClassVar[str]
    about: ClassVar[str]
    closed_form: ClassVar[bool] = False
    """Whether it solves equations whose residual shows success or failure. The failure of a search shows nothing."""

    active: ClassVar[bool] = False
    """Whether the server crafts the weights that the client trains (`write`)."""

    separates_hidden: ClassVar[bool] = False
    """Whether it separates the patches with hidden positions from the others. Its figure is then no lower bound."""

    is_bound: ClassVar[bool] = False
    """Whether it knows the images. It is then not an attack but a bound on attacks."""

    knows: ClassVar[str] = "the weights before the step, the kind of step, and the defence"
    """What the attacker knows besides the upload, as text for the page."""

    needs: ClassVar[str] = ""
    """What the upload must contain, as text for the page."""

    paper: ClassVar[str] = "ours"
    difference: ClassVar[str] = ""
    """How our version differs from the paper's."""

    measured: ClassVar[str] = ""
    """The benchmark or study that gives its figures."""

    slow: ClassVar[bool] = False
    """Whether it runs so long that it prints its progress."""

    def __init__(self, config: Any = None) -> None:
        self.config = self.Config() if config is None else config

    @classmethod
    def proof(cls) -> str:
        """What its result proves, for a reader."""
        if cls.active:
            return (
                "that one image was separated from the others, up to small errors. Another attack may still read more"
            )
        if cls.closed_form:
            return (
                "that the attack succeeded, if the residual of its equations is small. Under noise, a small residual "
                "also proves that no other attack can recover more from these equations"
            )
        return "nothing, because a failed search may have missed the images"

    @abstractmethod
    def prepare(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> Ready | Refused:
        """Whether it applies to gradients of these names, for an attacker with this knowledge."""

    def write(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> None:
        """Writes the weights that an active server sends, in place; called where `prepare` is ready. sent: names of
        the gradients that come back."""
        raise NotImplementedError

    def spoiled(self, known: Knowledge, noise: float) -> str | None:
        """Why its result on such a step proves nothing; None where its equations hold. noise: of
        `Knowledge.noise_beyond_rounding`."""
        return spoiled(known, noise) if self.closed_form else None

    @abstractmethod
    def recover(
        self, backbone: Backbone, uploads: Sequence[Gradients], known: Knowledge, deadline: Deadline
    ) -> Recovery:
        """The images behind the uploads, all solved together. deadline: for progress and time limit of a long one."""


def spoiled(known: Knowledge, noise: float) -> str | None:
    """Why equations between layers' inputs and their gradients prove nothing; None where they do.

    noise: its deviation, 0 where rounding moves the numbers more: rounding follows from the image and is no noise.
    """
    step, reasons = known.step, []
    coarse = step.dtype in (torch.float16, torch.bfloat16) or step.autocast
    if step.dtype == torch.int8 or (coarse and noise == 0):
        kind = torch.bfloat16 if step.dtype == torch.float32 else step.dtype
        reasons.append(
            f"rounding to {str(kind).removeprefix('torch.')} is not random noise, so a search for images whose "
            f"gradients round to the same numbers may recover more"
        )
    if step.dropout:
        reasons.append(
            f"the layers have dropout ({step.dropout:g}), and the attacker does not know which values are dropped"
        )
    if step.adam:
        one, more = (
            "the gradient of one step can be recovered only up to rounding",
            f"the gradients of {step.local_steps} steps cannot be recovered",
        )
        reasons.append(
            "Adam divides every entry of the gradient by the magnitude of this entry; "
            f"{one if step.local_steps == 1 else more}"
        )
    reasons += [known.defence.caveat] if known.defence.caveat else []
    return "; ".join(reasons) or None


def undo_adam(moved: Tensor) -> Tensor:
    """g of u = g / (|g| + ε), by u's distance to 1."""
    left = (1 - moved.double().abs()).clamp(min=ROUNDED)
    return (EPS * moved.double() / left).float()


def rounded_off(gradient: Tensor, kind: torch.dtype) -> float:
    """The deviation of a floating type's rounding of a gradient, without its overflowed numbers.

    Steps between numbers are in proportion to them down to the smallest normal number, and constant below.
    """
    size = float(known_numbers(gradient).nan_to_num().square().mean().sqrt())
    least = torch.finfo(gradient.dtype)
    return max(size * torch.finfo(kind).eps, least.tiny * least.eps) / math.sqrt(12)


def steps_off(gradient: Tensor) -> float:
    """The deviation of the rounding of a gradient to even steps, the largest number being 127 of them.

    The density of numbers is e^-|x|/b, with b from the share that was rounded to 0: where most were, they err far less
    than a number somewhere between two steps.
    """
    step = float(gradient.abs().max()) / LEVELS
    share = float((gradient == 0).double().mean())
    if step == 0:
        return 0.0
    rate = -2 * math.log1p(-share)  # of the fall, a step
    at = torch.linspace(0, 1, 2001, dtype=torch.float64)
    density = torch.exp(-rate * at)
    inner = at <= 0.5  # rounded to 0, from either side; all further steps are alike
    near = float((density * at.square())[inner].sum() / density[inner].sum())
    far = float((density * (at - 0.5).square()).sum() / density.sum())
    return step * math.sqrt(share * near + (1 - share) * far)


def check_server(attacks: Sequence[Attack], threat: ThreatModel = HONEST) -> None:
    """Refuses attacks that choose the weights where the server is honest."""
    for attack in attacks:
        if attack.active and threat != ACTIVE:
            reason = f"attacks={attack.name}: this attack needs a server that chooses the weights; set server=active"
            raise SitusError(reason, field=("attacks", "server"))


def absent(sent: Collection[str], names: Sequence[str]) -> Refused | None:
    """None where all these gradients are sent, else the reason."""
    missing = [name for name in names if name not in sent]
    reason = f"the gradient of {' and '.join(missing)} is not sent, so there are no equations to solve"
    return Refused(reason) if missing else None


def device_of(upload: Gradients) -> torch.device:
    """Where an upload lies."""
    return next(iter(upload.values())).device


def stack(uploads: Sequence[Gradients], name: str) -> Tensor:
    """One gradient of all uploads in float64, [n, ...]; numbers that overflowed their type are NaN."""
    return torch.stack([known_numbers(upload[name]) for upload in uploads])


def known_numbers(gradient: Tensor) -> Tensor:
    """A gradient in float64 with NaN where it overflowed its type, to infinity or to its largest number."""
    overflowed = ~(gradient.abs() < torch.finfo(gradient.dtype).max)
    return gradient.double().masked_fill(overflowed, torch.nan)
