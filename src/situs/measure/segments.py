"""mIoU of a segmentation over a whole split: by class, by sample, and the confusion of classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.backbones.base import Backbone
from situs.config import Checked
from situs.data.batch import VOID
from situs.data.loader import Loader
from situs.data.modalities.mask import names_beside
from situs.data.sampler import sample_of
from situs.data.sources.remote import is_remote
from situs.errors import SitusError, counted
from situs.limits import Within, check_value
from situs.measure.accuracy import confused_with, mixed_pairs
from situs.methods.base import Batch, Method
from situs.methods.segmentation import Segmentation, resize
from situs.models.data import AnyData, AnyModel, Chosen, load_set, made_with, opened
from situs.models.inference import Total, evaluating, rows_of_ranks
from situs.models.model import Model
from situs.results import Cell, Figure, Result, Summary, Table, percent, points
from situs.train.export import PARTS
from situs.train.step import autocast

MEANING = """
The intersection over union (IoU) of a class compares two areas: the pixels of the class, and the pixels predicted as
the class. IoU is the size of their intersection divided by the size of their union. An IoU of 100 % means that the two
areas are equal. mIoU is the mean IoU of all classes that are present or predicted. Each IoU is computed once over the
whole split, not for single images. Pixel accuracy is the share of pixels whose class is predicted right. Class accuracy
is the mean of this share over the classes. Pixels without a class (void) are left out of all numbers. Predictions and
masks are compared at the size of the masks.
"""
BARS, LISTED, CROSSED = 40, 20, 12
"""The most classes with a bar each; classes or pairs in a table; the most classes with a grid of all pairs."""
FIRST = 2
"""How many of the worst images open the page."""
PICTURES = 8
"""How many of the worst images the page shows."""
WINDOWS = 32
"""Sliding windows computed at a time."""


Predict = Callable[[Tensor], Tensor]
"""Inputs [B, C, H, W] -> logits [B, K, H, W]."""


@dataclass(frozen=True)
class Inference(Checked):
    """How a model segments an image that is larger than its input."""

    mode: Literal["slide", "whole"] = "slide"
    """How to segment large images. slide: cut windows of the model's input size, and average the logits of
    overlapping windows. whole: segment the whole image at once, with resampled position embeddings. Not every model
    allows whole."""

    overlap: Annotated[float, Within("[0, 1)")] = 1 / 3
    """With mode=slide: smallest overlap of neighbouring windows, as a fraction of the window."""


class Segmented(NamedTuple):
    """One sample: its number in its set; logits [K, h, w] and true classes [h, w], at the size of its mask."""

    row: Tensor
    logits: Tensor
    truth: Tensor


class ShownMask(NamedTuple):
    """One sample on the page. picture: [C, H, W] in [0, 1]. truth, predicted: [h, w] classes or VOID. iou: the mean."""

    name: str
    iou: float
    picture: Tensor
    truth: Tensor
    predicted: Tensor


class MeasuredSegments(NamedTuple):
    """rows: [n] the samples' numbers. ious: [n] each sample's mean over the classes present or predicted."""

    scores: SegmentScores
    rows: Tensor
    ious: Tensor


@dataclass(frozen=True)
class Segments(Result):
    """The scores of a segmentation. classes: names. worst: the samples with the lowest IoU, the lowest first."""

    file: ClassVar[str] = "segments"
    subject: ClassVar[str] = "segmentation"
    meaning: ClassVar[str] = MEANING
    scores: SegmentScores
    classes: Sequence[str]
    count: int
    worst: Sequence[ShownMask]
    how: Inference

    def summary(self) -> Summary:
        """mIoU, beside that of always predicting the most frequent class."""
        scores, name = self.scores, self.provenance.name
        plain = percent(always_most(scores.answers), 2)
        sentence = (
            f"{name} reaches an mIoU of {percent(scores.miou, 2)} on {self.provenance.counted(self.count)} of "
            f"{counted(len(self.classes), 'classes')} (always predicting the most frequent class: {plain})."
        )
        header = ["", "mIoU", "pixel accuracy", "class accuracy", "loss"]
        row = [
            name,
            *(percent(share, 2) for share in (scores.miou, scores.accuracy, scores.class_accuracy)),
            scores.loss,
        ]
        title = self.provenance.title(f"{self.provenance.counted(self.count)}, {self.how.mode}")
        numbers = (percent(scores.miou, 2), "mIoU"), (percent(scores.accuracy, 2), "pixels right")
        return Summary(sentence, (Table(title, header, [row]),), numbers=numbers)

    def numbers(self) -> dict[str, Any]:
        """The means, a row for each class, and the worst samples."""
        scores = self.scores
        means = {"miou": scores.miou, "accuracy": scores.accuracy, "class_accuracy": scores.class_accuracy}
        worst = [{"name": sample.name, "iou": sample.iou} for sample in self.worst]
        settings = {"loss": scores.loss, "count": self.count, "mode": self.how.mode, "overlap": self.how.overlap}
        return {**means, **settings, "classes": segment_rows(scores, self.classes), "worst": worst}

    def figures(self) -> list[Figure]:
        """The worst images, the classes, and their confusion."""
        rows = [
            (percent(sample.iou, 0), sample.picture, {"truth": sample.truth, "predicted": sample.predicted})
            for sample in self.worst
        ]
        caption = (
            "The number to the left of each image is the mean IoU of the classes in this image. Pixels that are not "
            "coloured in a mask have no class (void)."
        )
        worst = worst_figures(rows, "masks.mask_rows", self.classes, caption)
        return [*worst, *segment_figures(self.scores, self.classes)]

    def details(self) -> list[Table]:
        """The worst images; of many classes, the weakest and the most confused pairs."""
        worst = [[sample.name, points(sample.iou)] for sample in self.worst]
        listed = [Table(WORST, ["image", "IoU, %"], worst)] if worst else []
        return [*listed, *segment_details(self.scores, self.classes)]


WORST = "The worst images first"


def worst_figures(rows: Sequence[Any], draw: str, classes: Sequence[str], caption: str) -> list[Figure]:
    """The first of the worst images, for the opening of the page, and all of them below."""
    if not rows:
        return []
    few = len(rows) <= FIRST
    first = Figure("worst" if few else "worst-first", f"{WORST}. {caption}", draw, (rows[:FIRST], classes))
    return [first] if few else [first, Figure("worst", caption, draw, (rows, classes), section=WORST)]


def segment_figures(
    scores: SegmentScores, classes: Sequence[str], model: str = "", name: str = "classes"
) -> list[Figure]:
    """The IoU of each class and their confusion, where they are few. model: ", in NAME"."""
    rows = [row for row in segment_rows(scores, classes) if row["iou"] is not None]
    figures = []
    if len(rows) <= BARS:
        values = ({row["class"]: 100 * row["iou"] for row in rows}, "IoU, %")
        caption = f"Intersection over union of each class{model}."
        figures.append(Figure(name, caption, "figures.bars", values, {"digits": ".1f"}))
    if len(classes) <= CROSSED and name == "classes":
        shares = 100 * scores.answers.double() / scores.answers.sum(dim=1, keepdim=True)
        caption = f"How the pixels of each true class are predicted{model}."
        values = ({"": (shares, "% of the class's pixels")}, classes, classes, "predicted", "true")
        figures.append(Figure("confusion", caption, "figures.value_grids", values, {"limits": (0, 100)}))
    return figures


def segment_details(scores: SegmentScores, classes: Sequence[str], model: str = "") -> list[Table]:
    """Tables of many classes, which the figures do not show."""
    tables = []
    rows = [row for row in segment_rows(scores, classes) if row["iou"] is not None]
    if len(rows) > BARS:
        cells: list[list[Cell]] = [
            [row["class"], row["pixels"], points(row["iou"]), row["taken_for"] or "none"]
            for row in sorted(rows, key=lambda row: row["iou"])[:LISTED]
        ]
        title = f"The {counted(len(cells), 'classes')} with the lowest IoU{model}"
        tables.append(Table(title, ["class", "pixels", "IoU, %", "most often confused with"], cells))
    if len(classes) > CROSSED:
        of_class = scores.answers.sum(dim=1).clamp(min=1)
        cells = [
            [
                classes[a],
                classes[b],
                int(scores.answers[a, b]),
                f"{100 * float(scores.answers[a, b] / of_class[a]):.1f}",
            ]
            for a, b in mixed_pairs(scores.answers, classes, LISTED)
        ]
        title = f"The most confused pairs{model}"
        tables.append(Table(title, ["class", "predicted as", "pixels", "of the class, %"], cells))
    return tables


def segment_rows(scores: SegmentScores, classes: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each class: pixels, IoU (None if neither present nor predicted), the class it is confused with most."""
    pixels, others = scores.answers.sum(1).tolist(), confused_with(scores.answers, classes)
    return [
        {"class": name, "pixels": count, "iou": None if math.isnan(iou) else iou, "taken_for": other}
        for name, count, iou, other in zip(classes, pixels, scores.iou.tolist(), others, strict=True)
    ]


