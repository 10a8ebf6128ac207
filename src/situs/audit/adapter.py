"""A user's own module as the victim of an audit: any `nn.Module` that turns images into logits.

    def victim():
        return adapt(MyViT(), img_size=32, weight="to_patch.weight", table="positions")

    situs audit gradients package.module:victim --data FOLDER

Gradient matching needs nothing but the module. `patchembed` needs a layer whose input is the image and a position table
that is added behind it: one backward pass finds both, among all parameters or among those that are named. What the
module does to an image before that layer, be it a factor or several layers, is undone (`stem.View`). `tokens` needs the
layer alone, and a first block of attention and MLP with norms before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.audit.products import Feed, precise, record_products
from situs.audit.stem import Stem, StemBackbone, View, flat_weight
from situs.core.tokens import Size, pair
from situs.errors import SitusError
from situs.models.module import in_eval_mode, wrap_module


def adapt(
    module: nn.Module,
    img_size: Size,
    *,
    in_chans: int = 3,
    weight: str | None = None,
    table: str | None = None,
    name: str = "",
    normalisation: tuple[Sequence[float], Sequence[float]] | None = None,
) -> StemBackbone:
    """The module as a victim, in eval mode; one in half precision is copied to float32.

    weight, table: names of the patch embedding's weight and of the position table in the module; None searches for
    them. normalisation: mean and deviation of the channels that the module expects; None for ImageNet's.
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise SitusError(f"{type(module).__name__} has no parameters to train, so there is no gradient to audit")
    options = {"in_chans": in_chans, "name": name, "normalisation": normalisation}
    backbone = wrap_module(in_eval_mode(module), img_size, kind=StemBackbone, **options)
    assert isinstance(backbone, StemBackbone)
    size = pair(img_size)
    images = torch.randn(1, in_chans, *size, generator=torch.Generator().manual_seed(0))
    parameters = dict(backbone.named_parameters(remove_duplicate=False))
    for field, value in (("weight", weight), ("table", table)):
        if value is not None and f"model.{value}" not in parameters:
            raise SitusError(f"{field}={value}: {backbone.name} has no parameter named {value}")
    names = [None if value is None else f"model.{value}" for value in (weight, table)]
    backbone.table = names[1]
    frozen = [value for value in names if value is not None and not parameters[value].requires_grad]
    if frozen:
        backbone.stem = f"{frozen[0]} is frozen, so its gradient is neither computed nor sent"
        return backbone
    backbone.stem = stem = search_stem(backbone, images, *names)
    if isinstance(stem, Stem):
        backbone.dim, backbone.num_prefix = parameters[stem.table].shape[stem.channels], stem.first
        backbone.grid = (h, w) = grid_of(stem.count, size)
        backbone.input = backbone.input._replace(patch=(size[0] // h, size[1] // w) if h else None)
    return backbone


def grid_of(count: int, size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of `count` patches on an image of a size; (0, 0) where no even grid gives them."""
    grids = [(h, count // h) for h in range(1, count + 1) if count % h == 0]
    grids = [(h, w) for h, w in grids if size[0] % h == 0 and size[1] % w == 0]
    return min(grids, key=lambda grid: abs(size[0] / grid[0] - size[1] / grid[1]), default=(0, 0))


# --- the search -----------------------------------------------------------------------------------------------------
# One backward pass shows which layer's input is the image, and which table is added behind it: the gradient of the
# layer's weight is G^T times its input, and G stands in the rows of the table's gradient. Anything else has that
# property only by accident, which float64 rules out.


EQUAL = 1e-6
"""Relative error in float64 below which an equation holds; one that does not hold is off by far more."""


def search_stem(backbone: StemBackbone, images: Tensor, weight: str | None, table: str | None) -> Stem | str:
    """The stem among all trained parameters, or among those named, the one with the most patches; else the reason why
    there is none. images: any, [1, C, H, W]."""
    model = precise(backbone)
    images = images.to(next(model.parameters()).device).double()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        model.requires_grad_(False)
        sees_image = [product.rows.requires_grad for product in record_products(model, images.requires_grad_())[1]]
        for parameter in trained.values():
            parameter.requires_grad_()
        logits, products = record_products(model, images.detach())
        if not logits.requires_grad:
            raise SitusError(
                f"MODEL {backbone.name}: the logits do not depend on the parameters, so there is no gradient to audit. "
                "Check whether the forward method of the model uses torch.no_grad or detach"
            )
        loss = F.cross_entropy(logits, torch.zeros(1, dtype=torch.int64, device=logits.device))
        values = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    gradients = {name: g for name, g in zip(trained, values, strict=True) if g is not None}
    tables = [name for name in gradients if table in (None, name)]
    stems: list[Stem] = []
    for number, product in enumerate(products):
        if not sees_image[number] or product.name not in gradients or weight not in (None, product.name):
            continue
        flat = flat_weight(gradients[product.name], Stem(product.name, None, "", 0, layout=product.kind))
        for name in tables:
            place = None if name == product.name else _place(gradients[name], flat, product.rows[0].detach())
            if place is not None and _sees_enough(product.rows, model, number, images):
                bias = f"{product.name.removesuffix('weight')}bias"
                channels, first = place
                stem = Stem(product.name, bias if bias in trained else None, name, first, layout=product.kind)
                stems.append(replace(stem, product=number, channels=channels, count=product.rows.shape[1]))
                break
    best = min(stems, key=lambda stem: (-stem.count, stem.weight), default=None)
    return best or _reason(weight, table, any(sees_image))


def _sees_enough(inputs: Tensor, model: nn.Module, number: int, images: Tensor) -> bool:
    """Whether the layer's input [1, N, K] determines an image: it is affine in it, or has at least as many numbers.

    The classifier and its bias meet the same equation, but features are no picture.
    """
    if inputs.shape[1] > 1 and inputs.numel() >= images.numel():
        return True
    channels, height, width = images.shape[1:]
    return View(Feed(model, number, copied=True), (channels, height, width), images.device).affine


def _place(table: Tensor, weight: Tensor, inputs: Tensor) -> tuple[int, int] | None:
    """Where in ∂l/∂table the G with ∂l/∂W [D, K] = G^T inputs [N, K] stands: its axis of channels, from the end, and
    the first row; None where it is not there."""
    n, d = len(inputs), len(weight)
    # Both sides times one random vector: every first row is tried at once.
    probe = torch.randn(inputs.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(inputs)
    right, target = inputs @ probe, weight @ probe
    for axis in range(-1, -table.dim() - 1, -1):
        if table.shape[axis] != d or table.numel() < n * d or not target.any():
            continue
        rows = table.movedim(axis, -1).reshape(-1, d)
        products = F.conv1d(rows.T.unsqueeze(1), right.view(1, 1, -1)).squeeze(1)  # [D, first rows]
        first = int((products - target.unsqueeze(1)).norm(dim=0).argmin())
        if float((rows[first : first + n].T @ inputs - weight).norm()) <= EQUAL * float(weight.norm()):
            return axis, first
    return None


def _reason(weight: str | None, table: str | None, image_seen: bool) -> str:
    if not image_seen:
        return "no layer with a weight gets an input that depends on the image"
    if weight is not None and table is not None:
        return (
            f"{table} is not simply added to the output of a linear patch embedding. The gradient of {weight} is "
            "therefore not the product of the table's gradient and the patches"
        )
    needed = "the attack needs a linear patch embedding, and a position table that is simply added to the patch tokens"
    if weight is not None:
        return f"{needed}; no such table was found for the patch embedding {weight}"
    return (
        f"{needed}; no such patch embedding was found for {table}"
        if table is not None
        else f"{needed}; no such pair was found"
    )
