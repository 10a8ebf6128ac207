"""mIoU over a split: the table of answers, windows, and a model that says the truth."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from builders import small_method, small_vit
from hypothesis import given
from hypothesis import strategies as st
from masked import write_ade
from sklearn.metrics import confusion_matrix, jaccard_score
from torch import Tensor
from torch.nn import functional as F

from situs.data.batch import VOID
from situs.data.config import DataConfig
from situs.data.modalities.mask import MaskConfig
from situs.data.open import open_source
from situs.data.resize import centre_fit
from situs.errors import SitusError
from situs.measure.segments import (
    Inference,
    SegmentScores,
    always_most,
    class_iou,
    count_answers,
    evaluate_segments,
    segment,
    starts,
)
from situs.models import Model

MASKS = MaskConfig(1, (0,), ("ground", "disc"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ade(tmp_path_factory.mktemp("ade"), {"training": 2, "validation": 5})


@pytest.fixture(scope="module")
def model(data: Path) -> Model:
    torch.manual_seed(1)
    method = small_method("segmentation", small_vit(24, num_classes=0), 2, width=16, auxiliary_width=16).eval()
    images = DataConfig(str(data), target="mask", img_size=24, workers=0, masks=MASKS)
    return Model("tiny", method.backbone, method, images, MASKS.classes)


def test_it_is_what_a_slow_loop_finds(model: Model, data: Path) -> None:
    """Square windows without overlap in between: each image whole, resized by torchvision, judged pixel by pixel."""
    found = evaluate_segments(model, mode="whole", batch=2, pictures=3)
    source = open_source(data, "val", channels=3, target="mask", masks=MASKS)
    counts, ious = torch.zeros(2, 2), []
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in model.data.normalisation)
    for row in range(5):
        sample = source.read(row)
        height, width = sample["image"].shape[1:]
        shorter = min(height, width)
        image = centre_fit(sample["image"], 24 * height // shorter, 24 * width // shorter)
        sides = [round(side / 4) * 4 for side in image.shape[1:]]
        inputs = F.interpolate(((image / 255 - mean) / std)[None], sides, mode="bilinear", align_corners=False)
        with torch.no_grad():
            logits = F.interpolate(model.method.logits(inputs), image.shape[1:], mode="bilinear", align_corners=False)  # type: ignore[union-attr]
        said = F.interpolate(logits, (height, width), mode="bilinear", align_corners=False)[0].argmax(0)
        own = torch.zeros(2, 2)
        for true, guess in zip(sample["mask"].flatten().tolist(), said.flatten().tolist(), strict=True):
            if true != VOID:
                own[true, guess] += 1
        counts += own
        ious.append(float((own.diagonal() / (own.sum(0) + own.sum(1) - own.diagonal())).mean()))
    assert (found.scores.answers - counts).abs().max() <= 3  # a tie that rounds otherwise
    assert found.count == 5
    order = sorted(range(5), key=lambda row: ious[row])[:3]
    assert [each.name for each in found.worst] == [source.key(row) for row in order]
    for each, row in zip(found.worst, order, strict=True):
        assert each.iou == pytest.approx(ious[row], abs=5e-3)
        assert torch.equal(each.truth, source.read(row)["mask"]) and each.predicted.shape == each.truth.shape
        assert float(each.picture.min()) >= 0 and float(each.picture.max()) <= 1
    held = found.to_json()
    assert held["miou"] == found.scores.miou and [row["class"] for row in held["classes"]] == ["ground", "disc"]
    assert f"mIoU of {100 * found.scores.miou:.2f} % on 5 images of 2 classes" in found.summary().sentence


def test_how_images_are_batched_changes_nothing(model: Model) -> None:
    one, all_ = (evaluate_segments(model, batch=batch, pictures=0) for batch in (1, 5))
    assert torch.equal(one.scores.answers, all_.scores.answers) and one.worst == []
    assert one.scores.loss == pytest.approx(all_.scores.loss, rel=1e-6)
    assert evaluate_segments(model, count=2, pictures=0).count == 2


def test_the_guess_is_the_most_frequent_class() -> None:
    answers = torch.tensor([[6, 0, 0], [2, 0, 0], [0, 0, 0]])
    assert always_most(answers) == pytest.approx(6 / 8 / 2)


def test_others_are_refused(model: Model, data: Path, tmp_path: Path) -> None:
    bare = Model("bare", model.backbone, None, model.input)
    with pytest.raises(SitusError, match="bare: was not trained to segment; fine-tune it"):
        evaluate_segments(bare)
    with pytest.raises(
        SitusError, match=r"ade\d \(validation\): its classes differ from those of tiny: class 0 is 'ground' .* 'a'"
    ):
        evaluate_segments(model, data, masks=MaskConfig(0, (), ("a", "b", "c")))
    with pytest.raises(SitusError, match=r"classes differ from those of tiny: the data has 3 classes.* 2"):
        evaluate_segments(model, data, masks=MaskConfig(0, (), ("ground", "disc", "c")))
    lost = Model("lost", model.backbone, None, model.input, facts={"method": "segmentation"})
    with pytest.raises(SitusError, match=r"lost: has no file situs_method\.safetensors, so its decoder is missing"):
        evaluate_segments(lost)


def test_a_list_of_other_names_beside_other_data_is_refused(model: Model, tmp_path: Path) -> None:
    other = write_ade(tmp_path / "other", {"training": 1, "validation": 1})
    assert evaluate_segments(model, other, pictures=0).count == 1
    (other / "objectInfo150.txt").write_text("Idx\tName\n1\tground\n2\tsea\n")
    with pytest.raises(
        SitusError,
        match=r"its classes differ from those of tiny: class . is 'disc' in the model, but 'sea' in the data",
    ):
        evaluate_segments(model, other)
    assert evaluate_segments(model, other, masks=MASKS, pictures=0).count == 1


def test_where_no_image_can_be_read_it_says_why(model: Model, tmp_path: Path) -> None:
    other = write_ade(tmp_path / "other", {"training": 1, "validation": 2})
    (other / "annotations/validation/ADE_00000000.png").unlink()
    assert evaluate_segments(model, other, pictures=0).count == 1
    (other / "annotations/validation/ADE_00000001.png").write_bytes(b"")
    with pytest.raises(SitusError, match=r"none of its 2 images can be read; the first: .*00000000\.png: has no mask"):
        evaluate_segments(model, other)


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


@pytest.mark.parametrize(
    ("truth", "said"),
    [
        ([0, 1, 2, 2], [0, 1, 2, 1]),  # every pixel is known, the last class among them
        ([0, 1, 1, 0], [0, 1, 0, 0]),  # ... and not
        ([VOID, 1, 2, VOID], [0, 1, 2, 2]),
        ([VOID, VOID], [0, 2]),
        ([], []),
    ],
)
def test_answers_are_counted_pixel_by_pixel(truth: list[int], said: list[int]) -> None:
    expected = torch.zeros(3, 3, dtype=torch.int64)
    for true, answer in zip(truth, said, strict=True):
        if true != VOID:
            expected[true, answer] += 1
    counted = count_answers(torch.tensor(truth, dtype=torch.int32), torch.tensor(said, dtype=torch.int64), 3)
    assert torch.equal(counted, expected)


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


@given(st.integers(1, 200), st.integers(1, 60), st.floats(0, 0.9))
def test_windows_cover_a_side_and_overlap_enough(spare: int, window: int, overlap: float) -> None:
    found = starts(window + spare, window, overlap)
    assert found[0] == 0 and found[-1] == spare and found == sorted(set(found))
    step = max(1, int(window * (1 - overlap)))
    assert all(b - a <= step + 0.5 for a, b in itertools.pairwise(found))
    assert starts(window, window, overlap) == [0]


def local(inputs: Tensor) -> Tensor:
    """A model that looks at each point alone: what it says of one does not depend on what else it sees."""
    return torch.stack([inputs[:, 0] * 2, inputs[:, 1] - inputs[:, 2]], dim=1)


@pytest.mark.parametrize("overlap", [0.0, 1 / 3, 0.8])
def test_a_model_of_single_points_sees_the_same_in_windows_and_in_the_whole(overlap: float) -> None:
    picture = torch.randn(3, 28, 36, generator=torch.Generator().manual_seed(0))
    whole = segment(local, picture, (12, 16), (4, 4), Inference("whole"))
    slid = segment(local, picture, (12, 16), (4, 4), Inference("slide", overlap))
    torch.testing.assert_close(slid, whole, rtol=0, atol=1e-5)


def test_a_window_that_sees_the_whole_picture_is_the_whole() -> None:
    torch.manual_seed(0)
    method = small_method("segmentation", small_vit((16, 24)), 3, width=16, auxiliary_width=16).eval()
    picture = torch.randn(3, 16, 24)
    with torch.no_grad():
        slid, whole = (
            segment(method.logits, picture, (16, 24), (4, 4), Inference(mode)) for mode in ("slide", "whole")
        )
        assert torch.equal(slid, whole)
        # In a larger picture a window's own part is what the model says of that part alone.
        large = torch.randn(3, 16, 40)
        slid = segment(method.logits, large, (16, 24), (4, 4), Inference("slide", 1 / 3))
        left, right = (method.logits(large[None, :, :, at : at + 24])[0] for at in (0, 16))
        torch.testing.assert_close(slid[..., :16], left[..., :16], rtol=0, atol=1e-5)
        torch.testing.assert_close(slid[..., 24:], right[..., 8:], rtol=0, atol=1e-5)
        torch.testing.assert_close(slid[..., 16:24], (left[..., 16:] + right[..., :8]) / 2, rtol=0, atol=1e-5)


def test_the_whole_is_brought_to_whole_patches() -> None:
    seen = []

    def look(inputs: Tensor) -> Tensor:
        seen.append(tuple(inputs.shape[2:]))
        return local(inputs)

    picture = torch.ones(3, 17, 22)
    assert segment(look, picture, (16, 16), (4, 4), Inference("whole")).shape == (2, 17, 22)
    assert seen == [(16, 24)]
