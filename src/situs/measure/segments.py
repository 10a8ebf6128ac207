"""mIoU of a segmentation over a whole split: per class, by sample, and which classes are taken for which."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.config import Checked
from situs.data.batch import VOID
from situs.data.loader import Loader
from situs.data.masks import names_beside
from situs.data.sampler import sample_of
from situs.data.sources.remote import is_remote
from situs.errors import SitusError, counted
from situs.limits import Count, Within, check_value
from situs.measure.by_class import mixed_pairs
from situs.methods.base import Batch
from situs.methods.segmentation import Segmentation
from situs.methods.upernet import resize
from situs.models.data import AnyData, AnyModel, Chosen, load_set, made_with, opened
from situs.models.inference import Total, evaluating, rows_of_ranks
from situs.models.model import Model
from situs.results import Cell, Figure, Result, Summary, Table, percent
from situs.train.export import PARTS
from situs.train.step import autocast

MEANING = """
A class's intersection over union is the number of pixels that are of the class and are said to be, over the number that
are either: 100 % where the two areas are one. mIoU is its mean over the classes that are there or are said, over the
whole split and not image by image. Pixel accuracy is the share of pixels whose class is right, class accuracy the mean
over the classes of that share. Pixels without a class (void) are left out of every number. Images are judged at the
size of their masks.
"""
BARS, LISTED, CROSSED = 40, 20, 12
"""Classes up to which each has a bar; classes or pairs in a table; classes up to which a grid shows all pairs."""
FIRST = 2
"""Of the worst images so many open the page."""
PICTURES = 8
"""How many of the worst are kept to be looked at."""


Predict = Callable[[Tensor], Tensor]
"""Inputs [B, C, H, W] -> logits [B, K, H, W]."""


@dataclass(frozen=True)
class Inference(Checked):
    """How a picture that is larger than the model's inputs is seen."""

    mode: Literal["slide", "whole"] = "slide"
    """slide: windows of the model's own size, their logits averaged where they overlap. whole: at once, with positions
    resampled to its grid, where the model can."""

    overlap: Annotated[float, Within("[0, 1)")] = 1 / 3
    """slide: the least share of a window that the next one sees too."""

    at_once: Count = 32
    """slide: windows at a time."""


class Segmented(NamedTuple):
    """One sample: its number in its set; its logits [K, h, w], and the classes [h, w] of its mask, at its own size."""

    row: Tensor
    logits: Tensor
    truth: Tensor


class ShownMask(NamedTuple):
    """One sample to look at. picture: [C, H, W] in [0, 1]. truth, said: [h, w] classes or VOID. iou: their mean."""

    name: str
    iou: float
    picture: Tensor
    truth: Tensor
    said: Tensor


class MeasuredSegments(NamedTuple):
    """rows: [n] the samples' numbers. ious: [n] each sample's mean over the classes there or said."""

    scores: SegmentScores
    rows: Tensor
    ious: Tensor


@dataclass(frozen=True)
class Segments(Result):
    """What a segmentation came to. classes: names. worst: the samples with the lowest IoU, first the lowest."""

    file: ClassVar[str] = "segments"
    subject: ClassVar[str] = "segmentation"
    meaning: ClassVar[str] = MEANING
    scores: SegmentScores
    classes: Sequence[str]
    count: int
    worst: Sequence[ShownMask]
    how: Inference

    def summary(self) -> Summary:
        """mIoU, beside that of always saying the most frequent class."""
        found, name = self.scores, self.provenance.name
        plain = percent(always_most(found.answers), 2)
        said = (
            f"{name} reaches {percent(found.miou, 2)} mIoU on {self.provenance.counted(self.count)} of "
            f"{counted(len(self.classes), 'classes')} (always the most frequent class: {plain})."
        )
        header = ["", "mIoU", "pixel accuracy", "class accuracy", "loss"]
        row = [name, *(percent(each, 2) for each in (found.miou, found.accuracy, found.class_accuracy)), found.loss]
        title = self.provenance.title(f"{self.provenance.counted(self.count)}, {self.how.mode}")
        numbers = (percent(found.miou, 2), "mIoU"), (percent(found.accuracy, 2), "pixels right")
        return Summary(said, (Table(title, header, [row]),), numbers=numbers)

    def numbers(self) -> dict[str, Any]:
        """The means, a row a class, and the worst samples."""
        found = self.scores
        means = {"miou": found.miou, "accuracy": found.accuracy, "class_accuracy": found.class_accuracy}
        worst = [{"name": each.name, "iou": each.iou} for each in self.worst]
        own = {"loss": found.loss, "count": self.count, "mode": self.how.mode, "overlap": self.how.overlap}
        return {**means, **own, "classes": by_class(found, self.classes), "worst": worst}

    def figures(self) -> list[Figure]:
        """The worst images, the classes, and which are taken for which."""
        rows = [
            (percent(each.iou, 0), each.picture, {"truth": each.truth, "predicted": each.said}) for each in self.worst
        ]
        caption = "Left of each image the mean IoU of its own classes. Where no colour is, there is no class (void)."
        worst = worst_figures(rows, "masks.mask_rows", self.classes, caption)
        return [*worst, *class_figures(self.scores, self.classes)]

    def details(self) -> list[Table]:
        """The worst images; of many classes the weakest, and the pairs that are taken for one another most."""
        worst = [[each.name, f"{100 * each.iou:.2f}"] for each in self.worst]
        listed = [Table(WORST, ["image", "IoU, %"], worst)] if worst else []
        return [*listed, *class_details(self.scores, self.classes)]


