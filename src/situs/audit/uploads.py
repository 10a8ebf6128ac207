"""Audits of captured uploads whose images nobody knows here: the attacks' certificates speak, and nothing ever passes.

Without images there is no score. A closed form still proves that it has the image: its equations fit, have one solution
and leave little of it uncertain. That is above any gate. All else is inconclusive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from situs.audit.attacks.base import Attack, Normalisation
from situs.audit.captured import Captured
from situs.audit.cases import Case, ImageFinding, TestSet, certified_exposures
from situs.audit.deadline import Deadline
from situs.audit.defences import Defence, NoDefence, Step
from situs.audit.engine import Images
from situs.audit.gradients import REFUSED, Audit, opening, reasons, system_of
from situs.audit.reference import chance_kept, match_upload
from situs.audit.run import run
from situs.audit.scores import BEST_PSNR
from situs.backbones.base import Backbone
from situs.errors import counted
from situs.findings import NO_REFERENCE, Remark
from situs.methods.base import Method
from situs.results import Cell, Figure, Summary, Table, Tone

SCHEMA = "situs-audit-upload/1"
"""The form of upload.json."""

STATE = "The equations fit only if you gave the correct batch, noise and local steps"


@dataclass(frozen=True)
class UploadAudit(Audit):
    """Attacks on captured uploads, by defence as stated. uploads: what each is."""

    file: ClassVar[str] = "upload"
    meaning: ClassVar[str] = (
        "A recovered picture is certified if the attacker can prove, without the original, that the picture is right. "
        "This proof has three conditions. The attack's equations hold up to rounding and the stated noise. The "
        "equations have only one solution. This solution covers almost every pixel. The certified PSNR is the PSNR "
        "that this proof guarantees. The proof assumes that nobody altered the upload. Without reference images, no "
        "upload can pass a gate: a picture that is not certified may still be right, and another attack may recover "
        "more."
    )

    uploads: Sequence[Captured] = field(default=(), kw_only=True)

    @property
    def title(self) -> str:
        return f"Captured uploads of {self.model}"

    @property
    def tone(self) -> Tone:
        return "bad" if any(_above(pair) for pair in self.attacked) else "unsure"

    @property
    def mark(self) -> str:
        return "Not private" if self.tone == "bad" else "Not proved private"

    def line(self, pair: ImageFinding) -> str:
        return _certified(pair)

    def summary(self) -> Summary:
        rows: list[list[Cell]] = []
        for pair in self.pairs:
            if not pair.attacked:
                rows.append([pair.attack, pair.defence, REFUSED, *[None] * 5])
                continue
            best = max((one.value for one in pair.exposures), default=None)
            misfits = [(c.residual, c.expected) for c in pair.certificates if c.residual is not None]
            residual, expected = max(misfits, default=(None, None))
            shown = [None if value is None else f"{value:.2g}" for value in (residual, expected)]
            psnr = None if best is None else "no error" if best >= BEST_PSNR else f"{best:.1f}"
            rows.append([pair.attack, pair.defence, _certified(pair), psnr, *shown, *system_of(pair)])
        header = ["attack", "defence as stated", "certified", "certified PSNR, dB", "residual", "expected residual"]
        table = Table(f"{self.model}, {self._counted}", [*header, "rank of G", "condition of G"], rows)
        tables, ruling = [table], self.ruling
        if whys := reasons(self):
            tables.append(Table("Attacks that do not apply or are not exact", ["attack and defence", "why"], whys))
        numbers = ((f"{len(self._read)} of {len(self.names)}", "images certified"),)
        return Summary(self._verdict, tuple(tables), () if ruling is None else (ruling.sentence,), numbers)

    @property
    def _counted(self) -> str:
        return counted(len(self.uploads), "uploads")

    @property
    def _read(self) -> set[str]:
        """The images that some attack certifies."""
        return {one.sample for pair in self.attacked for one in pair.exposures if one.above}

    @property
    def _verdict(self) -> str:
        if not self.attacked:
            return opening(self)
        best = max(self.attacked, key=lambda pair: max((one.value for one in pair.exposures), default=0.0))
        read, total = len(self._read), counted(len(self.names), "images")
        if not read:
            nothing = (
                f"In {self._counted}, no image is certified: the attacker cannot prove that any image was recovered."
            )
            return f"{opening(self)} {nothing} This does not prove privacy: {NO_REFERENCE}. {STATE}.".lstrip()
        return (
            f"{opening(self)} {read} of {total} in {self._counted} can be read. The attacker can prove without the "
            f"originals that the result is right. Best attack: {best.attack}. Stated defence: {best.defence}."
        ).lstrip()

    def figures(self) -> list[Figure]:
        """What came back of each image, by attack."""
        pairs = [pair for pair in self.attacked if pair.shown is not None]
        if not pairs:
            return []
        rows = [(f"{pair.attack}, {pair.defence}", pair.shown.cpu()) for pair in pairs]
        caption = f"Images recovered from {self._counted}; there are no originals to compare with."
        return [Figure("recovered", caption, "figures.image_rows", (rows, self.names))]

    def details(self) -> list[Table]:
        rows = [[name, text] for name, text in self.notes.items()]
        kinds = [
            [one.name, one.sent, len(one.gradients), sum(g.numel() for g in one.gradients.values())]
            for one in self.uploads
        ]
        return [
            Table("Uploads", ["upload", "taken as", "tensors", "numbers"], kinds),
            *([Table("Notes", ["about", "note"], rows)] if rows else []),
        ]

    def numbers(self) -> dict[str, Any]:
        ruling = self.ruling
        return {
            "schema": SCHEMA,
            "model": self.model,
            "threat": self.threat.name,
            "batch": self.step.batch,
            "uploads": [{"name": one.name, "sent": one.sent, "tensors": len(one.gradients)} for one in self.uploads],
            "stopped": self.stopped,
            "verdict": self._verdict,
            "pairs": [
                pair.to_json()
                | {
                    "certified": {one.sample: one.value for one in pair.exposures},
                    "facts": [dict(f) for f in pair.facts],
                }
                for pair in self.pairs
            ],
            "notes": dict(self.notes),
            "gate": None if ruling is None else ruling.to_json(),
        }


def attack_uploads(
    model: Backbone | Method,
    test: TestSet,
    attacks: Sequence[Attack],
    defences: Sequence[Defence],
    *,
    step: Step,
    deadline: Deadline | None = None,
    keep: Callable[[UploadAudit], None] | None = None,
    **fields: Any,
) -> UploadAudit:
    """Every attack on captured uploads under every stated defence; deadline and keep: see `run`."""
    backbone = model if isinstance(model, Backbone) else model.backbone

    def make(findings: list[ImageFinding], stopped: str | None) -> UploadAudit:
        rows = [_by_certificate(finding, test) for finding in findings]
        about = {defence.label: defence.described for defence in defences}
        shown = (rows, test.names, test.real()[:0], backbone.name, step, {})
        return UploadAudit(*shown, uploads=test.captured, about=about, stopped=stopped, **fields)

    cases = [Case("", model, defence, attack, batch=step.batch) for defence in defences for attack in attacks]
    return run(Images(cases, test, make, step), deadline, keep)


def blank_set(
    captured: Sequence[Captured],
    size: tuple[int, int, int],
    batch: int,
    normalisation: Normalisation,
    stored: bool,
    device: torch.device | str,
) -> TestSet:
    """A test set for uploads of so many unknown images each."""
    count = len(captured) * batch
    names = [upload.name + f", image {number + 1}" * (batch > 1) for upload in captured for number in range(batch)]
    pixels, labels = torch.zeros(count, *size, device=device), torch.zeros(count, dtype=torch.int64, device=device)
    return TestSet(pixels, labels, normalisation, names, stored=stored, captured=captured, referenced=False)


def matched(backbone: Backbone, test: TestSet, stated: Sequence[Defence], batch: int) -> tuple[TestSet, list[Defence]]:
    """The test set with its uploads in the units of their gradients, and the defences with the noise that is really in
    them.

    Where an upload is not the gradient of one step on these images with noise on it, it stays as it is, with a caveat;
    no defence is then added to what is stated, and nothing is believed to be noise that may be something else.
    """
    names = {name: name for name, _ in backbone.named_parameters()}
    steps = stated[0].step(Step()).local_steps
    scaled, doubted = list[tuple[Captured, Defence]](), list[Captured]()
    with chance_kept():
        for number, upload in enumerate(test.captured):
            images = test.pixels[number * batch : (number + 1) * batch]
            gradients, rounding = upload.under(stated[0])
            match, _, wrong = match_upload(backbone, names, gradients, images, stated[0], steps)
            doubted.append(replace(upload, mismatch=wrong))
            if match is not None and not wrong:
                scaled.append(match.in_units(replace(upload, gradients=gradients, rounding=rounding)))
    if len(scaled) < len(doubted):
        return replace(test, captured=doubted), list(dict.fromkeys([*stated, NoDefence()]))
    least = min((noise for _, noise in scaled), key=lambda noise: noise.noise_level(batch))
    return replace(test, captured=[upload for upload, _ in scaled]), [least]


def _by_certificate(finding: ImageFinding, test: TestSet) -> ImageFinding:
    """The finding with what is certified as exposures, and why it can never pass."""
    if not finding.attacked:
        return replace(finding, asked=len(test))
    names = [test.names[number] for number in finding.numbers]
    exposures = certified_exposures(finding, test)
    proved = len(exposures) == finding.count and all(one.above for one in exposures)
    dropped = ("gap", "doubt") if proved else ("gap",)  # the doubt is that a reference might be another image
    remarks = [*(remark for remark in finding.remarks if remark.kind not in dropped), Remark("gap", NO_REFERENCE)]
    return replace(finding, samples=names, asked=len(test), exposures=exposures, remarks=remarks)


def _above(pair: ImageFinding) -> int:
    return sum(one.above for one in pair.exposures)


def _certified(pair: ImageFinding) -> str:
    return f"{_above(pair)} of {pair.count}" + ", stopped" * (pair.status == "stopped")
