"""The same computation run twice, clear and permuted, and how far the two are apart.

An *arm* runs owner's part, blocks and a loss: tokens -> assemble -> move -> blocks -> move back -> loss, with its own
copy of the parameters in a dtype of choice, and may train them. The wrapped model is never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from situs.backbones import create_backbone
from situs.backbones.base import Backbone, Stream
from situs.core.position import Positions
from situs.core.tokens import take
from situs.errors import SitusError
from situs.locks.precise import KeepDouble

Move = Callable[[Stream], Stream]
Back = Callable[[Tensor], Tensor]
PREFIX = "backbone.model."


@dataclass(frozen=True)
class Sample:
    """What the arms run on. index: the patch tokens that take part ([K]; None: all). mask: [B, K] or None."""

    x: Tensor
    index: Tensor | None = None
    mask: Tensor | None = None


@dataclass(frozen=True)
class Arm:
    """What one arm gave, in clear order; names are the wrapped model's own."""

    output: Tensor
    input_gradient: Tensor
    gradients: dict[str, Tensor]
    trained: dict[str, Tensor] = field(default_factory=dict)
    trained_output: Tensor | None = None


class Stack(nn.Module):
    """assemble, move and blocks as one module, so that `functional_call` can exchange its parameters."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone
        self.inside = False
        """Whether the blocks are running: what hooks see outside belongs to the owner."""

    def forward(self, tokens: Tensor, sample: Sample, move: Move) -> Tensor:
        places: Positions | None = self.backbone.positions()
        if sample.index is not None:
            places = places.take(sample.index)
        stream = move(self.backbone.assemble(tokens, places, sample.mask))
        self.inside = True
        try:
            return self.backbone.blocks(stream).z
        finally:
            self.inside = False


def as_backbone(model: Any) -> Backbone:
    """A backbone as it is, or around a model of timm or transformers; anything else is refused."""
    if isinstance(model, Backbone):
        return model
    if not isinstance(model, nn.Module):
        raise SitusError(f"verify takes a model, not a {type(model).__name__}; create_backbone makes one of a name")
    if not type(model).__module__.startswith(("timm.", "transformers.")):
        raise SitusError(
            f"{type(model).__qualname__} is neither timm's nor transformers', so where its blocks begin is not known"
        )
    return create_backbone(model)


def check_input(backbone: Backbone, x: Any) -> None:
    """Refuses inputs that the model cannot take: not None, no tensor, empty, of the wrong kind, unknown words."""
    if x is None or "tokens" in backbone.refusals:
        return
    kind = "ids [B, N], integers" if backbone.img_size is None else "images [B, C, H, W], floating point"
    if not isinstance(x, Tensor):
        raise SitusError(f"x is a {type(x).__name__}: {backbone.name} takes a tensor of {kind}")
    if not x.numel() or x.is_floating_point() == (backbone.img_size is None):
        raise SitusError(f"x is {list(x.shape)} of {x.dtype}: {backbone.name} takes {kind}")
    if backbone.img_size is None and not 0 <= int(x.min()) <= int(x.max()) < backbone.model.config.vocab_size:
        raise SitusError(f"x holds ids beyond the {backbone.model.config.vocab_size} words of {backbone.name}")


def sample_of(backbone: Backbone, x: Tensor | None, tokens: int, generator: torch.Generator) -> Sample:
    """Random inputs where none are given; at most `tokens` of their tokens where the model allows a subset."""
    if x is None:
        x = _random_input(backbone, tokens, generator)
    elif x.is_floating_point():
        x = x.to(own_dtype(backbone))
    if x.dim() == 2:  # ids: padding is part of the law where a model knows it
        mask = torch.ones(x.shape, dtype=torch.bool, device=x.device)
        if x.shape[1] > 4 and "rows" not in backbone.refusals:
            mask[-1, -3:] = False
        return Sample(x, mask=mask)
    if "take" in backbone.refusals or backbone.num_tokens <= tokens:
        return Sample(x)
    index = torch.randperm(backbone.num_tokens, generator=generator)[:tokens].sort().values
    return Sample(x, index.to(x.device))


def _random_input(backbone: Backbone, tokens: int, generator: torch.Generator) -> Tensor:
    weight = next(backbone.model.parameters())
    if backbone.img_size is not None:
        images = torch.randn(2, backbone.in_chans, *backbone.img_size, generator=generator)
        return images.to(weight.device, weight.dtype)
    words = backbone.model.config.vocab_size
    return torch.randint(words, (2, min(backbone.num_tokens, tokens)), generator=generator).to(weight.device)


def own_dtype(backbone: Backbone) -> torch.dtype:
    """The dtype of the model's weights."""
    return next(p.dtype for p in backbone.model.parameters() if p.is_floating_point())


