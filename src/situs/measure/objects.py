"""COCO's average precision of a detector over a whole split: boxes and masks, by class, the worst images first."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from situs.data.loader import Loader
from situs.data.modalities.objects import CocoSource, Rle, Truth, decode_rles, encode_masks, mask_api
from situs.data.sampler import sample_of
from situs.errors import SitusError, counted
from situs.files import write_text
from situs.limits import check_value
from situs.measure.accuracy import confused_with, mixed_pairs
from situs.measure.segments import BARS, CROSSED, LISTED, WORST, dense_method, worst_figures
from situs.methods.base import Batch
from situs.methods.detection import Detection
from situs.models.data import AnyData, AnyModel, Chosen, load_set, made_with, opened
from situs.models.inference import evaluating, rows_of_ranks
from situs.results import Cell, Figure, Result, Summary, Table, percent, points
from situs.train import distributed
from situs.train.step import autocast

SURE = 0.5
"""The lowest score of a detection that is compared object by object."""
OVERLAP = 0.5
"""The lowest intersection over union of two masks that count as one object."""

MEANING = f"""
Average precision (AP) is computed as in COCO, in percent. The detections of a class are sorted by score. A detection is
right if its overlap with an object of its class is large enough, and no detection with a higher score has matched this
object. Precision is averaged over recall from 0 to 1. This is done for ten required overlaps (intersection over union:
.5, .55, … .95) and for each class that has objects. AP is the mean of all these averages. AP50 requires an overlap of
.5, and AP75 of .75. Small objects have fewer than 32² pixels, and large objects have more than 96² pixels. Only the 100
best detections of an image are used. Detections inside a crowd are ignored.

