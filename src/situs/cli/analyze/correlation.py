"""How alike the features of two places are, in one image and in two: whether a model's features keep their position.

For example: situs analyze correlation runs/mp3 --out look
"""

from __future__ import annotations

from dataclasses import dataclass

from situs.cli.parser.model_args import FewImagesArgs
from situs.cli.result import measuring


@dataclass(frozen=True, kw_only=True)
class Args(FewImagesArgs):
    """Correlation between places."""

    depth: str = "norm"
    """The maps to draw: of "embedding", a block's number, or "norm", the model's end."""


run = measuring("situs.measure.correlation.analyze_correlation")
