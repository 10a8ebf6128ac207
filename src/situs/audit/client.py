"""The client: the gradients that it uploads for a batch, by parameter name, under a defence."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from situs.audit.deadline import StoppedError
from situs.audit.defences import Defence, Gradients, NoDefence, Step, method_of
from situs.audit.stem import Stem, table_rows
from situs.backbones.base import Backbone
from situs.config import Checked
from situs.core.precision import full_float32
from situs.core.when import START, When
from situs.errors import SitusError, counted
from situs.limits import Count
from situs.methods.base import Batch, Method
from situs.methods.measured import HidesPlaces

LEVELS = 127
"""int8's steps on either side of 0: the largest number of a tensor is that many."""

BETAS, EPS = (0.9, 0.999), 1e-8
"""Adam's constants."""


@dataclass(frozen=True)
class StepConfig(Checked):
    """Settings of audits on images or texts: number of samples, batch and gate."""

    count: Count | None = None
    """Number of samples to attack, from the start of the data: a multiple of the batch. Default: 12."""

    classes: Count | None = None
    """Number of classes of a new classifier. Default: 1000 for images, 2 for sentences."""

    batch: Count = 1
    """Number of images or sentences in the audited step."""

    fail_above: str | None = None
    """Gate. blind: fail if a sample is recovered better than by a blind guess. psnr=20 (images) or tokens=0.2 (texts):
    also fail if a sample is above this limit. Exit status: 0 (passed), 3 (failed), 4 (inconclusive)."""

    seed: int = 0
    """Random seed of new weights, masked words and noise."""

    server: Literal["honest", "active"] = "honest"
    """Weights from the server: honest, or crafted to make gradients reveal more (active)."""


RETIRED = {"precision": "the defence bf16, fp16 or int8", "local_steps": "the defence fedavg=2 (two local steps)"}
"""Options of earlier versions -> what stands in their place."""

AnyConfig = TypeVar("AnyConfig", bound=StepConfig)


def split_options(config: type[AnyConfig], options: Mapping[str, Any]) -> tuple[AnyConfig, dict[str, Any]]:
    """The options that are fields of a config as that config, and the others, which are for `open_model`.

    A loss that is a function itself is among the others.
    """
    for name in RETIRED.keys() & options.keys():
        raise SitusError(
            f"{name}={options[name]}: this option no longer exists; use {RETIRED[name]} instead", field="defences"
        )
    names = {field.name for field in fields(config)} - ({"loss"} if callable(options.get("loss")) else set())
    return (
        config(**{name: value for name, value in options.items() if name in names}),
        {name: value for name, value in options.items() if name not in names},
    )


def honest_only(config: StepConfig) -> None:
    """Refuses a server that chooses the weights."""
    if config.server != "honest":
        reason = f"server={config.server}: `situs audit sweep` assumes an honest server; remove this option"
        raise SitusError(reason, field="server")


def names_sent(method: Method, defence: Defence) -> dict[str, int]:
    """Name -> count of numbers, of the gradients that a client sends under a defence."""
    withheld = defence.withheld(method.backbone)
    return {name: p.numel() for name, p in parameter_names(method).items() if name not in withheld}


def victim_gradients(
    victim: Backbone | Method,
    images: Tensor,
    labels: Tensor,
    *,
    defence: Defence | None = None,
    step: Step | None = None,
    ids: Tensor | None = None,
) -> Gradients:
    """What a client sends for one batch: the mean gradient of its loss, by parameter name, under `defence`.

    images: [B, C, H, W] normalised as the model expects. labels: [B]. A backbone is trained as the defence's method
    says (cross entropy, or MJP); a method is trained as it is, or as the defence changes it. step: how it is made; the
    defence may change it, and its batch is that of the images. k > 1 local steps send a FedAvg update, divided by
    k · rate: the mean of the k gradients, as it is before the weights are rounded. ids: [B], which seed the samples'
    draws and noise.
    """
    check_inputs(images, labels)
    ids = torch.arange(images.shape[0]) if ids is None else ids
    step = replace(step or Step(), batch=len(ids))
    return upload_of(victim, Batch(images, ids.to(images.device), {"label": labels}), step, defence or NoDefence())


