"""What attacks came to, in one form for every scenario: images, texts, split features, locks and the guard.

A scenario makes a `Finding` of each attack on each defence, with what the attacker can prove by itself (`Certificate`)
and why it proves nothing or was not made (`Remark`). The gate (`situs.gate`) reads findings and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from situs.errors import counted

Fact = float | int | str | None
"""What an attacker says of an upload, for a reader."""

Status = Literal["done", "stopped", "refused", "not_run"]
"""done: to the end; stopped: on the first samples, or with a search cut short; refused: the attack does not apply,
which says nothing about privacy; not_run: never begun."""

Kind = Literal["refused", "stopped", "fallback", "inexact", "lower_bound", "doubt", "gap", "few"]
"""refused: why the attack does not apply. stopped: how far it came. fallback: why it is made though nobody asked for
it. inexact: why its solution is not exact here. lower_bound: why one who knows more could get more. doubt: why what it
does not find proves nothing. gap: what is missing or no number. few: why the samples are too few to tell anything.
None of these is ever a pass by itself; stopped, gap and few keep a whole defence from passing."""

FIT = 3.0
"""Equations fit if they are off by no more than this many times what noise and precision leave; pixels brighter than
the prior's deviation of 1 explain that much of noise, and what is wrong by form is off by hundreds (measured)."""

NO_NOISE = (
    "there is no noise in what is sent, and its equations fit and have one solution: what its layer was fed is known. "
    "A picture unlike the reference means that the reference is another one (augmentation, mixing, a factor between "
    "gradients)"
)
"""Why a solution without noise is never a pass."""


class ThreatModel(NamedTuple):
    """Who attacks, by name, and what that one does."""

    name: str
    about: str


HONEST = ThreatModel("honest-but-curious", "does what was agreed, keeps all that it is sent and looks at it")
"""The threat model of every audit."""


class Metric(NamedTuple):
    """A score of a sample. margin: by how much it may exceed the best blind guess; None where it is no part of a gate
    by itself. wish: what is above a wished limit must also exceed the best blind guess by this. scale: by what
    exceedances of several metrics are compared. most: what a perfect copy has. rises: whether it does with the leak.
    """

    name: str
    margin: float | None = None
    wish: float = 0.0
    scale: float = 0.1
    most: float = 1.0
    unit: str = ""
    rises: bool = True


class Exposure(NamedTuple):
    """One sample under one metric. blind: what the best guess that saw nothing has. above: whether it is above whatever
    the limits say, as it is for samples that are found again more often than by chance. among: how many such."""

    sample: str
    metric: Metric
    value: float
    blind: float | None = None
    above: bool = False
    among: str = ""

    @property
    def limit(self) -> float | None:
        """What blind guesses allow; None where they set no limit."""
        return None if self.blind is None or self.metric.margin is None else self.blind + self.metric.margin


class Certificate(NamedTuple):
    """What an attacker can prove of one sample without seeing it.

    fits: whether its equations hold as well as noise and precision predict. unique: whether they have one solution.
    unseen: numbers of the sample that no equation holds. order_known: whether they tell where each part stands.
    verdict: in words, where the equations fit and do not tell the sample.
    """

    fits: bool
    residual: float | None = None
    expected: float | None = None
    unique: bool = False
    order_known: bool = False
    unseen: int = 0
    verdict: str = ""

    @property
    def holds(self) -> bool:
        """Whether what it does not show is hidden; that the solution is unique counts only without noise."""
        return self.fits and self.order_known and not self.unseen


