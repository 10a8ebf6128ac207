"""The results of attacks in one form for every scenario: images, texts, split features, locks and the guard.

A scenario makes a `Finding` of each attack on each defence, with what the attacker can prove (`Certificate`) and why it
proves nothing or was not run (`Remark`). The gate (`situs.gate`) reads findings and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from situs.errors import counted

Fact = float | int | str | None
"""A fact that an attack reports of an upload."""

Status = Literal["done", "stopped", "refused", "not_run"]
"""done: to the end; stopped: on the first samples only, or with a shortened search; refused: the attack does not
apply, which proves nothing about privacy; not_run: never started."""

Kind = Literal["refused", "stopped", "fallback", "inexact", "lower_bound", "doubt", "gap", "few"]
"""refused: why the attack does not apply. stopped: how far it came. fallback: why it ran although it was not
requested. inexact: why its solution is not exact here. lower_bound: why another attacker could get more. doubt: why
what it does not find proves nothing. gap: what is missing or no number. few: why the samples are too few to judge. A
finding with one of these is no pass; stopped, gap and few keep a whole defence from passing."""

FIT = 3.0
"""Equations fit if their residual is at most this many times what noise and precision predict. Pixels brighter than
the prior's deviation of 1 explain a factor like that; wrong equations are off by hundreds (measured)."""

NO_NOISE = (
    "the upload has no noise, and the attack's equations fit and have one solution. The input of the "
    "attacked layer is therefore known. If the recovered image differs from the reference, the client changed the "
    "reference before training (augmentation, mixing) or scaled the gradients"
)
"""The reason why a solution without noise is never a pass."""


NO_REFERENCE = "there are no reference images, and the upload may reveal more than was recovered"
"""The reason why an upload with unknown images never passes."""


class ThreatModel(NamedTuple):
    """The attacker's name, and what it does. server: the server for which a verdict holds. unproved: why nothing is
    proved by what
    its attacks do not recover; "" where an attack can prove it."""

    name: str
    about: str
    server: str
    unproved: str = ""

    @property
    def assumed(self) -> str:
        """The first sentence of every verdict."""
        return f"Assumed: {self.server}."


HONEST = ThreatModel(
    "honest-but-curious", "follows the protocol, stores everything it receives and analyses it", "an honest server"
)
"""The threat model of an audit unless another is asked for."""

ACTIVE = ThreatModel(
    "active",
    "chooses the weights of the round (same names, shapes and types), and analyses what the client sends back",
    "a server that chooses the weights",
    "a server may recover more than this attack if it chooses other weights",
)
"""A server that chooses the weights."""

SERVERS = {"honest": HONEST, "active": ACTIVE}
"""Threat models of gradients, by the name that a config has for them."""


class Metric(NamedTuple):
    """A score of a sample. margin: by how much it may exceed the best blind guess; None if the gate looks at it only
    if the user sets a limit. wish: a value above the user's limit counts only if it exceeds the best blind guess by
    this. scale: the unit in which excesses of several metrics are compared. most: the value of a perfect copy. rises:
    whether a higher value means a larger leak.
    """

    name: str
    margin: float | None = None
    wish: float = 0.0
    scale: float = 0.1
    most: float = 1.0
    unit: str = ""
    rises: bool = True


class Exposure(NamedTuple):
    """One sample under one metric. blind: the best blind guess. above: whether it counts as above whatever the limits
    are, as samples do that are re-identified more often than by chance; among: how many of them, "3 of 8"."""

    sample: str
    metric: Metric
    value: float
    blind: float | None = None
    above: bool = False
    among: str = ""

    @property
    def limit(self) -> float | None:
        """The limit that blind guesses set; None if they set none."""
        return None if self.blind is None or self.metric.margin is None else self.blind + self.metric.margin


