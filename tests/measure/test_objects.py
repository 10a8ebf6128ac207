"""Average precision over a split: of a model that says the truth, and as pycocotools reads the file that is written."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders import small_method, small_vit
from figures import NUMPY, by_pycocotools, write_coco
from launch import torchrun
from torch.nn import functional

from situs.config import from_dict
from situs.data.config import DataConfig
from situs.data.modalities.objects import CocoSource, Truth, decode_rles, encode_masks
from situs.data.objects import ObjectConfig
from situs.data.open import open_source
from situs.errors import SitusError
from situs.measure.objects import (
    ImageDetections,
    average_precision,
    coco_results,
    count_objects,
    draw_masks,
    evaluate_objects,
    measure,
    to_file_pixels,
)
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
    with pytest.raises(SitusError, match=r": none of the 2 images has an object .*crowds"):
        evaluate_objects(model, data, split="train")


def test_no_images_have_no_precision(model: Model, data: Path) -> None:
    source = open_source(data, "val", target="objects", objects=ObjectConfig(CLASSES))
    loader: Any = SimpleNamespace(source=source, device=torch.device("cpu"))
    method: Any = model.method
    with pytest.raises(SitusError, match=f"{re.escape(source.name)}: there are no images to evaluate on") as caught:
        measure(method, loader, [])
    assert caught.value.field == "data"


def test_who_says_the_truth_is_right(model: Model, data: Path) -> None:
    model.method.detect = saying(data)  # type: ignore[union-attr]
    found = evaluate_objects(model, pictures=2, batch=4)
    assert found.boxes.ap == pytest.approx(1.0) and found.masks.ap50 == pytest.approx(1.0) and found.masks.ap > 0.9
    assert found.count == 6 and found.answers.f1 == 1.0
    assert found.answers.table.tolist() == [[4, 0, 0, 0], [0, 4, 0, 0], [0] * 4, [0] * 4]  # the crowd is in no row
    told = found.to_json()
    assert told["boxes"]["ap"] == pytest.approx(1.0) and told["objects"] == 8
    assert [row["objects"] for row in told["classes"]] == [4, 4, 0]
    assert "tiny reaches an AP of 100.00 for boxes and" in found.summary().sentence
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


def test_what_has_no_category_in_the_json_is_left_out_of_the_file_and_said(model: Model, tmp_path: Path) -> None:
    def without(told: dict[str, Any]) -> None:
        told["categories"] = [each for each in told["categories"] if each["name"] != "disc"]
        kept = {each["id"] for each in told["categories"]}
        told["annotations"] = [each for each in told["annotations"] if each["category_id"] in kept]

    data, file = write_coco(tmp_path, {"train": 3}, without), tmp_path / "found.json"
    found = evaluate_objects(model, data, split="train", save_detections=file)
    strange = [row["category_id"] for row in json.loads(file.read_text())]
    said = [text for text in found.provenance.left_out if "category" in text and "json" in text]
    assert len(said) == 1 and said[0].endswith("not in found.json") and len(set(strange)) <= 2


def test_an_untrained_model_is_judged_and_others_are_refused(model: Model, data: Path, tmp_path: Path) -> None:
    found = evaluate_objects(model, count=2, pictures=1)
    assert found.count == 2 and 0 <= found.boxes.ap < 0.5
    bare = Model("bare", model.backbone, None, model.input)
    with pytest.raises(SitusError, match="bare: was not trained to detect; fine-tune it"):
        evaluate_objects(bare)
    with pytest.raises(SitusError, match="its folder does not exist"):
        evaluate_objects(model, save_detections=tmp_path / "no" / "found.json")
    other: Any = open_source(data, "val", target="objects", objects=ObjectConfig((*CLASSES, "cat")))
    with pytest.raises(SitusError, match=r"differ from those of tiny \(4 classes and 3\)"):
        evaluate_objects(model, other)


RANKS = """
import json, sys
from situs.measure.objects import evaluate_objects
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


