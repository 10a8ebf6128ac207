"""Measures of robustness: mCE (raw and AlexNet-normalised), AURRA, AUPR.

Errors and accuracies are shares in [0, 1]. Two numbers are called mCE in the literature and must not be mixed: the mean
error over corruptions (*raw*), and the same with each corruption's error divided by that of AlexNet
(*AlexNet-normalised*, the definition of Hendrycks and Dietterich, which may exceed 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from situs.errors import SitusError, counted
from situs.measure.accuracy import Accuracy
from situs.measure.corruptions import ALEXNET, CORRUPTIONS, GROUPS, SEVERITIES, describe
from situs.results import Cell, Figure, Result, Summary, Table, percent, points

IMAGENET_CLASSES, IMAGENET_SIDE, IMAGENET_COUNT = 1000, 224, 50_000

MEANING = """
The top-1 error of a corruption is the mean over its severities. The raw mCE is the mean of these errors over all
corruptions. For the AlexNet-normalised mCE, the error of each corruption is first divided by the error of AlexNet on
ImageNet-C, so 100 % means an error equal to AlexNet's. On ImageNet the AlexNet-normalised mCE is larger than the raw
mCE by a quarter to a third, so do not compare the two numbers.
"""

MADE_HERE = (
    "Situs made these images with the published strengths, from clean images as the model sees them (cropped and "
    "resized). The corrupted images differ from the published files: the noise is different, frost is drawn instead of "
    "photographed, and the images are not saved as JPEG with quality 85. Compare these numbers with those of other "
    "models that were measured with Situs, not with published numbers."
)

Cells = Mapping[str, Mapping[int, Accuracy]]
"""corruption -> severity -> accuracy."""


@dataclass(frozen=True)
class CorruptionScores:
    """The scores of a grid of corruptions × severities.

    errors: the mean error over severities of each corruption. raw: their mean. normalised: the mean of errors over
    AlexNet's; None unless all five severities were measured, because AlexNet's are means over five.
    """

    errors: dict[str, float]
    raw: float
    normalised: float | None


def score(cells: Cells) -> CorruptionScores:
    """The scores of `cells`; every corruption must have the same severities."""
    if not cells:
        raise SitusError("there are no corruptions to average over", field="corruptions")
    levels = {tuple(sorted(row)) for row in cells.values()}
    if len(levels) > 1:
        raise SitusError(
            "the corruptions have different severities, so they have no common mean; use the same severities for all",
            field="severities",
        )
    errors = {name: 1.0 - mean(cell.top1 for cell in row.values()) for name, row in cells.items()}
    return CorruptionScores(errors, mean(errors.values()), normalised_mce(errors) if levels == {SEVERITIES} else None)


def normalised_mce(errors: Mapping[str, float]) -> float:
    """The mean over corruptions of the error divided by AlexNet's: 1 is as bad as AlexNet."""
    return mean(error / ALEXNET[name] for name, error in errors.items())


def response_curve(confidence: Tensor, correct: Tensor) -> Tensor:
    """Accuracy among the k most confident answers, k = 1 … n: [n] float64. confidence, correct: [n].

    Answers of equal confidence count as their mean, as in a random order: their order in the file means nothing.
    """
    if confidence.numel() == 0:
        raise SitusError("there are no predictions to rank by confidence")
    values, order = confidence.double().sort(descending=True)
    hits = correct.double()[order]
    _, group, counts = torch.unique_consecutive(values, return_inverse=True, return_counts=True)
    sums = torch.zeros_like(counts, dtype=torch.float64).scatter_add_(0, group, hits)
    shared = (sums / counts)[group]
    return shared.cumsum(0) / torch.arange(1, len(hits) + 1, device=hits.device)


def aurra(confidence: Tensor, correct: Tensor) -> float:
    """Area under the response rate accuracy curve: how well confidence separates right answers from wrong ones.

    The mean of `response_curve`: 1 only if all are right; with uninformative confidence it is the accuracy.
    """
    return float(response_curve(confidence, correct).mean())