WORST = "The worst images first"


def worst_figures(rows: Sequence[Any], draw: str, classes: Sequence[str], caption: str) -> list[Figure]:
    """The page opens with the first of the worst images, few enough to be seen there, and shows all of them below."""
    if not rows:
        return []
    few = len(rows) <= FIRST
    first = Figure("worst" if few else "worst-first", f"{WORST}. {caption}", draw, (rows[:FIRST], classes))
    return [first] if few else [first, Figure("worst", caption, draw, (rows, classes), section=WORST)]


def class_figures(found: SegmentScores, classes: Sequence[str], of: str = "", name: str = "classes") -> list[Figure]:
    """The IoU of each class and what it is taken for, where they are few. of: in which model."""
    rows = [row for row in by_class(found, classes) if row["iou"] is not None]
    figures = []
    if len(rows) <= BARS:
        values = ({row["class"]: 100 * row["iou"] for row in rows}, "IoU, %")
        caption = f"Intersection over union of each class{of}."
        figures.append(Figure(name, caption, "figures.bars", values, {"digits": ".1f"}))
    if len(classes) <= CROSSED and name == "classes":
        shares = 100 * found.answers.double() / found.answers.sum(dim=1, keepdim=True)
        caption = f"Share of each class's pixels that are said to be of each class{of}."
        values = ({"": (shares, "% of the class's pixels")}, classes, classes, "said", "true")
        figures.append(Figure("confusion", caption, "figures.value_grids", values, {"limits": (0, 100)}))
    return figures


def class_details(found: SegmentScores, classes: Sequence[str], of: str = "") -> list[Table]:
    """What the figures do not show of many classes."""
    tables = []
    rows = [row for row in by_class(found, classes) if row["iou"] is not None]
    if len(rows) > BARS:
        cells: list[list[Cell]] = [
            [row["class"], row["pixels"], f"{100 * row['iou']:.2f}", row["taken_for"] or "none"]
            for row in sorted(rows, key=lambda row: row["iou"])[:LISTED]
        ]
        title = f"The {counted(len(cells), 'classes')} with the lowest IoU{of}"
        tables.append(Table(title, ["class", "pixels", "IoU, %", "taken most often for"], cells))
    if len(classes) > CROSSED:
        of_class = found.answers.sum(dim=1).clamp(min=1)
        cells = [
            [classes[a], classes[b], int(found.answers[a, b]), f"{100 * float(found.answers[a, b] / of_class[a]):.1f}"]
            for a, b in mixed_pairs(found.answers, classes, LISTED)
        ]
        title = f"The pairs that take most pixels{of}"
        tables.append(Table(title, ["class", "said to be", "pixels", "of the class, %"], cells))
    return tables


def by_class(found: SegmentScores, classes: Sequence[str]) -> list[dict[str, Any]]:
    """A row a class: its pixels, its IoU (None where it is neither there nor said), what it is taken for most often."""
    most, which = found.answers.clone().fill_diagonal_(0).max(dim=1)
    rows = zip(classes, found.answers.sum(1).tolist(), found.iou.tolist(), most.tolist(), which.tolist(), strict=True)
    return [
        {
            "class": name,
            "pixels": pixels,
            "iou": None if math.isnan(iou) else iou,
            "taken_for": classes[said] if often else None,
        }
        for name, pixels, iou, often, said in rows
    ]