F1 and the tables of confused classes are not averages over recall: they come from counts of objects and detections.
These counts use only detections with a score of {SURE} or more. Each detection is matched to the object (of any class)
whose mask overlaps most with the mask of the detection, if this overlap is {OVERLAP} or more. F1 is twice the number of
objects detected with the right class, divided by the number of objects plus the number of detections.
"""
PICTURES = 8
"""How many of the worst images the page shows."""

_AT_ONCE = 1 << 25  # pixels of masks that are drawn at a time
_SURE = 0.5  # threshold of a drawn mask's pixels
NAMES = {"ap": "AP", "ap50": "AP50", "ap75": "AP75", "small": "small", "medium": "medium", "large": "large"}


class DrawnObjects(NamedTuple):
    """Objects on the page. boxes: [n, 4] in pixels of the file. classes: [n]. masks: [n, h, w] bool. scores: [n] of
    detections."""

    boxes: Tensor
    classes: Tensor
    masks: Tensor
    scores: Tensor | None = None


class ShownObjects(NamedTuple):
    """One image on the page. picture: [C, H, W] in [0, 1]. sides: of the file. f1: see `Answers`."""

    name: str
    f1: float
    picture: Tensor
    sides: tuple[int, int]
    truth: DrawnObjects
    predicted: DrawnObjects


class MeasuredObjects(NamedTuple):
    """The detections of each image, and the annotations in the same order."""

    boxes: ApScores
    masks: ApScores
    detected: Sequence[ImageDetections]
    truths: Sequence[Truth]


@dataclass(frozen=True)
class Detections(Result):
    """The scores of a detector. boxes, masks: average precision. answers: over all images. classes: names. count: of
    images. worst: the images with the lowest F1, the lowest first. saved: the file of the detections, or ""."""

    file: ClassVar[str] = "objects"
    subject: ClassVar[str] = "detection"
    meaning: ClassVar[str] = MEANING
    boxes: ApScores
    masks: ApScores
    answers: Answers
    classes: Sequence[str]
    count: int
    worst: Sequence[ShownObjects]
    saved: str = ""

    def summary(self) -> Summary:
        """AP of boxes and of masks."""
        name, objects = self.provenance.name, int(self.answers.table[:-1].sum())
        seen = self.provenance.counted(self.count)
        of = f"{counted(objects, 'objects')} of {counted(len(self.classes), 'classes')} in {seen}"
        reached = f"{points(self.boxes.ap)} for boxes and of {points(self.masks.ap)} for masks"
        sentence = f"{name} reaches an AP of {reached} on {of}."
        rows: list[list[Cell]] = [
            [what, *(points(value) for value in scores.means().values())]
            for what, scores in (("boxes", self.boxes), ("masks", self.masks))
        ]
        table = Table(self.provenance.title(seen), ["", *NAMES.values()], rows)
        f1 = (
            f"F1 is {percent(self.answers.f1, 1)} (a detection counts at a score of {SURE} or more, and matches at an "
            f"overlap of {OVERLAP} or more)."
        )
        notes = (f1, *([f"The detections are in {self.saved}."] if self.saved else []))
        numbers = (points(self.boxes.ap, 1) or "–", "AP of boxes"), (points(self.masks.ap, 1) or "–", "AP of masks")
        return Summary(sentence, (table,), notes, numbers)

    def numbers(self) -> dict[str, Any]:
        """The means, a row for each class, and the worst images."""
        means = {what: scores.means() for what, scores in (("boxes", self.boxes), ("masks", self.masks))}
        worst = [{"name": image.name, "f1": image.f1} for image in self.worst]
        counts = {"f1": self.answers.f1, "count": self.count, "objects": int(self.answers.table[:-1].sum())}
        return {**means, **counts, "classes": by_class(self), "worst": worst}

    def figures(self) -> list[Figure]:
        """The worst images, the classes, and their confusion."""
        rows = [
            (percent(image.f1, 0), image.picture, image.sides, {"truth": image.truth, "detected": image.predicted})
            for image in self.worst
        ]
        caption = (
            f"The number to the left of each image is its F1. Only detections with a score of {SURE} or more are drawn."
            " The number at each box is the score of the detection."
        )
        figures = worst_figures(rows, "masks.object_rows", self.classes, caption)
        rows_with_objects = [row for row in by_class(self) if row["boxes"] is not None]
        if len(rows_with_objects) <= BARS:
            for what in ("boxes", "masks"):
                values = ({row["class"]: 100 * row[what] for row in rows_with_objects}, "AP")
                caption = f"AP of {what} for each class that has objects."
                figures.append(Figure(f"classes-{what}", caption, "figures.bars", values, {"digits": ".1f"}))
        if len(self.classes) <= CROSSED:
            table, names = self.answers.table, [*self.classes, "none"]
            shares = 100 * table.double() / table.sum(dim=1, keepdim=True)
            caption = (
                "For each true class: the share of its objects that are detected as each class. The column 'none' "
                "shows missed objects. The row 'none' shows false detections."
            )
            values = ({"": (shares, "% of the row")}, names, names, "detected", "true")
            figures.append(Figure("confusion", caption, "figures.value_grids", values, {"limits": (0, 100)}))
        return figures

    def details(self) -> list[Table]:
        """The worst images; of many classes, the weakest and the most confused pairs."""
        tables, names = [], [*self.classes, "none"]
        if self.worst:
            cells: list[list[Cell]] = [
                [image.name, points(image.f1, 1), len(image.truth.classes), len(image.predicted.classes)]
                for image in self.worst
            ]
            tables.append(Table(WORST, ["image", "F1, %", "objects", "detected"], cells))
        rows_with_objects = [row for row in by_class(self) if row["boxes"] is not None]
        if len(rows_with_objects) > BARS:
            cells = [
                [row["class"], row["objects"], points(row['boxes']), points(row['masks']), row["missed"],
                 row["taken_for"] or "none"]
                for row in sorted(rows_with_objects, key=lambda row: row["boxes"])[:LISTED]
            ]  # fmt: skip
            header = ["class", "objects", "AP of boxes", "AP of masks", "missed", "most often confused with"]
            tables.append(Table(f"The {counted(len(cells), 'classes')} with the lowest AP of boxes", header, cells))
        if len(self.classes) > CROSSED:
            pairs = mixed_pairs(self.answers.table, names, LISTED)
            cells = [
                [names[true], names[predicted], int(self.answers.table[true, predicted])] for true, predicted in pairs
            ]
            caption = 'Under "detected", "none" means a missed object. Under "true", "none" means a false detection.'
            tables.append(Table("The most confused pairs", ["true", "detected", "objects"], cells, caption))
        return tables


def by_class(detections: Detections) -> list[dict[str, Any]]:
    """A row for each class: objects, AP of boxes and of masks (None without objects), how many are missed, and the
    class it is confused with most."""
    table, names = detections.answers.table[:-1], detections.classes
    columns = {
        "class": names,
        "objects": table.sum(dim=1).tolist(),
        "boxes": [None if math.isnan(value) else value for value in detections.boxes.classes],
        "masks": [None if math.isnan(value) else value for value in detections.masks.classes],
        "missed": table[:, -1].tolist(),
        "taken_for": confused_with(table[:, :-1], names),
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


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
    """Measures COCO's average precision of a detector on a whole split, in the pixels of the files.

    model: a run of detection, or an export of one. data: a path or a source; None for what a run was trained on.
    save_detections: a file for the detections, in COCO's json format. pictures: how many of the worst images the page
    shows. precision: fp32, or bf16 for autocast. chosen: see `load_set`. Under torchrun the ranks share the images.
    """
    check_value("pictures", pictures, ">= 0")
    if save_detections is not None:
        _check_file(Path(save_detections))
    model = opened(model, seed)
    method = dense_method(model, Detection, "detect", "heads are")
    loader = load_set(model, data, shared=True, target="objects", **chosen)
    if loader.classes != model.classes:
        counts = f"{counted(len(loader.classes or ()), 'classes')} and {len(model.classes or ())}"
        raise SitusError(
            f"{loader.source.name}: its classes differ from those of {model.name} ({counts})", field="data"
        )
    with evaluating(method):
        measured = measure(method, loader, loader, precision)
    if all(bool(truth.crowd.all()) for truth in measured.truths):
        reason = f"none of the {counted(len(measured.truths), 'images')} has an object (crowds do not count)"
        raise SitusError(f"{loader.source.name}: {reason}, so there is no precision to measure", field="data")
    by_image = [count_objects(*pair, method.classes) for pair in zip(measured.truths, measured.detected, strict=True)]
    order = np.argsort([answers.f1 for answers in by_image], kind="stable")[:pictures].tolist()
    worst = [_shown(loader, measured.detected[place], measured.truths[place], by_image[place].f1) for place in order]
    answers = Answers(torch.stack([answers.table for answers in by_image]).sum(0))
    if save_detections is not None:
        _save(Path(save_detections), loader, measured)
    provenance = made_with(model, loader, seed, precision)
    saved = "" if save_detections is None else Path(save_detections).name
    fields = (measured.boxes, measured.masks, answers, model.classes or (), len(by_image), worst, saved)
    return Detections(*fields, provenance=provenance)


def _check_file(file: Path) -> None:
    """Refuses a file that could not be written at the end."""
    if file.is_dir():
        raise SitusError(f"{file}: must be a file for the detections, but is a folder", field="save_detections")
    if not file.absolute().parent.is_dir():
        raise SitusError(f"{file}: its folder does not exist", field="save_detections")


def measure(method: Detection, loader: Loader, batches: Iterable[Batch], precision: str = "fp32") -> MeasuredObjects:
    """The scores over all batches of all ranks."""
    lines = [image.to_line() for batch in batches for image in detect(method, batch, precision)]
    text = bytearray("".join(f"{line}\n" for line in lines) or "\n", "ascii")
    whole = rows_of_ranks(torch.frombuffer(text, dtype=torch.uint8).to(loader.device)).cpu().numpy().tobytes()
    detected = [ImageDetections.from_line(line) for line in whole.decode("ascii").split("\n") if line]
    detected.sort(key=lambda image: image.row)
    if not detected:
        raise SitusError(f"{loader.source.name}: there are no images to evaluate on", field="data")
    truths = [truth_of(loader, image.row) for image in detected]
    boxes, masks = (average_precision(truths, detected, method.classes, kind) for kind in ("bbox", "segm"))
    return MeasuredObjects(boxes, masks, detected, truths)


def detect(method: Detection, batch: Batch, precision: str = "fp32") -> list[ImageDetections]:
    """The detections of each image of a batch, in the pixels of its file."""
    sides, whole = batch.targets["sides"], batch.targets["whole"].tolist()
    with autocast(batch.inputs.device, precision):
        outputs = method.detect(batch.inputs, sides)
    rows = zip(sample_of(batch.ids).tolist(), outputs, sides.tolist(), whole, strict=True)
    return [to_file_pixels(*row) for row in rows]


def truth_of(loader: Loader, row: int) -> Truth:
    """The annotations of an image of the loader's source."""
    source, number = loader.source.origin(row)
    assert isinstance(source, CocoSource)
    return source.truth(number)