class Certificate(NamedTuple):
    """What an attacker can prove about one sample without the sample itself.

    fits: whether its equations hold as well as noise and precision predict. unique: whether they have one solution.
    unseen: numbers of the sample that are in no equation. order_known: whether the place of each part is determined.
    verdict: in words, where the equations fit and do not determine the sample.
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
        """Whether it proves that the attacker can get no more; a unique solution matters only without noise."""
        return self.fits and self.order_known and not self.unseen


class Remark(NamedTuple):
    """Why a finding is less than it could be."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Finding:
    """The result of one attack on one defence.

    samples: names of the attacked ones; asked: how many there are in all. scores: metric -> a value for each sample,
    None if the metric is not defined. exposures: what the gate reads of them. closed: whether the attack solves
    equations that prove its result; certificates: then one for each sample. bound: whether it knows the samples, so it
    is a bound on attacks and not an attack. hardest: whether it ran under conditions worse than the owner's, which
    can show a leak and prove nothing. facts: what the attack reports of each sample. shown: what came back, for a page.
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
        """What distinguishes it from other findings of the same audit."""
        return self.attack, self.defence

    @property
    def attacked(self) -> bool:
        return self.status in ("done", "stopped")

    @property
    def count(self) -> int:
        """How many samples were attacked."""
        return len(self.samples)

    def why(self, *kinds: Kind) -> str | None:
        """The remarks of these kinds, joined; None without one."""
        return "; ".join(remark.text for remark in self.remarks if remark.kind in kinds) or None

    @property
    def caveat(self) -> str | None:
        """Why it is not exact."""
        return self.why("fallback", "inexact", "lower_bound")

    @property
    def proof(self) -> bool:
        """Whether it proves something: a closed form, finished on all samples, without a doubt, under the owner's
        conditions. A pass needs such a finding, and that no finding of the defence has a gap or too few samples."""
        whole = self.status == "done" and self.count == self.asked > 0
        certain = len(self.certificates) == self.count and all(certificate.holds for certificate in self.certificates)
        doubted = any(remark.kind not in ("gap", "few") for remark in self.remarks)
        return self.closed and whole and certain and not doubted and not (self.bound or self.hardest)

    def to_json(self) -> dict[str, Any]:
        """Attack, defence, status and remarks; a report adds the numbers of the samples."""
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
    """Why the result of a closed form proves nothing about privacy; None if it does.

    Its equations must hold for the model, fit as well as the stated noise and precision predict, and have one solution.
    Under noise the residual cannot show that equations are wrong or too few. So there is a control: the same attack
    without noise and in float32. Equations that fail there fail for another reason than the defence.

    caveat: why it is not exact here. noise: the stated deviation. control: gives the certificates of the control; None
    where the uploads themselves have no noise and are float32.
    """
    every = counted(len(certificates), "images")
    if caveat is not None:
        return f"it is not exact here, because {caveat}"
    if wrong := [certificate for certificate in certificates if not certificate.fits]:
        one = wrong[0]
        if one.verdict and one.expected is not None and (one.residual or 0.0) <= FIT * one.expected:
            return one.verdict  # the equations fit, and do not tell the image
        beside = ""
        if one.residual is not None and one.expected is not None:
            beside = f" (the residual is {one.residual:.2g}, but noise and rounding predict {one.expected:.2g})"
        return f"its equations do not fit for {len(wrong)} of {every}{beside}"
    if unseen := max((certificate.unseen for certificate in certificates), default=0):
        return (
            f"the attacked layer ignores {unseen} numbers of an image, and an attacker who guesses these numbers "
            "better may come closer to the image"
        )
    if not all(certificate.order_known for certificate in certificates):
        return (
            "the gradients do not reveal the order of the hidden patches, and an attacker who guesses another order "
            "may come closer to the image"
        )
    if control is not None and not all(certificate.fits and certificate.unique for certificate in control()):
        return (
            "on the same model without noise and in float32, its equations do not hold, or have more than one solution"
        )
    if noise == 0 and (loose := sum(not certificate.unique for certificate in certificates)):
        return f"its equations have more than one solution for {loose} of {every}"
    return NO_NOISE if noise == 0 else None
