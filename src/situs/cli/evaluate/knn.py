"""Nearest neighbours on frozen features, layer by layer: CLS and the mean of the patches, the training split as bank.

For example: situs evaluate knn runs/mp3 --k 20 --out look
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from situs.cli.result import MeasureArgs, measuring


@dataclass(frozen=True, kw_only=True)
class Args(MeasureArgs):
    """kNN accuracy of each layer."""

    k: Annotated[int | None, Parameter(metavar="N")] = None
    """How many neighbours decide; by default 20, or as many as a class has in the bank, where that is fewer."""

    temperature: Annotated[float | None, Parameter(metavar="τ|none")] = 0.07
    """τ of the weights exp(similarity / τ); none counts every neighbour as one."""

    train_count: Annotated[int | None, Parameter(metavar="IMAGES")] = 10_000
    """At most so many images of the training split as the bank; none for all."""


run = measuring("situs.measure.knn.evaluate_knn")
