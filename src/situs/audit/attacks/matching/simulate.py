"""What an attacker computes again and again: the gradients that guessed images would have sent.

The same function as `client.victim_gradients` without what the attacker cannot know (the noise, the draws of MJP beyond
its mask), pure and twice differentiable, so that it can be mapped over many uploads and followed back to the pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.func import functional_call, grad

from situs.audit.attacks.base import Knowledge
from situs.audit.client import Walk, hidden_places
from situs.audit.defences import Gradients
from situs.audit.stem import find_stem, table_rows
from situs.backbones.base import Backbone
from situs.methods.base import Batch, Draws, Method
from situs.methods.measured import HidesPlaces

Simulation = Callable[[Tensor, Tensor, Draws], Gradients]
"""(images [B, C, H, W], labels [B], draws) -> gradients by name."""


def simulation(method: Method, known: Knowledge, names: Iterable[str]) -> Simulation:
    """The function that turns guessed images into the gradients of `names` that a client would have made of them."""
    own = dict(method.named_parameters())
    full = {name.removeprefix("backbone."): name for name, p in own.items() if p.requires_grad}
    names = [name for name in names if name in full]
    whole = known.defence.per_sample or known.local_steps > 1  # a norm over all gradients, or steps along them
    moved = {name: own[full[name]].detach() for name in (full if whole else names)}
    size = 1 if known.defence.per_sample else known.batch

    def loss(weights: Gradients, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        batch = Batch(images, torch.zeros_like(labels), {"label": labels})
        return functional_call(method, {full[name]: w for name, w in weights.items()}, (batch, draws)).loss

    def mean(weights: Gradients, images: Tensor, labels: Tensor, draws: Draws) -> Gradients:
        total: Gradients = {}
        parts = range(0, known.batch, size)
        for i in parts:
            part = {name: value[i : i + size] if value.dim() else value for name, value in draws.items()}
            found = grad(loss)(weights, images[i : i + size], labels[i : i + size], part)
            found = known.defence.bound(found) if known.defence.per_sample else found
            total = {name: g + total[name] if total else g for name, g in found.items()}
        return {name: g / len(parts) for name, g in total.items()}

    def gradients(images: Tensor, labels: Tensor, draws: Draws) -> Gradients:
        weights, total, walk = moved, Gradients(), Walk(known.training)
        for step in range(known.local_steps):
            found = mean(weights, images, labels, draws)
            found = walk(found) if known.local_steps > 1 else found  # a single step is undone in what was sent
            total = {name: g + total[name] if total else g for name, g in found.items()}
            if step + 1 < known.local_steps:
                weights = {name: w - known.training.lr * found[name] for name, w in weights.items()}
        return {name: total[name] / known.local_steps for name in names}

    return gradients


def guessed_draws(method: Method, upload: Gradients, known: Knowledge) -> Draws:
    """The draws behind an upload as far as it shows them.

    Of one image under MJP the mask shows in the rows of the table that got no gradient, and the order inside it changes
    no gradient, so that any will do. A batch has a mask an image, which the sum hides: none is assumed.
    """
    ids = torch.zeros(known.batch, dtype=torch.int64)
    draws = method.draw(Batch(ids, ids), known.when._replace(seed=known.seed))
    for name in {"index", "pixels"} & draws.keys():
        draws[name] = torch.arange(draws[name].shape[1]).expand_as(draws[name]).contiguous()
    if "mask" in draws:
        mask = _mask_of(method.backbone, upload) if isinstance(method, HidesPlaces) and known.batch == 1 else None
        draws["mask"] = torch.zeros_like(draws["mask"]) if mask is None else mask[None].to(draws["mask"].device)
    device = next(method.parameters()).device
    return {name: value.to(device) for name, value in draws.items()}


def _mask_of(backbone: Backbone, upload: Gradients) -> Tensor | None:
    stem = find_stem(backbone)
    if isinstance(stem, str) or stem.table not in upload:
        return None
    return hidden_places(table_rows(upload[stem.table], stem))