def jittered(source: CocoSource, seed: int = 0, share: float = 0.15) -> tuple[list[Truth], list[ImageDetections]]:
    """Made-up answers: the truth moved and scaled, some classes wrong, some missing, some said twice, with scores."""
    draw = torch.Generator().manual_seed(seed)
    truths, found = [], []
    for row in range(len(source)):
        truth = source.truth(row)
        high, wide = truth.sides
        which = [n for n in range(len(truth.classes)) for _ in range(int(torch.randint(0, 3, (), generator=draw)))]
        masks, boxes, kinds = [], [], []
        for number in which:
            own = decode_rles([truth.rles[number]], truth.sides)[0]
            shift = (torch.randn(2, generator=draw) * share * float(truth.areas[number]) ** 0.5 / 2).round().int()
            masks.append(own.roll(shift.tolist(), (0, 1)))
            moved = truth.boxes[number] + shift.flip(0).repeat(2) + torch.randn(4, generator=draw).double()
            boxes.append(moved.clamp(min=0).minimum(torch.tensor([wide, high, wide, high])))
            other = torch.randint(0, len(source.classes or ()), (), generator=draw)
            kinds.append(int(other if torch.rand((), generator=draw) < 0.2 else truth.classes[number]))
        scores = torch.rand(len(which), generator=draw).double().sort(descending=True).values
        stacked = torch.stack(boxes) if boxes else torch.zeros(0, 4).double()
        rles = encode_masks(torch.stack(masks)) if masks else []
        truths.append(truth)
        found.append(ImageDetections(row, stacked, torch.tensor(kinds, dtype=torch.int64), scores, rles))
    return truths, found


def held_to_pycocotools(file: Path, source: CocoSource, seed: int = 0) -> dict[str, Any]:
    truths, found = jittered(source, seed)
    results, strange = coco_results(found, truths, source.categories)
    assert not strange
    scores = {}
    for kind in ("bbox", "segm"):
        ours = average_precision(truths, found, len(source.classes or ()), kind)  # type: ignore[arg-type]
        means, classes = by_pycocotools(file, results, kind)
        told = [math.nan if each == -1 else each for each in means]
        assert list(ours.means().values()) == pytest.approx(told, abs=1e-6, nan_ok=True)
        for number, category in enumerate(source.categories):
            assert ours.classes[number] == pytest.approx(classes.get(category, math.nan), abs=1e-6, nan_ok=True)
        scores[kind] = ours
    return scores


@NUMPY
def test_generated_images_are_judged_as_pycocotools_does(tmp_path: Path) -> None:
    write_coco(tmp_path, {"train": 8})
    source: Any = open_source(tmp_path, target="objects", objects=ObjectConfig())
    file = tmp_path / "annotations" / "instances_train2017.json"
    scores = held_to_pycocotools(file, source)
    assert 0.05 < scores["bbox"].ap < scores["bbox"].ap50 < 1 and 0.05 < scores["segm"].ap < 1
    assert math.isnan(scores["bbox"].classes[2]) and math.isnan(scores["segm"].large)  # only a crowd; none so large