def upload_of(
    victim: Backbone | Method, batch: Batch, step: Step, defence: Defence, stop: Callable[[], bool] = lambda: False
) -> Gradients:
    """The same for a batch and a step. stop: asked before each local step but the first; True raises
    `StoppedError`."""
    step = defence.step(step)
    method = method_of(defence, victim, step.seed)
    if step.local_steps > 1 or step.dropout:
        method = in_training(deepcopy(method), step)
    parts, named, when = _parts(batch, step.parts), parameter_names(method), step.when._replace(seed=step.seed)

    def gradient(number: int) -> Gradients:
        here = [parts[number % len(parts)]] if step.local_steps > 1 else parts
        return _mean([mean_gradient(method, defence, len(part.ids), partial(loss, part, number)) for part in here])

    def loss(part: Batch, number: int, span: slice) -> Tensor:
        part = part.part(span)
        with _seeded_dropout(step, part, number), _mixed_precision(step, part):
            return method(part, method.draw(part, when)).loss

    mean = after_steps(named, gradient, step, stop)
    chance = torch.Generator().manual_seed(step.seed * 1_000_003 + int(batch.ids[0]))
    withheld = defence.withheld(method.backbone)
    shared = {name: g for name, g in mean.items() if name not in withheld}
    return {name: rounded(g, step.dtype) for name, g in defence.upload(shared, len(batch.ids), chance).items()}


def after_steps(
    named: Mapping[str, Tensor],
    gradient: Callable[[int], Gradients],
    step: Step,
    stop: Callable[[], bool] = lambda: False,
) -> Gradients:
    """The mean update over a client's local steps in units of the rate, which move the weights `named` but for the
    last one. gradient: at the weights as they are, by the number of the step. stop: as in `upload_of`."""
    total, optimiser = Gradients(), LocalOptimiser(step.adam)
    for number in range(step.local_steps):
        if number and stop():
            raise StoppedError
        update = optimiser(gradient(number))
        total = _sum(total, update)
        if number + 1 < step.local_steps:
            with torch.no_grad():
                for name, parameter in named.items():
                    parameter -= step.lr * update[name]
    return total if step.local_steps == 1 else {name: g / step.local_steps for name, g in total.items()}


def mean_gradient(model: nn.Module, defence: Defence, count: int, loss: Callable[[slice], Tensor]) -> Gradients:
    """The mean gradient of a model over `count` samples, each sample's bounded first where the defence does.

    loss: the mean over some of the samples."""
    size, named, bounded = 1 if defence.per_sample else count, parameter_names(model), []
    for at in range(0, count, size):
        # full_float32: what a GPU rounds off would count as protection
        with torch.enable_grad(), full_float32(), _whole_norms(model) as scales:
            gradients = torch.autograd.grad(loss(slice(at, at + size)), [*named.values(), *scales], allow_unused=True)
        pairs = zip(named.items(), gradients, strict=False)
        bounded.append(defence.bound({name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}))
    return _mean(bounded)


