"""Where a backbone keeps its patch embedding and its position table, by parameter name, found by behaviour.

Nothing here knows a library's layout: a weight is the patch embedding if multiplying patches by it *is* `embed`, and
a parameter holds the table if the table's gradient arrives in its rows unchanged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from situs.audit.stem.inverse import View
from situs.audit.stem.products import Feed, Kind
from situs.backbones.base import Backbone
from situs.core.tokens import pair, patchify, unpatchify
from situs.errors import SitusError
from situs.models.module import OwnModule


@dataclass(frozen=True)
class Stem:
    """Names of what an image meets first. first: the row of the table parameter that belongs to patch 0.

    layout: how the weight holds a patch: "patches" as a convolution whose patches are those of `patchify`; else what is
    multiplied with it is the input of product number `product` (`products.Feed`). channels: the table's axis of
    channels, from the end. count: the patches; 0 for as many as the backbone has tokens.
    """

    weight: str
    bias: str | None
    table: str
    first: int
    patch_size: tuple[int, int]
    layout: Literal["patches"] | Kind = "patches"
    product: int = -1
    channels: int = -1
    count: int = 0


class StemBackbone(OwnModule):
    """A user's own module that names its stem itself, or the reason why it has none.

    others: further stems, where images take several paths. table: the parameter that its user calls the position table,
    whether or not the stem is one.
    """

    stem: Stem | str = "its patch embedding and position table were not looked for"
    others: tuple[Stem, ...] = ()
    table: str | None = None


def flat_weight(weight: Tensor, stem: Stem | None = None) -> Tensor:
    """A patch embedding's weight (or its gradient) as the matrix [..., D, K] on the patches of `patchify`.

    weight: a convolution [..., D, C, P_h, P_w], or as the stem's layout says; K is then what its layer is fed.
    """
    layout = "patches" if stem is None else stem.layout
    if layout == "patches":
        return weight.movedim(-3, -1).flatten(-3)
    return weight.flatten(-3) if layout == "unfolded" else weight.mT if layout == "turned" else weight


def table_rows(parameter: Tensor, stem: Stem, prefix: bool = False) -> Tensor:
    """The rows of a table parameter (or of its gradient) that belong to patches, [N, D]; prefix: all it has."""
    rows = parameter.movedim(stem.channels, -1)
    rows = rows.reshape(-1, rows.shape[-1])
    return rows if prefix else rows[stem.first : stem.first + stem.count if stem.count else None]


def patch_count(backbone: Backbone, stem: Stem) -> int:
    """N: how many patches an image has in the patch embedding's equations."""
    return stem.count or backbone.num_tokens


def view_of(backbone: Backbone, stem: Stem) -> View | None:
    """What the patch embedding sees of an image, where that is not simply its patches."""
    if stem.layout == "patches":
        return None
    assert backbone.input.shape is not None
    device = next(backbone.parameters()).device
    return View(Feed(backbone, stem.product), (backbone.input.channels, *pair(backbone.input.shape)), device)


def to_images(patches: Tensor, backbone: Backbone, stem: Stem) -> Tensor:
    """Patches [B, N, K] -> normalised images [B, C, H, W]."""
    view = view_of(backbone, stem)
    if view is None:
        return unpatchify(patches, backbone.grid, stem.patch_size)
    return torch.stack([view.image(each.double())[0] for each in patches])


def patches_of(images: Tensor, backbone: Backbone, stem: Stem) -> Tensor:
    """Normalised images [B, C, H, W] -> what the patch embedding is fed of them, [B, N, K]."""
    if stem.layout == "patches":
        return patchify(images, stem.patch_size)
    return Feed(backbone, stem.product)(images.double())


def find_stem(backbone: Backbone) -> Stem | str:
    """The names, or the reason why pixels cannot be solved for: one sentence for a reader."""
    if isinstance(backbone, StemBackbone):
        return backbone.stem
    if reason := _no_patches(backbone):
        return reason
    table = _find_table(backbone)
    if isinstance(table, str):
        return table
    found = find_embedding(backbone)
    if isinstance(found, str):
        return found
    if not dict(backbone.named_parameters())[found.weight].requires_grad:
        return f"its patch embedding ({found.weight}) is frozen, so its gradient is neither computed nor sent"
    if not _is_additive(backbone):
        return "its position table is not simply added to the patch tokens"
    return replace(found, table=table[0], first=table[1])


def find_stems(backbone: Backbone) -> list[Stem]:
    """Every layer that is fed the image with a table behind it; none where pixels cannot be solved for."""
    stem = find_stem(backbone)
    return [] if isinstance(stem, str) else [stem, *(backbone.others if isinstance(backbone, StemBackbone) else ())]


def find_embedding(backbone: Backbone) -> Stem | str:
    """The patch embedding alone, whatever the positions are and whether or not it is trained (its `table` is ""); else
    the reason."""
    if reason := _no_patches(backbone):
        return reason
    assert backbone.input.patch is not None
    size = pair(backbone.input.patch)
    weight = _find_weight(backbone, size)
    if weight is None:
        return (
            "its patch embedding is not one linear map of each patch (a norm, overlapping patches or several layers), "
            "so the gradient of its weight is not a product with the pixels"
        )
    bias = f"{weight.removesuffix('weight')}bias"
    return Stem(weight, bias if bias in dict(backbone.named_parameters()) else None, "", 0, size)


