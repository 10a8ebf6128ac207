"""The step of a training at which something is drawn."""

from __future__ import annotations

from typing import NamedTuple


class When(NamedTuple):
    """seed: of the run. step: updates done before. epoch: from 0. progress: share of the run done, in [0, 1]. epochs:
    of the whole run; None outside of one."""

    seed: int = 0
    epoch: int = 0
    progress: float = 0.0
    step: int = 0
    epochs: int | None = None


START = When()
"""The first step of a run of unknown length."""
