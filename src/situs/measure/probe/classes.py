"""Linear probes of frozen models: for the class of a sample, the place of a patch, the class of a pixel.

`evaluate_probe` is the call for all three; each kind has its section below.

"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.backbones.base import Backbone
from situs.core.masking import count_of
from situs.core.permutation import random_permutation
from situs.core.position import coordinates, distances
from situs.core.random import uniform
from situs.core.tokens import mask_of, take
from situs.data.batch import VOID
from situs.data.sources.memory import addressed
from situs.errors import SitusError, counted
from situs.limits import check_value
from situs.measure.accuracy import ByClass, class_figures, class_table, hard, headline
from situs.measure.features import Pool, extract
from situs.measure.probe.linear import (
    AT_ONCE,
    Linear,
    Probe,
    Probes,
    Score,
    choose_decay,
    fit_probe,
    minimise,
    score,
)
from situs.measure.segments import (
    MEANING,
    Inference,
    SegmentScores,
    measure,
    seeing,
    segment_details,
    segment_figures,
    segment_rows,
)
from situs.methods.base import Batch, UnknownPosition
from situs.methods.segmentation import resize
from situs.models import Model
from situs.models.data import AnyData, AnyModel, Chosen, check_labels, load_bank, made_with, opened
from situs.models.inference import evaluating
from situs.progress import tracked
from situs.results import Cell, Figure, Provenance, Summary, Table, percent, points
from situs.train.step import autocast

RATIO = 0.75
"""Share of the patches whose position is removed."""


def evaluate_probe(
    model: AnyModel,
    data: AnyData = None,
    *,
    kind: Literal["position", "class", "segments"] = "position",
    after: AnyModel | None = None,
    train_count: int = 2000,
    ratio: float = RATIO,
    pool: Pool = "mean",
    precision: str = "fp32",
    seed: int = 0,
    **chosen: Unpack[Chosen],
) -> ClassProbes | PositionProbes | SegmentProbes:
    """Linear probes of frozen features: for the place of patches without a position, the class, or masks.

    model, after: whatever `open_model` takes; the second stands beside the first, on the same samples. data: a path;
    None for the samples that a run was trained on. train_count: the most samples of the training split to fit to.
    ratio: share of the patches whose position is removed. pool: how a sample becomes one vector. chosen: see
    `load_set`; among them masks, how masks are read.
    """
    if kind not in ("position", "class", "segments"):
        raise SitusError(field="kind", value=kind, allowed="position, class or segments")
    first = opened(model, seed).holding_out(chosen.pop("held_out", None))
    models = {first.name: first}
    if after is not None:
        second = opened(after, seed).holding_out(first.data.held_out)
        models[second.name if second.name not in models else f"{second.name} (after)"] = second
    unknown = follow(models) if kind == "position" else {}
    grids = {opened_model.backbone.out_grid for opened_model in models.values()}
    if kind == "position" and len(grids) > 1:
        listed = " and ".join(map(str, sorted(grids)))
        raise SitusError(f"the two models must have the same grid, but have the grids {listed}", field="after")
    probes: dict[str, Any] = {}
    origins, classes = {}, ()
    for name, opened_model in tracked([*models.items()], "models"):
        target = "mask" if kind == "segments" else "class"
        source = addressed(data) or first.data.path or None
        train, test = load_bank(opened_model, source, train_count=train_count, target=target, **chosen)
        options = {"seed": seed, "precision": precision, "positions": opened_model.positions}
        if kind == "class":
            classes = check_labels(test)
            probes[name] = probe_class(opened_model.backbone, train, test, len(classes), pool=pool, **options)
        elif kind == "segments":
            classes = check_labels(test)
            probes[name] = probe_segments(opened_model.backbone, train, test, len(classes), **options)
        else:
            probes[name] = probe_position(opened_model.backbone, train, test, unknown[name], ratio=ratio, **options)
        more = {"fitted_to": train.source.name}
        origins[name] = made_with(opened_model, test, seed, precision, beside=[train], more=more)
    provenance = Provenance.joint(origins.values())
    if kind == "class":
        return ClassProbes(probes, origins, classes=classes, provenance=provenance)
    if kind == "segments":
        return SegmentProbes(probes, origins, classes=classes, provenance=provenance)
    return PositionProbes(probes, origins, grid=grids.pop(), ratio=ratio, provenance=provenance)


# --- classes --------------------------------------------------------------------------------------------------------


MEANING_OF_CLASSES = """
The backbone is frozen and every sample becomes one vector. A logistic regression on these vectors is fitted to the
training split; its weight decay is chosen on a part of this split. The numbers are measured on a split that was not
used for fitting. The backbone is not trained, so the probe measures how well its features separate the classes.
"""


@dataclass(frozen=True)
class ClassProbe(Probe):
    """pool: what a sample's vector is."""

    pool: Pool

    def numbers(self) -> dict[str, Any]:
        """The scores, and how it was fitted."""
        score = self.score
        numbers = {"pool": self.pool, "accuracy": score.accuracy, "loss": score.loss, "count": score.count}
        return {**numbers, **ByClass.of(score.answers).numbers(), **super().numbers()}


