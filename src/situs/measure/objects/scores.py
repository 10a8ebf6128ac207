"""How right what was found is: COCO's average precision, and who was taken for what.

torchmetrics wraps the same library, and takes seconds to import every library of language models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from situs.data.sources.coco import Truth, mask_api
from situs.measure.objects.found import Found

SURE = 0.5
"""From this score on what was found counts as said, where it is compared one by one."""
OVERLAP = 0.5
"""From this intersection over union on two masks are of one object."""

_ALL, _SMALL, _MEDIUM, _LARGE = range(4)


@dataclass(frozen=True)
class ApScores:
    """Average precision as COCO means it: over overlaps from .5 to .95, at .5, at .75, and of objects by their size,
    below 32² pixels, below 96², and above. classes: of each class, [K]. NaN where there is no such object."""

    ap: float
    ap50: float
    ap75: float
    small: float
    medium: float
    large: float
    classes: Sequence[float]

    def means(self) -> dict[str, float]:
        """All but the classes, by name."""
        return {name: getattr(self, name) for name in ("ap", "ap50", "ap75", "small", "medium", "large")}


def average_precision(
    truths: Sequence[Truth], found: Sequence[Found], classes: int, kind: Literal["bbox", "segm"]
) -> ApScores:
    """The average precision of what was found in images, of which the truths are told in the same order."""
    from faster_coco_eval import COCO, COCOeval_faster

    images = [{"id": number, "height": each.sides[0], "width": each.sides[1]} for number, each in enumerate(truths)]
    kinds = [{"id": number, "name": str(number)} for number in range(classes)]
    told = {"images": images, "categories": kinds}
    there = [_rows(number, each, each.crowd, each.areas) for number, each in enumerate(truths)]
    said = [_rows(number, each, None, _areas(each, kind), each.scores) for number, each in enumerate(found)]
    truth, answers = (COCO(told | {"annotations": _numbered(rows)}) for rows in (there, said))
    judge = COCOeval_faster(truth, answers, kind, print_function=_silent, extra_calc=False)
    judge.params.imgIds, judge.params.catIds = [*range(len(images))], [*range(classes)]
    judge.evaluate()
    judge.accumulate()
    # [overlap, recall, class, size, most an image], -1 where there is no such object
    precision = np.asarray(judge.eval["precision"], dtype=np.float64)[..., -1].reshape(10, 101, classes, 4)

    def mean(part: np.ndarray) -> float:
        known = part[part > -1]
        return float(known.mean()) if known.size else math.nan

    sizes = (mean(precision[..., size]) for size in (_ALL, _SMALL, _MEDIUM, _LARGE))
    ap, small, medium, large = sizes
    each = [mean(precision[:, :, number, _ALL]) for number in range(classes)]
    return ApScores(ap, mean(precision[0, ..., _ALL]), mean(precision[5, ..., _ALL]), small, medium, large, each)


class Answers(NamedTuple):
    """Objects of one image or of many by (true, said) class, [K + 1, K + 1]: the last row is of what is said and is not
    there, the last column of what is there and is missed."""

    table: Tensor

    @property
    def f1(self) -> float:
        """Objects that are found under their class, twice, over those that are there and those that are said."""
        right, rows, columns = self.table.diagonal()[:-1].sum(), self.table[:-1].sum(), self.table[:, :-1].sum()
        return float(2 * right / (rows + columns)) if rows + columns else 1.0


def count_objects(truth: Truth, found: Found, classes: int) -> Answers:
    """What was found with some certainty, each given to the object that its mask overlaps most, the surest first.

    What lies in a crowd counts neither as right nor as wrong.
    """
    table = torch.zeros(classes + 1, classes + 1, dtype=torch.int64)
    crowd, sure = truth.crowd.tolist(), (found.scores >= SURE).nonzero()[:, 0].tolist()
    free = {number for number, many in enumerate(crowd) if not many}
    overlaps = np.zeros((len(sure), len(crowd)))
    if sure and crowd:
        overlaps = np.asarray(mask_api().iou([found.rles[each] for each in sure], truth.rles, [*map(int, crowd)]))
    for row, each in enumerate(sure):
        said = int(found.classes[each])
        best = max(free, key=lambda number: overlaps[row, number], default=None)
        if best is not None and overlaps[row, best] >= OVERLAP:
            table[int(truth.classes[best]), said] += 1
            free.discard(best)
        elif not any(many and overlaps[row, number] >= OVERLAP for number, many in enumerate(crowd)):
            table[classes, said] += 1
    for number in free:
        table[int(truth.classes[number]), classes] += 1
    return Answers(table)


def _rows(
    image: int, each: Truth | Found, crowd: Tensor | None, areas: Sequence[float] | Tensor, scores: Tensor | None = None
) -> list[dict[str, Any]]:
    """COCO's annotations of one image."""
    left, top, right, bottom = each.boxes.double().unbind(1)
    boxes = torch.stack([left, top, right - left, bottom - top], dim=1).tolist()
    count = len(boxes)
    columns: dict[str, Any] = {
        "image_id": [image] * count,
        "category_id": each.classes.tolist(),
        "bbox": boxes,
        "area": [float(area) for area in areas],
        "segmentation": each.rles,
        "iscrowd": [0] * count if crowd is None else crowd.int().tolist(),
    } | ({} if scores is None else {"score": scores.tolist()})
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _areas(found: Found, kind: str) -> Sequence[float]:
    """What COCO's sizes go by: the area of the box, or of the mask, that is judged."""
    if kind == "bbox":
        return ((found.boxes[:, 2] - found.boxes[:, 0]) * (found.boxes[:, 3] - found.boxes[:, 1])).tolist()
    return [float(mask_api().area(rle)) for rle in found.rles]


def _numbered(parts: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows = [row for part in parts for row in part]
    return [row | {"id": number} for number, row in enumerate(rows, start=1)]


def _silent(*_: Any) -> None:
    pass
