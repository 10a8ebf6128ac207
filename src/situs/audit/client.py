"""The client: the gradients that it would upload for a batch, by parameter name, under a defence."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

from situs.audit.defences import Defence, Gradients, NoDefence, method_of
from situs.audit.stem import Stem, table_rows
from situs.backbones.base import Backbone
from situs.core.precision import full_float32
from situs.errors import SitusError
from situs.limits import check_value
from situs.methods.base import Batch, Method

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The types gradients may be sent in. They are computed in float32 and rounded on the way out."""

LOCAL_LR = 0.01
"""The learning rate of a client's local steps, which the server sets."""


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
    check_value("local_steps", local_steps, ">= 1")
    method = method_of(defence, victim, seed)
    ids = torch.arange(images.shape[0]) if ids is None else ids
    if local_steps > 1:
        method = deepcopy(method)
    total: Gradients = {}
    for step in range(local_steps):
        found = _step(method, Batch(images, ids.to(images.device), {"label": labels}), defence, seed, epoch)
        total = {name: g + total[name] if total else g for name, g in found.items()}
        if step + 1 < local_steps:
            with torch.no_grad():
                for name, parameter in parameter_names(method).items():
                    parameter -= lr * found[name]
    mean = {name: g / local_steps for name, g in total.items()}
    chance = torch.Generator().manual_seed(seed * 1_000_003 + int(ids[0]))
    withheld = defence.withheld(method.backbone)
    kept = {name: g for name, g in mean.items() if name not in withheld}
    return {name: g.to(dtype) for name, g in defence.upload(kept, images.shape[0], chance).items()}


def known_gradient(method: Method, stem: Stem, gradients: Gradients, seed: int = 0, epoch: int = 0) -> Tensor | None:
    """What an attacker subtracts from the table's gradient: λ ∂DAL/∂E_pos on the patch rows, [N, D]; None for no DAL.

    Batch 1. The mask that DAL leaves out is read off the rows that got no gradient at all.
    """
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


def _step(method: Method, batch: Batch, defence: Defence, seed: int, epoch: int) -> Gradients:
    """The mean gradient over the batch, each sample bounded first where the defence asks for it."""
    count = len(batch.ids)
    size = 1 if defence.per_sample else count
    parts = [batch.part(slice(at, at + size)) for at in range(0, count, size)]
    total: Gradients = {}
    for part in parts:
        with torch.enable_grad(), full_float32():  # what a GPU rounds off would count as protection
            loss = method(part, method.draw(part, seed=seed, epoch=epoch)).loss
            named = parameter_names(method)
            found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        held = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)}
        bounded = defence.bound(held)
        total = {name: g + total[name] if total else g for name, g in bounded.items()}
    return {name: g / len(parts) for name, g in total.items()}