@dataclass(frozen=True)
class ClassProbes(Probes[ClassProbe]):
    """Classes read off frozen features. classes: their names."""

    file: ClassVar[str] = "probe-class"
    subject: ClassVar[str] = "linear classification probe"
    meaning: ClassVar[str] = MEANING_OF_CLASSES
    classes: Sequence[str] = field(kw_only=True)

    def summary(self) -> Summary:
        """The accuracy on each model; a row for each."""
        (name, first), *rest = self.probes.items()
        things = self.provenance.things
        words = {"mean": "the mean of the patches", "cls": "the CLS token"}[first.pool]
        samples, rows_of = self.provenance.counted(first.score.count), ByClass.of
        text = (
            f"With {name}, a linear classifier on {words} recognises {percent(first.score.accuracy, 2)} of {samples}. "
            f"{rows_of(first.score.answers).words(self.classes)}"
        )
        text += "".join(f" With {other} the top-1 is {percent(probe.score.accuracy, 2)}." for other, probe in rest)
        header = ["model", "pool", "top-1, %", "balanced, %", "largest class, %", "loss", things,
                  f"{things} fitted to", "weight decay"]  # fmt: skip
        rows: list[list[Cell]] = [
            [name, probe.pool, points(probe.score.accuracy),
             points(rows_of(probe.score.answers).balanced),
             points(rows_of(probe.score.answers).majority), probe.score.loss, probe.score.count,
             probe.train_count, f"{probe.fitted.weight_decay:g}"]
            for name, probe in self.probes.items()
        ]  # fmt: skip
        return Summary(text, (Table(self.data, header, rows),), numbers=headline(rows_of(first.score.answers)))

    def figures(self) -> tuple[Figure, ...]:
        """The classes of the first model."""
        name, first = self.first
        shares = {model: probe.score.accuracy for model, probe in self.probes.items()}
        return class_figures(first.score.answers, self.classes, self.provenance.things, shares, f", in {name}")

    def details(self) -> list[Table]:
        """The classes of the first model, and how it was fitted."""
        return [class_table(self.first[1].score.answers, self.classes, self.provenance.things), *super().details()]


def probe_class(
    backbone: Backbone,
    train: Iterable[Batch],
    test: Iterable[Batch],
    classes: int,
    *,
    pool: Pool = "mean",
    seed: int = 0,
    precision: str = "fp32",
    positions: bool = True,
) -> ClassProbe:
    """Fits to the pooled features of `train` and scores on those of `test`.

    pool: the mean of the patches or CLS. positions: whether the backbone uses its own.
    """
    backbone.require("tokens")
    sets = []
    for batches in (train, test):
        features = extract(backbone, batches, pool, positions=positions, precision=precision)
        if features.labels is None:
            raise SitusError("a classification probe needs labels, and the data has none", field="data")
        sets.append((features.features, hard(features.labels)))
    (inputs, labels), test_set = sets
    fitted = fit_probe(inputs, labels, classes, seed=seed)
    return ClassProbe(score(fitted.linear, [test_set], classes), fitted, len(labels), pool)


# --- places (DropPos, Table 7) --------------------------------------------------------------------------------------
# From the final features of patches without a position to their place. All patches are visible, and three quarters of
# them lose their position. A linear classifier predicts which of the N positions each of these came from. It is fitted
# to the training split and scored on another; the backbone is frozen.


