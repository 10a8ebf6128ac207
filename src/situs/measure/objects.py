"""COCO's average precision of a detection over a whole split: boxes and masks, per class, the worst images first."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from situs.data.loader import Loader
from situs.data.sampler import sample_of
from situs.data.sources.coco import CocoSource, Rle, Truth, decode_rles, encode_masks, mask_api
from situs.errors import SitusError, counted
from situs.files import write_text
from situs.limits import check_value
from situs.measure.by_class import mixed_pairs
from situs.measure.segments import BARS, CROSSED, LISTED, WORST, worst_figures
from situs.methods.base import Batch
from situs.methods.detection import Detection
from situs.models.data import AnyData, AnyModel, Chosen, load_set, made_with, opened
from situs.models.inference import evaluating, rows_of_ranks
from situs.models.model import Model
from situs.results import Cell, Figure, Result, Summary, Table, percent
from situs.train import distributed
from situs.train.export import PARTS
from situs.train.step import autocast

SURE = 0.5
"""From this score on what was found counts as said, where it is compared one by one."""
OVERLAP = 0.5
"""From this intersection over union on two masks are of one object."""

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

_AT_ONCE = 1 << 25  # pixels of masks that are drawn at a time
_SURE = 0.5  # from which share on a pixel of a drawn mask is of the object
NAMES = {"ap": "AP", "ap50": "AP50", "ap75": "AP75", "small": "small", "medium": "medium", "large": "large"}


class DrawnObjects(NamedTuple):
    """Objects to look at. boxes: [n, 4] in pixels of the file. classes: [n]. masks: [n, h, w] bool. scores: of what
    was found."""

    boxes: Tensor
    classes: Tensor
    masks: Tensor
    scores: Tensor | None = None


class ShownObjects(NamedTuple):
    """One image to look at. picture: [C, H, W] in [0, 1]. sides: of the file. f1: see `Answers`."""

    name: str
    f1: float
    picture: Tensor
    sides: tuple[int, int]
    truth: DrawnObjects
    said: DrawnObjects


class MeasuredObjects(NamedTuple):
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
    worst: Sequence[ShownObjects]
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
        raise SitusError(f"{loader.source.name}: {said}, so there is no precision to measure", field="data")
    each = [count_objects(*pair, method.classes) for pair in zip(measured.truths, measured.found, strict=True)]
    order = np.argsort([answers.f1 for answers in each], kind="stable")[:pictures].tolist()
    worst = [_shown(loader, measured.found[place], measured.truths[place], each[place].f1) for place in order]
    answers = Answers(torch.stack([answers.table for answers in each]).sum(0))
    if save_detections is not None:
        _save(Path(save_detections), loader, measured)
    made = made_with(model, loader, seed, precision)
    saved = "" if save_detections is None else Path(save_detections).name
    own = (measured.boxes, measured.masks, answers, model.classes or (), len(each), worst, saved)
    return Detections(*own, provenance=made)


def _check_file(file: Path) -> None:
    """Refuses at once what could not be written in the end."""
    if file.is_dir():
        raise SitusError(f"{file}: is a folder; give a file for the detections", field="save_detections")
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


def measure(method: Detection, loader: Loader, batches: Iterable[Batch], precision: str = "fp32") -> MeasuredObjects:
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
    return MeasuredObjects(boxes, masks, found, truths)


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


def _save(file: Path, loader: Loader, measured: MeasuredObjects) -> None:
    source, _ = loader.source.origin(0)
    assert isinstance(source, CocoSource)
    rows, strange = coco_results(measured.found, measured.truths, source.categories)
    if strange:
        said = f"{strange:,} of what was found is of classes that its json has no category for"
        loader.source.notes.append(f"{source.name}: {said}; they are not in {file.name}")
    if not distributed.rank():
        write_text(file, json.dumps(rows) + "\n")


def _shown(loader: Loader, found: Found, truth: Truth, f1: float) -> ShownObjects:
    pipeline, row = loader.pipeline, found.row
    values = pipeline.collate(0, [row], [pipeline.fetch(row, 0, row)])
    batch = pipeline.finish(pipeline.move(values, loader.device), torch.tensor([row], device=loader.device), {})
    [(high, wide)] = values["sides"].tolist()
    picture = loader.shown(batch.inputs)[0, :, :high, :wide].cpu()
    sure = (found.scores >= SURE).nonzero()[:, 0]
    said = _drawn(found.boxes[sure], found.classes[sure], [found.rles[each] for each in sure], truth.sides)
    there = _drawn(truth.boxes, truth.classes, truth.rles, truth.sides)
    return ShownObjects(
        loader.source.key(row), f1, picture, truth.sides, there, said._replace(scores=found.scores[sure])
    )


def _drawn(boxes: Tensor, classes: Tensor, rles: list[Rle], sides: tuple[int, int]) -> DrawnObjects:
    return DrawnObjects(boxes, classes, decode_rles(rles, sides))


def _points(value: float) -> Cell:
    """In hundredths, as COCO's scores are told."""
    return None if math.isnan(value) else f"{100 * value:.2f}"