def rounded(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient as it arrives when sent in a type; int8 arrives as whole steps times their scale, as floats."""
    if dtype != torch.int8:
        return gradient.to(dtype)
    step = gradient.abs().max() / LEVELS
    return (gradient / step.clamp(min=torch.finfo(gradient.dtype).tiny)).round() * step


class LocalOptimiser:
    """The update of a client's weights for a gradient, in units of the rate: SGD's, or Adam's.

    Called once for each local step, in their order; differentiable."""

    def __init__(self, adam: bool) -> None:
        self.adam, self.count, self.first, self.second = adam, 0, Gradients(), Gradients()

    def __call__(self, gradients: Gradients) -> Gradients:
        if not self.adam:
            return gradients
        (b1, b2), self.count = BETAS, self.count + 1
        self.first = {n: (1 - b1) * g + b1 * self.first.get(n, 0 * g) for n, g in gradients.items()}
        self.second = {n: (1 - b2) * g * g + b2 * self.second.get(n, 0 * g) for n, g in gradients.items()}
        s1, s2 = 1 - b1**self.count, 1 - b2**self.count
        return {n: m / s1 / ((self.second[n] / s2).sqrt() + EPS) for n, m in self.first.items()}


def in_training(method: Method, step: Step) -> Method:
    """The method itself, with its dropout layers at the client's rate, in training mode."""
    if step.dropout:
        for part in method.modules():
            part.training = part.training or not isinstance(part, nn.modules.batchnorm._BatchNorm)
            if isinstance(part, nn.Dropout):
                part.p = step.dropout
    return method


@torch.no_grad()
def least_likely(method: Method, images: Tensor) -> Tensor:
    """The class with the least probability, [n]: the label with the largest loss, and about the largest gradient."""
    return torch.cat([method.backbone(part).argmin(dim=-1) for part in images.split(8)])


def known_gradient(method: Method, stem: Stem, gradients: Gradients, when: When = START) -> Tensor | None:
    """λ ∂DAL/∂E_pos on the patch rows, [N, D], which an attacker subtracts from the table's gradient; None without DAL.

    Batch 1. DAL leaves out the masked rows, which are those without any gradient.
    """
    hidden = hidden_places(table_rows(gradients[stem.table], stem))
    with torch.enable_grad():
        loss = method.table_loss(hidden[None], when) if isinstance(method, HidesPlaces) else None
        if loss is None:
            return None
        [gradient] = torch.autograd.grad(loss, [dict(method.backbone.named_parameters())[stem.table]])
    return table_rows(gradient, stem)


def hidden_places(rows: Tensor) -> Tensor:
    """[N] bool: the places whose row of ∂l/∂E_pos [N, D] is zero, so that no patch used their position."""
    return (rows == 0).all(dim=-1)


def parameter_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trained parameters as `Backbone.named_parameters()` names them; a method's own under their own names."""
    named = model.named_parameters()
    return {name.removeprefix("backbone."): p for name, p in named if p.requires_grad}


def check_inputs(images: Tensor, labels: Tensor) -> None:
    """Refuses anything but normalised images [B, C, H, W] with labels [B]."""
    if not images.is_floating_point():
        raise SitusError(f"images are {images.dtype}; they must be normalised floats, (x / 255 - mean) / std")
    if images.dim() != 4 or labels.shape != images.shape[:1]:
        shapes = f"images {list(images.shape)} and labels {list(labels.shape)}"
        raise SitusError(f"{shapes}: the shapes must be [B, C, H, W] and [B]")
    if not bool(images.isfinite().all()):
        raise SitusError("images contain NaN or infinity; they must be normalised floats, (x / 255 - mean) / std")
    if labels.is_floating_point():
        raise SitusError(f"labels are {labels.dtype}; they must be class numbers (integers)")
    if float(images.abs().max()) > 30:
        raise SitusError(
            f"images have values up to {float(images.abs().max()):.0f}, so they are not normalised; give normalised "
            "values, (x / 255 - mean) / std"
        )


def no_gradient(gradient: Any, parameter: Tensor) -> str:
    """Why something is no gradient of a parameter; "" where it is."""
    if not isinstance(gradient, Tensor):
        return f"is {type(gradient).__name__}, but must be a tensor"
    if gradient.layout != torch.strided:
        return "is sparse: give gradient.to_dense()"
    if not gradient.is_floating_point():
        return f"is {gradient.dtype}: convert it to floats, and multiply it by its scale"
    if gradient.shape != parameter.shape:
        return f"has shape {list(gradient.shape)}, but the parameter has shape {list(parameter.shape)}"
    if gradient.device != parameter.device:
        return f"is on {gradient.device}, but the module is on {parameter.device}"
    if bool(gradient.isnan().any()):
        return "contains NaN"
    coarse = torch.finfo(gradient.dtype).bits < 32  # its numbers may overflow
    return "" if coarse or bool(gradient.isfinite().all()) else "contains infinity"


def _parts(batch: Batch, parts: int) -> list[Batch]:
    """The samples behind an upload, as so many batches of one size."""
    count = len(batch.ids)
    if count % parts:
        raise SitusError(
            f"{counted(count, 'samples')} cannot be divided into {counted(parts, 'batches')} of equal size",
            field=("batch", "defences"),
        )
    return [batch.part(slice(at, at + count // parts)) for at in range(0, count, count // parts)]


def _sum(total: Gradients, more: Gradients) -> Gradients:
    return {name: g + total[name] if total else g for name, g in more.items()}


def _mean(gradients: list[Gradients]) -> Gradients:
    total: Gradients = {}
    for more in gradients:
        total = _sum(total, more)
    return total if len(gradients) == 1 else {name: g / len(gradients) for name, g in total.items()}


@contextmanager
def _whole_norms(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """The frozen scales of LayerNorms whose bias is trained, trained as well.

    For more than 65,536 rows CUDA cannot compute the gradient of a bias alone (pytorch#193016).
    """
    norms = [part for part in model.modules() if isinstance(part, nn.LayerNorm) and isinstance(part.bias, Tensor)]
    scales = [part.weight for part in norms if part.bias.requires_grad and not part.weight.requires_grad]
    for scale in scales:
        scale.requires_grad_(True)
    try:
        yield scales
    finally:
        for scale in scales:
            scale.requires_grad_(False)


@contextmanager
def _mixed_precision(step: Step, part: Batch) -> Iterator[None]:
    """bfloat16 where the client computes in it."""
    with torch.autocast(part.inputs.device.type, torch.bfloat16, enabled=step.autocast), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # a CPU without bfloat16 computes it all the same
        yield


@contextmanager
def _seeded_dropout(step: Step, part: Batch, number: int) -> Iterator[None]:
    """Draws what is dropped the same for a seed, sample and local step, and leaves torch's generator as it is."""
    if not step.dropout:
        yield
        return
    device = part.inputs.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(((step.seed * 1_000_003 + int(part.ids[0])) * 1009 + number) % 2**63)
        yield
