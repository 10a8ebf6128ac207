"""The stem of a module that nobody describes: which layer is fed the image, and which table is added behind it.

One backward pass tells: the gradient of the layer's weight is G^T times what the layer is fed, and G is what stands in
the rows of the table's gradient. Nothing else has that property but by accident, which float64 rules out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.audit.stem import Stem, StemBackbone, flat_weight
from situs.audit.stem.inverse import View
from situs.audit.stem.products import Feed, precise, watch_products

EQUAL = 1e-6
"""Relative: in float64 an equation that holds is off by less, and one that does not by far more."""


class _Place(NamedTuple):
    """Where the rows of a layer's G stand in a table: its axis of channels, from the end, and the first row."""

    channels: int
    first: int


def search_stem(backbone: StemBackbone, images: Tensor, weight: str | None, table: str | None) -> Stem | str:
    """The stem among all trained parameters, or among those named; else the reason. images: [1, C, H, W], any."""
    model = precise(backbone)
    images = images.to(next(model.parameters()).device).double()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        model.requires_grad_(False)
        seeing = [product.inputs.requires_grad for product in watch_products(model, images.requires_grad_())[1]]
        for parameter in trained.values():
            parameter.requires_grad_()
        logits, products = watch_products(model, images.detach())
        loss = F.cross_entropy(logits, torch.zeros(1, dtype=torch.int64, device=logits.device))
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    gradients = {name: g for name, g in zip(trained, found, strict=True) if g is not None}
    tables = [name for name in gradients if table in (None, name)]
    for number, product in enumerate(products):
        if not seeing[number] or product.name not in gradients or weight not in (None, product.name):
            continue
        flat = flat_weight(gradients[product.name], Stem(product.name, None, "", 0, (1, 1), product.kind))
        for name in tables:
            place = None if name == product.name else _place(gradients[name], flat, product.inputs[0].detach())
            if place is not None and _sees_enough(product.inputs, model, number, images):
                bias = f"{product.name.removesuffix('weight')}bias"
                count = product.inputs.shape[1]
                fields = (product.kind, number, place.channels, count)
                return Stem(product.name, bias if bias in trained else None, name, place.first, (1, 1), *fields)
    return _reason(weight, table, any(seeing))


def _sees_enough(inputs: Tensor, model: nn.Module, number: int, images: Tensor) -> bool:
    """Whether an image can be had from what the layer is fed [1, N, K]: it is affine, or as many numbers and more.

    The classifier and its bias meet the same equation, but features are no picture.
    """
    if inputs.shape[1] > 1 and inputs.numel() >= images.numel():
        return True
    channels, height, width = images.shape[1:]
    return View(Feed(model, number), (channels, height, width), images.device).affine


def _place(table: Tensor, weight: Tensor, inputs: Tensor) -> _Place | None:
    """Where in ∂l/∂table G stands with ∂l/∂W [D, K] = G^T inputs [N, K]; None where it does not."""
    n, d = len(inputs), len(weight)
    # Both sides times one random vector: every first row is tried at once.
    probe = torch.randn(inputs.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(inputs)
    given, wanted = inputs @ probe, weight @ probe
    for axis in range(-1, -table.dim() - 1, -1):
        if table.shape[axis] != d or table.numel() < n * d or not wanted.any():
            continue
        rows = table.movedim(axis, -1).reshape(-1, d)
        made = F.conv1d(rows.T.unsqueeze(1), given.view(1, 1, -1)).squeeze(1)  # [D, first rows]
        off = (made - wanted.unsqueeze(1)).norm(dim=0) / wanted.norm()
        first = int(off.argmin())
        if float((rows[first : first + n].T @ inputs - weight).norm()) <= EQUAL * float(weight.norm()):
            return _Place(axis, first)
    return None


def _reason(weight: str | None, table: str | None, seen: bool) -> str:
    if not seen:
        return "no layer was found that multiplies what comes of the image with one of its weights"
    if weight is not None and table is not None:
        return (
            f"the gradient of {weight} is not the product of the table's gradient with what it is fed: {table} is not "
            "simply added behind a linear patch embedding"
        )
    among = " and ".join(name for name in (weight, table) if name) or "its trained parameters"
    return (
        f"among {among} there is no position table that is simply added behind a linear layer which is fed the image, "
        "so no row holds a patch's own gradient"
    )