MEANING_OF_PLACES = """
All patches are visible, but most have lost their position. A linear classifier predicts the lost position of a patch
from the final feature of this patch. The backbone is frozen. The classifier is a logistic regression fitted to the
training split; its weight decay is chosen on a part of this split. The numbers are measured on a split that was not
used for fitting. "Error of one guess" is the lowest mean error that is possible if one position is predicted for all
patches.

A model with a high accuracy infers positions from the content of the patches and from the few patches that keep their
position. DropPos's Table 7 compares this accuracy before and after fine-tuning with labels. If fine-tuning raises the
accuracy, the task of the fine-tuning needs positions.
"""


@dataclass(frozen=True)
class PositionProbe(Probe):
    """score: over the test split's dropped patches, classes are places. distance: mean error in patches.

    guess: the error of always predicting the one best place, for scale. unknown: what a patch without a position gets,
    in words.
    """

    distance: float
    guess: float
    unknown: str

    def numbers(self) -> dict[str, Any]:
        """The scores, and how it was fitted."""
        return {
            "accuracy": self.score.accuracy,
            "distance": self.distance,
            "constant_guess_distance": self.guess,
            "patches": self.score.count,
            "unknown": self.unknown,
            **super().numbers(),
        }


@dataclass(frozen=True)
class PositionProbes(Probes[PositionProbe]):
    """Position probes; the second model is the first one fine-tuned. ratio: share of the positions dropped."""

    file: ClassVar[str] = "probe-position"
    subject: ClassVar[str] = "linear position probe"
    meaning: ClassVar[str] = MEANING_OF_PLACES
    grid: tuple[int, ...] = field(kw_only=True)
    ratio: float = RATIO

    def summary(self) -> Summary:
        """Accuracy and mean error of the places; a row for each model."""
        names, probes = list(self.probes), list(self.probes.values())
        first, last = probes[0], probes[-1]
        sentence = (
            f"A linear classifier predicts the right position for {percent(first.score.accuracy, 2)} of the patches "
            f"that lost their position (chance {percent(1 / len(first.score.answers), 2)}), with a mean error of "
            f"{first.distance:.2f} patches."
        )
        if len(probes) > 1:
            sentence += (
                f" For {names[-1]}, the share of right predictions is {percent(last.score.accuracy, 2)}, and the mean "
                f"error is {last.distance:.2f} patches."
            )
        counts = ["patches tested", f"{self.provenance.things} fitted to"]
        header = ["model", "accuracy, %", "mean error, patches", "error of one guess", *counts]
        rows: list[list[Cell]] = [
            [name, points(probe.score.accuracy), probe.distance, probe.guess, probe.score.count,
             probe.train_count]
            for name, probe in self.probes.items()
        ]  # fmt: skip
        unknown = [f"In {name}, a patch that lost its position gets {probe.unknown}." for name, probe in
                   self.probes.items()]  # fmt: skip
        share = (percent(first.score.accuracy, 2), "positions predicted correctly")
        return Summary(sentence, (Table(self.data, header, rows),), tuple(unknown), (share,))

    def figures(self) -> list[Figure]:
        """The accuracy of each model, and of each place."""
        places = math.prod(self.grid)
        shares = {name: 100 * probe.score.accuracy for name, probe in self.probes.items()}
        by_class = {name: ByClass.of(probe.score.answers) for name, probe in self.probes.items()}
        maps = {
            name: (100 * by.hits.double() / by.counts.clamp(min=1)).reshape(self.grid) for name, by in by_class.items()
        }
        labels = ("column of the patch", "row of the patch", "positions predicted correctly, %")
        values = ({name: (shares_of, labels[-1]) for name, shares_of in maps.items()}, *map(range, self.grid))
        highest = max(float(shares_of.max()) for shares_of in maps.values())
        return [
            Figure("accuracy", "Share of the lost positions that a linear classifier predicts right.",
                   "figures.bars", (shares | {f"chance, 1 / {places}": 100 / places}, labels[-1]), {"digits": ".2f"}),
            Figure("places", "The share of right predictions for each true position. Each cell stands where its "
                   "patch is in the input.",
                   "figures.value_grids", (*values, *labels[:2]),
                   {"limits": (0.0, max(highest, 1.0)), "digits": ".0f", "cell": (0.4, 0.3)}),
        ]  # fmt: skip

    def numbers(self) -> dict[str, Any]:
        """The share of dropped positions, and every model."""
        return {"ratio": self.ratio, **super().numbers()}