def _save(file: Path, loader: Loader, measured: MeasuredObjects) -> None:
    source, _ = loader.source.origin(0)
    assert isinstance(source, CocoSource)
    rows, strange = coco_results(measured.detected, measured.truths, source.categories)
    if strange:
        note = f"{strange:,} detections have a class that is not a category in the json file of the data"
        loader.source.notes.append(f"{source.name}: {note}, so they are not in {file.name}")
    if not distributed.rank():
        write_text(file, json.dumps(rows) + "\n")


def _shown(loader: Loader, detected: ImageDetections, truth: Truth, f1: float) -> ShownObjects:
    pipeline, row = loader.pipeline, detected.row
    values = pipeline.collate(0, [row], [pipeline.fetch(row, 0, row)])
    batch = pipeline.finish(pipeline.move(values, loader.device), torch.tensor([row], device=loader.device), {})
    [(high, wide)] = values["sides"].tolist()
    picture = loader.shown(batch.inputs)[0, :, :high, :wide].cpu()
    sure = (detected.scores >= SURE).nonzero()[:, 0]
    masks = decode_rles([detected.rles[number] for number in sure], truth.sides)
    predicted = DrawnObjects(detected.boxes[sure], detected.classes[sure], masks, detected.scores[sure])
    truths = DrawnObjects(truth.boxes, truth.classes, decode_rles(truth.rles, truth.sides))
    return ShownObjects(loader.source.key(row), f1, picture, truth.sides, truths, predicted)