class Remark(NamedTuple):
    """Why a finding is less than it could be."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Finding:
    """What came of one attack on one defence.

    samples: names of those attacked, of `asked` that there are. scores: metric -> a value for each sample, None where
    the metric is not defined. exposures: what the gate reads of them. closed: whether the attack solves equations that
    prove its result; certificates: then one for each sample. bound: whether it is told the samples, so that it is a
    bound on attacks and none itself. hardest: whether it was made under conditions worse than the owner's own, which
    can expose and prove nothing. facts: what the attacker says of each sample. shown: what came back, for a page.
    """

    attack: str
    defence: str
    status: Status = "done"
    samples: Sequence[str] = ()
    asked: int = 0
    scores: Mapping[str, Sequence[float] | None] = field(default_factory=dict)
    exposures: Sequence[Exposure] = ()
    certificates: Sequence[Certificate] = ()
    remarks: Sequence[Remark] = ()
    closed: bool = False
    bound: bool = False
    hardest: bool = False
    facts: Sequence[Mapping[str, Fact]] = ()
    shown: Any = None

    @property
    def key(self) -> Hashable:
        """By what it is told from others of one audit."""
        return self.attack, self.defence

    @property
    def attacked(self) -> bool:
        return self.status in ("done", "stopped")

    @property
    def count(self) -> int:
        """How many samples were attacked."""
        return len(self.samples)

    def why(self, *kinds: Kind) -> str | None:
        """The remarks of these kinds in one; None where there is none."""
        return "; ".join(remark.text for remark in self.remarks if remark.kind in kinds) or None

    @property
    def caveat(self) -> str | None:
        """Why it is not exact."""
        return self.why("fallback", "inexact", "lower_bound")

    @property
    def proof(self) -> bool:
        """Whether it proves something: a closed form, on all samples, to the end, without a doubt, under the owner's
        conditions. A pass needs such a finding, and that no finding beside it has a gap or too few samples."""
        whole = self.status == "done" and self.count == self.asked > 0
        certain = len(self.certificates) == self.count and all(certificate.holds for certificate in self.certificates)
        doubted = any(remark.kind not in ("gap", "few") for remark in self.remarks)
        return self.closed and whole and certain and not doubted and not (self.bound or self.hardest)

    def to_json(self) -> dict[str, Any]:
        """What it is; the numbers of its samples are written by whoever knows their metrics."""
        return {
            "attack": self.attack,
            "defence": self.defence,
            "status": self.status,
            "closed_form": self.closed,
            "bound": self.bound,
            "remarks": [remark._asdict() for remark in self.remarks],
        }


Certificates = Sequence[Certificate]


def doubt_of(
    caveat: str | None, certificates: Certificates, noise: float, control: Callable[[], Certificates] | None
) -> str | None:
    """Why the result of a closed form proves nothing of privacy; None where it does.

    Its equations must hold for the model, fit as well as the stated noise and precision predict, and have one solution.
    Noise hides from the residual that equations are wrong, and that they have too few directions. So there is a
    control: the same attack without noise and in float32. What does not hold there is not the defence's doing.

    caveat: why it is not exact here. noise: deviation of the noise that was stated. control: makes the certificates of
    the upload without noise and in float32; None where the uploads themselves are such.
    """
    every = counted(len(certificates), "images")
    if caveat is not None:
        return f"it is not exact here ({caveat})"
    if wrong := [certificate for certificate in certificates if not certificate.fits]:
        one = wrong[0]
        if one.verdict and one.expected is not None and (one.residual or 0.0) <= FIT * one.expected:
            return one.verdict  # the equations fit, and do not tell the image
        beside = ""
        if one.residual is not None and one.expected is not None:
            beside = f" (residual {one.residual:.2g}, where noise and precision predict {one.expected:.2g})"
        return f"its equations do not fit for {len(wrong)} of {every}{beside}"
    if unseen := max((certificate.unseen for certificate in certificates), default=0):
        return f"its layer does not see {unseen} numbers of an image, and a better guess at them may come closer"
    if not all(certificate.order_known for certificate in certificates):
        return "the gradients do not say in which order the hidden patches stand, and another order may come closer"
    if control is not None and not all(certificate.fits and certificate.unique for certificate in control()):
        return (
            "its equations do not hold, or have more than one solution, on the same model without noise and in float32"
        )
    if noise == 0 and (loose := sum(not certificate.unique for certificate in certificates)):
        return f"its equations have more than one solution for {loose} of {every}"
    return NO_NOISE if noise == 0 else None
