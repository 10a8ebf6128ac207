"""Outlines of objects as COCO's annotations have them, polygons or run lengths, and the masks that they enclose."""

from __future__ import annotations

import marshal
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from situs.errors import SitusError, missing_extra

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


def packed_outline(told: Any, sides: tuple[int, int]) -> bytes | None:
    """A "segmentation" in one piece, for a million lists of numbers would take ten times the memory; None where it
    encloses nothing: no polygon has three corners.

    sides: of its image. Raises SitusError, the end of a sentence, on what is no outline.
    """
    if isinstance(told, dict):
        _check_runs(told, sides)
        return marshal.dumps(told["counts"])
    if told is None:
        return None
    if not isinstance(told, list) or not all(isinstance(part, list) for part in told):
        raise SitusError("is neither a list of polygons nor run lengths")
    parts = [part for part in told if len(part) >= 2 * _CORNERS]
    for part in parts:
        if len(part) % 2 or not all(map(is_number, part)):
            raise SitusError("has a polygon that is no list of x and y")
    return marshal.dumps(parts) if parts else None


def rle_of(outline: bytes, sides: tuple[int, int]) -> Rle:
    """A packed outline as run lengths in an image of these sides, cut at its border. Raises SitusError, the end of a
    sentence, where they cannot be counted out."""
    told, api = marshal.loads(outline), mask_api()  # noqa: S302  (of what was packed here)
    try:
        if isinstance(told, str):
            found = {"size": list(sides), "counts": told.encode()}
            api.decode(found)  # which counts the pixels
            return found
        if isinstance(told[0], list):
            return api.merge(api.frPyObjects(told, *sides))
        return api.frPyObjects({"size": list(sides), "counts": told}, *sides)
    except (ValueError, RuntimeError, TypeError) as error:
        raise SitusError(f"cannot be drawn ({str(error).rstrip('.')})") from error


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


def _check_runs(told: dict[str, Any], sides: tuple[int, int]) -> None:
    size, counts = told.get("size"), told.get("counts")
    if not isinstance(size, list) or tuple(size) != sides:
        said = " × ".join(map(str, size)) if isinstance(size, list) else size
        raise SitusError(f"is a mask of {said}, and its image is {sides[0]} × {sides[1]}")
    if isinstance(counts, str) and counts.isascii():
        return
    if not isinstance(counts, list) or not all(isinstance(each, int) and each >= 0 for each in counts):
        raise SitusError("has run lengths that are no numbers from 0 on")
    if sum(counts) != sides[0] * sides[1]:
        raise SitusError(f"has run lengths of {sum(counts):,} pixels, and its image has {sides[0] * sides[1]:,}")


def is_number(value: Any) -> bool:
    """Whether JSON's value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