def tensors_of(stack: Stack, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Copies of all parameters and buffers in `dtype`."""

    def copy(t: Tensor) -> Tensor:
        return t.detach().to(dtype, copy=True) if t.is_floating_point() else t.detach().clone()

    parameters = {name: copy(p) for name, p in stack.named_parameters()}
    return parameters, {name: copy(b) for name, b in stack.named_buffers()}


def embedded(backbone: Backbone, sample: Sample, dtype: torch.dtype) -> Tensor:
    """The patch tokens that the arms start from, [B, K, D]."""
    with torch.no_grad():
        tokens = backbone.embed(sample.x).to(dtype)
    return tokens if sample.index is None else take(tokens, sample.index)


def keyed(
    parameters: Mapping[str, Tensor], key: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """The parameters with `key` applied to those of the wrapped model, under the model's own names."""
    state = {name.removeprefix(PREFIX): p for name, p in parameters.items() if name.startswith(PREFIX)}
    return {**parameters, **{PREFIX + name: p for name, p in key(state).items()}}


Tensors = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
"""Parameters and buffers, by name."""


def run_arm(stack: Stack, tensors: Tensors, tokens: Tensor, sample: Sample, move: Move, back: Back) -> Tensor:
    """Forward: the blocks' output in clear order."""
    with precise(tokens.dtype):
        return back(functional_call(stack, {**tensors[0], **tensors[1]}, (tokens, sample, move)))


def train_arm(
    stack: Stack,
    tensors: Tensors,
    tokens: Tensor,
    sample: Sample,
    move: Move,
    back: Back,
    cotangent: Tensor,
    steps: int,
) -> Arm:
    """Forward, backward and `steps` of AdamW. loss = <cotangent, output in clear order>."""
    parameters = {name: p.clone().requires_grad_(p.is_floating_point()) for name, p in tensors[0].items()}
    leaves = {name: p for name, p in parameters.items() if p.requires_grad}

    def output(tokens: Tensor) -> Tensor:
        return run_arm(stack, (parameters, tensors[1]), tokens, sample, move, back)

    start = tokens.clone().requires_grad_()
    first = output(start)
    found = torch.autograd.grad((first * cotangent).sum(), [start, *leaves.values()], allow_unused=True)
    gradients = {name: g for name, g in zip(leaves, found[1:], strict=True) if g is not None}
    if not steps:
        return Arm(first.detach(), found[0], _own(gradients))
    used = [parameters[name] for name in gradients]
    # A large epsilon: the usual 1e-8 blows rounding in gradients that are 0 (the keys' bias) up towards whole steps.
    optimizer = torch.optim.AdamW(used, lr=1e-3, weight_decay=0.05, eps=1e-6)
    for step in range(steps):
        loss = None if step == 0 else (output(tokens) * cotangent).sum()
        grads = gradients.values() if loss is None else torch.autograd.grad(loss, used)
        for p, g in zip(used, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
    with torch.no_grad():
        last = output(tokens)
    trained = {name: parameters[name].detach() for name in gradients}
    return Arm(first.detach(), found[0], _own(gradients), _own(trained), last)


def _own(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Under the wrapped model's own names; what the backbone itself holds (Swin's table) keeps a name of its own."""
    return {name.removeprefix(PREFIX): t for name, t in named.items()}


def precise(dtype: torch.dtype) -> Any:
    """float64 all the way where float64 is asked for."""
    return KeepDouble() if dtype == torch.float64 else nullcontext()


@contextmanager
def evaluating(backbone: Backbone) -> Iterator[None]:
    """Without dropout, whose draws belong to places; the mode is put back."""
    training = backbone.training
    backbone.eval()
    try:
        yield
    finally:
        backbone.train(training)


def gap(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest number of `a`; infinite where either is not finite."""
    if a.shape != b.shape:
        return float("inf")
    scale, difference = a.abs().max(), (a - b).abs().max()
    if not (torch.isfinite(scale) and torch.isfinite(difference)):
        return float("inf")
    return float(difference / scale.clamp(min=torch.finfo(a.dtype).tiny))


def named_gap(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The worst tensor's difference, relative to that tensor's largest number.

    Or to a thousandth of the largest of all, where its own is smaller: a gradient that is 0 but for rounding (the
    keys' bias under a softmax) has no size of its own.
    """
    if a.keys() != b.keys():
        return float("inf")
    floor = max((float(t.abs().max()) for t in a.values()), default=0.0) * 1e-3
    worst = 0.0
    for name, t in a.items():
        difference = float((t - b[name]).abs().max())
        worst = max(worst, difference / max(float(t.abs().max()), floor, torch.finfo(t.dtype).tiny))
        if not difference < float("inf"):
            return float("inf")
    return worst