def always_most(answers: Tensor) -> float:
    """The mIoU of always predicting the most frequent class."""
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
    """Measures the mIoU of a segmentation on a whole split, at the size of the masks.

    model: a run of segmentation, or an export of one. data: a path or a source; None for the samples that a run was
    trained on. mode, overlap: see `Inference`. pictures: how many of the worst samples the page shows. precision: fp32,
    or bf16 for autocast. chosen: see `load_set`. Under torchrun the ranks share the samples.
    """
    check_value("pictures", pictures, ">= 0")
    model = opened(model, seed)
    how = Inference(mode, overlap)
    method = dense_method(model, Segmentation, "segment", "decoder is", ", or probe it")
    loader = load_set(model, data, shared=True, target="mask", **chosen)
    mask_config = chosen.get("masks")
    _check_names(model, loader, None if mask_config and mask_config.classes else data)
    see = seeing(method.backbone, method.logits, how, precision)
    with evaluating(method):
        measured = measure(see, loader, method.classes)
        order = measured.ious.argsort(stable=True)[:pictures]
        worst = list(_shown(see, loader, measured.rows[order].tolist(), measured.ious[order].tolist()))
    provenance = made_with(model, loader, seed, precision)
    return Segments(measured.scores, model.classes or (), len(measured.rows), worst, how, provenance=provenance)


