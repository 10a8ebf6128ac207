"""How long a run goes, in which precision, on how many ranks, and how often it speaks and saves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from situs.config import Checked
from situs.errors import SitusError
from situs.limits import Count, Natural, Rule
from situs.train.log import TRACKERS

Tracker = Annotated[str, Rule(f"one of {', '.join(sorted(TRACKERS))}", TRACKERS.__contains__)]


@dataclass(frozen=True)
class TrainConfig(Checked):
    """How long a run goes, in which precision, on how many ranks, and how often it speaks and saves."""

    epochs: Count | None = 100
    """Passes over the data; None: use max_steps. If only one of the two is set, it overrides the other one of a
    preset, a file or a resumed run."""

    max_steps: Count | None = None
    """Number of steps, instead of epochs; if both are set, training ends with the earlier one."""

    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Precision of forward and backward passes; weights and optimiser stay in float32. auto: bf16 on a GPU, fp32 on
    a CPU."""

    residual: Literal["half", "float32"] = "half"
    """Precision of the residual stream in bf16 and fp16: half is faster; float32 is what timm's models have under
    autocast."""

    compile: bool = False
    """Compile the method's forward pass on a GPU (torch.compile): slow first steps, faster later ones."""

    graph: bool = True
    """On one GPU: record the step as a CUDA graph and replay it, without waiting for Python."""

    accumulate: Count = 1
    """Micro-batches per step: less memory, the same gradient."""

    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How torchrun's ranks share the model: a copy on each, or sharded (FSDP2)."""

    seed: Natural = 0
    """Random seed."""

    log_every: Count = 50
    """Steps between two lines of the log."""

    save_every: Count = 1000
    """Steps between two checkpoints; one is also written at the end and on Ctrl-C."""

    keep: Count = 2
    """Number of newest checkpoints that are kept."""

    keep_at: tuple[Count, ...] = ()
    """Steps whose checkpoints are always kept."""

    keep_best: bool = False
    """Also keep the checkpoint with the best validation result, and use it as the run's model (early stopping)."""

    trackers: tuple[Tracker, ...] = ()
    """Also log to: tensorboard, wandb (extra `track`), trackio (extra `trackio`)."""

    def check(self) -> None:
        if self.epochs is None and self.max_steps is None:
            raise SitusError(field=("epochs", "max_steps"), value=None, allowed="given unless max_steps is")

    def precision_on(self, device: torch.device) -> str:
        """The arithmetic on this device: bf16, fp16 or fp32."""
        return ("bf16" if device.type == "cuda" else "fp32") if self.precision == "auto" else self.precision

    def total_steps(self, steps_per_epoch: int) -> int:
        """How many updates the run makes."""
        by_epochs = math.inf if self.epochs is None else self.epochs * steps_per_epoch
        return int(min(by_epochs, math.inf if self.max_steps is None else self.max_steps))
