"""What a model finds in an image, in the pixels of its file; and COCO's json of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from situs.data.sources.coco import Rle, Truth, encode_masks

_AT_ONCE = 1 << 25  # pixels of masks that are drawn at a time
_SURE = 0.5


class Found(NamedTuple):
    """What was found in one image, the surest first. row: its number in its set.

    boxes: [n, 4] left, top, right, bottom in pixels of the file. classes: [n] from 0 on. scores: [n]. rles: n masks.
    """

    row: int
    boxes: Tensor
    classes: Tensor
    scores: Tensor
    rles: list[Rle]

    def to_line(self) -> str:
        """As one line of text, from which `from_line` makes the same again."""
        masks = [each["counts"].decode("ascii") for each in self.rles]
        sides = self.rles[0]["size"] if self.rles else []
        return json.dumps([self.row, *(each.tolist() for each in self[1:4]), sides, masks])

    @staticmethod
    def from_line(line: str) -> Found:
        """What `to_line` wrote."""
        row, boxes, classes, scores, sides, masks = json.loads(line)
        rles = [{"size": sides, "counts": each.encode("ascii")} for each in masks]
        own = torch.tensor(boxes, dtype=torch.float64).view(-1, 4), torch.tensor(classes, dtype=torch.int64)
        return Found(row, *own, torch.tensor(scores, dtype=torch.float64), rles)


def in_the_file(row: int, said: Mapping[str, Tensor], sides: Sequence[int], whole: Sequence[int]) -> Found:
    """What a model says of an image, in the pixels of its file.

    said: "boxes" [n, 4] in pixels of the model's input, "labels" and "scores" [n], "masks" [n, m, m] within the boxes.
    sides: height and width of what is image in the input; whole: those of the file.
    """
    by = torch.tensor([whole[1] / sides[1], whole[0] / sides[0]] * 2, device=said["boxes"].device)
    boxes, (high, wide) = said["boxes"].float() * by, whole
    some = max(1, _AT_ONCE // (high * wide))
    rles = []
    for first in range(0, len(boxes), some):
        drawn = draw_masks(said["masks"][first : first + some].float(), boxes[first : first + some], (high, wide))
        rles += encode_masks(drawn)
    own = boxes.double().cpu(), said["labels"].long().cpu(), said["scores"].double().cpu()
    return Found(row, *own, rles)


def draw_masks(masks: Tensor, boxes: Tensor, sides: tuple[int, int]) -> Tensor:
    """How sure masks [n, m, m] are within their boxes [n, 4], as masks [n, H, W] bool: each pixel by what lies in its
    middle. torchvision's own first widens the boxes to whole pixels."""
    left, top, right, bottom = boxes.unbind(1)
    rows = _shares(top, bottom, masks.shape[1], sides[0])
    columns = _shares(left, right, masks.shape[2], sides[1])
    return rows @ masks @ columns.transpose(1, 2) > _SURE


def _shares(first: Tensor, last: Tensor, cells: int, pixels: int) -> Tensor:
    """[n, pixels, cells]: how much of each cell between first and last [n] the middle of a pixel sees, bilinearly."""
    places = torch.arange(pixels, device=first.device) + 0.5
    at = (places - first[:, None]) / (last - first)[:, None] * cells - 0.5
    return (1 - (at[..., None] - torch.arange(cells, device=first.device)).abs()).clamp(min=0)


def coco_results(
    found: Iterable[Found], truths: Iterable[Truth], categories: Sequence[Any]
) -> tuple[list[dict[str, Any]], int]:
    """COCO's list of results, with the ids of images and categories that the data has; and how many have no category
    there."""
    rows, strange = [], 0
    for each, truth in zip(found, truths, strict=True):
        for box, kind, score, rle in zip(*(part.tolist() for part in each[1:4]), each.rles, strict=True):
            if categories[kind] is None:
                strange += 1
                continue
            left, top, right, bottom = box
            mask = {"size": list(rle["size"]), "counts": rle["counts"].decode("ascii")}
            rows.append({"image_id": truth.number, "category_id": categories[kind], "score": score,
                         "bbox": [left, top, right - left, bottom - top], "segmentation": mask})  # fmt: skip
    return rows, strange
