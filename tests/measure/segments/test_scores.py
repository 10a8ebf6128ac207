"""IoU by hand, and beside torchmetrics' and scikit-learn's."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import confusion_matrix, jaccard_score

from situs.data.batch import VOID
from situs.measure.segments.scores import SegmentScores, class_iou, count_answers


def test_a_case_by_hand() -> None:
    truth = torch.tensor([[0, 0, 1], [1, VOID, 1]])
    said = torch.tensor([[0, 1, 1], [1, 0, 0]])
    scores = SegmentScores(count_answers(truth, said, 4))
    assert scores.answers.tolist() == [[1, 1, 0, 0], [1, 2, 0, 0], [0] * 4, [0] * 4]
    assert scores.iou[:2].tolist() == [1 / 3, 2 / 4] and scores.iou[2:].isnan().all()
    assert math.isclose(scores.miou, (1 / 3 + 1 / 2) / 2)
    assert math.isclose(scores.accuracy, 3 / 5, rel_tol=1e-6)
    assert math.isclose(scores.class_accuracy, (1 / 2 + 2 / 3) / 2, rel_tol=1e-6)


def answers() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    truth, other = (torch.randint(low, high, (3, 20, 30), generator=draw) for low, high in ((VOID, 5), (0, 7)))
    return truth, torch.where(torch.rand(3, 20, 30, generator=draw) < 0.4, truth.clamp(min=0), other)


def test_it_is_scikit_learns() -> None:
    truth, said = answers()
    scores = SegmentScores(count_answers(truth, said, 8))  # class 7 is neither there nor said
    known = truth != VOID
    assert scores.answers.tolist() == confusion_matrix(truth[known], said[known], labels=range(8)).tolist()
    assert math.isclose(scores.miou, jaccard_score(truth[known], said[known], average="macro"), rel_tol=1e-9)
    each = torch.stack([count_answers(a, b, 8) for a, b in zip(truth, said, strict=True)])
    torch.testing.assert_close(class_iou(each)[1], class_iou(each[1]), equal_nan=True)


@pytest.mark.slow  # for the import
def test_it_is_torchmetrics() -> None:
    metrics = pytest.importorskip("torchmetrics.classification")
    truth, said = answers()
    scores = SegmentScores(count_answers(truth, said, 8))
    theirs = metrics.MulticlassJaccardIndex(8, average="none", ignore_index=VOID)(said, truth).double()
    torch.testing.assert_close(scores.iou[:7], theirs[:7], rtol=1e-6, atol=0)
    mean = metrics.MulticlassJaccardIndex(8, average="macro", ignore_index=VOID)(said, truth)
    assert math.isclose(scores.miou, float(mean), rel_tol=1e-6)