_ALL, _SMALL, _MEDIUM, _LARGE = range(4)


@dataclass(frozen=True)
class ApScores:
    """COCO's average precision: over overlaps from .5 to .95, at .5, at .75, and of objects by their size, below 32²
    pixels, below 96², and above. classes: of each class, [K]. NaN where there is no such object."""

    ap: float
    ap50: float
    ap75: float
    small: float
    medium: float
    large: float
    classes: Sequence[float]

    def means(self) -> dict[str, float]:
        """All but the classes, by name."""
        return {name: getattr(self, name) for name in ("ap", "ap50", "ap75", "small", "medium", "large")}


def average_precision(
    truths: Sequence[Truth], detected: Sequence[ImageDetections], classes: int, kind: Literal["bbox", "segm"]
) -> ApScores:
    """The average precision of the detections in images, with the annotations in the same order."""
    from faster_coco_eval import COCO, COCOeval_faster

    images = [{"id": number, "height": image.sides[0], "width": image.sides[1]} for number, image in enumerate(truths)]
    kinds = [{"id": number, "name": str(number)} for number in range(classes)]
    shared = {"images": images, "categories": kinds}
    annotations = [_rows(number, image, image.crowd, image.areas) for number, image in enumerate(truths)]
    results = [_rows(number, image, None, _areas(image, kind), image.scores) for number, image in enumerate(detected)]
    truth, answers = (
        COCO(shared | {"annotations": [row | {"id": at} for at, row in enumerate(chain(*rows), start=1)]})
        for rows in (annotations, results)
    )
    judge = COCOeval_faster(truth, answers, kind, print_function=lambda *_: None, extra_calc=False)
    judge.params.imgIds, judge.params.catIds = [*range(len(images))], [*range(classes)]
    judge.evaluate()
    judge.accumulate()
    # [overlap, recall, class, size, most an image], -1 where there is no such object
    precision = np.asarray(judge.eval["precision"], dtype=np.float64)[..., -1].reshape(10, 101, classes, 4)

    def mean(part: np.ndarray) -> float:
        known = part[part > -1]
        return float(known.mean()) if known.size else math.nan

    sizes = (mean(precision[..., size]) for size in (_ALL, _SMALL, _MEDIUM, _LARGE))
    ap, small, medium, large = sizes
    image = [mean(precision[:, :, number, _ALL]) for number in range(classes)]
    return ApScores(ap, mean(precision[0, ..., _ALL]), mean(precision[5, ..., _ALL]), small, medium, large, image)


