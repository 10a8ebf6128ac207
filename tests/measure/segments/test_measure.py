"""mIoU over a split: as a slow loop finds it, at the masks' own size, with the worst first; and who is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from builders import small_method, small_vit
from masked import write_ade
from torch.nn import functional as F

from situs.data.batch import VOID
from situs.data.config import DataConfig
from situs.data.masks import MaskConfig
from situs.data.open import open_source
from situs.data.resize import centre_fit
from situs.errors import SitusError
from situs.measure.segments.measure import always_most, evaluate_segments
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
        assert torch.equal(each.truth, source.read(row)["mask"]) and each.said.shape == each.truth.shape
        assert float(each.picture.min()) >= 0 and float(each.picture.max()) <= 1
    held = found.to_json()
    assert held["miou"] == found.scores.miou and [row["class"] for row in held["classes"]] == ["ground", "disc"]
    assert f"{100 * found.scores.miou:.2f} % mIoU on 5 images of 2 classes" in found.summary().sentence


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
    with pytest.raises(SitusError, match=r"ade\d \(validation\): its classes are not those of tiny: 'ground' .* 'a'"):
        evaluate_segments(model, data, masks=MaskConfig(0, (), ("a", "b", "c")))
    with pytest.raises(SitusError, match="its classes are not those of tiny: there are 3, not 2"):
        evaluate_segments(model, data, masks=MaskConfig(0, (), ("ground", "disc", "c")))
    lost = Model("lost", model.backbone, None, model.input, facts={"method": "segmentation"})
    with pytest.raises(SitusError, match=r"lost: its decoder is gone, the file situs_method\.safetensors"):
        evaluate_segments(lost)


def test_a_list_of_other_names_beside_other_data_is_refused(model: Model, tmp_path: Path) -> None:
    other = write_ade(tmp_path / "other", {"training": 1, "validation": 1})
    assert evaluate_segments(model, other, pictures=0).count == 1
    (other / "objectInfo150.txt").write_text("Idx\tName\n1\tground\n2\tsea\n")
    with pytest.raises(SitusError, match="its classes are not those of tiny: 'disc' there is 'sea' here"):
        evaluate_segments(model, other)
    assert evaluate_segments(model, other, masks=MASKS, pictures=0).count == 1


def test_where_no_image_can_be_read_it_says_why(model: Model, tmp_path: Path) -> None:
    other = write_ade(tmp_path / "other", {"training": 1, "validation": 2})
    (other / "annotations/validation/ADE_00000000.png").unlink()
    assert evaluate_segments(model, other, pictures=0).count == 1
    (other / "annotations/validation/ADE_00000001.png").write_bytes(b"")
    with pytest.raises(SitusError, match=r"none of its 2 images can be read; the first: .*00000000\.png: has no mask"):
        evaluate_segments(model, other)
