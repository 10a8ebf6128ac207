"""Average precision over a split: of a model that says the truth, and as pycocotools reads the file that is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import small_method, small_vit
from figures import NUMPY, by_pycocotools, write_coco
from launch import torchrun

from situs.config import from_dict
from situs.data.config import DataConfig
from situs.data.objects import ObjectConfig
from situs.data.open import open_source
from situs.data.sources.coco import decode_rles
from situs.errors import SitusError
from situs.measure.objects.measure import evaluate_objects
from situs.models import Model
from situs.train.run import RunConfig, train_run

CLASSES = ("rectangle", "disc", "crowd of dots")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_coco(tmp_path_factory.mktemp("coco"), {"train": 2, "val": 6})


@pytest.fixture
def model(data: Path) -> Model:
    torch.manual_seed(1)
    method = small_method("detection", small_vit(32, num_classes=0), 3, width=8, hidden=8, proposals=30).eval()
    images = DataConfig(str(data), target="objects", img_size=32, workers=0, objects=ObjectConfig(CLASSES))
    return Model("tiny", method.backbone, method, images, CLASSES)


def saying(data: Path, spoil: Callable[[int, dict[str, Any]], dict[str, Any]] = lambda _, said: said) -> Any:
    """A `detect` that says the truth of the images in their order, in the pixels of the input; crowds too."""
    source: Any = open_source(data, "val", target="objects", objects=ObjectConfig(CLASSES))
    seen = iter(range(len(source)))

    def detect(inputs: torch.Tensor, sides: torch.Tensor) -> list[dict[str, Any]]:
        found = []
        for (high, wide), row in zip(sides.tolist(), seen, strict=False):
            truth = source.truth(row)
            by = torch.tensor([wide / truth.sides[1], high / truth.sides[0]] * 2)
            masks = []
            for box, mask in zip(truth.boxes, decode_rles(truth.rles, truth.sides), strict=True):
                left, top, right, bottom = box.round().int().tolist()
                part = mask[top:bottom, left:right][None, None].float()
                masks.append(torch.nn.functional.interpolate(part, (28, 28), mode="bilinear")[0, 0])
            said = {"boxes": truth.boxes.float() * by, "labels": truth.classes, "scores": torch.ones(len(masks))}
            found.append(spoil(row, said | {"masks": torch.stack(masks) if masks else torch.zeros(0, 28, 28)}))
        return found

    return detect


def test_images_of_crowds_alone_have_no_precision(model: Model, tmp_path: Path) -> None:
    def crowds(told: dict[str, Any]) -> None:
        told["annotations"] = [row for row in told["annotations"] if row["iscrowd"]]

    data = write_coco(tmp_path, {"train": 2}, crowds)
    with pytest.raises(SitusError, match=r": none of the 2 images looked at has an object apart from crowds, so that"):
        evaluate_objects(model, data, split="train")


def test_who_says_the_truth_is_right(model: Model, data: Path) -> None:
    model.method.detect = saying(data)  # type: ignore[union-attr]
    found = evaluate_objects(model, pictures=2, batch=4)
    assert found.boxes.ap == pytest.approx(1.0) and found.masks.ap50 == pytest.approx(1.0) and found.masks.ap > 0.9
    assert found.count == 6 and found.answers.f1 == 1.0
    assert found.answers.table.tolist() == [[4, 0, 0, 0], [0, 4, 0, 0], [0] * 4, [0] * 4]  # the crowd is in no row
    told = found.to_json()
    assert told["boxes"]["ap"] == pytest.approx(1.0) and told["objects"] == 8
    assert [row["objects"] for row in told["classes"]] == [4, 4, 0]
    assert "tiny reaches 100.00 AP of boxes and" in found.summary().sentence
    assert [len(each.truth.classes) for each in found.worst] == [3, 2]


@NUMPY
def test_what_is_wrong_comes_first_and_pycocotools_reads_the_file(model: Model, data: Path, tmp_path: Path) -> None:
    def spoil(row: int, said: dict[str, Any]) -> dict[str, Any]:
        if row == 3:
            return said | {"labels": 1 - said["labels"]}
        keep = 1 if row == 4 else len(said["labels"])
        return {name: value[:keep] for name, value in said.items()} | {"boxes": said["boxes"][:keep] + 0.7}

    model.method.detect = saying(data, spoil)  # type: ignore[union-attr]
    file = tmp_path / "found.json"
    found = evaluate_objects(model, pictures=3, batch=6, save_detections=file)
    assert [each.name for each in found.worst[:2]] == [f"{number:012}.png" for number in (3, 4)]
    assert found.worst[0].f1 == 0.0 and found.worst[1].f1 == pytest.approx(2 / 3)
    assert found.answers.table.tolist() == [[2, 1, 0, 1], [1, 3, 0, 0], [0] * 4, [0] * 4]
    assert found.provenance.facts["data"] and found.saved == "found.json"
    results = json.loads(file.read_text())
    assert {row["category_id"] for row in results} == {2, 7, 40} and results[0]["image_id"] == 1000
    truth = data / "annotations" / "instances_val2017.json"
    for kind, ours in (("bbox", found.boxes), ("segm", found.masks)):
        means, _ = by_pycocotools(truth, results, kind)
        assert 0.1 < means[0] < 0.9
        assert [ours.ap, ours.ap50, ours.ap75] == pytest.approx(means[:3], abs=1e-6)


def test_an_untrained_model_is_judged_and_others_are_refused(model: Model, data: Path, tmp_path: Path) -> None:
    found = evaluate_objects(model, count=2, pictures=1)
    assert found.count == 2 and 0 <= found.boxes.ap < 0.5
    bare = Model("bare", model.backbone, None, model.input)
    with pytest.raises(SitusError, match="bare: was not trained to detect; fine-tune it"):
        evaluate_objects(bare)
    with pytest.raises(SitusError, match="its folder is not there"):
        evaluate_objects(model, save_detections=tmp_path / "no" / "found.json")
    other: Any = open_source(data, "val", target="objects", objects=ObjectConfig((*CLASSES, "cat")))
    with pytest.raises(SitusError, match=r"has 4 classes, not the 3 of tiny, or others"):
        evaluate_objects(model, other)


RANKS = """
import json, sys
from situs.measure.objects.measure import evaluate_objects
from situs.train import distributed

