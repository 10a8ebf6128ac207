"""The threat: who sees what. The gradients a client would upload, by parameter name, under a defence.

A defence either changes what is trained (`method`: MJP) or what is sent (`upload`: noise, clipping, leaving names out).
Each says what an attacker knows of it (`known`), because a defence is only worth what it is worth against someone
who has read about it; `noise_level` and `known_gradient` are that knowledge in numbers.
"""

# ruff: noqa: ARG002  (every defence is given the same arguments)
from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from situs.audit.stem import position_names, require_stem, table_rows
from situs.backbones.base import Backbone
from situs.config import check_range
from situs.errors import SitusError
from situs.methods.base import Batch, Method
from situs.methods.mjp import MJP, MJPConfig
from situs.methods.mjp.dal import require_table
from situs.methods.supervised import Supervised, SupervisedConfig

Gradients = dict[str, Tensor]
"""Named as `Backbone.named_parameters()` names them; what a method adds, as the method does."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The types gradients may be sent in. They are computed in float32 and rounded on the way out."""

UNKNOWN = "unknown"
"""E_unk's name in what MJP sends."""

LOCAL_LR = 0.01
"""The learning rate of a client's local steps, which the server sets."""

THREAT = {
    "who": "an honest-but-curious server (or whoever reads its traffic) in federated or distributed training",
    "sees": "the gradients, or the weight update, of one client's step, by parameter name",
    "knows": "the architecture, the weights the step began with, how images are normalised, the loss and the defence",
    "does not know": "the images; all it takes for granted is that they are pictures, stored as bytes. Nor the labels: "
    "the closed forms need none, and gradient matching infers them from the classifier's gradient unless it is told",
    "does": "solves linear systems, or searches for images whose gradients match; it changes nothing in the protocol, "
    "so a client cannot notice it",
}
"""The attacker of this audit, for the page's first section."""


@dataclass(frozen=True)
class Defence:
    """What a client does so that its gradients tell less. Fields are its settings."""

    name: ClassVar[str] = "none"
    about: ClassVar[str] = "gradients are sent as they are"
    known: ClassVar[str] = "there is nothing to know"
    per_sample: ClassVar[bool] = False
    """Whether `bound` must see each sample's gradient by itself, before the mean over the batch."""

    @property
    def label(self) -> str:
        """The name with its settings: "noise σ=0.001"."""
        return self.name

    def method(self, backbone: Backbone, seed: int = 0) -> Method:
        """What is trained; what it adds to the backbone is the same for a seed, since the attacker has it too."""
        return Supervised(backbone, SupervisedConfig(label_smoothing=0.0))

    @property
    def hidden_share(self) -> float | None:
        """The share of the patches whose places it hides; None for a defence of another kind."""
        return None

    def refuses(self, backbone: Backbone) -> str | None:
        """None, or the reason why this defence cannot be had on a backbone."""
        return None

    def retrain(self, method: Method, seed: int = 0) -> Method:
        """What is trained where a run brings its own method: that method, unless the defence is one itself."""
        return method

    def bound(self, gradients: Gradients) -> Gradients:
        """One sample's gradient as it enters the mean, where `per_sample` is set; differentiable."""
        return gradients

    def withheld(self, backbone: Backbone) -> set[str]:
        """Names of the gradients that stay with the client."""
        return set()

    def upload(self, gradients: Gradients, batch: int, chance: torch.Generator) -> Gradients:
        """What is sent of the mean gradient over `batch` samples, without what is withheld."""
        return gradients

    def noise_level(self, batch: int) -> float:
        """The deviation of the noise on each number sent, which the attacker knows."""
        return 0.0


@dataclass(frozen=True)
class NoDefence(Defence):
    """The gradients as they are."""


@dataclass(frozen=True)
class Noise(Defence):
    """Gaussian noise on every number."""

    sigma: float = 1e-3
    """σ: deviation of the noise, in the gradient's own units."""

    name: ClassVar[str] = "noise"
    about: ClassVar[str] = "Gaussian noise of deviation σ on every number that is sent"
    known: ClassVar[str] = "σ: the attacker damps the directions that the noise drowns (ridge)"

    def __post_init__(self) -> None:
        check_range("noise", self.sigma, 0, math.inf, flag="--defence noise=σ", high_open=True)

    @property
    def label(self) -> str:
        return f"noise σ={self.sigma:g}"

    def upload(self, gradients: Gradients, batch: int, chance: torch.Generator) -> Gradients:
        return _noisy(gradients, self.noise_level(batch), chance)

    def noise_level(self, batch: int) -> float:
        return self.sigma


