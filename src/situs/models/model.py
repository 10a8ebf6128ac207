"""`Model`: an opened model, which every verb works on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from situs.backbones.base import Backbone
from situs.core.when import START, When
from situs.data.config import DataConfig
from situs.errors import SitusError
from situs.files import read_json
from situs.methods.base import Method
from situs.methods.measured import SolvesPuzzles
from situs.methods.mp3 import MP3
from situs.models.describe import fact_text, facts_of
from situs.results import Origin, percent
from situs.train.private import Spent
from situs.train.tuning import TuningConfig


@dataclass(frozen=True)
class Model:
    """An opened model, on its device and in eval mode (a module in the mode it was in).

    method: a run's method with its heads and tokens; None for what is no run. input: how its images, clips or sentences
    are prepared (and, for a run, where they are); None where unknown. classes: their names, where known. facts: its
    origin, no paths. classifier: whether it has a trained head. positions: whether its positions were used in
    training. locked: whether it is a locked folder opened without its key. identity: a hash of where it was opened
    from, which distinguishes the results of two models. home: its folder's or its weights' name, which distinguishes
    models of one name. notes: what a reader of its results must know, by name. when: a run's last step, for its
    method's schedules. tuning: which of its weights a run trained. spent: the (ε, δ) of a run with DP-SGD.
    """

    name: str
    backbone: Backbone
    method: Method | None = None
    input: DataConfig | None = None
    classes: tuple[str, ...] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    classifier: bool = True
    positions: bool = True
    locked: bool = False
    identity: str = ""
    home: str = ""
    notes: dict[str, str] = field(default_factory=dict)
    when: When = START
    tuning: TuningConfig = field(default_factory=TuningConfig)
    spent: Spent | None = None

    def __repr__(self) -> str:
        """One line per fact, in less than a screen, without the weights."""
        first = {name: self.facts[name] for name in ("kind", "weights") if name in self.facts}
        shown = {**first, **facts_of(self.backbone)}
        if (sides := self.backbone.input.shape) is not None:
            shown["input"] = (self.backbone.input.channels, *sides)
        if self.classes is not None:
            shown["classes"] = f"{len(self.classes)}: {', '.join(self.classes)}"
        if not self.classifier:
            shown["classes"] = "no trained classifier"
        shown |= self.facts | self.notes
        lines = [f"{name.replace('_', ' '):<13} {_line(value)}" for name, value in shown.items()]
        return "\n".join([f"Model {self.name}", *(f"  {line}" for line in lines[:LINES])])

    @property
    def data(self) -> DataConfig:
        """How its images or clips are prepared; a model that takes none is refused."""
        if self.input is None:
            raise SitusError(f"{self.name}: takes no images")
        if self.input.modality.ids:
            things = self.input.modality.things
            raise SitusError(
                f"{self.name}: reads {things}, but only models that read images or clips are supported here",
                field="model",
            )
        return self.input

    @property
    def samples(self) -> DataConfig:
        """How its images, clips or sentences are prepared."""
        return self.data if self.input is None or not self.input.modality.ids else self.input

    @property
    def multi_label(self) -> bool:
        """Whether its classifier is multi-label."""
        return self.classifier and self.input is not None and self.input.multi_label

    @property
    def trained(self) -> Method | Backbone:
        """The method that a run was trained with, else the backbone."""
        return self.method or self.backbone

    @property
    def device(self) -> torch.device:
        """Where its weights are; the CPU where it has none."""
        return next((weight.device for weight in self.backbone.parameters()), torch.device("cpu"))

    @property
    def origin(self) -> Origin:
        """Name and identity, for its results."""
        return Origin(self.name, self.identity)

    def holding_out(self, share: float | None) -> Model:
        """The same, with another held-out share for data without an evaluation split; None keeps the present one."""
        return self if share is None else replace(self, input=replace(self.samples, held_out=share))


LINES, WIDTH = 20, 100
"""Largest number of lines of a model's description, and of characters of a value."""


