"""mIoU of a run of segmentation, or of its export: per class, which classes are confused, the worst images first.

For example (runs/ade: a run of `situs finetune --preset ade20k-upernet`):
situs evaluate segments runs/ade --out look
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from situs.cli.result import MeasureArgs, measuring


@dataclass(frozen=True, kw_only=True)
class Args(MeasureArgs):
    """mIoU of a segmentation."""

    mode: Literal["slide", "whole"] = "slide"
    """Windows of the model's own size, averaged where they overlap; or the whole image at once, its positions
    resampled."""

    overlap: Annotated[float, Parameter(metavar="SHARE")] = 1 / 3
    """slide: the least share of a window that the next one sees too."""

    pictures: Annotated[int, Parameter(metavar="IMAGES")] = 8
    """How many of the worst images the page shows."""

    batch: int = 16
    """Images read at a time."""


run = measuring("situs.measure.segments.evaluate_segments")
