"""What robustness is measured by: mCE raw and over AlexNet's, AURRA, AUPR.

Errors and accuracies are shares in [0, 1]. Two numbers go by the name mCE in the literature, and they must not be
mixed: the mean error over corruptions as it is (*raw*), and the same with each corruption's error divided by that of
AlexNet (*AlexNet-normalised*, the definition of Hendrycks and Dietterich, which may pass 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from situs.errors import SitusError
from situs.evaluate.accuracy import Accuracy
from situs.evaluate.corruptions_severity import SEVERITIES

ALEXNET = {
    "gaussian_noise": 0.886,
    "shot_noise": 0.894,
    "impulse_noise": 0.923,
    "defocus_blur": 0.820,
    "glass_blur": 0.826,
    "motion_blur": 0.786,
    "zoom_blur": 0.798,
    "snow": 0.867,
    "frost": 0.827,
    "fog": 0.819,
    "brightness": 0.565,
    "contrast": 0.853,
    "elastic_transform": 0.646,
    "pixelate": 0.718,
    "jpeg_compression": 0.607,
}
"""AlexNet's top-1 error on each corruption of ImageNet-C, the mean over its five severities."""

ALEXNET_CLEAN = 0.435
"""AlexNet's top-1 error on ImageNet itself, as the paper gives it."""

Cells = Mapping[str, Mapping[int, Accuracy]]
"""corruption -> severity -> accuracy."""


@dataclass(frozen=True)
class Scores:
    """The figures of a grid of corruptions × severities.

    errors: the mean error over severities of each corruption. raw: their mean. normalised: the mean of errors over
    AlexNet's; None unless all five severities were measured, because AlexNet's are means over five. relative: the same
    of what corruption adds to the error. added: what it adds to the raw mean. Both None without a clean accuracy.
    """

    errors: dict[str, float]
    raw: float
    normalised: float | None
    relative: float | None
    added: float | None


def score(cells: Cells, clean: Accuracy | None = None) -> Scores:
    """The figures of `cells`; every corruption must have the same severities."""
    errors = mean_errors(cells)
    whole = all(tuple(sorted(row)) == SEVERITIES for row in cells.values())
    plain = None if clean is None else 1.0 - clean.top1
    raw = raw_mce(errors)
    return Scores(
        errors,
        raw,
        normalised_mce(errors) if whole else None,
        relative_mce(errors, plain) if whole and plain is not None else None,
        None if plain is None else raw - plain,
    )


def mean_errors(cells: Cells) -> dict[str, float]:
    """Each corruption's top-1 error, the mean over its severities."""
    if not cells:
        raise SitusError("there are no corruptions to average over (--corruptions)")
    if len({tuple(sorted(row)) for row in cells.values()}) > 1:
        raise SitusError("corruptions measured at different severities have no common mean (--severities)")
    return {name: 1.0 - sum(cell.top1 for cell in row.values()) / len(row) for name, row in cells.items()}


def raw_mce(errors: Mapping[str, float]) -> float:
    """The mean error over corruptions, unnormalised."""
    return sum(errors.values()) / len(errors)


def normalised_mce(errors: Mapping[str, float]) -> float:
    """The mean over corruptions of the error over AlexNet's: 1 is as bad as AlexNet."""
    return sum(error / ALEXNET[name] for name, error in errors.items()) / len(errors)


def relative_mce(errors: Mapping[str, float], clean: float) -> float:
    """The mean over corruptions of what each adds to the error on clean images, over what it adds to AlexNet's."""
    added = [(error - clean) / (ALEXNET[name] - ALEXNET_CLEAN) for name, error in errors.items()]
    return sum(added) / len(added)


def response_curve(confidence: Tensor, correct: Tensor) -> Tensor:
    """Accuracy among the k most confident answers, k = 1 … n: [n] float64. confidence, correct: [n].

    Answers of equal confidence count as in a random order: each as their mean. Their order in the file, which a plain
    sort would follow, says nothing about the model.
    """
    if confidence.numel() == 0:
        raise SitusError("there are no answers to rank")
    values, order = confidence.double().sort(descending=True)
    hits = correct.double()[order]
    _, group, counts = torch.unique_consecutive(values, return_inverse=True, return_counts=True)
    sums = torch.zeros_like(counts, dtype=torch.float64).scatter_add_(0, group, hits)
    shared = (sums / counts)[group]
    return shared.cumsum(0) / torch.arange(1, len(hits) + 1, device=hits.device)


def aurra(confidence: Tensor, correct: Tensor) -> float:
    """Area under the response rate accuracy curve: how well confidence tells right answers from wrong ones.

    The mean of `response_curve`: 1 only if all are right; a model whose confidence says nothing gets its accuracy.
    """
    return float(response_curve(confidence, correct).mean())


def aupr(anomalous: Tensor, normal: Tensor) -> float:
    """Area under the precision-recall curve of finding anomalies (the positives), as average precision.

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
    """ImageNet-A: accuracy and AURRA among the set's own classes. curve: accuracy at 1 %, 2 % … 100 % answered."""

    name: str
    accuracy: float
    aurra: float
    count: int
    classes: int
    curve: tuple[float, ...]


@dataclass(frozen=True)
class Anomalies:
    """ImageNet-O: AUPR of telling it from images of the classifier's own classes. classes: in the softmax."""

    name: str
    normal_name: str
    aupr: float
    anomalies: int
    normal: int
    classes: int

    @property
    def chance(self) -> float:
        """What a score that says nothing gets: the anomalies' share."""
        return self.anomalies / (self.anomalies + self.normal)
