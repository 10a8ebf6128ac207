"""The classes of a whole picture of any shape: by windows of the model's own size that overlap, or at once.

Where a window sees the whole picture, both are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from situs.config import Checked
from situs.limits import Count, Within
from situs.methods.upernet import resize

Predict = Callable[[Tensor], Tensor]
"""Inputs [B, C, H, W] -> logits [B, K, H, W]."""


@dataclass(frozen=True)
class Inference(Checked):
    """How a picture that is larger than the model's inputs is seen."""

    mode: Literal["slide", "whole"] = "slide"
    """slide: windows of the model's own size, their logits averaged where they overlap. whole: at once, with positions
    resampled to its grid, where the model can."""

    overlap: Annotated[float, Within("[0, 1)")] = 1 / 3
    """slide: the least share of a window that the next one sees too."""

    at_once: Count = 32
    """slide: windows at a time."""


def starts(length: int, window: int, overlap: float) -> list[int]:
    """Where windows begin along a side: as few as overlap enough, the first and the last at its ends."""
    spare = length - window
    count = 0 if spare <= 0 else -(-spare // max(1, int(window * (1 - overlap))))
    return [round(spare * number / max(1, count)) for number in range(count + 1)]


def segment(
    predict: Predict, picture: Tensor, window: tuple[int, int], patch: tuple[int, int], how: Inference
) -> Tensor:
    """The logits [K, H, W] of a picture [C, H, W] that is at least as large as a window.

    patch: sides that a picture is a multiple of to be seen whole; another is brought to the next.
    """
    if how.mode == "slide":
        return _slide(predict, picture, window, how)
    high, wide = (max(1, round(side / own)) * own for side, own in zip(picture.shape[1:], patch, strict=True))
    return resize(predict(resize(picture[None], (high, wide))).float(), picture.shape[1:])[0]


def _slide(predict: Predict, picture: Tensor, window: tuple[int, int], how: Inference) -> Tensor:
    (height, width), (high, wide) = picture.shape[1:], window
    places = [(top, left) for top in starts(height, high, how.overlap) for left in starts(width, wide, how.overlap)]
    total, seen = None, torch.zeros(height, width, device=picture.device)
    for first in range(0, len(places), how.at_once):
        some = places[first : first + how.at_once]
        parts = predict(_windows(picture, some, window)).float()
        for (top, left), part in zip(some, parts, strict=True):
            total = part.new_zeros(len(part), height, width) if total is None else total
            total[:, top : top + high, left : left + wide] += part
            seen[top : top + high, left : left + wide] += 1
    assert total is not None
    return total / seen


def _windows(picture: Tensor, places: list[tuple[int, int]], window: tuple[int, int]) -> Tensor:
    high, wide = window
    return torch.stack([picture[:, top : top + high, left : left + wide] for top, left in places])