def _line(value: Any) -> str:
    text = " ".join(fact_text(value).split())
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"


def identity_of(origin: str) -> str:
    """A short hash of where something was opened from, so that results name no folders."""
    return hashlib.sha256(origin.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def folder_name(path: str | Path) -> str:
    """A folder's name, links resolved."""
    return Path(path).resolve().name


def puzzle_method(
    model: Model, position_ratios: Sequence[float] | None = None, anchor_ratio: float | None = None
) -> SolvesPuzzles:
    """The method of a run with a position head; any other model is refused.

    position_ratios: refused for a method that hides every position (MP3). anchor_ratio: share of MP3's patches that
    keep their positions; None: as in training.
    """
    if model.method is None:
        raise SitusError(f"{model.name}: is not a run, and only a run has a position head; give a DropPos or MP3 run")
    method, kind = model.method, type(model.method).__name__
    if not isinstance(method, SolvesPuzzles):
        raise SitusError(f"{model.name}: was trained by {kind}, which has no position head; give a DropPos or MP3 run")
    if position_ratios is not None and len(method.puzzle_ratios) == 1:
        raise SitusError(
            f"{model.name}: {kind} hides every position, so position_ratios does not apply", field="position_ratios"
        )
    if anchor_ratio is None:
        return method
    if not isinstance(method, MP3):
        raise SitusError(
            f"anchor_ratio: applies only to MP3, but the model was trained by {kind}",
            field="anchor_ratio",
            value=anchor_ratio,
        )
    return method.under(anchor_ratio=anchor_ratio)


def anchor_notes(share: float, trained: float) -> tuple[str, ...]:
    """The note for a puzzle in which a share of the patches keep their positions (MP3's anchors).

    trained: the same share in training.
    """
    if share == trained:
        note = (
            f"{percent(share, None)} of the patches keep their positions (hints), as in training. The accuracy also "
            "counts these patches."
        )
        return (note,) if share else ()
    kept = f"{percent(share, None)} keep them. The accuracy also counts these patches"
    here = kept if share else "no patch keeps its position"
    return (f"{percent(trained, None)} of the patches kept their positions in training (hints); here {here}.",)


def check_classifier(model: Model, *, multi_label: bool = False) -> None:
    """Refuses a model without a trained classifier and, unless `multi_label`, one that is multi-label."""
    if not model.classifier:
        reasons = {
            "mask": "classifies pixels, not whole images; measure it with situs evaluate accuracy",
            "objects": "detects objects, and does not classify whole images; measure it with situs evaluate accuracy",
            "words": "predicts the next word, not a class; measure it with situs evaluate accuracy",
        }
        reason = reasons.get("" if model.input is None else model.input.target)
        raise SitusError(f"{model.name}: {reason or 'has no trained classifier; fine-tune it first (situs finetune)'}")
    if model.multi_label and not multi_label:
        raise SitusError(f"{model.name}: is multi-label, but only single-label classification is supported here")


DEFENCE_FILE = "defence.json"


class FeatureDefence(NamedTuple):
    """defence: as the owner named it. scale: the unit of its noise's σ, the same in all steps."""

    defence: str
    scale: float


def feature_defence_of(run: str | Path) -> FeatureDefence | None:
    """The defence recorded in a run's folder; None where there is none."""
    file = Path(run) / DEFENCE_FILE
    if not file.is_file():
        return None
    record = read_json(file)
    if not isinstance(record.get("defence"), str) or type(record.get("scale")) not in (int, float):
        raise SitusError(f"{file}: is damaged: it must contain the run's defence and the scale of its noise")
    return FeatureDefence(record["defence"], record["scale"])


def protection(spent: Spent | None, defence: str | None) -> list[str]:
    """Sentences of a model card on how the training protected its samples; none where it did not."""
    sentences = [] if spent is None else [f"Differential privacy: {spent}."]
    if defence is not None:
        sentences.append(
            f"In split learning, the server saw the tokens only after the defence {defence}, which does not give "
            "differential privacy (no ε)."
        )
    return sentences
