"""Sets of images with objects that tests write in COCO's layout: discs and rectangles known in closed form."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

DISC, RECTANGLE, CROWD = 7, 2, 40
"""Ids of the categories, with holes and not in the order of their names."""

CATEGORIES = [
    {"id": DISC, "name": "disc"},
    {"id": RECTANGLE, "name": "rectangle"},
    {"id": CROWD, "name": "crowd of dots"},
]


def circle(x: float, y: float, radius: float, corners: int = 180) -> list[float]:
    """A polygon around a disc."""
    angles = np.linspace(0, 2 * np.pi, corners, endpoint=False)
    return np.stack([x + radius * np.cos(angles), y + radius * np.sin(angles)], axis=1).ravel().round(3).tolist()


def scene(number: int, height: int, width: int) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """A picture [H, W, 3] of a disc and a rectangle apart from each other, and its annotations without ids."""
    draw = np.random.default_rng(number)
    radius = draw.uniform(0.12, 0.2) * min(height, width)
    cx, cy = draw.uniform(0.25, 0.3) * width, draw.uniform(0.3, 0.7) * height
    left, top = round(0.55 * width), round(draw.uniform(0.1, 0.4) * height)
    w, h = round(draw.uniform(0.2, 0.4) * width), round(draw.uniform(0.2, 0.4) * height)
    y, x = np.mgrid[:height, :width] + 0.5
    picture = np.full((height, width, 3), (40, 120, 160)) + draw.normal(0, 6, (height, width, 3))
    picture[(x - cx) ** 2 + (y - cy) ** 2 < radius**2] = (210, 90, 60)
    picture[top : top + h, left : left + w] = (90, 200, 70)
    corners = [left, top, left + w, top, left + w, top + h, left, top + h]
    box = [cx - radius, cy - radius, 2 * radius, 2 * radius]
    told = [
        {"category_id": DISC, "bbox": box, "segmentation": [circle(cx, cy, radius)], "area": np.pi * radius**2},
        {"category_id": RECTANGLE, "bbox": [left, top, w, h], "segmentation": [corners], "area": float(w * h)},
    ]
    return picture.clip(0, 255).astype(np.uint8), told


def dots(height: int, width: int) -> dict[str, Any]:
    """A crowd in the lowest two rows, by its run lengths."""
    counts = [height - 2, *([2, height - 2] * (width - 1)), 2]
    told = {"size": [height, width], "counts": counts}
    return {
        "category_id": CROWD,
        "bbox": [0, height - 2, width, 2],
        "segmentation": told,
        "area": 2 * width,
        "iscrowd": 1,
    }


def write_coco(root: Path, counts: dict[str, int], change: Callable[[dict[str, Any]], None] | None = None) -> Path:
    """annotations/instances_SPLIT2017.json and SPLIT2017/: every third image has no objects, the first one a crowd.

    change: what is done to the training split's json before it is written.
    """
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    for split, count in counts.items():
        told: dict[str, Any] = {"images": [], "annotations": [], "categories": CATEGORIES}
        (root / f"{split}2017").mkdir(exist_ok=True)
        for number in range(count):
            height, width = 40 + 6 * (number % 3), 60 - 10 * (number % 2)
            picture, found = scene(number + 100 * len(split), height, width)
            name, own = f"{number:012}.png", 1000 + 7 * number
            Image.fromarray(picture).save(root / f"{split}2017" / name)
            told["images"].append({"id": own, "file_name": name, "height": height, "width": width})
            found = [] if number % 3 == 2 else [*found, *([] if number else [dots(height, width)])]
            for each in found:
                given = {"id": len(told["annotations"]) + 1, "image_id": own, "iscrowd": 0}
                told["annotations"].append(given | each)
        if change is not None and split == "train":
            change(told)
        (root / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(told))
    return root


NUMPY = pytest.mark.filterwarnings("ignore:__array__ implementation")
"""pycocotools speaks to an older NumPy."""


def by_pycocotools(file: Path, results: list[dict[str, Any]], kind: str) -> tuple[list[float], dict[Any, float]]:
    """The six means, and the AP of each category that has objects."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    if kind == "segm":  # else it takes the boxes' areas for those of the masks
        results = [{name: value for name, value in row.items() if name != "bbox"} for row in results]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(file))
        judge = COCOeval(truth, truth.loadRes(json.loads(json.dumps(results))), kind)
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    each = judge.eval["precision"][:, :, :, 0, -1]
    own = {
        number: float(part[part > -1].mean())
        for number, part in zip(judge.params.catIds, each.transpose(2, 0, 1), strict=True)
        if (part > -1).any()
    }
    return judge.stats[:6].tolist(), own
