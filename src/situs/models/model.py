"""`Model`: what every verb works on, wherever it was opened from, and what it can say of itself."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from situs.backbones.base import Backbone
from situs.core.when import START, When
from situs.data.config import DataConfig
from situs.errors import SitusError, counted
from situs.methods.base import Method
from situs.methods.measured import SolvesPuzzles
from situs.methods.mp3 import MP3
from situs.results import Origin, percent
from situs.train.private.accounting import Spent
from situs.train.tuning import TuningConfig


@dataclass(frozen=True)
class Model:
    """A model that was opened, on its device and in eval mode (a module in the mode it was in).

    method: what a run was trained with, its own heads and tokens included; None for all that is no run. input: how its
    images, clips or sentences are prepared (and, of a run, where they are); None where nobody knows. classes: their
    names, where they are known. facts: where it comes from, no paths. classifier: whether it has a trained head.
    positions: whether its positions took part in training. locked: whether it is a locked folder opened without its
    key. identity: a hash of where it was opened from, by which one model's results are told from another's. home: the
    folder it lies in, or its weights, which tells it from another of its name. notes: what a reader of its results must
    know, by name. when: a run's last step, where its method's schedules stand. tuning: which of its weights a run
    trained. spent: what a run of DP-SGD promises.
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
        """A line for each thing to know of it, in less than a screen: the weights themselves are not shown."""
        first = {name: self.facts[name] for name in ("kind", "weights") if name in self.facts}
        told = {"model": self.backbone.name, **first, **_told(self), **self.facts, **self.notes}
        lines = [f"{name.replace('_', ' '):<12} {_line(value)}" for name, value in told.items() if value is not None]
        return "\n".join([f"Model {self.name}", *(f"  {line}" for line in lines[:LINES])])

    @property
    def data(self) -> DataConfig:
        """How its images or clips are prepared; a model that takes none is refused."""
        if self.input is None:
            raise SitusError(f"{self.name}: takes no images")
        if self.input.modality.ids:
            things = self.input.modality.things
            raise SitusError(f"{self.name}: reads {things}, and this is for models of images or clips", field="model")
        return self.input

    @property
    def samples(self) -> DataConfig:
        """How its images, clips or sentences are prepared."""
        return self.data if self.input is None or not self.input.modality.ids else self.input

    @property
    def multi_label(self) -> bool:
        """Whether its classifier tells any number of classes an image."""
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
        """What a result of it says it is of."""
        return Origin(self.name, self.identity)

    def holding_out(self, share: float | None) -> Model:
        """The same, with another share held out of data without a split to be judged on; None keeps what there is."""
        return self if share is None else replace(self, input=replace(self.samples, held_out=share))


LINES, WIDTH = 20, 100
"""Lines of a model's description at most, and characters of what stands in one."""


def _told(model: Model) -> dict[str, Any]:
    """What it is, sees and tells."""
    backbone = model.backbone
    kind, sides = type(backbone.model), backbone.input.shape
    told: dict[str, Any] = {"class": f"{kind.__module__}.{kind.__qualname__}"}
    told["trained by"] = None if model.method is None else type(model.method).__name__
    if sides is not None:
        patch = backbone.input.patch
        told["sees"] = f"{_sides(sides)}, {counted(backbone.input.channels, 'channels')}"
        told["sees"] += "" if patch is None else f", in patches of {_sides(patch)}"
    told["words"] = backbone.input.words or None
    told["tokens"] = None
    if "tokens" not in backbone.refusals:
        grid = f" ({_sides(backbone.grid)})" if len(backbone.grid) > 1 else ""
        told["tokens"] = f"{backbone.num_tokens}{grid}, and {backbone.num_prefix} before them"
        told["blocks"] = f"{backbone.depth}, {backbone.dim} wide"
    if model.classes is not None:
        told["classes"] = f"{len(model.classes)}: {', '.join(model.classes)}"
    if not model.classifier:
        told["classes"] = "no trained classifier"
    told["parameters"] = f"{sum(each.numel() for each in backbone.parameters()):,}"
    told["device"] = str(model.device)
    return told


def _sides(sides: Sequence[int]) -> str:
    return " × ".join(map(str, sides))


def _line(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"


def identity_of(origin: str) -> str:
    """A short hash of where something was opened from: results tell nobody's folders."""
    return hashlib.sha256(origin.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def folder_name(path: str | Path) -> str:
    """A folder's own name, however it was reached."""
    return Path(path).resolve().name


def puzzle_method(
    model: Model, position_ratios: Sequence[float] | None = None, anchor_ratio: float | None = None
) -> SolvesPuzzles:
    """The method of a run with a position head; any other model is refused.

    position_ratios: asked for, which one that hides every place (MP3) does not have. anchor_ratio: the share of the
    patches that MP3 tells their place; None as in the training.
    """
    if model.method is None:
        raise SitusError(f"{model.name}: is no run, and only a run keeps its position head; name a DropPos or MP3 run")
    method, kind = model.method, type(model.method).__name__
    if not isinstance(method, SolvesPuzzles):
        raise SitusError(f"{model.name}: was trained by {kind}, which has no position head; DropPos and MP3 runs do")
    if position_ratios is not None and len(method.puzzle_ratios) == 1:
        raise SitusError(f"{model.name}: {kind} hides every place, and no share of them", field="position_ratios")
    if anchor_ratio is None:
        return method
    if not isinstance(method, MP3):
        said = f"{kind} asks for no patch that it tells its place; MP3 may"
        raise SitusError(said, field="anchor_ratio", value=anchor_ratio)
    return method.under(anchor_ratio=anchor_ratio)


def told_places(share: float, trained: float) -> tuple[str, ...]:
    """What to say of a puzzle in which a share of the patches asked for were told their place (MP3's anchors).

    trained: the same share in the training.
    """
    if share == trained:
        said = f"This run tells {percent(share, None)} of the patches their place, here too, and their guesses count."
        return (said,) if share else ()
    here = f"{percent(share, None)} are, and their guesses count" if share else "none is"
    return (f"In training {percent(trained, None)} of the patches were told their place; here {here}.",)


def check_classifier(model: Model, *, multi_label: bool = False) -> None:
    """Refuses a model whose head was never trained; and where one class is asked for, one that tells any number."""
    if not model.classifier:
        more = {
            "mask": "tells the class of each pixel, and none of a whole image (situs evaluate accuracy)",
            "objects": "finds objects, and tells no class of a whole image (situs evaluate accuracy)",
            "words": "tells the next word, and no class (situs evaluate accuracy)",
        }
        said = more.get("" if model.input is None else model.input.target)
        raise SitusError(f"{model.name}: {said or 'has no trained classifier; fine-tune it first (situs finetune)'}")
    if model.multi_label and not multi_label:
        raise SitusError(f"{model.name}: is multi-label, and one class an image is asked for here")