def unknown_position_of(model: Model) -> UnknownPosition:
    """What a token without a position gets: the vector that the run learned for it, if any."""
    learned = None if model.method is None else model.method.unknown_position()
    if learned is not None:
        return learned
    model.backbone.require("tokens")
    if not model.positions or not model.backbone.positions().kinds:
        return UnknownPosition(None, "nothing, because this model uses no positions", False)
    return UnknownPosition(
        None, "a zero vector (and no rotation or bias), since this model learned no vector for unknown positions"
    )


def follow(models: Mapping[str, Model]) -> dict[str, UnknownPosition]:
    """The vector of each model for unknown positions; a model without one takes the first's, for comparison."""
    vectors = {name: unknown_position_of(model) for name, model in models.items()}
    (first, lent), *_ = vectors.items()
    if lent.vector is None:
        return vectors
    shared = UnknownPosition(
        lent.vector, f"{first}'s vector for unknown positions, because this model has not learned one"
    )
    zero = {name: vector for name, vector in vectors.items() if vector.vector is None and vector.sighted}
    fits = {name for name in zero if models[name].backbone.dim == lent.vector.shape[0]}
    return {name: shared if name in fits else vector for name, vector in vectors.items()}


def dropped_features(
    backbone: Backbone,
    batch: Batch,
    unknown: UnknownPosition,
    *,
    ratio: float = RATIO,
    seed: int = 0,
    stream: str = "probe.position",
    positions: bool = True,
) -> tuple[Tensor, Tensor]:
    """Final features [B, K, D] of the int(ratio · N) patches whose position is dropped, and their places [B, K].

    On a hierarchical model a patch is the area of one output token, and loses its position as a whole.
    """
    count = backbone.out_grid[0] * backbone.out_grid[1]
    order = random_permutation(uniform(seed, 0, batch.ids, stream, (count,)))
    places = order[:, : count_of(ratio, count)]
    known = None
    if positions:
        mask = mask_of(places, count)
        known = backbone.positions().forget(mask[:, _behind(backbone, mask.device)], unknown.vector)
    features = backbone.encode(backbone.embed(batch.inputs), known)
    return take(features.patches, places), places


