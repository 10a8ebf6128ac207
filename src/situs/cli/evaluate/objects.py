"""COCO's AP of a run of detection, or of its export: boxes and masks, per class, the worst images first.

For example (runs/coco: a run of `situs finetune --preset coco-maskrcnn`; coco: COCO's folder):
situs evaluate objects runs/coco --data coco --save-detections found.json --out look
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from situs.cli.result import MeasureArgs, measuring


@dataclass(frozen=True, kw_only=True)
class Args(MeasureArgs):
    """Average precision of a detection."""

    save_detections: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Write what was found there, in COCO's json of results: boxes and masks in the pixels of the files."""

    pictures: Annotated[int, Parameter(metavar="IMAGES")] = 8
    """How many of the worst images the page shows."""

    batch: int = 8
    """Images at a time."""


run = measuring("situs.measure.objects.evaluate_objects")
