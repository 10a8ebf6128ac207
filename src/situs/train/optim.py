"""AdamW with the usual recipes: schedule, parameter groups, layer decay, clipping.

Each rule is a pure function of names and shapes (`layer_numbers`, `groups`) or of the step (`rate_at`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from situs.config import Checked
from situs.errors import SitusError
from situs.limits import Count, Natural, NotNegative, Positive, Within
from situs.methods.base import Method

_torch: Any = torch  # its stubs do not export the foreach kernels


_Decay = Annotated[float, Within("[0, 1)")]


@dataclass(frozen=True)
class OptimConfig(Checked):
    """AdamW with its schedule, weight decay and clipping."""

    retired: ClassVar = {"ema_warmup": (True, "the average always begins with a smaller decay than `ema`")}

    lr: Positive | None = None
    """Peak learning rate. Default: base_lr · global batch / lr_reference."""

    base_lr: Positive | None = None
    """Learning rate for a global batch of `lr_reference`, if `lr` is not set. The default is 5e-4 for a batch of 512.
    Below a batch of 256, the default rate is proportional to the square root of the batch. If only a classifier or LoRA
    is trained, the default is 1e-3 · sqrt(300 / updates), between 3e-4 and 3e-3."""

    lr_reference: Count = 512
    """Batch size for which `base_lr` is the learning rate. It is 512 in the recipes of DeiT and MP3, and 256 in those
    of MAE and DropPos."""

    weight_decay: NotNegative = 0.05
    """Decoupled weight decay of matrices and kernels. Norms, biases, positions and tokens have no decay."""

    betas: tuple[_Decay, _Decay] = (0.9, 0.999)
    """Decay of AdamW's two moments. MAE and DropPos pretrain with (0.9, 0.95)."""

    eps: Positive = 1e-8
    """AdamW's ε, added to the root of the second moment."""

    schedule: Literal["cosine", "linear", "constant", "halving", "steps"] = "cosine"
    """How the learning rate falls from its peak to `min_lr` after the warm-up. halving: by half after every
    `halve_every` updates. steps: to a tenth at each point in `drop_at`."""

    halve_every: Count = 10_000
    """With schedule=halving: number of updates between two halvings of the rate."""

    drop_at: tuple[Annotated[float, Within("(0, 1)")], ...] = (0.8889, 0.963)
    """With schedule=steps: the points at which the rate drops, as ratios of the run's length. The default is the usual
    schedule of detectors."""

    warmup_epochs: NotNegative = 5.0
    """Warm-up in epochs. The rate rises linearly from 0, step by step."""

    warmup_steps: Natural | None = None
    """Warm-up in updates. It replaces `warmup_epochs`."""

    warmup_lr: Positive | None = None
    """Constant learning rate during the warm-up. Default: the rate rises from 0."""

    min_lr: NotNegative = 1e-6
    """Learning rate at the end of the run."""

    layer_decay: Annotated[float, Within("(0, 1]")] | None = None
    """Layer decay: the learning rate of a layer divided by that of the next layer. With 1, all layers have the same
    rate. Default: .75 if all layers of a pretrained model are fine-tuned as a classifier and no learning rate is set
    (the rate is then 1.2e-6 · batch); otherwise 1."""

    clip: Positive | None = None
    """Clip the gradient to this norm. Default: no clipping."""

    clip_mode: Literal["norm", "parameter"] = "norm"
    """Which gradient norm is clipped. norm: over all parameters. parameter: of each parameter, as in DropPos's
    published code."""

    ema: Annotated[float, Within("(0, 1)")] | None = None
    """Decay of the moving average of the weights (EMA), such as .9999. Default: no average. At step t the decay is at
    most (1 + t) / (10 + t), so that the average soon forgets the first weights."""


RATES = {
    "cosine": lambda share: 0.5 * (1.0 + math.cos(math.pi * share)),
    "linear": lambda share: 1.0 - share,
    "constant": lambda _: 1.0,
}
"""name -> level between min_lr (0) and the peak (1) when `share` of the way after the warm-up is done."""