def aupr(anomalous: Tensor, normal: Tensor) -> float:
    """Area under the precision-recall curve of detecting anomalies (the positives), as average precision.

    anomalous, normal: [n] and [m] anomaly scores (−confidence). Chance is n / (n + m).
    """
    from sklearn.metrics import average_precision_score

    if anomalous.numel() == 0 or normal.numel() == 0:
        raise SitusError("AUPR needs anomalies and normal images")
    scores = torch.cat([anomalous.double(), normal.double()]).cpu().numpy()
    truth = np.concatenate([np.ones(len(anomalous)), np.zeros(len(normal))])
    return float(average_precision_score(truth, scores))


@dataclass(frozen=True)
class Natural:
    """ImageNet-A: accuracy and AURRA among the set's classes. curve: accuracy at response rates of 1 %, … 100 %."""

    name: str
    accuracy: float
    aurra: float
    count: int
    classes: int
    curve: tuple[float, ...]


@dataclass(frozen=True)
class Anomalies:
    """ImageNet-O: AUPR of detecting it among images of the classifier's classes. classes: in the softmax."""

    name: str
    normal_name: str
    aupr: float
    anomalies: int
    normal: int
    classes: int

    @property
    def chance(self) -> float:
        """The AUPR of a random score: the share of anomalies."""
        return self.anomalies / (self.anomalies + self.normal)


