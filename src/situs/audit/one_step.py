"""One step of a training loop as a scenario: an upload whose images are known, attacked before it is sent.

Each attack runs under each assumption about the upload (`assumptions`), and what it recovers is compared with the
images and with what the first layer was fed in their place (`Reference`). A gallery of earlier images (`Memory`)
distinguishes re-identification from chance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.audit.attacks.base import Attack, Normalisation
from situs.audit.captured import Captured
from situs.audit.cases import Case, ImageFinding, TestSet
from situs.audit.client import victim_gradients
from situs.audit.deadline import Deadline
from situs.audit.defences import Defence, NoDefence, Noise, Step
from situs.audit.engine import Images, trials_of
from situs.audit.gradients import Audit
from situs.audit.oracle import Oracle, bound_of
from situs.audit.reference import Match, cross_entropy_slopes
from situs.audit.run import Trial
from situs.audit.scores import CHANCE, METRICS, Scores, denormalise, exposures_of, gaps_of, measure
from situs.backbones.base import Backbone
from situs.findings import Exposure, Remark
from situs.gate import Limit, awaits_bound, exposed

LESS = (1, 3, 10, 30, 100)
"""Factors by which the stated noise alone is divided in further attempts, where it could not be measured."""

DECOYS = 32
"""Images of earlier looks that are kept as a gallery, and looks whose re-identification counts."""

THUMB, SIMILAR = 16, 0.9
"""Two images show the same where their thumbnails of that many pixels a side correlate by more."""

CROSS_ENTROPY = 0.99
"""The loss counts as cross entropy where its slopes have at least this cosine with those of one class each."""

# --- what pictures are compared with ---------------------------------------------------------------------------------


class Reference(NamedTuple):
    """What recovered pictures are compared with: those of a batch [B, C, H, W] (inputs: normalised; real: in [0, 1]),
    the gallery (these first, then others), and the scores of blind guesses."""

    inputs: Tensor
    real: Tensor
    gallery: Tensor
    blind: dict[str, Scores]


class Reidentified(NamedTuple):
    """How often an attack re-identified images in a gallery, in one look. chance: the probability of one hit."""

    hits: int
    count: int
    chance: float

    @classmethod
    def of(cls, finding: ImageFinding, total: int) -> Reidentified:
        """Those of a finding among so many images."""
        hits = finding.scores.get("reidentified") or [0.0] * finding.count
        return cls(round(sum(hits)), len(hits), min(1.0, len(hits) / total))


def tail(looks: Iterable[Reidentified]) -> float:
    """The probability of as many hits or more in such looks by chance."""
    hits, odds = 0, [1.0]  # odds[k]: of k hits so far
    for look in looks:
        hits += look.hits
        for _ in range(look.count):
            more, less = [p * look.chance for p in odds], [p * (1 - look.chance) for p in odds]
            odds = [a + b for a, b in zip([*less, 0.0], [0.0, *more], strict=True)]
    return sum(odds[hits:])


class Memory:
    """What a guard remembers of earlier looks. decoys: their pictures as bytes, each once. looks: by attack, which
    images were re-identified."""

    def __init__(self) -> None:
        self.decoys: deque[Tensor] = deque(maxlen=DECOYS)
        self.looks: dict[str, deque[Reidentified]] = {}

    def keep(self, real: Tensor) -> None:
        """Keeps pictures [B, C, H, W] for the galleries of later looks."""
        for picture in (real * 255).round().to(torch.uint8).cpu():
            others = [decoy for decoy in self.decoys if decoy.shape == picture.shape]
            if not others or not bool(alike(picture[None] / 255, torch.stack(others) / 255).any()):
                self.decoys.append(picture)

    def note(self, attack: str, look: Reidentified) -> None:
        self.looks.setdefault(attack, deque(maxlen=DECOYS)).append(look)

    def reference(self, images: Tensor, normalisation: Normalisation, backbone: Backbone) -> Reference:
        """The batch's pictures, a gallery with others, and blind guesses: grey is the mean of the normalisation, which
        everyone has."""
        real, grey = (denormalise(batch, *normalisation) for batch in (images, torch.zeros_like(images)))
        others = [decoy for decoy in self.decoys if decoy.shape == real.shape[1:]]
        decoys = torch.stack(others).to(real) / 255 if others else real[:0]
        decoys = decoys[~alike(real, decoys).any(dim=0)]  # the same image in another epoch is no blind guess
        gallery = torch.cat([real, decoys])
        different = ~alike(real, gallery)
        different[range(len(real)), range(len(real))] = False
        guesses = {"grey": grey}
        if bool(different.any()):
            mean, other = grey.clone(), grey.clone()
            for number, rows in enumerate(different):
                if bool(rows.any()):
                    mean[number], other[number] = gallery[rows].mean(dim=0), gallery[rows][0]
            guesses |= {"mean image": mean, "another image": other}
        blind = {name: measure(guess, gallery, backbone, None) for name, guess in guesses.items()}
        return Reference(images, real, gallery, blind)

    def remarks(self) -> list[Remark]:
        """Why re-identified images, or a gallery that is too small to tell, keep an upload from being below."""
        remarks = []
        for attack, looks in self.looks.items():
            if tail([look._replace(hits=look.count) for look in looks]) >= CHANCE:
                few = "the guard has seen only few other images, so re-identification may be chance: audit more steps"
                return [Remark("few", few)]
            if tail(looks) < CHANCE:
                remarks.append(
                    Remark("gap", f"the attack `{attack}` re-identifies recent images more often than by chance")
                )
        return remarks


@torch.no_grad()
def alike(one: Tensor, other: Tensor) -> Tensor:
    """Which of pictures [B, C, H, W] and others [G, C, H, W] show the same, [B, G]: their grey thumbnails correlate,
    shifted or mirrored."""
    if not len(other):
        return torch.zeros(len(one), 0, dtype=torch.bool, device=one.device)
    thumbs = [F.adaptive_avg_pool2d(pictures.double().mean(dim=1), THUMB) for pictures in (one, other)]
    x, y = (thumb - thumb.mean(dim=(1, 2), keepdim=True) for thumb in thumbs)
    x, y = (thumb / thumb.flatten(1).norm(dim=1).clamp(min=1e-9).view(-1, 1, 1) for thumb in (x, y))
    best = x.new_full((len(x), len(y)), -1.0)
    for dims in ((), (1,), (2,), (1, 2)):
        spectra = torch.fft.rfft2(x.flip(dims))[:, None] * torch.fft.rfft2(y).conj()
        best = torch.maximum(best, torch.fft.irfft2(spectra, s=(THUMB, THUMB)).amax(dim=(2, 3)))
    return best > SIMILAR


# --- what attackers take the upload to be ----------------------------------------------------------------------------


class Assumption(NamedTuple):
    """What an attacker takes an upload to be. proves: whether it is known to be true, so that a failure says
    something."""

    upload: Captured
    defence: Defence
    step: Step
    proves: bool = False


def assumptions(upload: Captured, match: Match | None, stated: Defence, step: Step) -> list[Assumption]:
    """The gradient under the measured noise. Where that could not be measured: the defence as stated first, then none,
    less noise, and the upload without the factors of its tensors."""
    if match is not None and not match.wrong:
        return [Assumption(*match.in_units(upload), replace(step, local_steps=1), proves=True)]
    uploads, noise = [upload], stated.noise_level(step.batch)
    if match is not None and match.factors:
        plain = {name: g / (match.factors.get(name) or 1.0) for name, g in upload.gradients.items()}
        uploads.append(replace(upload, gradients=plain))
    many = stated.step(Step()).batch  # of accumulated batches, all images are given
    accumulated = replace(step, batch=step.batch if step.batch % many else step.batch // many)
    known = {stated: accumulated, NoDefence(): step}
    for weaker in [Noise(noise / part) for part in LESS if noise]:
        known.setdefault(weaker, replace(stated.step(step), batch=step.batch))
    return [Assumption(one, defence, assumed) for one in uploads for defence, assumed in known.items()]


# --- the scenario ----------------------------------------------------------------------------------------------------


@dataclass
class OneStep:
    """The scenario of a step. references: by name, the images first. match: the upload beside the recomputed gradient;
    slopes: ∂loss/∂logits of its passes, [B, classes] each. gaps: why nothing of it can pass."""

    name: ClassVar[str] = Images.name
    cards = staticmethod(Images.cards)

    backbone: Backbone
    attacks: Sequence[Attack]
    assumed: Sequence[Assumption]
    references: Mapping[str, Reference]
    normalisation: Normalisation
    stated: Defence
    limit: Limit
    deadline: Deadline
    memory: Memory
    match: Match | None = None
    slopes: Sequence[Tensor] = ()
    gaps: Sequence[Remark] = ()
    cross_entropy: bool = True
    """Whether the loss is cross entropy, as far as the oracle needed to know."""

    leaked: bool = False
    """Whether an attack is above."""

    def __post_init__(self) -> None:
        galleries = {name: reference.gallery for name, reference in self.references.items()}
        images = next(iter(self.references.values())).inputs.float()
        labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        self.test = TestSet(images, labels, self.normalisation, _names(len(images)), galleries=galleries)
        self.parts = [
            (one, [self._case(attack, one.defence, name) for name in self.references])
            for attack in self.attacks
            for one in self.assumed
        ]

    def _case(self, attack: Attack, defence: Defence, name: str, hardest: bool = False) -> Case:
        count = len(self.references[name].real)
        return Case("", self.backbone, defence, attack, compared_with=name, hardest=hardest, batch=count)

    def planned(self) -> Iterator[ImageFinding]:
        late = f"did not finish within {self.deadline.seconds:g} s"
        for _, (case, *_) in self.parts:
            yield case.finding("not_run", remarks=[Remark("gap", f"{case.attack.name} {late}")])

    def trials(self) -> Iterator[ImageFinding | Trial]:
        for one, cases in self.parts:
            yield from trials_of(cases, replace(self.test, captured=(one.upload,)), one.step)

    def enough(self, finding: Any) -> bool:
        """Whether no further attack is needed: one is above, under every assumption that was to be tried."""
        self.leaked = self.leaked or bool(exposed(self._compared(finding), self.limit))
        return self.leaked and any(finding.case in cases for one, cases in self.parts if one is self.assumed[-1])

    def report(self, findings: Mapping[Hashable, Any], stopped: str | None) -> Audit:
        last, proves = [*self.references][-1], self.assumed[0].proves
        first, rows = [cases[0] for one, cases in self.parts if one is self.assumed[0]], list[ImageFinding]()
        for finding in map(self._compared, findings.values()):
            if proves and finding.attacked and finding.case.compared_with == last:
                self.memory.note(finding.attack, Reidentified.of(finding, len(self.references[last].gallery)))
            needless = {"not_run": self.leaked, "refused": finding.case not in first}
            if not needless.get(finding.status):
                remarks, hardest = [*self.gaps, *finding.remarks], finding.attacked and not proves
                rows.append(replace(finding, defence=self.stated.label, remarks=remarks, hardest=hardest))
        if awaits_bound(rows, self.limit):
            late = Remark("gap", f"the oracle did not finish within {self.deadline.seconds:g} s")
            more = [*self.memory.remarks(), *[late] * self.deadline.spent()]
            rows[0] = replace(rows[0], remarks=[*rows[0].remarks, *more])
        shown = (rows, self.test.names, self.test.real()[:0], self.backbone.name, self.assumed[0].step, {})
        about = {self.stated.label: self.stated.described}
        return Audit(*shown, about=about, limit=self.limit, stopped=stopped)

    def bounds(self, report: Audit, deadline: Deadline) -> Iterator[ImageFinding]:
        """The oracle's findings on a step of cross entropy with the labels and the very noise of this one; where the
        loss is another, with the least likely labels too."""
        if self.match is None or not awaits_bound(report.findings, self.limit):
            return
        [(upload, noise, *_)], (name, reference) = self.assumed, [*self.references.items()][-1]
        slopes, images = torch.cat([*self.slopes]), reference.inputs.float()
        labels = slopes.argmin(dim=1)
        expected = cross_entropy_slopes(self.backbone(images).detach(), labels)
        cosines = F.cosine_similarity(slopes.to(expected.dtype), expected)
        self.cross_entropy = float(cosines.min()) > CROSS_ENTROPY
        clean, theirs = victim_gradients(self.backbone, images, labels), self.match.clean
        noisy = {n: clean[n] + (g - theirs[n]) for n, g in upload.gradients.items() if n in theirs}
        test = replace(self.test, pixels=images, labels=labels, captured=(replace(upload, gradients=noisy),))
        for hardest in [False] if self.cross_entropy else [False, True]:
            case = self._case(Oracle(), noise, name, hardest)
            bound = bound_of(case, test, Step(len(images)), deadline, self._compared, limit=self.limit)
            yield replace(bound, defence=self.stated.label)
            if bound.status != "done" or exposed(bound, self.limit):
                return

    def _compared(self, finding: ImageFinding) -> ImageFinding:
        """The finding with what the gate reads: each image against its blind guesses, and whether images are
        re-identified far more often than by chance in this look alone; over many looks: `Memory.remarks`."""
        if not finding.attacked:
            return finding
        reference, scores = self.references[finding.case.compared_with], finding.scores
        count, names = len(reference.real), _names(len(reference.gallery))
        look = Reidentified.of(finding, len(names))
        limited = scores if self.limit.metric == "reidentified" else {**scores, "reidentified": None}
        rows = exposures_of(limited, names, range(count), reference.blind, finding.case.patches, look.chance)
        if not finding.bound and tail([look]) < CHANCE**2:
            among = f"{look.hits} of {look.count} among {len(names)}"
            again = METRICS["reidentified"]
            rows.append(Exposure(names[0], again, look.hits / look.count, look.chance, above=True, among=among))
        more = [] if finding.bound else gaps_of(finding, count)
        return replace(finding, samples=names[:count], exposures=rows, remarks=[*finding.remarks, *more])


def _names(count: int) -> list[str]:
    return [f"image {number}" for number in range(count)]