@dataclass(frozen=True)
class Clip(Defence):
    """DP-SGD's two steps: each sample's whole gradient is clipped to a norm, and noise in its proportion is added."""

    norm: float = 1.0
    """C: the largest norm a sample's gradient may have, over all parameters together."""

    multiplier: float = 0.01
    """Noise on the sum has deviation multiplier · C. DP-SGD is commonly run with 0.5 and more; this default is weak."""

    name: ClassVar[str] = "clip"
    about: ClassVar[str] = (
        "each sample's gradient clipped to norm C, then noise of deviation multiplier · C (DP-SGD's form)"
    )
    known: ClassVar[str] = (
        "C and the noise multiplier; a common factor on all gradients changes no solution, and what it leaves of a "
        "loss on the position table (DAL) is found and subtracted"
    )
    per_sample: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("clip", self.norm, 0, math.inf, flag="--defence clip=C", low_open=True, high_open=True)
        check_range("multiplier", self.multiplier, 0, math.inf, flag="multiplier", high_open=True)

    @property
    def label(self) -> str:
        return f"clip C={self.norm:g}, noise {self.multiplier:g}·C"

    def bound(self, gradients: Gradients) -> Gradients:
        norm = torch.stack([g.double().norm() for g in gradients.values()]).norm()
        factor = (self.norm / norm.clamp(min=1e-30)).clamp(max=1.0)
        return {name: g * factor.to(g.dtype) for name, g in gradients.items()}

    def upload(self, gradients: Gradients, batch: int, chance: torch.Generator) -> Gradients:
        return _noisy(gradients, self.noise_level(batch), chance)

    def noise_level(self, batch: int) -> float:
        return self.multiplier * self.norm / batch


@dataclass(frozen=True)
class NoPositionGradient(Defence):
    """The gradients of everything that holds positions stay with the client."""

    name: ClassVar[str] = "no-pe-gradient"
    about: ClassVar[str] = "the gradients of the parameters that hold positions are not sent"
    known: ClassVar[str] = (
        "which names are missing; the closed forms of this audit then have nothing to solve with, which is no proof: "
        "the patches stand in the gradients of the first block as well"
    )

    def refuses(self, backbone: Backbone) -> str | None:
        if position_names(backbone):
            return None
        return f"{backbone.name} has no trained parameter that is known to hold positions, so nothing is withheld"

    def withheld(self, backbone: Backbone) -> set[str]:
        return {*position_names(backbone), UNKNOWN}


@dataclass(frozen=True)
class MaskedJigsaw(Defence):
    """MJP's training step: shuffled patches lose their places, and DAL regresses places from the table."""

    mask_ratio: float = 0.03
    """γ: share of the patches that are shuffled and lose their place."""

    name: ClassVar[str] = "mjp"
    about: ClassVar[str] = (
        "masked jigsaw training (MJP): the share γ of the patches is shuffled and shares one position"
    )
    known: ClassVar[str] = (
        "the method and its λ: rows of the table without a gradient reveal the mask, and the gradient of DAL on the "
        "other rows is computed and subtracted"
    )

    def __post_init__(self) -> None:
        check_range("mjp", self.mask_ratio, 0, 1, flag="--defence mjp=γ")

    @property
    def label(self) -> str:
        return f"mjp γ={self.mask_ratio:g}"

    def method(self, backbone: Backbone, seed: int = 0) -> Method:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            method = MJP(backbone, replace(MJPConfig(), mask_ratio=self.mask_ratio, label_smoothing=0.0))
        like = next(backbone.parameters())
        return method.to(like.device, like.dtype)

    def refuses(self, backbone: Backbone) -> str | None:
        if "tokens" in backbone.refusals:
            return f"no masked jigsaw is played with {backbone.name}: {backbone.refusals['tokens']}"
        try:
            require_table(backbone)
        except SitusError as error:
            return str(error)
        return None

    def retrain(self, method: Method, seed: int = 0) -> Method:
        """MJP with this γ: over a run of MJP its own trained tokens and heads, over another's backbone new ones."""
        return method.at_hidden_share(self.mask_ratio) or self.method(method.backbone, seed)

    @property
    def hidden_share(self) -> float:
        return self.mask_ratio


def method_of(defence: Defence, victim: Backbone | Method, seed: int = 0) -> Method:
    """What is trained under a defence: cross entropy or the defence's own on a backbone, else a run's own method."""
    return defence.method(victim, seed) if isinstance(victim, Backbone) else defence.retrain(victim, seed)


def blurred(method: Method) -> str:
    """Why the figure of an attack that does not separate hidden patches is a lower bound; "" where none are hidden."""
    if method.hidden_share is None:
        return ""
    return (
        f"a lower bound, and no credit to {type(method).__name__}: the gradients of the hidden patches blur all "
        "others, and this attack does not separate them; adaptive-mjp does"
    )


def names_sent(method: Method, defence: Defence) -> dict[str, int]:
    """The gradients that a client sends under a defence: how many numbers each name has."""
    withheld = defence.withheld(method.backbone)
    return {name: p.numel() for name, p in parameter_names(method).items() if name not in withheld}