_ALL, _SMALL, _MEDIUM, _LARGE = range(4)


@dataclass(frozen=True)
class ApScores:
    """Average precision as COCO means it: over overlaps from .5 to .95, at .5, at .75, and of objects by their size,
    below 32² pixels, below 96², and above. classes: of each class, [K]. NaN where there is no such object."""

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
    truths: Sequence[Truth], found: Sequence[Found], classes: int, kind: Literal["bbox", "segm"]
) -> ApScores:
    """The average precision of what was found in images, of which the truths are told in the same order."""
    from faster_coco_eval import COCO, COCOeval_faster

    images = [{"id": number, "height": each.sides[0], "width": each.sides[1]} for number, each in enumerate(truths)]
    kinds = [{"id": number, "name": str(number)} for number in range(classes)]
    told = {"images": images, "categories": kinds}
    there = [_rows(number, each, each.crowd, each.areas) for number, each in enumerate(truths)]
    said = [_rows(number, each, None, _areas(each, kind), each.scores) for number, each in enumerate(found)]
    truth, answers = (COCO(told | {"annotations": _numbered(rows)}) for rows in (there, said))
    judge = COCOeval_faster(truth, answers, kind, print_function=_silent, extra_calc=False)
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
    each = [mean(precision[:, :, number, _ALL]) for number in range(classes)]
    return ApScores(ap, mean(precision[0, ..., _ALL]), mean(precision[5, ..., _ALL]), small, medium, large, each)


class Answers(NamedTuple):
    """Objects of one image or of many by (true, said) class, [K + 1, K + 1]: the last row is of what is said and is not
    there, the last column of what is there and is missed."""

    table: Tensor

    @property
    def f1(self) -> float:
        """Objects that are found under their class, twice, over those that are there and those that are said."""
        right, rows, columns = self.table.diagonal()[:-1].sum(), self.table[:-1].sum(), self.table[:, :-1].sum()
        return float(2 * right / (rows + columns)) if rows + columns else 1.0


def count_objects(truth: Truth, found: Found, classes: int) -> Answers:
    """What was found with some certainty, each given to the object that its mask overlaps most, the surest first.

    What lies in a crowd counts neither as right nor as wrong.
    """
    table = torch.zeros(classes + 1, classes + 1, dtype=torch.int64)
    crowd, sure = truth.crowd.tolist(), (found.scores >= SURE).nonzero()[:, 0].tolist()
    free = {number for number, many in enumerate(crowd) if not many}
    overlaps = np.zeros((len(sure), len(crowd)))
    if sure and crowd:
        overlaps = np.asarray(mask_api().iou([found.rles[each] for each in sure], truth.rles, [*map(int, crowd)]))
    for row, each in enumerate(sure):
        said = int(found.classes[each])
        best = max(free, key=lambda number: overlaps[row, number], default=None)
        if best is not None and overlaps[row, best] >= OVERLAP:
            table[int(truth.classes[best]), said] += 1
            free.discard(best)
        elif not any(many and overlaps[row, number] >= OVERLAP for number, many in enumerate(crowd)):
            table[classes, said] += 1
    for number in free:
        table[int(truth.classes[number]), classes] += 1
    return Answers(table)


def _rows(
    image: int, each: Truth | Found, crowd: Tensor | None, areas: Sequence[float] | Tensor, scores: Tensor | None = None
) -> list[dict[str, Any]]:
    """COCO's annotations of one image."""
    left, top, right, bottom = each.boxes.double().unbind(1)
    boxes = torch.stack([left, top, right - left, bottom - top], dim=1).tolist()
    count = len(boxes)
    columns: dict[str, Any] = {
        "image_id": [image] * count,
        "category_id": each.classes.tolist(),
        "bbox": boxes,
        "area": [float(area) for area in areas],
        "segmentation": each.rles,
        "iscrowd": [0] * count if crowd is None else crowd.int().tolist(),
    } | ({} if scores is None else {"score": scores.tolist()})
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _areas(found: Found, kind: str) -> Sequence[float]:
    """What COCO's sizes go by: the area of the box, or of the mask, that is judged."""
    if kind == "bbox":
        return ((found.boxes[:, 2] - found.boxes[:, 0]) * (found.boxes[:, 3] - found.boxes[:, 1])).tolist()
    return [float(mask_api().area(rle)) for rle in found.rles]