def peak_rate(config: OptimConfig, global_batch: int, *, updates: int = 0, few: bool = False) -> float:
    """The highest rate of the schedule for a global batch of this size.

    few: whether only a small part of the weights is trained (the classifier, LoRA's products), in `updates` updates.
    These weights start at or near 0, so that a short run needs larger updates.
    """
    if config.lr is not None:
        return config.lr
    if config.base_lr is not None or config.lr_reference != OptimConfig.lr_reference:
        return (config.base_lr or BASE_LR) * global_batch / config.lr_reference
    if few and updates:
        return min(3e-3, max(3e-4, 1e-3 * math.sqrt(300 / updates)))
    share = global_batch / LINEAR_FROM
    return BASE_LR * LINEAR_FROM / config.lr_reference * (share if share >= 1 else math.sqrt(share))


def gentle(config: OptimConfig, method: Method) -> OptimConfig:
    """The rates for every layer of a pretrained model, if the config sets none: low ones below the head.

    From the cross-validation in `benchmarks/few_labels.py`. A model without numbered blocks has one rate for all.
    """
    if (config.lr, config.base_lr, config.layer_decay) != (
        None,
        None,
        None,
    ) or config.lr_reference != OptimConfig.lr_reference:
        return config
    blocks = bool(method.backbone.block_modules())
    return replace(config, base_lr=GENTLE_LR * config.lr_reference, layer_decay=GENTLE_DECAY if blocks else None)


GENTLE_LR, GENTLE_DECAY = 1.2e-6, 0.75
"""For a pretrained model's layers: rate per sample of a batch, and layer decay."""

BASE_LR, LINEAR_FROM = 5e-4, 256
"""Defaults: rate for a batch of 512, and the batch from which the rate is linear in the batch; below, in its root."""

FEW = 0.1
"""Share of the weights below which only a small part of them counts as trained."""


def trains_few(method: Method) -> bool:
    """Whether only a small part of the weights is trained; those on the other side of a split count as there."""
    weights = list(method.parameters())
    trained = [weight for weight in weights if getattr(weight, "trained_elsewhere", weight.requires_grad)]
    return sum(weight.numel() for weight in trained) < FEW * sum(weight.numel() for weight in weights)


def requested_warmup(config: OptimConfig, steps_per_epoch: int) -> int:
    """The updates of the warm-up that the config asks for."""
    return round(config.warmup_epochs * steps_per_epoch) if config.warmup_steps is None else config.warmup_steps


def warmup_steps(config: OptimConfig, steps_per_epoch: int, total: int) -> int:
    """The warm-up's updates in a run of `total`: a tenth of them where it would be longer than the run."""
    requested = requested_warmup(config, steps_per_epoch)
    return requested if requested < total else total // 10