@dataclass(frozen=True)
class Robustness(Result):
    """The scores. data: the name of the clean set. published: that of the corrupted set, None where it was made here.

    pictures: [corruptions, columns, C, H, W] in [0, 1], one image per severity; the clean image first if it is known.
    outputs: the classifier's. skipped: sentences on images that could not be read. side: of the images, in pixels.
    """

    file: ClassVar[str] = "robustness"
    meaning: ClassVar[str] = MEANING
    data: str | None
    published: str | None
    clean: Accuracy | None
    cells: Cells
    pictures: Tensor | None
    natural: Natural | None
    anomalies: Anomalies | None
    outputs: int
    skipped: tuple[str, ...]
    side: int

    @property
    def scores(self) -> CorruptionScores:
        """The scores of the corruptions, where there are any."""
        return score(self.cells)

    @property
    def count(self) -> int:
        """Images of a cell."""
        return next(iter(next(iter(self.cells.values())).values())).count

    @property
    def caveat(self) -> str | None:
        """Why the mCE does not compare with published ones, in one sentence; None where it does."""
        reasons = []
        if self.outputs != IMAGENET_CLASSES or self.side != IMAGENET_SIDE:
            reasons.append(
                "AlexNet's errors are for ImageNet (1,000 classes) at 224 pixels, but the model has "
                f"{self.outputs:,} classes at {self.side} pixels"
            )
        if self.published is None:
            reasons.append("Situs made the corrupted images, and frost is drawn instead of photographed")
        if len(self.cells) < len(CORRUPTIONS):
            reasons.append(f"the mean is over {len(self.cells)} of ImageNet-C's 15 corruptions")
        if self.count < IMAGENET_COUNT:
            reasons.append(f"the mean is over {self.count:,} of ImageNet's 50,000 images")
        return "; ".join(reasons) or None

    def summary(self) -> Summary:
        """The effect of corruptions; a row for each, then a row for each measure."""
        tables = [Table(f"{self.published or self.data}, corrupted", *self._corrupted())] if self.cells else []
        measures = self._measures()
        tables.append(Table(self.provenance.name, ["measure", "value", "measured on"], measures))
        numbers = tuple((value, f"{measure}, {of}" if of else measure) for measure, value, of in measures[:4])
        return Summary(self._verdict(), tuple(tables), self.skipped, numbers)

    def figures(self) -> list[Figure]:
        """Accuracy over severity and at every corruption, examples; the response curve on ImageNet-A."""
        figures: list[Figure] = self._drawn() if self.cells else []
        if (natural := self.natural) is not None:
            curve = {natural.name: (range(1, 101), [100 * value for value in natural.curve])}
            labels = "response rate, % (most confident first)", "accuracy of these answers, %"
            caption = (
                "The response rate is the share of answers that are kept, the most confident first. The curve shows "
                "the accuracy of the kept answers, and its mean is AURRA. A "
                "falling curve means that confident answers are right more often."
            )
            title = "Natural adversarial examples"
            figures.append(Figure("response", caption, "figures.curves", (curve, *labels), section=title))
        if not figures and (odd := self.anomalies) is not None:
            shares = {f"AUPR of {odd.name}": 100 * odd.aupr, "chance": 100 * odd.chance}
            figures.append(Figure("", "", "bars", (shares, "%")))
        return figures

    def _drawn(self) -> list[Figure]:
        severities, names = list(next(iter(self.cells.values()))), [spoken(name) for name in self.cells]
        values = [[100 * cell.top1 for cell in row.values()] for row in self.cells.values()]
        beside = "" if self.clean is None else f", {percent(self.clean.top1)} on clean images"
        margin = 100 * 1.96 * 0.5 / math.sqrt(self.count)  # a 95 % interval at its widest, accuracy one half
        accuracy = Figure(
            "accuracy",
            f"Top-1 accuracy in percent{beside}. Chance is {100 / self.outputs:.3g} %. With "
            f"{counted(self.count, 'images')}, the 95 % interval of each accuracy is at most ± {margin:.1f} points.",
            "figures.value_grids",
            ({"": (values, "top-1 accuracy, %")}, names, list(map(str, severities)), "severity", ""),
            {"limits": (0.0, 100.0), "cell": (0.95, 0.36)},
        )
        assert self.pictures is not None
        titles = [*["clean"] * (self.published is None), *(f"severity {severity}" for severity in severities)]
        caption = f"The first image of each folder of {self.published}."
        if self.published is None:
            caption = (
                f"Each row shows one corruption of the first image of the set, as the model saw it. {MADE_HERE} Source "
                f"of the strengths: {describe(self.side)}."
            )
        rows = list(zip(names, self.pictures, strict=True))
        title = "Examples of the corruptions"
        looks = Figure("corruptions", caption, "figures.image_rows", (rows, titles), section=title)
        return [*([self._over_severity(severities)] if len(severities) > 1 else []), accuracy, looks]

    def _over_severity(self, severities: list[int]) -> Figure:
        """The mean of each kind of corruption, from the clean images on."""
        series = {}
        clean = [] if self.clean is None else [(0, 100 * self.clean.top1)]
        for kind, members in GROUPS.items():
            rows = [self.cells[name] for name in members if name in self.cells]
            if rows:
                means = [100 * mean(row[severity].top1 for row in rows) for severity in severities]
                series[kind] = tuple(zip(*clean, *zip(severities, means, strict=True), strict=True))
        label = "severity" if self.clean is None else "severity (0: clean)"
        caption = "The mean accuracy of each kind of corruption, at each severity."
        return Figure("severity", caption, "figures.curves", (series, label, "top-1 accuracy, %"))

    def _verdict(self) -> str:
        sentences = []
        if self.cells:
            scores = self.scores
            ranked = sorted(scores.errors, key=scores.errors.__getitem__)
            best, worst = ranked[0], ranked[-1]
            beside = "" if self.clean is None else f", and {percent(self.clean.top1)} of the clean images"
            sentences.append(
                f"The model classifies {percent(1 - scores.raw)} of the corrupted images right (raw mCE: "
                f"{percent(scores.raw)}){beside}."
            )
            if worst != best:
                name = spoken(worst)
                sentences.append(
                    f"{name[0].upper()}{name[1:]} reduces accuracy most ({percent(1 - scores.errors[worst])} right), "
                    f"{spoken(best)} least ({percent(1 - scores.errors[best])} right)."
                )
        if (natural := self.natural) is not None:
            aurra = percent(natural.aurra)
            sentences.append(f"On {natural.name} the top-1 is {percent(natural.accuracy)} (AURRA: {aurra}).")
        if (strange := self.anomalies) is not None:
            chance = percent(strange.chance)
            aupr_ = percent(strange.aupr)
            sentences.append(f"The model detects {strange.name} with an AUPR of {aupr_} (chance: {chance}).")
        return " ".join(sentences)

    def _corrupted(self) -> tuple[list[str], list[list[Cell]]]:
        """Header, and a row for each corruption: accuracy at each severity, mean error, error over AlexNet's."""
        scores, severities = self.scores, list(next(iter(self.cells.values())))
        normal = scores.normalised is not None
        rows: list[list[Cell]] = []
        if self.clean is not None:
            blank: list[Cell] = [None] * len(severities)
            rows.append(["clean", *blank, points(1 - self.clean.top1, 1), *([None] if normal else [])])
        for name, row in self.cells.items():
            error = scores.errors[name]
            over = [points(error / ALEXNET[name], 1)] if normal else []
            rows.append([spoken(name), *(points(cell.top1, 1) for cell in row.values()), points(error, 1), *over])
        return ["top-1 at severity", *map(str, severities), "mean error", *(["error / AlexNet's"] * normal)], rows

    def _measures(self) -> list[tuple[str, str, str]]:
        """(measure, value, what it was measured on)."""
        rows: list[tuple[str, str, str]] = []
        if self.clean is not None:
            rows.append(
                ("top-1, clean", percent(self.clean.top1), f"{self.data}, {counted(self.clean.count, 'images')}")
            )
        if self.cells:
            scores = self.scores
            several = f"{len(self.cells)} corruptions, {counted(self.count, 'images')} each"
            rows.append(("mCE, raw", percent(scores.raw), f"mean error over {several}"))
            if scores.normalised is None:
                rows.append(
                    (
                        "mCE, AlexNet-normalised",
                        "–",
                        "needs all five severities, because AlexNet's errors are means over five",
                    )
                )
            else:
                note = self.caveat or "comparable with published models"
                rows.append(("mCE, AlexNet-normalised", percent(scores.normalised), note))
        if (natural := self.natural) is not None:
            kind = f"{natural.name}, {counted(natural.count, 'images')}; top-1 among its {natural.classes} classes"
            rows.append(("ImageNet-A, top-1", percent(natural.accuracy), kind))
            rows.append(("ImageNet-A, AURRA", percent(natural.aurra), "mean accuracy over all response rates"))
        if (strange := self.anomalies) is not None:
            kind = (
                f"{strange.anomalies:,} anomalous images and {strange.normal:,} normal images of {strange.normal_name}"
            )
            rows.append(("ImageNet-O, AUPR", percent(strange.aupr), f"{kind}; chance {percent(strange.chance)}"))
        return rows

    def numbers(self) -> dict[str, Any]:
        """Every number, without pictures."""
        result: dict[str, Any] = {"outputs": self.outputs, "skipped": list(self.skipped)}
        if self.cells:
            scores = self.scores
            result |= {
                "images": "made here" if self.published is None else self.published,
                "clean": None if self.clean is None else asdict(self.clean),
                "corruptions": {
                    name: {
                        "severities": {str(severity): asdict(cell) for severity, cell in row.items()},
                        "error": scores.errors[name],
                        "alexnet_error": ALEXNET[name],
                    }
                    for name, row in self.cells.items()
                },
                "mce_raw": scores.raw,
                "mce_alexnet_normalised": scores.normalised,
                "mce_note": self.caveat,
            }
        if self.natural is not None:
            result["imagenet_a"] = asdict(self.natural)
        if self.anomalies is not None:
            result["imagenet_o"] = {**asdict(self.anomalies), "chance": self.anomalies.chance}
        return result


def spoken(name: str) -> str:
    """A corruption's name in words."""
    return name.replace("_", " ").replace("jpeg", "JPEG").replace("gaussian", "Gaussian")