def _numbered(parts: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows = [row for part in parts for row in part]
    return [row | {"id": number} for number, row in enumerate(rows, start=1)]


def _silent(*_: Any) -> None:
    pass


class Found(NamedTuple):
    """What was found in one image, the surest first. row: its number in its set.

    boxes: [n, 4] left, top, right, bottom in pixels of the file. classes: [n] from 0 on. scores: [n]. rles: n masks.
    """

    row: int
    boxes: Tensor
    classes: Tensor
    scores: Tensor
    rles: list[Rle]

    def to_line(self) -> str:
        """As one line of text, from which `from_line` makes the same again."""
        masks = [each["counts"].decode("ascii") for each in self.rles]
        sides = self.rles[0]["size"] if self.rles else []
        return json.dumps([self.row, *(each.tolist() for each in self[1:4]), sides, masks])

    @staticmethod
    def from_line(line: str) -> Found:
        """What `to_line` wrote."""
        row, boxes, classes, scores, sides, masks = json.loads(line)
        rles = [{"size": sides, "counts": each.encode("ascii")} for each in masks]
        own = torch.tensor(boxes, dtype=torch.float64).view(-1, 4), torch.tensor(classes, dtype=torch.int64)
        return Found(row, *own, torch.tensor(scores, dtype=torch.float64), rles)


def in_the_file(row: int, said: Mapping[str, Tensor], sides: Sequence[int], whole: Sequence[int]) -> Found:
    """What a model says of an image, in the pixels of its file.

    said: "boxes" [n, 4] in pixels of the model's input, "labels" and "scores" [n], "masks" [n, m, m] within the boxes.
    sides: height and width of what is image in the input; whole: those of the file.
    """
    by = torch.tensor([whole[1] / sides[1], whole[0] / sides[0]] * 2, device=said["boxes"].device)
    boxes, (high, wide) = said["boxes"].float() * by, whole
    some = max(1, _AT_ONCE // (high * wide))
    rles = []
    for first in range(0, len(boxes), some):
        drawn = draw_masks(said["masks"][first : first + some].float(), boxes[first : first + some], (high, wide))
        rles += encode_masks(drawn)
    own = boxes.double().cpu(), said["labels"].long().cpu(), said["scores"].double().cpu()
    return Found(row, *own, rles)


def draw_masks(masks: Tensor, boxes: Tensor, sides: tuple[int, int]) -> Tensor:
    """How sure masks [n, m, m] are within their boxes [n, 4], as masks [n, H, W] bool: each pixel by what lies in its
    middle. torchvision's own first widens the boxes to whole pixels."""
    left, top, right, bottom = boxes.unbind(1)
    rows = _shares(top, bottom, masks.shape[1], sides[0])
    columns = _shares(left, right, masks.shape[2], sides[1])
    return rows @ masks @ columns.transpose(1, 2) > _SURE


def _shares(first: Tensor, last: Tensor, cells: int, pixels: int) -> Tensor:
    """[n, pixels, cells]: how much of each cell between first and last [n] the middle of a pixel sees, bilinearly."""
    places = torch.arange(pixels, device=first.device) + 0.5
    at = (places - first[:, None]) / (last - first)[:, None] * cells - 0.5
    return (1 - (at[..., None] - torch.arange(cells, device=first.device)).abs()).clamp(min=0)


def coco_results(
    found: Iterable[Found], truths: Iterable[Truth], categories: Sequence[Any]
) -> tuple[list[dict[str, Any]], int]:
    """COCO's list of results, with the ids of images and categories that the data has; and how many have no category
    there."""
    rows, strange = [], 0
    for each, truth in zip(found, truths, strict=True):
        for box, kind, score, rle in zip(*(part.tolist() for part in each[1:4]), each.rles, strict=True):
            if categories[kind] is None:
                strange += 1
                continue
            left, top, right, bottom = box
            mask = {"size": list(rle["size"]), "counts": rle["counts"].decode("ascii")}
            rows.append({"image_id": truth.number, "category_id": categories[kind], "score": score,
                         "bbox": [left, top, right - left, bottom - top], "segmentation": mask})  # fmt: skip
    return rows, strange
