"""COCO's average precision of a detection over a whole split: boxes and masks, per class, the worst images first."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from situs.data.loader import Loader
from situs.data.sampler import sample_of
from situs.data.sources.coco import CocoSource, Rle, Truth, decode_rles
from situs.errors import SitusError, counted
from situs.files import write_text
from situs.limits import check_value
from situs.measure.by_class import mixed_pairs
from situs.measure.objects.found import Found, coco_results, in_the_file
from situs.measure.objects.scores import OVERLAP, SURE, Answers, ApScores, average_precision, count_objects
from situs.measure.segments.measure import BARS, CROSSED, LISTED, WORST, worst_figures
from situs.methods.base import Batch
from situs.methods.detection import Detection
from situs.models.data import AnyData, AnyModel, Chosen, load_set, made_with, opened
from situs.models.inference import evaluating, rows_of_ranks
from situs.models.model import Model
from situs.results import Cell, Figure, Result, Summary, Table, percent
from situs.train import distributed
from situs.train.export import PARTS
from situs.train.step import autocast

MEANING = f"""
Average precision (AP) as COCO means it, in hundredths: what was found is sorted by its score, each is right where it
overlaps an object of its class that no surer one has taken, and precision is averaged over recall from 0 to 1; AP is
the mean over overlaps (intersection over union) of .5, .55, … .95 and over the classes that have objects, AP50 and AP75
are at one overlap. Small objects have less than 32² pixels, large ones more than 96². At most 100 are judged an image.
What lies in a crowd counts neither as right nor as wrong. The comparison object by object takes what has a score of
{SURE} or more and gives each to the object that its mask overlaps most, by at least {OVERLAP}, of whatever class. F1 is
twice the number found under their class over those that are there and those that are said.
"""
PICTURES = 8
"""How many of the worst are kept to be looked at."""

NAMES = {"ap": "AP", "ap50": "AP50", "ap75": "AP75", "small": "small", "medium": "medium", "large": "large"}


class Drawn(NamedTuple):
    """Objects to look at. boxes: [n, 4] in pixels of the file. classes: [n]. masks: [n, h, w] bool. scores: of what
    was found."""

    boxes: Tensor
    classes: Tensor
    masks: Tensor
    scores: Tensor | None = None


class Shown(NamedTuple):
    """One image to look at. picture: [C, H, W] in [0, 1]. sides: of the file. f1: see `Answers`."""

    name: str
    f1: float
    picture: Tensor
    sides: tuple[int, int]
    truth: Drawn
    said: Drawn


class Measured(NamedTuple):
    """What was found in each image, beside the truths in the same order."""

    boxes: ApScores
    masks: ApScores
    found: Sequence[Found]
    truths: Sequence[Truth]


@dataclass(frozen=True)
class Detections(Result):
    """What a detection came to. boxes, masks: average precision. answers: over all images. classes: names. count: of
    images. worst: the images with the lowest F1, first the lowest. saved: the file that holds what was found."""

    file: ClassVar[str] = "objects"
    subject: ClassVar[str] = "detection"
    meaning: ClassVar[str] = MEANING
    boxes: ApScores
    masks: ApScores
    answers: Answers
    classes: Sequence[str]
    count: int
    worst: Sequence[Shown]
    saved: str = ""

    def summary(self) -> Summary:
        """AP of boxes and of masks."""
        name, there = self.provenance.name, int(self.answers.table[:-1].sum())
        seen = self.provenance.counted(self.count)
        of = f"{counted(there, 'objects')} of {counted(len(self.classes), 'classes')} in {seen}"
        said = f"{name} reaches {_points(self.boxes.ap)} AP of boxes and {_points(self.masks.ap)} of masks on {of}."
        rows: list[list[Cell]] = [
            [what, *(_points(value) for value in scores.means().values())]
            for what, scores in (("boxes", self.boxes), ("masks", self.masks))
        ]
        table = Table(self.provenance.title(seen), ["", *NAMES.values()], rows)
        kept = f"Found with a score of {SURE} or more: F1 {percent(self.answers.f1, 1)} at an overlap of {OVERLAP}."
        notes = (kept, *([f"What was found is in {self.saved}."] if self.saved else []))
        numbers = (f"{100 * self.boxes.ap:.1f}", "AP of boxes"), (f"{100 * self.masks.ap:.1f}", "AP of masks")
        return Summary(said, (table,), notes, numbers)

    def numbers(self) -> dict[str, Any]:
        """The means, a row a class, and the worst images."""
        means = {what: each.means() for what, each in (("boxes", self.boxes), ("masks", self.masks))}
        worst = [{"name": each.name, "f1": each.f1} for each in self.worst]
        own = {"f1": self.answers.f1, "count": self.count, "objects": int(self.answers.table[:-1].sum())}
        return {**means, **own, "classes": by_class(self), "worst": worst}

    def figures(self) -> list[Figure]:
        """The worst images, the classes, and which are taken for which."""
        rows = [
            (percent(each.f1, 0), each.picture, each.sides, {"truth": each.truth, "found": each.said})
            for each in self.worst
        ]
        caption = f"Left of each image its F1; found: what has a score of {SURE} or more, the score at each box."
        figures = worst_figures(rows, "objects.object_rows", self.classes, caption)
        there = [row for row in by_class(self) if row["boxes"] is not None]
        if len(there) <= BARS:
            for what in ("boxes", "masks"):
                values = ({row["class"]: 100 * row[what] for row in there}, "AP")
                caption = f"AP of each class that has objects, of {what}."
                figures.append(Figure(f"classes-{what}", caption, "figures.bars", values, {"digits": ".1f"}))
        if len(self.classes) <= CROSSED:
            table, names = self.answers.table, [*self.classes, "none"]
            shares = 100 * table.double() / table.sum(dim=1, keepdim=True)
            caption = (
                "Of each class's objects the share that is said to be of each class, or missed (none). The last row: "
                "what is said where no object is."
            )
            values = ({"": (shares, "% of the row")}, names, names, "said", "true")
            figures.append(Figure("confusion", caption, "figures.value_grids", values, {"limits": (0, 100)}))
        return figures

    def details(self) -> list[Table]:
        """The worst images; of many classes the weakest, and the pairs that are taken for one another most."""
        tables, names = [], [*self.classes, "none"]
        if self.worst:
            cells: list[list[Cell]] = [
                [each.name, f"{100 * each.f1:.1f}", len(each.truth.classes), len(each.said.classes)]
                for each in self.worst
            ]
            tables.append(Table(WORST, ["image", "F1, %", "objects", "found"], cells))
        there = [row for row in by_class(self) if row["boxes"] is not None]
        if len(there) > BARS:
            cells = [
                [row["class"], row["objects"], f"{100 * row['boxes']:.2f}", f"{100 * row['masks']:.2f}", row["missed"],
                 row["taken_for"] or "none"]
                for row in sorted(there, key=lambda row: row["boxes"])[:LISTED]
            ]  # fmt: skip
            header = ["class", "objects", "AP of boxes", "AP of masks", "missed", "taken most often for"]
            tables.append(Table(f"The {counted(len(cells), 'classes')} with the lowest AP of boxes", header, cells))
        if len(self.classes) > CROSSED:
            pairs = mixed_pairs(self.answers.table, names, LISTED)
            cells = [[names[true], names[said], int(self.answers.table[true, said])] for true, said in pairs]
            caption = "none: missed, or not there."
            tables.append(Table("The pairs that take most objects", ["true", "said", "objects"], cells, caption))
        return tables


def by_class(found: Detections) -> list[dict[str, Any]]:
    """A row a class: its objects, its AP of boxes and of masks (None where it has no objects), how many of them are
    missed, and what the others are taken for most often."""
    table = found.answers.table
    rows = []
    for number, name in enumerate(found.classes):
        others = table[number, :-1].clone()
        others[number] = 0
        taken = found.classes[int(others.argmax())] if int(others.max()) else None
        own = {"boxes": found.boxes.classes[number], "masks": found.masks.classes[number]}
        rows.append({"class": name, "objects": int(table[number].sum()),
                     **{what: None if math.isnan(value) else value for what, value in own.items()},
                     "missed": int(table[number, -1]), "taken_for": taken})  # fmt: skip
    return rows


def evaluate_objects(
    model: AnyModel,
    data: AnyData = None,
    *,
    save_detections: str | Path | None = None,
    pictures: int = PICTURES,
    precision: str = "fp32",
    seed: int = 0,
    **chosen: Unpack[Chosen],
) -> Detections:
    """Measures COCO's average precision of a detection on a whole split, in the pixels of the files.

    model: a run of detection, or an export of one. data: a path or a source; None for what a run was trained on.
    save_detections: a file for COCO's json of what was found. pictures: how many of the worst images are kept to be
    looked at. precision: fp32, or bf16 for autocast. chosen: see `load_set`. Under torchrun the ranks share the images.
    """
    check_value("pictures", pictures, ">= 0")
    if save_detections is not None:
        _check_file(Path(save_detections))
    model = opened(model, seed)
    method = detection_of(model)
    loader = load_set(model, data, shared=True, target="objects", **chosen)
    if loader.classes != model.classes:
        said = (
            f"has {counted(len(loader.classes or ()), 'classes')}, not the {len(model.classes or ())} of {model.name}"
        )
        raise SitusError(f"{loader.source.name}: {said}, or others", field="data")
    with evaluating(method):
        measured = measure(method, loader, loader, precision)
    if all(bool(truth.crowd.all()) for truth in measured.truths):
        said = f"none of the {counted(len(measured.truths), 'images')} looked at has an object apart from crowds"
        raise SitusError(f"{loader.source.name}: {said}, so that there is no precision to tell", field="data")
    each = [count_objects(*pair, method.classes) for pair in zip(measured.truths, measured.found, strict=True)]
    order = np.argsort([answers.f1 for answers in each], kind="stable")[:pictures].tolist()
    worst = [_shown(loader, measured.found[place], measured.truths[place], each[place].f1) for place in order]
    answers = Answers(torch.stack([answers.table for answers in each]).sum(0))
    made = made_with(model, loader, seed, precision)
    if save_detections is not None:
        _save(Path(save_detections), loader, measured)
    saved = "" if save_detections is None else Path(save_detections).name
    own = (measured.boxes, measured.masks, answers, model.classes or (), len(each), worst, saved)
    return Detections(*own, provenance=made)


def _check_file(file: Path) -> None:
    """Refuses at once what could not be written in the end."""
    if file.is_dir():
        raise SitusError(f"{file}: is a folder, and the detections are one file", field="save_detections")
    if not file.absolute().parent.is_dir():
        raise SitusError(f"{file}: its folder is not there", field="save_detections")


def detection_of(model: Model) -> Detection:
    """The method of a model that was trained to detect; any other is refused."""
    if model.method is None and model.facts.get("method") == "detection":
        raise SitusError(f"{model.name}: its heads are gone, the file {PARTS}; export it again", field="model")
    if not isinstance(model.method, Detection):
        raise SitusError(
            f"{model.name}: was not trained to detect; fine-tune it with the method detection", field="model"
        )
    return model.method


def measure(method: Detection, loader: Loader, batches: Iterable[Batch], precision: str = "fp32") -> Measured:
    """The scores over all batches of all ranks; each brings its own part of the images."""
    lines = [each.to_line() for batch in batches for each in find(method, batch, precision)]
    text = bytearray("".join(f"{line}\n" for line in lines) or "\n", "ascii")
    whole = rows_of_ranks(torch.frombuffer(text, dtype=torch.uint8).to(loader.device)).cpu().numpy().tobytes()
    found = [Found.from_line(line) for line in whole.decode("ascii").split("\n") if line]
    found.sort(key=lambda each: each.row)
    if not found:
        raise SitusError(f"{loader.source.name}: there are no images to evaluate on", field="data")
    truths = [truth_of(loader, each.row) for each in found]
    boxes, masks = (average_precision(truths, found, method.classes, kind) for kind in ("bbox", "segm"))
    return Measured(boxes, masks, found, truths)


def find(method: Detection, batch: Batch, precision: str = "fp32") -> list[Found]:
    """What is found in each image of a batch, in the pixels of its file."""
    sides, whole = batch.targets["sides"], batch.targets["whole"].tolist()
    with autocast(batch.inputs.device, precision):
        said = method.detect(batch.inputs, sides)
    rows = zip(sample_of(batch.ids).tolist(), said, sides.tolist(), whole, strict=True)
    return [in_the_file(*row) for row in rows]


def truth_of(loader: Loader, row: int) -> Truth:
    """What the annotations say of an image of the loader's source."""
    source, number = loader.source.origin(row)
    assert isinstance(source, CocoSource)
    return source.truth(number)