def _check_names(model: Model, loader: Loader, data: AnyData) -> None:
    """Refuses data with other classes: by their number, or by the list of names beside other data."""
    beside: tuple[str, ...] = ()
    if isinstance(data, (str, Path)) and not is_remote(data) and str(data) != model.samples.path:
        beside = names_beside(Path(data).expanduser())
    names = beside or loader.classes or ()
    known = model.classes or ()
    if names != known:
        pairs = enumerate(zip(known, names, strict=False))
        pair = next(((number, *pair) for number, pair in pairs if pair[0] != pair[1]), None)
        counts = f"the data has {len(names)} classes, but the model has {len(known)}"
        difference = f"class {pair[0]} is {pair[1]!r} in the model, but {pair[2]!r} in the data" if pair else counts
        raise SitusError(
            f"{loader.source.name}: its classes differ from those of {model.name}: {difference}", field="data"
        )


M = TypeVar("M", bound=Method)


def dense_method(model: Model, kind: type[M], task: str, parts: str, instead: str = "") -> M:
    """The method of a model that was trained for a dense task, such as "segment"; any other model is refused. parts: of
    the model that an export may lack. instead: what else is possible."""
    name = kind.__name__.lower()
    if model.method is None and model.facts.get("method") == name:
        raise SitusError(
            f"{model.name}: has no file {PARTS}, so its {parts} missing; export the model again", field="model"
        )
    if not isinstance(model.method, kind):
        reason = f"was not trained to {task}; fine-tune it with the method {name}{instead}"
        raise SitusError(f"{model.name}: {reason}", field="model")
    return model.method


See = Callable[[Batch], Iterator[Segmented]]
"""The segmentations of a batch's samples."""


def seeing(backbone: Backbone, predict: Predict, how: Inference, precision: str = "fp32") -> See:
    """A function that segments each sample of a batch in its own shape."""
    spec: Any = backbone.input
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
    """The scores over all batches of all ranks."""
    answers, losses, rows, ious = Total(), Total(), [], []
    for batch in batches:
        for row, logits, truth in see(batch):
            counts = count_answers(truth, logits.argmax(dim=0), classes)
            answers.add(counts)
            losses.add(F.cross_entropy(logits[None], truth[None].long(), ignore_index=VOID, reduction="sum").double())
            rows.append(row)
            ious.append(class_iou(counts).nanmean())
    table = answers.over_ranks().cpu()
    loss = float(losses.over_ranks()) / int(table.sum())
    numbers, means = (rows_of_ranks(torch.stack(parts)).cpu() for parts in (rows, ious))
    return MeasuredSegments(SegmentScores(table, loss), numbers, means)


