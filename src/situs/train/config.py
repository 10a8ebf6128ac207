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
    """Passes over the data; None leaves the length to max_steps. Given without max_steps it takes that one's place in
    what lies below: a preset, a file, a run that is resumed."""

    max_steps: Count | None = None
    """Largest number of updates, in the place of epochs; where both are given together, the run and its schedule end
    with whichever is first."""

    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Arithmetic of the forward and backward; weights and optimiser stay in float32. auto: bf16 on a GPU, fp32 on
    a CPU, where bf16 is mostly emulated."""

    residual: Literal["half", "float32"] = "half"
    """What runs from block to block in bf16 and fp16: half as the products, which is faster, or float32, as timm's own
    models have it under autocast."""

    compile: bool = False
    """Compile the method's forward on a GPU (torch.compile): the first steps take a minute, the others less time."""

    graph: bool = True
    """Where one GPU trains, record the step once and replay it (a CUDA graph): kernels no longer wait for Python."""

    accumulate: Count = 1
    """Micro-batches a step: less memory, the same gradient."""

    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How torchrun's ranks share the model: a copy on each, or sharded (FSDP2)."""

    seed: Natural = 0
    """Of all draws and of the data's order."""

    log_every: Count = 50
    """Steps between two lines of the log; the device is waited for only there."""

    save_every: Count = 1000
    """Steps between two checkpoints; one is also written at the end and on Ctrl-C."""

    keep: Count = 2
    """How many of the newest checkpoints stay."""

    keep_at: tuple[Count, ...] = ()
    """Updates after which a checkpoint is written that stays."""

    keep_best: bool = False
    """Keep the checkpoint of the best validation too, and take it for the run's model: early stopping by choice."""

    trackers: tuple[Tracker, ...] = ()
    """Where the log also goes: tensorboard, wandb (the extra `track`), trackio (`trackio`)."""

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