def _save(file: Path, loader: Loader, measured: Measured) -> None:
    source, _ = loader.source.origin(0)
    assert isinstance(source, CocoSource)
    rows, strange = coco_results(measured.found, measured.truths, source.categories)
    if strange:
        said = f"{strange:,} of what was found is of classes that its json has no category for"
        loader.source.notes.append(f"{source.name}: {said}; they are not in {file.name}")
    if not distributed.rank():
        write_text(file, json.dumps(rows) + "\n")


def _shown(loader: Loader, found: Found, truth: Truth, f1: float) -> Shown:
    pipeline, row = loader.pipeline, found.row
    values = pipeline.collate(0, [row], [pipeline.fetch(row, 0, row)])
    batch = pipeline.finish(pipeline.move(values, loader.device), torch.tensor([row], device=loader.device), {})
    [(high, wide)] = values["sides"].tolist()
    picture = loader.shown(batch.inputs)[0, :, :high, :wide].cpu()
    sure = (found.scores >= SURE).nonzero()[:, 0]
    said = _drawn(found.boxes[sure], found.classes[sure], [found.rles[each] for each in sure], truth.sides)
    there = _drawn(truth.boxes, truth.classes, truth.rles, truth.sides)
    return Shown(loader.source.key(row), f1, picture, truth.sides, there, said._replace(scores=found.scores[sure]))


def _drawn(boxes: Tensor, classes: Tensor, rles: list[Rle], sides: tuple[int, int]) -> Drawn:
    return Drawn(boxes, classes, decode_rles(rles, sides))


def _points(value: float) -> Cell:
    """In hundredths, as COCO's scores are told."""
    return None if math.isnan(value) else f"{100 * value:.2f}"