@pytest.mark.parametrize("wrong", [0, 1, 13])
def test_more_than_ten_objects_of_a_class_count_in_one_image(wrong: int) -> None:
    """All fourteen are detected; at the end of the list, `wrong` of the detections are of another class."""
    masks = torch.zeros(14, 32, 64, dtype=torch.bool)
    corners = [(8 * (number // 7), 9 * (number % 7)) for number in range(14)]
    for mask, (y, x) in zip(masks, corners, strict=True):
        mask[y : y + 7, x : x + 8] = True
    boxes = torch.tensor([[x, y, x + 8, y + 7] for y, x in corners], dtype=torch.float64)
    kinds, rles = torch.zeros(14, dtype=torch.int64), encode_masks(masks)
    truth = Truth(1, (32, 64), boxes, kinds, kinds.bool(), torch.full((14,), 56.0), rles)
    named = torch.tensor([0] * (14 - wrong) + [1] * wrong)
    found = ImageDetections(0, boxes, named, torch.linspace(1, 0.5, 14).double(), rles)
    reached = sum(point <= 100 * (14 - wrong) / 14 for point in range(101)) / 101  # of the recalls 0, 0.01, …, 1
    for kind in ("bbox", "segm"):
        scores = average_precision([truth], [found], 2, kind)  # type: ignore[arg-type]
        assert (scores.ap, scores.ap50, scores.small) == pytest.approx((reached,) * 3)
        assert math.isnan(scores.medium) and math.isnan(scores.classes[1])


@pytest.mark.slow
@pytest.mark.shared_data
@NUMPY
def test_real_images_are_judged_as_pycocotools_does(shared_data: Path) -> None:
    source: Any = open_source(shared_data / "detection", target="objects", objects=ObjectConfig())
    scores = held_to_pycocotools(shared_data / "detection" / "instances.json", source, seed=1)
    for each in scores.values():
        assert all(0.05 < value < 1 for value in each.means().values())


@pytest.mark.slow  # for the import
def test_generated_images_are_judged_as_torchmetrics_does(tmp_path: Path) -> None:
    from torchmetrics.detection import MeanAveragePrecision

    write_coco(tmp_path, {"train": 8})
    source: Any = open_source(tmp_path, target="objects", objects=ObjectConfig())
    truths, found = jittered(source)
    metric = MeanAveragePrecision(iou_type=("bbox", "segm"), backend="faster_coco_eval")
    for truth, said in zip(truths, found, strict=True):
        own = {"boxes": said.boxes.float(), "labels": said.classes, "scores": said.scores.float()}
        there = {"boxes": truth.boxes.float(), "labels": truth.classes, "iscrowd": truth.crowd.int()}
        there |= {"area": truth.areas.float(), "masks": decode_rles(truth.rles, truth.sides)}
        metric.update([own | {"masks": decode_rles(said.rles, truth.sides)}], [there])
    theirs = metric.compute()
    for kind in ("bbox", "segm"):
        ours = average_precision(truths, found, 3, kind)  # type: ignore[arg-type]
        for name, there in (("ap", "map"), ("ap50", "map_50"), ("ap75", "map_75")):
            assert getattr(ours, name) == pytest.approx(float(theirs[f"{kind}_{there}"]), abs=1e-6)


def truth_of(masks: torch.Tensor, classes: list[int], crowd: list[bool]) -> Truth:
    nothing = torch.zeros(len(classes), 4).double()
    areas = masks.sum((1, 2)).double()
    return Truth(1, (8, 8), nothing, torch.tensor(classes), torch.tensor(crowd), areas, encode_masks(masks))


def squares(*corners: tuple[int, int, int]) -> torch.Tensor:
    masks = torch.zeros(len(corners), 8, 8, dtype=torch.bool)
    for mask, (top, left, side) in zip(masks, corners, strict=True):
        mask[top : top + side, left : left + side] = True
    return masks


def test_objects_are_given_to_what_overlaps_them_most_by_hand() -> None:
    truth = truth_of(squares((0, 0, 4), (4, 4, 4), (0, 4, 4)), [0, 1, 0], [False, False, True])
    masks = squares((0, 0, 4), (0, 0, 4), (5, 4, 3), (0, 5, 3), (4, 0, 2), (4, 0, 2))
    scores = torch.tensor([0.9, 0.8, 0.8, 0.7, 0.6, 0.4])
    found = ImageDetections(0, torch.zeros(6, 4), torch.tensor([0, 1, 0, 1, 1, 1]), scores, encode_masks(masks))
    answers = count_objects(truth, found, 2)
    # Right; said twice, so once too often; the second under another class; one in the crowd; one on nothing; unsure.
    assert answers.table.tolist() == [[1, 0, 0], [1, 0, 0], [0, 2, 0]]
    assert answers.f1 == pytest.approx(2 * 1 / (2 + 4))
    none = ImageDetections(0, torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(0), [])
    assert count_objects(truth, none, 2).table.tolist() == [[0, 0, 1], [0, 0, 1], [0, 0, 0]]
    empty = truth_of(squares()[:0], [], [])
    assert count_objects(empty, none, 2).f1 == 1.0 and count_objects(empty, found, 2).f1 == 0.0


def test_nothing_found_is_a_score_of_0(tmp_path: Path) -> None:
    write_coco(tmp_path, {"train": 2})
    source: Any = open_source(tmp_path, target="objects", objects=ObjectConfig())
    none = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    scores = average_precision(
        [source.truth(0), source.truth(1)], [ImageDetections(n, *none, []) for n in (0, 1)], 3, "segm"
    )
    assert scores.ap == scores.ap50 == 0.0
    assert np.array_equal(scores.classes, [0.0, 0.0, math.nan], equal_nan=True)


def test_boxes_and_masks_are_those_of_the_file() -> None:
    """A file of 60 × 90 seen at 32 × 48: boxes are 60 / 32 as large there, and a full mask fills its box."""
    said = {
        "boxes": torch.tensor([[8.0, 0.0, 24.0, 16.0], [0.0, 16.0, 48.0, 32.0]]),
        "labels": torch.tensor([1, 0]),
        "scores": torch.tensor([0.75, 0.5]),
        "masks": torch.stack([torch.ones(28, 28), torch.zeros(28, 28)]),
    }
    found = to_file_pixels(7, said, (32, 48), (60, 90))
    assert torch.equal(found.boxes, torch.tensor([[15.0, 0, 45, 30], [0, 30, 90, 60]], dtype=torch.float64))
    masks = decode_rles(found.rles, (60, 90))
    inside = torch.zeros(60, 90, dtype=torch.bool)
    inside[:30, 15:45] = True
    assert torch.equal(masks[0], inside)
    assert not masks[1].any()
    again = ImageDetections.from_line(found.to_line())
    assert again.row == 7 and again.rles == found.rles
    assert all(torch.equal(one, two) for one, two in zip(again[1:4], found[1:4], strict=True))
    none = to_file_pixels(0, {name: value[:0] for name, value in said.items()}, (32, 48), (60, 90))
    assert none.rles == [] and ImageDetections.from_line(none.to_line()).boxes.shape == (0, 4)


def test_half_a_mask_is_half_its_box() -> None:
    mask = torch.zeros(1, 28, 28)
    mask[:, :, :14] = 1
    drawn = draw_masks(mask, torch.tensor([[10.0, 10, 66, 66]]), (80, 80))[0]
    wanted = torch.zeros(80, 80, dtype=torch.bool)
    wanted[10:66, 10:38] = True
    assert torch.equal(drawn, wanted)


def test_a_mask_is_drawn_where_its_box_lies_also_between_pixels() -> None:
    """Against torch's own sampling at each pixel's middle."""
    torch.manual_seed(0)
    masks, (high, wide) = torch.rand(6, 28, 28), (50, 70)
    boxes = torch.rand(6, 4) * torch.tensor([30.0, 20.0, 50.0, 35.0]) - 3
    boxes[:, 2:] += boxes[:, :2] + 8
    y, x = torch.meshgrid(torch.arange(high) + 0.5, torch.arange(wide) + 0.5, indexing="ij")
    for mask, box in zip(masks, boxes, strict=True):
        across, down = (x - box[0]) / (box[2] - box[0]), (y - box[1]) / (box[3] - box[1])
        grid = 2 * torch.stack([across, down], dim=-1)[None] - 1
        wanted = functional.grid_sample(mask[None, None], grid, align_corners=False)[0, 0] > 0.5
        drawn = draw_masks(mask[None], box[None], (high, wide))[0]
        assert wanted.any() and torch.equal(drawn, wanted)