def _shown(see: See, loader: Loader, rows: Sequence[int], ious: Sequence[float]) -> Iterator[ShownMask]:
    """The samples of these numbers, segmented again for the page."""
    pipeline = loader.pipeline
    for row, iou in zip(rows, ious, strict=True):
        values = pipeline.move(pipeline.collate(0, [row], [pipeline.fetch(row, 0, row)]), loader.device)
        batch = pipeline.finish(values, torch.tensor([row], device=loader.device), {})
        [(_, logits, truth)] = see(batch)
        predicted = logits.argmax(dim=0).to(truth.dtype).cpu()
        yield ShownMask(loader.source.key(row), iou, loader.shown(batch.inputs)[0].cpu(), truth.cpu(), predicted)


@dataclass(frozen=True)
class SegmentScores:
    """answers: [K, K] int64, pixels by (true, predicted), without void. loss: their mean cross entropy."""

    answers: Tensor
    loss: float = float("nan")

    @property
    def iou(self) -> Tensor:
        """Intersection over union of each class, [K]; NaN where it is neither present nor predicted."""
        return class_iou(self.answers)

    @property
    def miou(self) -> float:
        """The mean IoU over the classes that are present or predicted."""
        return float(self.iou.nanmean())

    @property
    def accuracy(self) -> float:
        """Share of the pixels whose class is right."""
        return float(self.answers.diagonal().sum() / self.answers.sum())

    @property
    def class_accuracy(self) -> float:
        """The mean over the classes that are present of the share of their pixels that are right."""
        return float((self.answers.diagonal() / self.answers.sum(dim=1)).nanmean())


def class_iou(answers: Tensor) -> Tensor:
    """answers [..., K, K] -> intersection over union [..., K], NaN where both are empty."""
    right = answers.diagonal(dim1=-2, dim2=-1).double()
    return right / (answers.sum(-1) + answers.sum(-2) - right)


def count_answers(truth: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """Pixels by (true, predicted), [K, K] int64, without void ones. truth, predicted: of one shape."""
    truth, predicted = truth.flatten().long(), predicted.flatten().long()
    pairs = torch.where(truth == VOID, classes * classes, truth * classes + predicted)
    return torch.bincount(pairs, minlength=classes * classes + 1)[:-1].view(classes, classes)


def starts(length: int, window: int, overlap: float) -> list[int]:
    """Starts of the windows along a side: as few as overlap enough, the first and the last at its ends."""
    spare = length - window
    count = 0 if spare <= 0 else -(-spare // max(1, int(window * (1 - overlap))))
    return [round(spare * number / max(1, count)) for number in range(count + 1)]


def segment(
    predict: Predict, picture: Tensor, window: tuple[int, int], patch: tuple[int, int], how: Inference
) -> Tensor:
    """The logits [K, H, W] of a picture [C, H, W] that is at least as large as a window.

    patch: a picture seen whole is resized to a multiple of these sides.
    """
    if how.mode == "slide":
        return _slide(predict, picture, window, how)
    high, wide = (
        max(1, round(side / side_of_patch)) * side_of_patch
        for side, side_of_patch in zip(picture.shape[1:], patch, strict=True)
    )
    return resize(predict(resize(picture[None], (high, wide))).float(), picture.shape[1:])[0]


def _slide(predict: Predict, picture: Tensor, window: tuple[int, int], how: Inference) -> Tensor:
    (height, width), (high, wide) = picture.shape[1:], window
    places = [(top, left) for top in starts(height, high, how.overlap) for left in starts(width, wide, how.overlap)]
    total, seen = None, torch.zeros(height, width, device=picture.device)
    for first in range(0, len(places), WINDOWS):
        some = places[first : first + WINDOWS]
        parts = predict(torch.stack([picture[:, top : top + high, left : left + wide] for top, left in some])).float()
        for (top, left), part in zip(some, parts, strict=True):
            total = part.new_zeros(len(part), height, width) if total is None else total
            total[:, top : top + high, left : left + wide] += part
            seen[top : top + high, left : left + wide] += 1
    assert total is not None
    return total / seen