class Answers(NamedTuple):
    """Objects of one image or of many by (true, detected) class, [K + 1, K + 1]: the last row holds detections without
    an object, the last column missed objects."""

    table: Tensor

    @property
    def f1(self) -> float:
        """Twice the objects detected with the right class, over objects plus detections."""
        right, rows, columns = self.table.diagonal()[:-1].sum(), self.table[:-1].sum(), self.table[:, :-1].sum()
        return float(2 * right / (rows + columns)) if rows + columns else 1.0


def count_objects(truth: Truth, detected: ImageDetections, classes: int) -> Answers:
    """The detections with a score of at least `SURE`, each matched to the object that its mask overlaps most, the
    highest score first. A detection inside a crowd counts neither as right nor as wrong."""
    table = torch.zeros(classes + 1, classes + 1, dtype=torch.int64)
    crowd, sure = truth.crowd.tolist(), (detected.scores >= SURE).nonzero()[:, 0].tolist()
    free = {number for number, many in enumerate(crowd) if not many}
    overlaps = np.zeros((len(sure), len(crowd)))
    if sure and crowd:
        overlaps = np.asarray(mask_api().iou([detected.rles[index] for index in sure], truth.rles, [*map(int, crowd)]))
    for row, index in enumerate(sure):
        predicted = int(detected.classes[index])
        best = max(free, key=lambda number: overlaps[row, number], default=None)
        if best is not None and overlaps[row, best] >= OVERLAP:
            table[int(truth.classes[best]), predicted] += 1
            free.discard(best)
        elif not any(many and overlaps[row, number] >= OVERLAP for number, many in enumerate(crowd)):
            table[classes, predicted] += 1
    for number in free:
        table[int(truth.classes[number]), classes] += 1
    return Answers(table)


def _rows(
    image: int,
    objects: Truth | ImageDetections,
    crowd: Tensor | None,
    areas: Sequence[float] | Tensor,
    scores: Tensor | None = None,
) -> list[dict[str, Any]]:
    """COCO's annotations of one image."""
    left, top, right, bottom = objects.boxes.double().unbind(1)
    boxes = torch.stack([left, top, right - left, bottom - top], dim=1).tolist()
    count = len(boxes)
    columns: dict[str, Any] = {
        "image_id": [image] * count,
        "category_id": objects.classes.tolist(),
        "bbox": boxes,
        "area": [float(area) for area in areas],
        "segmentation": objects.rles,
        "iscrowd": [0] * count if crowd is None else crowd.int().tolist(),
    } | ({} if scores is None else {"score": scores.tolist()})
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _areas(detected: ImageDetections, kind: str) -> Sequence[float]:
    """The areas by which COCO sorts sizes: of the boxes, or of the masks."""
    if kind == "bbox":
        return ((detected.boxes[:, 2] - detected.boxes[:, 0]) * (detected.boxes[:, 3] - detected.boxes[:, 1])).tolist()
    return [float(mask_api().area(rle)) for rle in detected.rles]


