"""Defences of how a step is made: masked jigsaws, local steps, several batches, dropout, mixed precision."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from situs.audit.defences.base import WHOLE, Defence, Step, setting
from situs.backbones.base import Backbone
from situs.errors import SitusError, counted
from situs.methods.base import Method
from situs.methods.mjp import MJP, MJPConfig, require_table


@dataclass(frozen=True)
class MaskedJigsaw(Defence):
    """MJP's training step: shuffled patches lose their positions, and the loss DAL regresses positions from the
    position table."""

    mask_ratio: float = setting(0.03, "[0, 1]")
    """γ: share of the patches that are shuffled and lose their position."""

    name: ClassVar[str] = "mjp"
    form: ClassVar[str] = "mjp γ={mask_ratio:g}"
    about: ClassVar[str] = (
        "masked jigsaw training (MJP): a ratio γ of the patches is shuffled, and these patches get the same position "
        "vector"
    )
    known: ClassVar[str] = (
        "the method and the weight λ of its position loss (DAL). Rows of zeros in the position table's gradient "
        "reveal the mask. The attacker subtracts the gradient of DAL from the other rows"
    )

    def method(self, backbone: Backbone, seed: int = 0) -> Method:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            method = MJP(backbone, replace(MJPConfig(), mask_ratio=self.mask_ratio, label_smoothing=0.0))
        like = next(backbone.parameters())
        return method.to(like.device, like.dtype)

    def refuses(self, backbone: Backbone) -> str | None:
        if "tokens" in backbone.refusals:
            return f"masked jigsaw training does not work with {backbone.name}: {backbone.refusals['tokens']}"
        try:
            require_table(backbone)
        except SitusError as error:
            return str(error)
        return None

    def retrain(self, method: Method, seed: int = 0) -> Method:
        """MJP with this γ: over a run of MJP its own trained tokens and heads, over another's backbone new ones."""
        if isinstance(method, MJP):
            return method.under(mask_ratio=self.mask_ratio)
        return self.method(method.backbone, seed)

    @property
    def hidden_share(self) -> float:
        return self.mask_ratio


@dataclass(frozen=True)
class FedAvg(Defence):
    """The difference of the weights after several steps of plain SGD."""

    steps: float = setting(2, WHOLE)
    """k: number of local steps before the client sends."""

    lr: float = setting(0.01, "(0, inf)", "fedavg: rate")
    """Learning rate of these steps, which the server sets."""

    name: ClassVar[str] = "fedavg"
    form: ClassVar[str] = "{name} k={steps:g}, rate {lr:g}"
    about: ClassVar[str] = (
        "the client makes k steps of SGD on the same images, and sends the change of the weights divided "
        "by k · rate. The client thus sends the mean of k gradients (for k = 1, the gradient itself)"
    )
    known: ClassVar[str] = (
        "k. The row space of a layer's weight update contains all inputs that this layer gets during the k steps. The "
        "attacker also knows the weights from which the first step starts. Therefore the attack `tokens` works. The "
        "attack `patchembed` works for one image, because its equations hold for every k"
    )
    adam: ClassVar[bool] = False

    def step(self, step: Step) -> Step:
        return replace(step, local_steps=int(self.steps), lr=self.lr, adam=self.adam)


@dataclass(frozen=True)
class FedAdam(FedAvg):
    """The same with Adam."""

    steps: float = setting(1, WHOLE)
    lr: float = setting(0.001, "(0, inf)", "fedavg-adam: rate")

    name: ClassVar[str] = "fedavg-adam"
    about: ClassVar[str] = (
        "the client makes k steps of Adam on the same images, and sends the change of the weights "
        "divided by k · rate. Adam divides each entry of a gradient by its magnitude, so that little "
        "more than the sign remains"
    )
    known: ClassVar[str] = (
        "k, the rate and Adam's constants. The gradient of one step can be recovered up to rounding; the gradients of "
        "several steps cannot"
    )
    adam: ClassVar[bool] = True


@dataclass(frozen=True)
class Accumulate(Defence):
    """The client adds up the gradients of several batches before it sends."""

    parts: float = setting(2, WHOLE)
    """m: number of batches in one upload."""

    name: ClassVar[str] = "accumulate"
    about: ClassVar[str] = (
        "one upload covers m batches: their gradients are added, or each local step takes the next batch"
    )
    known: ClassVar[str] = "m. To the attacker, the m batches are one batch with all images"

    @property
    def label(self) -> str:
        return f"accumulate {counted(int(self.parts), 'batches')}"

    def step(self, step: Step) -> Step:
        return replace(step, batch=step.batch * int(self.parts), parts=int(self.parts))


@dataclass(frozen=True)
class Dropout(Defence):
    """Every dropout layer of the model is active and has the same rate."""

    rate: float = setting(0.1, "[0, 1)")
    """p: the share of activations that each layer drops."""

    exact: ClassVar[bool] = False
    name: ClassVar[str] = "dropout"
    form: ClassVar[str] = "{name} p={rate:g}"
    about: ClassVar[str] = "the step runs in training mode, and every dropout layer of the model has the rate p"
    known: ClassVar[str] = (
        "p, but not which values are dropped. The equations that the attack `patchembed` solves still hold"
    )

    def step(self, step: Step) -> Step:
        return replace(step, dropout=self.rate)

    def refuses(self, backbone: Backbone) -> str | None:
        if any(isinstance(part, nn.Dropout) for part in backbone.modules()):
            return None
        return f"{backbone.name} has no dropout layer"


@dataclass(frozen=True)
class Autocast(Defence):
    """The client computes in mixed precision."""

    exact: ClassVar[bool] = False
    name: ClassVar[str] = "autocast"
    about: ClassVar[str] = "the client computes its step in mixed precision (bfloat16), and sends float32"
    known: ClassVar[str] = "the precision, and therefore the rounding error of activations and gradients"

    def step(self, step: Step) -> Step:
        return replace(step, autocast=True)