def always_most(answers: Tensor) -> float:
    """The mIoU of always saying the most frequent class."""
    counts = answers.sum(dim=1).double()
    return float(counts.max() / counts.sum() / (counts > 0).sum())


def evaluate_segments(
    model: AnyModel,
    data: AnyData = None,
    *,
    mode: Literal["slide", "whole"] = "slide",
    overlap: float = Inference.overlap,
    pictures: int = PICTURES,
    precision: str = "fp32",
    seed: int = 0,
    **chosen: Unpack[Chosen],
) -> Segments:
    """Measures mIoU of a segmentation on a whole split, at the masks' own size.

    model: a run of segmentation, or an export of one. data: a path or a source; None for the samples that a run was
    trained on. mode, overlap: see `Inference`. pictures: how many of the worst samples are kept to be looked at.
    precision: fp32, or bf16 for autocast. chosen: see `load_set`. Under torchrun the ranks share the samples.
    """
    check_value("pictures", pictures, ">= 0")
    model = opened(model, seed)
    method, how = segmentation_of(model), Inference(mode, overlap)
    loader = load_set(model, data, shared=True, target="mask", **chosen)
    told = chosen.get("masks")
    _check_names(model, loader, None if told and told.classes else data)
    see = seeing(method, method.logits, how, precision)
    with evaluating(method):
        found = measure(see, loader, method.classes)
        order = found.ious.argsort(stable=True)[:pictures]
        worst = list(_shown(see, loader, found.rows[order].tolist(), found.ious[order].tolist()))
    made = made_with(model, loader, seed, precision)
    return Segments(found.scores, model.classes or (), len(found.rows), worst, how, provenance=made)


def _check_names(model: Model, loader: Loader, data: AnyData) -> None:
    """Refuses data of other classes: by their number, or by a list beside data that is not the model's own."""
    beside: tuple[str, ...] = ()
    if isinstance(data, (str, Path)) and not is_remote(data) and str(data) != model.samples.path:
        beside = names_beside(Path(data).expanduser())
    names = beside or loader.classes or ()
    known = model.classes or ()
    if names != known:
        pair = next((pair for pair in zip(known, names, strict=False) if pair[0] != pair[1]), None)
        said = f"{pair[0]!r} there is {pair[1]!r} here" if pair else f"there are {len(names)}, not {len(known)}"
        raise SitusError(f"{loader.source.name}: its classes are not those of {model.name}: {said}", field="data")


def segmentation_of(model: Model) -> Segmentation:
    """The method of a model that was trained to segment; any other is refused."""
    if model.method is None and model.facts.get("method") == "segmentation":
        raise SitusError(f"{model.name}: its decoder is missing (the file {PARTS}); export it again", field="model")
    if not isinstance(model.method, Segmentation):
        raise SitusError(
            f"{model.name}: was not trained to segment; fine-tune it with the method segmentation, or probe it",
            field="model",
        )
    return model.method


See = Callable[[Batch], Iterator[Segmented]]
"""What is seen in the samples of a batch, as an evaluation's loader gives it."""


def seeing(method: Any, predict: Predict, how: Inference, precision: str = "fp32") -> See:
    """Segments each sample of a batch in its own shape. method: what holds the backbone."""
    spec = method.backbone.input
    window, patch = spec.shape, spec.patch or (1, 1)

    def see(batch: Batch) -> Iterator[Segmented]:
        targets = batch.targets
        sides, whole = targets["sides"].tolist(), targets["whole"].tolist()
        for number, ((high, wide), (tall, long)) in enumerate(zip(sides, whole, strict=True)):
            picture = batch.inputs[number, :, :high, :wide]
            with autocast(picture.device, precision):
                logits = segment(predict, picture, window, patch, how)
            truth = targets["mask"][number, :tall, :long]
            yield Segmented(sample_of(batch.ids[number]), resize(logits[None], (tall, long))[0], truth)

    return see


def measure(see: See, batches: Iterable[Batch], classes: int) -> MeasuredSegments:
    """The scores over all batches, summed over the ranks where there are several; each brings its own part."""
    answers, losses, rows, ious = Total(), Total(), [], []
    for batch in batches:
        for row, logits, truth in see(batch):
            own = count_answers(truth, logits.argmax(dim=0), classes)
            answers.add(own)
            losses.add(F.cross_entropy(logits[None], truth[None].long(), ignore_index=VOID, reduction="sum").double())
            rows.append(row)
            ious.append(class_iou(own).nanmean())
    table = answers.over_ranks().cpu()
    loss = float(losses.over_ranks()) / int(table.sum())
    numbers, means = (rows_of_ranks(torch.stack(each)).cpu() for each in (rows, ious))
    return MeasuredSegments(SegmentScores(table, loss), numbers, means)