def _no_patches(backbone: Backbone) -> str | None:
    if "tokens" in backbone.refusals:
        return f"{backbone.refusals['tokens']}, so there is no patch embedding to solve for"
    if backbone.input.shape is None or not backbone.input.channels:
        return "it takes no images"
    return None


_POSITIONAL = re.compile(r"(^|[._])((abs_|rel_)?pos(ition(s|al)?)?(_|$|\.)|relative_|rope|rotary)")


def position_names(backbone: Backbone) -> tuple[str, ...]:
    """The trained parameters that hold a model's positions, of every kind: those its positions are computed from, and
    those that are called so."""
    trained = {name: p for name, p in backbone.named_parameters() if p.requires_grad}
    found = {name for name in trained if _POSITIONAL.search(name)}
    if isinstance(backbone, StemBackbone):
        stem = backbone.stem
        tables = {backbone.table, None if isinstance(stem, str) or stem.table == stem.bias else stem.table}
        return tuple(name for name in trained if name in found | tables)
    if "tokens" in backbone.refusals:
        return tuple(name for name in trained if name in found)
    with torch.enable_grad():
        places = backbone.positions()
        parts = [places.table, places.rotary, None if places.bias is None else places.bias.values]
        parts = [part.sum() for part in parts if part is not None and part.requires_grad]
        if parts:
            held = torch.autograd.grad(torch.stack(parts).sum(), list(trained.values()), allow_unused=True)
            found |= {name for name, g in zip(trained, held, strict=True) if g is not None}
    return tuple(name for name in trained if name in found)


def require_stem(backbone: Backbone) -> Stem:
    """The names; an error with the reason where there are none."""
    stem = find_stem(backbone)
    if isinstance(stem, str):
        raise SitusError(f"{backbone.name}: {stem}")
    return stem


def noise_for(backbone: Backbone, *shape: int) -> Tensor:
    """Numbers to try a model with: its own device and type, the same each time, no generator of the caller touched."""
    like = next(backbone.parameters())
    chance = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=chance).to(like.device, like.dtype)


def _find_table(backbone: Backbone) -> tuple[str, int] | str:
    """(name of the table's parameter, its first patch row), or the reason why no gradient of the table exists."""
    with torch.enable_grad():
        places = backbone.positions()
        table = places.table
        if table is None:
            held = {"rotary": "rotates queries and keys", "bias": "adds a bias between pairs of tokens"}
            how = " and ".join(held[kind] for kind in places.kinds) or "adds no positions to its tokens"
            return f"it {how} and has no table that is added to the tokens, so no row holds a patch's own gradient"
        if not table.requires_grad:
            return "its position table is fixed or frozen, so its gradient is neither computed nor sent"
        probe = noise_for(backbone, *table.shape)
        owners = {name: p for name, p in backbone.named_parameters() if p.requires_grad}
        found = torch.autograd.grad((table * probe).sum(), list(owners.values()), allow_unused=True)
    held = {name: g for name, g in zip(owners, found, strict=True) if g is not None}
    for name, gradient in held.items():
        rows = gradient.reshape(-1, gradient.shape[-1])
        first = rows.shape[0] - probe.shape[0]
        if len(held) == 1 and first >= 0 and torch.equal(rows[first:], probe):
            return name, first
    return "its position table is computed (resampled) from other weights at every step, so its rows mix places"


@torch.no_grad()
def _find_weight(backbone: Backbone, size: tuple[int, int]) -> str | None:
    """The weight whose product with the patches is what `embed` gives."""
    assert backbone.input.shape is not None
    images = noise_for(backbone, 1, backbone.input.channels, *backbone.input.shape)
    tokens, patches = backbone.embed(images), patchify(images, size)
    parameters = dict(backbone.named_parameters())
    shape = (backbone.dim, backbone.input.channels, *size)
    for name, weight in parameters.items():
        if tuple(weight.shape) != shape or not name.endswith("weight"):
            continue
        product = patches @ flat_weight(weight).T
        bias = parameters.get(f"{name.removesuffix('weight')}bias")
        product = product if bias is None else product + bias
        if _same(product, tokens):
            return name
    return None


@torch.no_grad()
def _is_additive(backbone: Backbone) -> bool:
    """Whether the stream knows tokens and table by their sum alone: what one gains, the other may lose."""
    places = backbone.positions()
    assert places.table is not None
    tokens, shift = noise_for(backbone, 2, backbone.num_tokens, backbone.dim)
    streams = []
    for sign in (0, 1):
        moved = replace(places, table=places.table - sign * shift)
        with torch.random.fork_rng(devices=[]):  # dropout between the two would be the same noise
            torch.manual_seed(0)
            streams.append(backbone.assemble((tokens + sign * shift)[None], moved).z)
    return _same(*streams)


def _same(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= 1e-3 * other.norm())