def rate_at(step: int, total: int, warmup: int, peak: float, config: OptimConfig) -> float:
    """The rate of the update number `step` (the first is 0) of `total`, of which the first `warmup` rise."""
    if step < warmup:
        return peak * (step + 1) / warmup if config.warmup_lr is None else config.warmup_lr
    if config.schedule == "halving":
        return max(min(config.min_lr, peak), peak * 0.5 ** (step // config.halve_every))
    if config.schedule == "steps":
        return max(min(config.min_lr, peak), peak * 0.1 ** sum(step >= share * total for share in config.drop_at))
    share = (step - warmup) / max(1, total - warmup)
    low = min(config.min_lr, peak)
    return low + (peak - low) * RATES[config.schedule](min(1.0, share))


BACKBONE = "backbone."


def layer_numbers(method: Method) -> dict[str, int]:
    """Depth of each parameter: 0 for embedding, positions, prefix tokens; i + 1 for block i; then the rest.

    What the method adds is at the top.
    """
    roles = {f"{BACKBONE}{name}": role for name, role in method.backbone.roles().items()}
    top = len(method.backbone.block_modules()) + 1
    return {name: roles[name].depth if name in roles else top for name, _ in method.named_parameters()}


_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)


def spared_names(method: Method) -> set[str]:
    """Parameters without weight decay: norms, biases, whatever has one dimension, positions, tokens."""
    spared = {f"{module}.{name}" for module, norm in method.named_modules() if isinstance(norm, _NORMS)
              for name, _ in norm.named_parameters(recurse=False)}  # fmt: skip
    spared |= method.no_decay()
    models_rule: Any = getattr(method.backbone.model, "no_weight_decay", None)  # timm's models may have one
    if models_rule is not None:
        spared |= {f"{BACKBONE}model.{name}" for name in models_rule()}
    roles = method.backbone.roles()
    spared |= {f"{BACKBONE}{name}" for name, role in roles.items() if role.part in ("table", "position", "prefix")}
    spared |= {name for name, parameter in method.named_parameters() if parameter.ndim <= 1}
    return spared - method.decayed()


def groups(method: Method, config: OptimConfig) -> list[dict[str, Any]]:
    """Every trainable parameter in one group {params, names, weight_decay, scale}; frozen ones in none.

    scale: the group's share of the schedule's rate, layer_decay^(top - depth).
    """
    numbers, decay = layer_numbers(method), config.layer_decay or 1.0
    top = max(numbers.values(), default=0)
    if decay < 1 and top < 2:
        raise SitusError(
            f"layer_decay={decay}: must be 1 for {method.backbone.name}, which has no numbered blocks",
            field="optim.layer_decay",
        )
    spared = spared_names(method)
    by_rule: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in method.named_parameters():
        if not parameter.requires_grad:
            continue
        depth = numbers[name] if decay < 1 else top
        key = (depth, name in spared)
        group = by_rule.setdefault(key, {
            "params": [], "names": [], "scale": decay ** (top - depth),
            "weight_decay": 0.0 if name in spared else config.weight_decay,
        })  # fmt: skip
        group["params"].append(parameter)
        group["names"].append(name)
    if not by_rule:
        raise SitusError(f"{type(method).__name__}: every parameter is frozen, so there is nothing to train")
    return [by_rule[key] for key in sorted(by_rule)]


def make_optimizer(method: Method, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over `groups`. The fused kernels can also skip an update on the device (`found_inf`)."""
    parameter_groups = groups(method, config)
    device = parameter_groups[0]["params"][0].device
    for group in parameter_groups:
        # Written by `set_rate` before each update; on a GPU a tensor, which a recorded update reads.
        group["lr"] = torch.zeros((), device=device) if device.type == "cuda" else 0.0
    return torch.optim.AdamW(
        parameter_groups, betas=config.betas, eps=config.eps, fused=True, capturable=device.type == "cuda"
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Gives every group its share of this step's rate."""
    for group in optimizer.param_groups:
        share = rate * group["scale"]
        group["lr"] = group["lr"].fill_(share) if isinstance(group["lr"], Tensor) else share


def clip_gradients(parameters: Sequence[Tensor], config: OptimConfig) -> Tensor:
    """Clips the gradients in place; gives their norm over all parameters before that, on the device."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        raise SitusError("no parameter has a gradient: the loss does not depend on any trained parameter")
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    clip_by(gradients, config, clip_share(norm, config))
    return norm


def gradient_norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each gradient by itself, by the kernel that their common norm is computed with."""
    return _torch._foreach_norm(list(gradients)) if gradients else []


def clip_share(norm: Tensor, config: OptimConfig) -> Tensor | None:
    """The factor that clips all gradients to the config's norm; None where the config asks for no common norm."""
    if config.clip is None or config.clip_mode != "norm":
        return None
    return torch.clamp(config.clip / (norm + 1e-6), max=1.0)


def clip_by(gradients: Sequence[Tensor], config: OptimConfig, share: Tensor | None) -> None:
    """Clips gradients in place: by their common share, or each by itself where the config says so."""
    if config.clip is None or not gradients:
        return
    if config.clip_mode == "norm":
        assert share is not None
        _torch._foreach_mul_(gradients, share)
    else:
        norms = torch.stack(gradient_norms(gradients))
        shares = torch.clamp(config.clip / (norms + 1e-6), max=1.0)
        _torch._foreach_mul_(gradients, list(shares.unbind()))