def victim_gradients(
    victim: Backbone | Method,
    images: Tensor,
    labels: Tensor,
    *,
    defence: Defence | None = None,
    dtype: torch.dtype = torch.float32,
    local_steps: int = 1,
    lr: float = LOCAL_LR,
    seed: int = 0,
    ids: Tensor | None = None,
    epoch: int = 0,
) -> Gradients:
    """What a client sends for one batch: the mean gradient of its loss, by parameter name, under `defence`.

    images: [B, C, H, W] normalised as the model expects. labels: [B]. A backbone is trained as the defence's method
    says (cross entropy, or MJP); a method is trained as it is, or as the defence changes it. local_steps: k > 1 sends a
    FedAvg update instead, from k steps of plain SGD with `lr` on the same batch, divided by k · lr: the mean of the k
    gradients. ids: [B], which name the samples' own draws and noise. epoch: of the run, for draws and schedules.
    """
    defence = NoDefence() if defence is None else defence
    check_inputs(images, labels)
    check_range("local_steps", local_steps, 1, flag="--local-steps")
    method = method_of(defence, victim, seed)
    ids = torch.arange(images.shape[0]) if ids is None else ids
    if local_steps > 1:
        method = deepcopy(method)
    total: Gradients = {}
    for step in range(local_steps):
        found = _step(method, Batch(images, ids.to(images.device), {"label": labels}), defence, seed, epoch)
        total = {name: g + total[name] if total else g for name, g in found.items()}
        if step + 1 < local_steps:
            _descend(method, found, lr)
    mean = {name: g / local_steps for name, g in total.items()}
    chance = torch.Generator().manual_seed(seed * 1_000_003 + int(ids[0]))
    withheld = defence.withheld(method.backbone)
    kept = {name: g for name, g in mean.items() if name not in withheld}
    return {name: g.to(dtype) for name, g in defence.upload(kept, images.shape[0], chance).items()}


def known_gradient(method: Method, gradients: Gradients, seed: int = 0, epoch: int = 0) -> Tensor | None:
    """What an attacker subtracts from the table's gradient: λ ∂DAL/∂E_pos on the patch rows, [N, D]; None for no DAL.

    Batch 1. The mask that DAL leaves out is read off the rows that got no gradient at all.
    """
    stem = require_stem(method.backbone)
    hidden = hidden_places(table_rows(gradients[stem.table], stem))
    with torch.enable_grad():
        loss = method.table_loss(hidden[None], seed=seed, epoch=epoch)
        if loss is None:
            return None
        [found] = torch.autograd.grad(loss, [dict(method.backbone.named_parameters())[stem.table]])
    return table_rows(found, stem)


def hidden_places(rows: Tensor) -> Tensor:
    """The places whose row of ∂l/∂E_pos [N, D] is zero: those that used no position, [N] bool."""
    return (rows == 0).all(dim=-1)


def parameter_names(method: Method) -> dict[str, nn.Parameter]:
    """Trained parameters as `Backbone.named_parameters()` names them; the method's own under their own names."""
    named = method.named_parameters()
    return {name.removeprefix("backbone."): p for name, p in named if p.requires_grad}


def check_inputs(images: Tensor, labels: Tensor) -> None:
    """Refuses what is no batch of normalised images with a label each."""
    if not images.is_floating_point():
        raise SitusError(f"images are {images.dtype}: the victim takes normalised floats, (x / 255 - mean) / std")
    if images.dim() != 4 or labels.shape != images.shape[:1]:
        shapes = f"images {list(images.shape)} and labels {list(labels.shape)}"
        raise SitusError(f"{shapes}: must be [B, C, H, W] and [B]")
    if not bool(images.isfinite().all()):
        raise SitusError("images hold NaN or infinity: the victim takes normalised floats, (x / 255 - mean) / std")
    if labels.is_floating_point():
        raise SitusError(f"labels are {labels.dtype}: the victim takes the numbers of classes, as integers")
    if float(images.abs().max()) > 30:
        raise SitusError(
            f"images reach {float(images.abs().max()):.0f}: these are grey levels and not normalised; "
            "give (x / 255 - mean) / std"
        )


@contextmanager
def full_float32() -> Iterator[None]:
    """float32 with all its digits: a GPU rounds what it convolves to TF32's 10 bits unless told not to, and the audit
    would count that as protection."""
    held = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = held


def _step(method: Method, batch: Batch, defence: Defence, seed: int, epoch: int) -> Gradients:
    """The mean gradient over the batch, each sample bounded first where the defence asks for it."""
    count = len(batch.ids)
    size = 1 if defence.per_sample else count
    parts = [batch.part(slice(at, at + size)) for at in range(0, count, size)]
    total: Gradients = {}
    for part in parts:
        with torch.enable_grad(), full_float32():
            loss = method(part, method.draw(part, seed=seed, epoch=epoch)).loss
            named = parameter_names(method)
            found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        held = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)}
        bounded = defence.bound(held)
        total = {name: g + total[name] if total else g for name, g in bounded.items()}
    return {name: g / len(parts) for name, g in total.items()}


@torch.no_grad()
def _descend(method: Method, gradients: Gradients, lr: float) -> None:
    for name, parameter in parameter_names(method).items():
        parameter -= lr * gradients[name]


def _noisy(gradients: Gradients, sigma: float, chance: torch.Generator) -> Gradients:
    if sigma == 0:
        return gradients
    noisy = {}
    for name, g in gradients.items():
        noisy[name] = g + sigma * torch.randn(g.shape, generator=chance, dtype=torch.float32).to(g.device, g.dtype)
    return noisy
