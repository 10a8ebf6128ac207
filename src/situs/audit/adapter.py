"""A user's own module as the victim of an audit: any `nn.Module` that turns images into logits.

    def victim():
        return adapt(MyViT(), img_size=32, weight="to_patch.weight", table="positions")

    situs audit gradients package.module:victim --data FOLDER

Gradient matching needs nothing but the module. `patchembed` and `april` need a layer that is fed the image and a
position table that is added behind it: both are found by one backward pass, among all parameters or among those that
are named. What the module does to an image before that layer, be it a factor or several layers, is undone (`inverse`).
`tokens` needs the layer alone, and a first block of attention and MLP with norms before them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.audit.stem import Feed, Stem, StemBackbone, View, flat_weight, precise, watch_products
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
    """The module as a victim, in eval mode; one in half precision is copied to float32, in which the step is made.

    weight: the patch embedding's weight by its name in the module. table: the position table. Where they are not named,
    they are looked for. normalisation: mean and deviation of the channels that the module expects; ImageNet's where
    None.
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise SitusError(f"{type(module).__name__} has no parameters to train, so there is no gradient to audit")
    asked = {"in_chans": in_chans, "name": name, "normalisation": normalisation}
    backbone = wrap_module(in_eval_mode(module), img_size, kind=StemBackbone, **asked)
    assert isinstance(backbone, StemBackbone)
    size = pair(img_size)
    images = torch.randn(1, in_chans, *size, generator=torch.Generator().manual_seed(0))
    parameters = dict(backbone.named_parameters(remove_duplicate=False))
    for flag, given in (("weight", weight), ("table", table)):
        if given is not None and f"model.{given}" not in parameters:
            raise SitusError(f"{flag}={given}: must name a parameter of {backbone.name} ({flag})")
    names = [None if given is None else f"model.{given}" for given in (weight, table)]
    backbone.table = names[1]
    frozen = [each for each in names if each is not None and not parameters[each].requires_grad]
    if frozen:
        backbone.stem = f"{frozen[0]} is frozen, so its gradient is neither computed nor sent"
        return backbone
    stems = search_stems(backbone, images, *names)
    if isinstance(stems, str):
        backbone.stem = stems
    else:
        stem, *others = stems
        backbone.stem, backbone.others = stem, tuple(others)
        backbone.dim, backbone.num_prefix = parameters[stem.table].shape[stem.channels], stem.first
        backbone.grid = (h, w) = grid_of(stem.count, size)
        backbone.input = backbone.input._replace(patch=(size[0] // h, size[1] // w) if h else None)
    return backbone


def grid_of(count: int, size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of so many patches on an image of a size; (0, 0) where no even cut gives them."""
    able = [(h, count // h) for h in range(1, count + 1) if count % h == 0]
    able = [(h, w) for h, w in able if size[0] % h == 0 and size[1] % w == 0]
    return min(able, key=lambda grid: abs(size[0] / grid[0] - size[1] / grid[1]), default=(0, 0))


# --- the search -----------------------------------------------------------------------------------------------------
# One backward pass tells which layer is fed the image, and which table is added behind it: the gradient of the layer's
# weight is G^T times what the layer is fed, and G is what stands in the rows of the table's gradient. Nothing else has
# that property but by accident, which float64 rules out.


EQUAL = 1e-6
"""Relative: in float64 an equation that holds is off by less, and one that does not by far more."""


def search_stems(backbone: StemBackbone, images: Tensor, weight: str | None, table: str | None) -> list[Stem] | str:
    """The stems among all trained parameters, or among those named, the one with the most patches first: images may
    take several paths, in any order. Where there is none, the reason. images: [1, C, H, W], any."""
    model = precise(backbone)
    images = images.to(next(model.parameters()).device).double()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        model.requires_grad_(False)
        seeing = [product.inputs.requires_grad for product in watch_products(model, images.requires_grad_())[1]]
        for parameter in trained.values():
            parameter.requires_grad_()
        logits, products = watch_products(model, images.detach())
        if not logits.requires_grad:
            raise SitusError(
                f"{backbone.name}: its logits hang on none of its parameters (torch.no_grad or detach in its forward?)"
                ", so there is no gradient to audit (MODEL)"
            )
        loss = F.cross_entropy(logits, torch.zeros(1, dtype=torch.int64, device=logits.device))
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    gradients = {name: g for name, g in zip(trained, found, strict=True) if g is not None}
    tables = [name for name in gradients if table in (None, name)]
    stems: list[Stem] = []
    for number, product in enumerate(products):
        if not seeing[number] or product.name not in gradients or weight not in (None, product.name):
            continue
        flat = flat_weight(gradients[product.name], Stem(product.name, None, "", 0, (1, 1), product.kind))
        for name in tables:
            place = None if name == product.name else _place(gradients[name], flat, product.inputs[0].detach())
            if place is not None and _sees_enough(product.inputs, model, number, images):
                bias = f"{product.name.removesuffix('weight')}bias"
                count = product.inputs.shape[1]
                channels, first = place
                fields = (product.kind, number, channels, count)
                stems.append(Stem(product.name, bias if bias in trained else None, name, first, (1, 1), *fields))
                break
    stems.sort(key=lambda stem: (-stem.count, stem.weight))
    return stems or _reason(weight, table, any(seeing))


def _sees_enough(inputs: Tensor, model: nn.Module, number: int, images: Tensor) -> bool:
    """Whether an image can be had from what the layer is fed [1, N, K]: it is affine, or as many numbers and more.

    The classifier and its bias meet the same equation, but features are no picture.
    """
    if inputs.shape[1] > 1 and inputs.numel() >= images.numel():
        return True
    channels, height, width = images.shape[1:]
    return View(Feed(model, number, copied=True), (channels, height, width), images.device).affine


def _place(table: Tensor, weight: Tensor, inputs: Tensor) -> tuple[int, int] | None:
    """Where in ∂l/∂table G stands with ∂l/∂W [D, K] = G^T inputs [N, K]: its axis of channels, from the end, and the
    first row; None where it does not."""
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
            return axis, first
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