class ImageDetections(NamedTuple):
    """The detections of one image, the highest score first. row: its number in its set.

    boxes: [n, 4] left, top, right, bottom in pixels of the file. classes: [n] from 0 on. scores: [n]. rles: n masks.
    """

    row: int
    boxes: Tensor
    classes: Tensor
    scores: Tensor
    rles: list[Rle]

    def to_line(self) -> str:
        """As one line of text, from which `from_line` makes the same again."""
        masks = [rle["counts"].decode("ascii") for rle in self.rles]
        sides = self.rles[0]["size"] if self.rles else []
        return json.dumps([self.row, *(rle.tolist() for rle in self[1:4]), sides, masks])

    @staticmethod
    def from_line(line: str) -> ImageDetections:
        """What `to_line` wrote."""
        row, boxes, classes, scores, sides, masks = json.loads(line)
        rles = [{"size": sides, "counts": counts.encode("ascii")} for counts in masks]
        parts = torch.tensor(boxes, dtype=torch.float64).view(-1, 4), torch.tensor(classes, dtype=torch.int64)
        return ImageDetections(row, *parts, torch.tensor(scores, dtype=torch.float64), rles)


def to_file_pixels(
    row: int, outputs: Mapping[str, Tensor], sides: Sequence[int], whole: Sequence[int]
) -> ImageDetections:
    """A model's detections in an image, in the pixels of its file.

    outputs: "boxes" [n, 4] in pixels of the model's input, "labels" and "scores" [n], "masks" [n, m, m] within the
    boxes. sides: height and width of the image in the input, without padding; whole: those of the file.
    """
    scale = torch.tensor([whole[1] / sides[1], whole[0] / sides[0]] * 2, device=outputs["boxes"].device)
    boxes, (high, wide) = outputs["boxes"].float() * scale, whole
    some = max(1, _AT_ONCE // (high * wide))
    rles = []
    for first in range(0, len(boxes), some):
        drawn = draw_masks(outputs["masks"][first : first + some].float(), boxes[first : first + some], (high, wide))
        rles += encode_masks(drawn)
    parts = boxes.double().cpu(), outputs["labels"].long().cpu(), outputs["scores"].double().cpu()
    return ImageDetections(row, *parts, rles)


def draw_masks(masks: Tensor, boxes: Tensor, sides: tuple[int, int]) -> Tensor:
    """Probabilities [n, m, m] within their boxes [n, 4], as masks [n, H, W] bool: each pixel by the value at its
    centre. torchvision instead widens the boxes to whole pixels first."""
    left, top, right, bottom = boxes.unbind(1)
    rows = _shares(top, bottom, masks.shape[1], sides[0])
    columns = _shares(left, right, masks.shape[2], sides[1])
    return rows @ masks @ columns.transpose(1, 2) > _SURE


def _shares(first: Tensor, last: Tensor, cells: int, pixels: int) -> Tensor:
    """[n, pixels, cells]: bilinear weights of the cells between first and last [n] at the centre of each pixel."""
    places = torch.arange(pixels, device=first.device) + 0.5
    at = (places - first[:, None]) / (last - first)[:, None] * cells - 0.5
    return (1 - (at[..., None] - torch.arange(cells, device=first.device)).abs()).clamp(min=0)


def coco_results(
    detected: Iterable[ImageDetections], truths: Iterable[Truth], categories: Sequence[Any]
) -> tuple[list[dict[str, Any]], int]:
    """COCO's list of results, with the data's ids of images and categories; and how many detections have no category
    there."""
    rows, strange = [], 0
    for image, truth in zip(detected, truths, strict=True):
        for box, kind, score, rle in zip(*(part.tolist() for part in image[1:4]), image.rles, strict=True):
            if categories[kind] is None:
                strange += 1
                continue
            left, top, right, bottom = box
            mask = {"size": list(rle["size"]), "counts": rle["counts"].decode("ascii")}
            rows.append({"image_id": truth.number, "category_id": categories[kind], "score": score,
                         "bbox": [left, top, right - left, bottom - top], "segmentation": mask})  # fmt: skip
    return rows, strange