def probe_position(
    backbone: Backbone,
    train: Iterable[Batch],
    test: Iterable[Batch],
    unknown: UnknownPosition,
    *,
    ratio: float = RATIO,
    seed: int = 0,
    precision: str = "fp32",
    positions: bool = True,
) -> PositionProbe:
    """Fits to `train`, whose features are kept on the device, and scores on `test`, batch by batch.

    unknown: what a patch without a position gets. positions: whether the backbone uses its own.
    """
    backbone.require("tokens")
    grid, count = backbone.out_grid, math.prod(backbone.out_grid)
    check_value("ratio", ratio, "(0, 1]")
    if not count_of(ratio, count):
        raise SitusError(
            f"ratio={ratio}: drops none of {counted(count, 'positions')}; choose a larger ratio", field="ratio"
        )

    def features(batches: Iterable[Batch], split: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for batch in batches:
            stream = f"probe.position/{split}"
            with torch.no_grad(), autocast(batch.inputs.device, precision):
                final, places = dropped_features(
                    backbone, batch, unknown, ratio=ratio, seed=seed, stream=stream, positions=positions
                )
            ids = batch.ids[:, None].expand_as(places)
            yield final.flatten(0, 1).float(), places.flatten(), ids.flatten()

    with evaluating(backbone):
        parts = list(features(train, "train"))
        if not parts:
            raise SitusError("there are no samples to fit the probe to", field="data")
        inputs, places, groups = (torch.cat(part) for part in zip(*parts, strict=True))
        fitted = fit_probe(inputs, places, count, groups=groups, seed=seed)
        scores = score(fitted.linear, ((part, truth) for part, truth, _ in features(test, "test")), count)
    distance_of = distances(grid)
    error = float((scores.answers.double() * distance_of).sum() / scores.count)
    guess = float(
        (scores.answers.sum(dim=1).double() @ distance_of).min() / scores.count
    )  # always predicting the best place
    return PositionProbe(scores, fitted, len(groups.unique()), error, guess, unknown.words)


def _behind(backbone: Backbone, device: torch.device) -> Tensor:
    """The output token of each token of the grid, [N]."""
    rows, columns = coordinates(backbone.grid, device).unbind(-1)
    (height, width), (high, wide) = backbone.grid, backbone.out_grid
    # Merges halve a side and round up, so that a whole number of tokens lies behind each but the last.
    return rows // -(-height // high) * wide + columns // -(-width // wide)


# --- pixels ---------------------------------------------------------------------------------------------------------
# One linear layer on frozen patch features, whose logits are upsampled. It is fitted by full-batch L-BFGS, as the
# other probes are: the mean cross entropy at 4 × 4 points of each patch, with bilinear logits between the patches'
# centres, on the centre crop of each training sample. It is scored at the size of the masks, by sliding windows.


MEANING_OF_SEGMENTS = """
The model is frozen. One linear layer, the same for every patch, gives each patch a logit for each class. The logits are
upsampled to the size of the image (bilinear). The class with the largest logit is the predicted class of a pixel. The
probe measures how well the patch features separate the classes in the image.
"""
PLACES = 4
"""Points along a patch's side at which the layer is fitted."""


@dataclass(frozen=True)
class SegmentProbe(Probe):
    """score: over the pixels of the test split."""

    @property
    def scores(self) -> SegmentScores:
        """Intersection over union."""
        return SegmentScores(self.score.answers, self.score.loss)

    def numbers(self) -> dict[str, Any]:
        """The scores, and how it was fitted."""
        scores = self.scores
        means = {"miou": scores.miou, "accuracy": scores.accuracy, "class_accuracy": scores.class_accuracy}
        return {**means, "loss": scores.loss, "count": self.score.count, **super().numbers()}


@dataclass(frozen=True)
class SegmentProbes(Probes[SegmentProbe]):
    """Masks read off frozen features. classes: their names."""

    file: ClassVar[str] = "probe-segments"
    subject: ClassVar[str] = "linear segmentation probe"
    meaning: ClassVar[str] = MEANING_OF_SEGMENTS + MEANING
    classes: Sequence[str] = field(kw_only=True)

    def summary(self) -> Summary:
        """The mIoU on each model; a row for each."""
        (name, first), *rest = self.probes.items()
        text = (
            f"A linear layer on the patch features of {name} reaches an mIoU of {percent(first.scores.miou, 2)} on "
            f"{self.provenance.counted(first.score.count)} of {counted(len(self.classes), 'classes')}."
        )
        text += "".join(f" With {other} the mIoU is {percent(probe.scores.miou, 2)}." for other, probe in rest)
        things = self.provenance.things
        header = ["model", "mIoU, %", "pixel accuracy, %", "loss", things, f"{things} fitted to", "weight decay"]
        rows: list[list[Cell]] = [
            [name, points(probe.scores.miou), points(probe.scores.accuracy), probe.score.loss,
             probe.score.count, probe.train_count, f"{probe.fitted.weight_decay:g}"]
            for name, probe in self.probes.items()
        ]  # fmt: skip
        miou = (percent(first.scores.miou, 2), f"mIoU, {self.first[0]}")
        return Summary(text, (Table(self.data, header, rows),), numbers=(miou,))

    def figures(self) -> list[Figure]:
        """The IoU of the classes for each model; the confusion of classes for the first."""
        figures: list[Figure] = []
        for number, (name, probe) in enumerate(self.probes.items(), start=1):
            picture = "classes" if number == 1 else f"classes-{number}"
            figures += segment_figures(probe.scores, self.classes, f", in {name}", picture)
        return figures

    def details(self) -> list[Table]:
        """The classes of the first model, and how it was fitted."""
        name, first = self.first
        return [*segment_details(first.scores, self.classes, f", in {name}"), *super().details()]

    def numbers(self) -> dict[str, Any]:
        """The numbers of every model, with its classes."""
        numbers = super().numbers()
        for name, probe in self.probes.items():
            numbers["models"][name]["classes"] = segment_rows(probe.scores, self.classes)
        return numbers


def probe_segments(
    backbone: Backbone,
    train: Iterable[Batch],
    test: Iterable[Batch],
    classes: int,
    *,
    seed: int = 0,
    precision: str = "fp32",
    positions: bool = True,
) -> SegmentProbe:
    """Fits to the patch features of `train`, kept on the device, and scores on `test`.

    positions: whether the backbone uses its own.
    """
    backbone.require("tokens")
    places = [PLACES * side for side in backbone.out_grid]

    def patches(inputs: Tensor) -> Tensor:
        with torch.no_grad(), autocast(inputs.device, precision):
            return backbone.encode(backbone.embed(inputs), backbone.positions() if positions else None).patches.float()

    with evaluating(backbone):
        parts = []
        for batch in train:
            inputs, masks = _centres(batch, backbone.input.shape or (0, 0), places)
            parts.append((patches(inputs), masks))
        if not parts:
            raise SitusError("there are no samples to fit the probe to", field="data")
        features, masks = (torch.cat(part) for part in zip(*parts, strict=True))

        def fit(rows: Tensor, decay: float, start: Linear | None) -> Linear:
            return fit_patches(features[rows], masks[rows], classes, decay, backbone.out_grid, start=start)

        def judge(rows: Tensor, linear: Linear) -> tuple[float, float]:
            return _judged(linear, features[rows], masks[rows], backbone.out_grid)

        groups = torch.arange(len(features), device=features.device)
        fitted = choose_decay(groups, fit, judge, seed)

        def predict(inputs: Tensor) -> Tensor:
            return resize(grid_logits(fitted.linear, patches(inputs), backbone.out_grid), inputs.shape[2:])

        measured = measure(seeing(backbone, predict, Inference(), precision), test, classes)
    scores = measured.scores
    score = Score(scores.accuracy, scores.loss, len(measured.rows), scores.answers)
    return SegmentProbe(score, fitted, len(features))


def grid_logits(linear: Linear, features: Tensor, grid: Sequence[int]) -> Tensor:
    """Patch features [B, N, D] -> logits [B, K, *grid]."""
    return linear(features).transpose(1, 2).unflatten(2, tuple(grid))


def _centres(batch: Batch, size: Sequence[int], places: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The centre crops of a batch's samples [B, C, *size], and the classes at a grid of points in them [B, *places]."""
    inputs, masks = [], []
    sides, whole = batch.targets["sides"].tolist(), batch.targets["whole"].tolist()
    for number, (side, full_size) in enumerate(zip(sides, whole, strict=True)):
        first = [(have - want) // 2 for have, want in zip(side, size, strict=True)]
        inputs.append(batch.inputs[number, :, first[0] : first[0] + size[0], first[1] : first[1] + size[1]])
        rows, columns = (
            ((start + (torch.arange(count, device=batch.inputs.device) + 0.5) * (want / count)) * (full / have)).long()
            for start, count, want, full, have in zip(first, places, size, full_size, side, strict=True)
        )
        masks.append(batch.targets["mask"][number][rows[:, None], columns])
    return torch.stack(inputs), torch.stack(masks)


def fit_patches(
    features: Tensor,
    masks: Tensor,
    classes: int,
    weight_decay: float,
    grid: Sequence[int],
    *,
    start: Linear | None = None,
) -> Linear:
    """The minimum of mean cross entropy + weight_decay / 2 · ‖W‖² on standardised features; the bias is free.

    features: [n, N, D] on `grid`. masks: [n, h, w] classes or VOID, to whose size logits are brought.
    """
    known, rows = int((masks != VOID).sum()), _rows(masks, classes)

    @torch.enable_grad()
    def slope_of(linear: Linear) -> Tensor:
        linear.weight.grad = linear.bias.grad = None
        total = weight_decay / 2 * linear.weight.square().sum()
        total.backward()
        total = total.detach()
        for part, truth in zip(features.split(rows), masks.split(rows), strict=True):
            loss = _loss(linear, part, truth, grid) / known
            loss.backward()
            total += loss.detach()
        return total

    return minimise(features, classes, start, slope_of)


def _loss(linear: Linear, features: Tensor, masks: Tensor, grid: Sequence[int]) -> Tensor:
    """The sum over all points that have a class."""
    logits = resize(grid_logits(linear, features, grid), masks.shape[1:])
    flat, truth = logits.permute(0, 2, 3, 1).flatten(0, 2), masks.flatten().long()
    return F.cross_entropy(flat, truth, ignore_index=VOID, reduction="sum")


def _judged(linear: Linear, features: Tensor, masks: Tensor, grid: Sequence[int]) -> tuple[float, float]:
    """Accuracy and mean cross entropy."""
    known, right, loss = int((masks != VOID).sum()), 0, 0.0
    for part, truth in zip(features.split(_rows(masks, 1)), masks.split(_rows(masks, 1)), strict=True):
        predicted = resize(grid_logits(linear, part, grid), truth.shape[1:]).argmax(dim=1)
        right += int((predicted == truth).sum())
        loss += float(_loss(linear, part, truth, grid))
    return right / known, loss / known


def _rows(masks: Tensor, classes: int) -> int:
    return max(1, AT_ONCE // (classes * masks.shape[1] * masks.shape[2]))
