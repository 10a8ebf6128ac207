"""How long a run is, in which precision, on how many ranks, and how often it logs and saves."""

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
    """How long a run is, in which precision, on how many ranks, and how often it logs and saves."""

    epochs: Count | None = 100
    """Passes over the data; None: max_steps alone sets the length. Given without max_steps, it overrides max_steps from
    a preset, a file or a resumed run."""

    max_steps: Count | None = None
    """Number of updates; overrides epochs. Given together with epochs, the run and its schedule end at the first of the
    two."""

    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Arithmetic of the forward and backward; weights and optimiser stay in float32. auto: bf16 on a GPU, fp32 on
    a CPU, where bf16 is mostly emulated."""

    residual: Literal["half", "float32"] = "half"
    """Precision of the residual stream in bf16 and fp16: half, which is faster, or float32, as in timm under
    autocast."""

    compile: bool = False
    """Compile the method's forward on a GPU (torch.compile): the first steps take a minute, the others less time."""

    graph: bool = True
    """On one GPU, record the step once and replay it (a CUDA graph): kernels no longer wait for Python."""

    accumulate: Count = 1
    """Micro-batches a step: less memory, the same gradient."""

    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How torchrun's ranks share the model: a copy on each, or sharded (FSDP2)."""

    seed: Natural = 0
    """Seed of all draws and of the data's order."""

    log_every: Count = 50
    """Steps between two lines of the log; the run waits for the device only there."""

    save_every: Count = 1000
    """Steps between two checkpoints; one is also written at the end and on Ctrl-C."""

    keep: Count = 2
    """How many of the newest checkpoints are kept."""

    keep_at: tuple[Count, ...] = ()
    """Steps after which a checkpoint is written and always kept."""

    keep_best: bool = False
    """Also keep the checkpoint of the best validation, and use it as the run's model (early stopping)."""

    trackers: tuple[Tracker, ...] = ()
    """Other places for the log: tensorboard, wandb (the extra `track`), mlflow and trackio (extras of the same
    names)."""

    def check(self) -> None:
        if self.epochs is None and self.max_steps is None:
            raise SitusError(field=("epochs", "max_steps"), value=None, allowed="set unless max_steps is")

    def precision_on(self, device: torch.device) -> str:
        """The arithmetic on this device: bf16, fp16 or fp32."""
        return ("bf16" if device.type == "cuda" else "fp32") if self.precision == "auto" else self.precision

    def total_steps(self, steps_per_epoch: int) -> int:
        """How many updates the run makes."""
        by_epochs = math.inf if self.epochs is None else self.epochs * steps_per_epoch
        return int(min(by_epochs, math.inf if self.max_steps is None else self.max_steps))