ranks = distributed.start("cpu")
found = evaluate_objects(sys.argv[1], sys.argv[2], pictures=2, batch=int(sys.argv[5]), save_detections=sys.argv[3])
if ranks.main:
    open(sys.argv[4], "w").write(json.dumps(found.to_json()))
distributed.stop()
"""


@pytest.mark.slow
def test_two_ranks_find_what_one_finds(data: Path, tmp_path: Path) -> None:
    method = {"name": "detection", "width": 8, "hidden": 8, "anchor": 1.0, "score": 0.0, "detections": 5}
    tables = {
        "method": method,
        "backbone": {
            "name": "vit_tiny_patch16_224",
            "patch_size": 4,
            "model_args": {"depth": 1, "embed_dim": 16, "num_heads": 2},
        },
        "data": {"path": str(data), "img_size": 32, "batch": 2, "workers": 0},
        "augment": {"crop": "fitted"},
        "train": {"epochs": 1, "precision": "fp32"},
    }
    train_run(from_dict(RunConfig, tables), out=tmp_path / "run", device="cpu", quiet=True)
    (tmp_path / "ranks.py").write_text(RANKS)
    given = [str(each) for each in (tmp_path / "ranks.py", tmp_path / "run", data)]
    alone = [*given, str(tmp_path / "one.json"), str(tmp_path / "alone.json"), "2"]  # as new a process as the ranks are
    subprocess.run([sys.executable, *alone], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, timeout=120)
    torchrun(*given, tmp_path / "two.json", tmp_path / "ranks.json", 4)
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert one == two
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("alone", "ranks"))
    assert two["count"] == 6 and all(one[name] == two[name] for name in ("boxes", "worst"))
