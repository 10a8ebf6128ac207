"""Outlines of objects as COCO's annotations have them, polygons or run lengths, and the masks that they enclose.

They are kept as numbers one behind the other: a million small lists would take ten times the memory, and each worker
process would copy them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from situs.errors import SitusError, missing_extra

_POLYGONS, _COUNTS, _TEXT = range(3)
_CORNERS = 3  # of a polygon at least

Rle = dict[str, Any]
"""A mask by the lengths of its runs: "size", height and width, and "counts", packed into bytes."""


def mask_api() -> Any:
    """What draws polygons as COCO does."""
    try:
        from faster_coco_eval.core import mask
    except ImportError as error:
        raise missing_extra("faster-coco-eval", "dense", "reading the outlines of objects") from error
    return mask


class Outlines:
    """Outlines by number, in the order in which they were added."""

    def __init__(self) -> None:
        self._values, self._ends, self._parts, self._kinds = array("d"), array("q", [0]), array("q", [0]), bytearray()

    def __len__(self) -> int:
        return len(self._kinds)

    def add(self, told: Any, sides: tuple[int, int]) -> bool:
        """Adds a "segmentation"; False where it encloses nothing: no polygon has three corners.

        sides: of its image. Raises SitusError, the end of a sentence, on what is no outline.
        """
        if isinstance(told, dict):
            kind, parts = _runs(told, sides)
        elif isinstance(told, list) and all(isinstance(part, list) for part in told):
            kind, parts = _POLYGONS, [_corners(part) for part in told if len(part) >= 2 * _CORNERS]
        elif told is None:
            return False
        else:
            raise SitusError("is neither a list of polygons nor run lengths")
        if not parts:
            return False
        for part in parts:
            self._values.extend(part)
            self._ends.append(len(self._values))
        self._parts.append(len(self._ends) - 1)
        self._kinds.append(kind)
        return True

    def rle(self, number: int, sides: tuple[int, int]) -> Rle:
        """One of them as run lengths in an image of these sides, cut at its border. Raises SitusError, the end of a
        sentence, where they cannot be counted out."""
        first, last = self._parts[number], self._parts[number + 1]
        parts = [self._values[self._ends[each] : self._ends[each + 1]] for each in range(first, last)]
        api, kind = mask_api(), self._kinds[number]
        try:
            if kind == _POLYGONS:
                return api.merge(api.frPyObjects([part.tolist() for part in parts], *sides))
            whole = [int(value) for value in parts[0]]
            if kind == _COUNTS:
                return api.frPyObjects({"size": list(sides), "counts": whole}, *sides)
            found = {"size": list(sides), "counts": bytes(whole)}
            api.decode(found)  # which counts the pixels
        except (ValueError, RuntimeError, TypeError) as error:
            raise SitusError(f"cannot be drawn ({str(error).rstrip('.')})") from error
        return found


def decode_rles(rles: Sequence[Rle], sides: tuple[int, int]) -> Tensor:
    """[m, H, W] bool."""
    if not rles:
        return torch.zeros(0, *sides, dtype=torch.bool)
    return torch.from_numpy(np.ascontiguousarray(mask_api().decode(list(rles)).transpose(2, 0, 1))).bool()


def encode_masks(masks: Tensor) -> list[Rle]:
    """Masks [m, H, W] bool as run lengths."""
    if not len(masks):
        return []
    return mask_api().encode(np.asfortranarray(masks.cpu().numpy().transpose(1, 2, 0), dtype=np.uint8))


def is_outside(told: Any, sides: tuple[int, int]) -> bool:
    """Whether a "segmentation" that was added lies wholly beyond a border of its image: of polygons all corners."""
    return isinstance(told, list) and all(_beyond(part, sides) for part in told if len(part) >= 2 * _CORNERS)


def _beyond(part: list[float], sides: tuple[int, int]) -> bool:
    high, wide = sides
    if 0 < part[0] < wide and 0 < part[1] < high:  # which is so of nearly all
        return False
    across, down = part[0::2], part[1::2]
    return max(across) <= 0 or min(across) >= wide or max(down) <= 0 or min(down) >= high


def _corners(part: list[Any]) -> Sequence[float]:
    try:
        found = array("d", part)
    except TypeError:
        found = array("d", [math.nan])
    if len(part) % 2 or not math.isfinite(sum(found)):
        raise SitusError("has a polygon that is no list of x and y")
    return found


def _runs(told: dict[str, Any], sides: tuple[int, int]) -> tuple[int, Sequence[Sequence[float]]]:
    size, counts = told.get("size"), told.get("counts")
    if not isinstance(size, list) or tuple(size) != sides:
        said = " × ".join(map(str, size)) if isinstance(size, list) else size
        raise SitusError(f"is a mask of {said}, and its image is {sides[0]} × {sides[1]}")
    if isinstance(counts, str) and counts.isascii():
        return _TEXT, [list(counts.encode())]
    if not isinstance(counts, list) or not all(isinstance(each, int) and each >= 0 for each in counts):
        raise SitusError("has run lengths that are no numbers from 0 on")
    if sum(counts) != sides[0] * sides[1]:
        raise SitusError(f"has run lengths of {sum(counts):,} pixels, and its image has {sides[0] * sides[1]:,}")
    return _COUNTS, [counts]


def is_number(value: Any) -> bool:
    """Whether JSON's value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
