"""Length and precision of a run, its distribution over ranks, and how often it logs and saves."""

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
    """Length and precision of a run, its distribution over ranks, and how often it logs and saves."""

    epochs: Count | None = 100
    """Number of passes over the data; with "none", only `max_steps` sets the length. If you set only `epochs`, it
    overrides the `max_steps` of a preset, a config file or a resumed run."""

    max_steps: Count | None = None
    """Number of updates; if you set only `max_steps`, it overrides `epochs`. If you set both, the run and its schedule
    end at the earlier of the two."""

    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Precision of the forward and backward pass. Weights and optimiser stay in float32. auto: bf16 on a GPU, fp32 on a
    CPU."""

    residual: Literal["half", "float32"] = "half"
    """Precision of the residual stream in a bf16 or fp16 run. half: the precision of the run, which is faster. float32:
    as in timm under autocast."""

    compile: bool = False
    """Compile the method's forward pass on a GPU (torch.compile). The first steps then take a minute, and later steps
    are faster."""

    graph: bool = True
    """On one GPU, record the training step as a CUDA graph and replay the graph. The kernels then do not wait for
    Python, so steps are faster."""

    accumulate: Count = 1
    """Number of micro-batches per step. More micro-batches need less memory; the gradient is the same."""

    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How the ranks of torchrun store the model. ddp: a copy on each rank. fsdp: sharded over the ranks (FSDP2)."""

    seed: Natural = 0
    """Random seed of the training and of the data's order."""

    log_every: Count = 50
    """Number of steps between two lines of the log. The run waits for the device only at these steps, so a larger
    number is faster."""

    save_every: Count = 1000
    """Number of steps between two checkpoints. A checkpoint is also written at the end and on Ctrl-C."""

    keep: Count = 2
    """Number of newest checkpoints that are kept."""

    keep_at: tuple[Count, ...] = ()
    """Steps whose checkpoints are written and never deleted."""

    keep_best: bool = False
    """Also keep the checkpoint with the best validation result. This checkpoint is then the run's model (early
    stopping)."""

    trackers: tuple[Tracker, ...] = ()
    """Further logs, comma-separated: tensorboard, wandb, mlflow, trackio. wandb needs the extra situs[track], mlflow
    needs situs[mlflow], trackio needs situs[trackio]."""

    def check(self) -> None:
        if self.epochs is None and self.max_steps is None:
            raise SitusError(field=("epochs", "max_steps"), value=None, allowed="set if max_steps is none")

    def precision_on(self, device: torch.device) -> str:
        """The arithmetic on this device: bf16, fp16 or fp32."""
        return ("bf16" if device.type == "cuda" else "fp32") if self.precision == "auto" else self.precision

    def total_steps(self, steps_per_epoch: int) -> int:
        """How many updates the run makes."""
        by_epochs = math.inf if self.epochs is None else self.epochs * steps_per_epoch
        return int(min(by_epochs, math.inf if self.max_steps is None else self.max_steps))