def _shown(see: See, loader: Loader, rows: Sequence[int], ious: Sequence[float]) -> Iterator[ShownMask]:
    """The samples of these numbers, seen again."""
    pipeline = loader.pipeline
    for row, iou in zip(rows, ious, strict=True):
        values = pipeline.move(pipeline.collate(0, [row], [pipeline.fetch(row, 0, row)]), loader.device)
        batch = pipeline.finish(values, torch.tensor([row], device=loader.device), {})
        [(_, logits, truth)] = see(batch)
        said = logits.argmax(dim=0).to(truth.dtype).cpu()
        yield ShownMask(loader.source.key(row), iou, loader.shown(batch.inputs)[0].cpu(), truth.cpu(), said)


@dataclass(frozen=True)
class SegmentScores:
    """answers: [K, K] int64, pixels by (true, said), void ones left out. loss: their mean cross entropy."""

    answers: Tensor
    loss: float = float("nan")

    @property
    def iou(self) -> Tensor:
        """Intersection over union of each class, [K]; NaN where it is neither there nor said."""
        return class_iou(self.answers)

    @property
    def miou(self) -> float:
        """Its mean over the classes that are there or said."""
        return float(self.iou.nanmean())

    @property
    def accuracy(self) -> float:
        """Share of the pixels whose class is right."""
        return float(self.answers.diagonal().sum() / self.answers.sum())

    @property
    def class_accuracy(self) -> float:
        """The mean over the classes that are there of the share of their pixels that are right."""
        return float((self.answers.diagonal() / self.answers.sum(dim=1)).nanmean())


def class_iou(answers: Tensor) -> Tensor:
    """answers [..., K, K] -> intersection over union [..., K], NaN where both are empty."""
    right = answers.diagonal(dim1=-2, dim2=-1).double()
    return right / (answers.sum(-1) + answers.sum(-2) - right)


def count_answers(truth: Tensor, said: Tensor, classes: int) -> Tensor:
    """Pixels by (true, said), [K, K] int64; those without a class are left out. truth, said: any one shape."""
    truth, said = truth.flatten().long(), said.flatten().long()
    pairs = torch.where(truth == VOID, classes * classes, truth * classes + said)
    return torch.bincount(pairs, minlength=classes * classes + 1)[:-1].view(classes, classes)


def starts(length: int, window: int, overlap: float) -> list[int]:
    """Where windows begin along a side: as few as overlap enough, the first and the last at its ends."""
    spare = length - window
    count = 0 if spare <= 0 else -(-spare // max(1, int(window * (1 - overlap))))
    return [round(spare * number / max(1, count)) for number in range(count + 1)]


def segment(
    predict: Predict, picture: Tensor, window: tuple[int, int], patch: tuple[int, int], how: Inference
) -> Tensor:
    """The logits [K, H, W] of a picture [C, H, W] that is at least as large as a window.

    patch: sides that a picture is a multiple of to be seen whole; another is brought to the next.
    """
    if how.mode == "slide":
        return _slide(predict, picture, window, how)
    high, wide = (max(1, round(side / own)) * own for side, own in zip(picture.shape[1:], patch, strict=True))
    return resize(predict(resize(picture[None], (high, wide))).float(), picture.shape[1:])[0]


def _slide(predict: Predict, picture: Tensor, window: tuple[int, int], how: Inference) -> Tensor:
    (height, width), (high, wide) = picture.shape[1:], window
    places = [(top, left) for top in starts(height, high, how.overlap) for left in starts(width, wide, how.overlap)]
    total, seen = None, torch.zeros(height, width, device=picture.device)
    for first in range(0, len(places), how.at_once):
        some = places[first : first + how.at_once]
        parts = predict(_windows(picture, some, window)).float()
        for (top, left), part in zip(some, parts, strict=True):
            total = part.new_zeros(len(part), height, width) if total is None else total
            total[:, top : top + high, left : left + wide] += part
            seen[top : top + high, left : left + wide] += 1
    assert total is not None
    return total / seen


def _windows(picture: Tensor, places: list[tuple[int, int]], window: tuple[int, int]) -> Tensor:
    high, wide = window
    return torch.stack([picture[:, top : top + high, left : left + wide] for top, left in places])
