"""Where a model's heads look: maps over images, by relative offset, and entropy layer by head.

For example: situs analyze attention runs/mp3 --out look
"""

from __future__ import annotations

from dataclasses import dataclass

from situs.cli.parser.model_args import FewImagesArgs
from situs.cli.result import measuring


@dataclass(frozen=True, kw_only=True)
class Args(FewImagesArgs):
    """Where a model's heads look."""

    layer: int | None = None
    """The layer whose maps are laid over images, 1 for the first; by default the last."""

    show: int = 6
    """How many images are shown."""


run = measuring("situs.measure.attention.analyze_attention")
