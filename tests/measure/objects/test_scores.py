"""COCO's average precision beside pycocotools' and torchmetrics', and who was taken for what, by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from figures import NUMPY, by_pycocotools, write_coco

from situs.data.objects import ObjectConfig
from situs.data.open import open_source
from situs.data.sources.coco import CocoSource, Truth, decode_rles, encode_masks
from situs.measure.objects.found import Found, coco_results
from situs.measure.objects.scores import average_precision, count_objects


def jittered(source: CocoSource, seed: int = 0, share: float = 0.15) -> tuple[list[Truth], list[Found]]:
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
        found.append(Found(row, stacked, torch.tensor(kinds, dtype=torch.int64), scores, rles))
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
    found = Found(0, torch.zeros(6, 4), torch.tensor([0, 1, 0, 1, 1, 1]), scores, encode_masks(masks))
    answers = count_objects(truth, found, 2)
    # Right; said twice, so once too often; the second under another class; one in the crowd; one on nothing; unsure.
    assert answers.table.tolist() == [[1, 0, 0], [1, 0, 0], [0, 2, 0]]
    assert answers.f1 == pytest.approx(2 * 1 / (2 + 4))
    none = Found(0, torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(0), [])
    assert count_objects(truth, none, 2).table.tolist() == [[0, 0, 1], [0, 0, 1], [0, 0, 0]]
    empty = truth_of(squares()[:0], [], [])
    assert count_objects(empty, none, 2).f1 == 1.0 and count_objects(empty, found, 2).f1 == 0.0


def test_nothing_found_is_a_score_of_0(tmp_path: Path) -> None:
    write_coco(tmp_path, {"train": 2})
    source: Any = open_source(tmp_path, target="objects", objects=ObjectConfig())
    none = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    scores = average_precision([source.truth(0), source.truth(1)], [Found(n, *none, []) for n in (0, 1)], 3, "segm")
    assert scores.ap == scores.ap50 == 0.0
    assert np.array_equal(scores.classes, [0.0, 0.0, math.nan], equal_nan=True)
