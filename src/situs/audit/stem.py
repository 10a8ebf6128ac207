"""The stem of a backbone: its patch embedding and position table by parameter name, and the way back to the image.

Nothing here knows a library's layout: a weight is the patch embedding if multiplying patches by it *is* `embed`, and
a parameter holds the table if the table's gradient arrives in its rows unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from situs.audit.deadline import StoppedError
from situs.audit.products import Feed, Kind, unfold
from situs.backbones.base import Backbone
from situs.core.tokens import pair, patchify, unpatchify
from situs.errors import SitusError
from situs.models.module import OwnModule

# ---------------------------------------------------------------------------------------------------------------------
# From a layer's input back to the image, through whatever the model does before that layer.
#
# A fixed linear map (scaling, mixed channels, padding, resizing) is undone by one least-squares solve with products of
# autograd; what it does not see of an image comes out as 0 and is counted. Anything else, such as a normalisation by
# the image's own mean and deviation, is undone by Gauss-Newton steps, each of which is such a solve.


DAMPING = 1e-6
"""Directions weaker than this share of the strongest are left at 0: they drown in rounding."""

STEPS = 25
"""Gauss-Newton steps at most."""

REACHED = 1e-9
"""Gauss-Newton ends when the residual is this share of the layer's input."""

PROBES = 4
"""Random images from which the size of a map's null space is estimated."""


class Scaled(NamedTuple):
    """A map that only moves and scales numbers: input i is scale[i] · image[index[i]] + shift[i], [N, K] each."""

    index: Tensor
    scale: Tensor
    shift: Tensor


class View:
    """The map from an image of `shape` (C, H, W) to a layer's input, and its inverse. affine: whether it is fixed and
    affine.

    centre [N, K] and spread: mean and deviation of the layer's input for images of normalised pixels. invariant: the
    layer cannot tell the gain and offset of the whole "image", or of each "channel". stop: asked while a map that is
    not affine is undone; stopped: whether that was cut short.
    """

    def __init__(self, feed: Feed, shape: tuple[int, int, int], device: torch.device) -> None:
        self.feed, self.shape, self.stopped = feed, shape, False
        self.stop: Callable[[], bool] = lambda: False
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(2, *shape, generator=generator, dtype=torch.float64).to(device)
        with torch.no_grad():
            one, other, both = (feed(image) for image in (images[:1], images[1:], images.sum(dim=0, keepdim=True)))
            zero, twice = feed(torch.zeros_like(images[:1])), feed(2 * images[:1])
        size = float((one - zero).norm())
        bent = float((both - one - other + zero).norm()) + float((twice - 2 * one + zero).norm())
        self.affine = bool(zero.isfinite().all()) and bent <= 1e-6 * size
        self.start = images[:1]
        self.centre = zero[0] if self.affine else torch.zeros_like(one[0])
        self.spread = max(float((one[0] - self.centre).square().mean().sqrt()), 1e-12)
        self.scaled = self._scaled() if self.affine else None
        self.invariant = None if self.affine else self._invariance(one)

    @torch.no_grad()
    def _scaled(self) -> Scaled | None:
        """The map as moved and scaled numbers; None where it is no such map."""
        count = int(np.prod(self.shape))
        numbers = torch.arange(count, dtype=torch.float64, device=self.start.device).view(1, *self.shape)
        scale = self.feed(torch.ones_like(numbers))[0] - self.centre
        nonzero = scale.abs() > 1e-9 * scale.abs().max()
        index = ((self.feed(numbers)[0] - self.centre) / torch.where(nonzero, scale, 1.0)).round().long()
        index = index.clamp(0, count - 1)
        scale = torch.where(nonzero, scale, 0.0)
        mapped = scale * self.start.flatten()[index] + self.centre
        same = bool((mapped - self.feed(self.start)[0]).norm() <= 1e-9 * mapped.norm())
        return Scaled(index, scale, self.centre) if same else None

    @torch.no_grad()
    def _invariance(self, value: Tensor) -> Literal["channel", "image"] | None:
        """Whose gain and offset the layer's input `value` does not depend on."""
        channels = torch.linspace(0.7, 1.3, self.shape[0], dtype=torch.float64, device=value.device).view(1, -1, 1, 1)
        gains: dict[Literal["channel", "image"], Any] = {"channel": channels, "image": 1.3}
        for kind, gain in gains.items():
            other = self.feed(gain * self.start + 0.2 * gain)
            if float((other - value).norm()) <= 1e-3 * float(value.norm()):
                return kind
        return None

    def unseen(self) -> int:
        """How many of the image's numbers the map does not see: its null space, estimated; 0 is certain."""
        _, along, against = self.feed.derivative(self.start)
        count, generator = int(np.prod(self.shape)), torch.Generator().manual_seed(1)
        missing = []
        for _ in range(PROBES):
            signs = (torch.randint(2, self.start.shape, generator=generator) * 2 - 1).to(self.start)
            lost_part = signs - self._solve(along, against, along(signs))
            missing.append(float((signs * lost_part).sum()))
        lost = float(np.mean(missing))
        return 0 if lost < 1e-3 * count**0.5 else max(1, round(lost))

    def image(self, inputs: Tensor) -> tuple[Tensor, float]:
        """The image [C, H, W] whose layer input is nearest to `inputs` [N, K], and the relative residual."""
        target = inputs.unsqueeze(0)
        value, along, against = self.feed.derivative(self.start)
        try:  # of least norm: what the layer does not see is grey
            image = self._solve(along, against, target - value + along(self.start))
        except StoppedError:
            image = torch.zeros_like(self.start)
        residual = self._residual(image, target)
        if self.affine:
            return image[0], residual
        image, residual = self._descend(image, residual, target)
        if residual > REACHED and self.invariant is None:  # from grey, where saturation is farthest
            grey = torch.zeros_like(image)
            second = self._descend(grey, self._residual(grey, target), target)
            image, residual = min((image, residual), second, key=lambda solution: solution[1])
        return image[0], residual

    def _descend(self, image: Tensor, residual: float, target: Tensor) -> tuple[Tensor, float]:
        """Gauss-Newton steps, each halved until it helps."""
        for _ in range(STEPS):
            if not REACHED < residual < np.inf:
                break
            value, along, against = self.feed.derivative(image)
            try:
                step, before = self._solve(along, against, target - value), residual
            except StoppedError:
                break
            for factor in (1.0, 0.5, 0.25, 0.1, 0.01):
                after = self._residual(image + factor * step, target)
                if after < residual:
                    image, residual = image + factor * step, after
                    break
            if residual >= before * (1 - 1e-3):
                break
        return image, residual

    @torch.no_grad()
    def _residual(self, image: Tensor, target: Tensor) -> float:
        size = float((target - self.centre).norm()) or 1.0
        residual = float((self.feed(image) - target).norm()) / size
        return residual if np.isfinite(residual) else float("inf")

    def _solve(self, along: Any, against: Any, right: Tensor) -> Tensor:
        """The image of least norm among those with the least |J image - right|."""
        from scipy.sparse import linalg

        like, shape = self.start, right.shape

        def multiply(vector: Any, to: torch.Size, product: Any) -> Any:
            if not self.affine and (self.stopped or self.stop()):
                self.stopped = True
                raise StoppedError
            return product(torch.from_numpy(np.array(vector)).view(to).to(like)).detach().cpu().flatten().numpy()

        linear_operator: Any = linalg.LinearOperator
        operator = linear_operator(
            (right.numel(), like.numel()),
            matvec=lambda v: multiply(v, like.shape, along),
            rmatvec=lambda u: multiply(u, shape, against),
            dtype=np.float64,
        )
        flat = right.detach().cpu().flatten().numpy()
        damping = DAMPING * self.spread * (right.numel() / like.numel()) ** 0.5
        limit = 2000 if self.affine else 300
        image = linalg.lsmr(operator, flat, damp=damping, atol=1e-13, btol=1e-13, conlim=0, maxiter=limit)[0]
        return torch.from_numpy(image).view(like.shape).to(like)


def fill(image: Tensor, invariant: str, normalisation: tuple[Sequence[float], Sequence[float]]) -> Tensor:
    """A normalised image [C, H, W] with gain and offset chosen so that it fills black to white.

    invariant: whether those of each "channel" are unknown, or those of the "image".
    """
    mean, std = (torch.tensor(part, dtype=image.dtype, device=image.device).view(-1, 1, 1) for part in normalisation)
    by_channel = invariant == "channel"
    dims = (1, 2) if by_channel else (0, 1, 2)
    low, high = image.amin(dim=dims, keepdim=True), image.amax(dim=dims, keepdim=True)
    mean, std = (mean, std) if by_channel else (mean.mean(), std.mean())  # one gain for all channels
    return ((image - low) / (high - low).clamp(min=1e-12) - mean) / std


# --- the stem --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stem:
    """Names of the parameters that an image meets first. first: the row of the table that belongs to patch 0.

    layout: how the weight holds a patch: "patches" as a convolution on the patches of `patchify` of `patch_size`; else
    the weight is multiplied with the rows of product number `product` (`products.Feed`). channels: the table's axis of
    channels, from the end. count: of the patches; 0 for as many as the backbone has tokens.
    """

    weight: str
    bias: str | None
    table: str
    first: int
    patch_size: tuple[int, int] = (0, 0)
    layout: Literal["patches"] | Kind = "patches"
    product: int = -1
    channels: int = -1
    count: int = 0


class StemBackbone(OwnModule):
    """A user's own module with its stem, or the reason why it has none.

    table: the parameter that its user calls the position table, even where no stem was found.
    """

    stem: Stem | str = "the model's patch embedding and position table were not searched for"
    table: str | None = None


def flat_weight(weight: Tensor, stem: Stem | None = None) -> Tensor:
    """A patch embedding's weight (or its gradient) as the matrix [..., D, K] on the patches of `patchify`.

    weight: a convolution [..., D, C, P_h, P_w], or as the stem's layout says; K is then the width of its layer's input.
    """
    layout = "patches" if stem is None else stem.layout
    if layout == "patches":
        return weight.movedim(-3, -1).flatten(-3)
    return weight.flatten(-3) if layout == "unfolded" else weight.mT if layout == "turned" else weight


def table_rows(parameter: Tensor, stem: Stem, prefix: bool = False) -> Tensor:
    """The rows of a table parameter (or of its gradient) that belong to patches, [N, D]; prefix: all of its rows."""
    rows = parameter.movedim(stem.channels, -1)
    rows = rows.reshape(-1, rows.shape[-1])
    return rows if prefix else rows[stem.first : stem.first + stem.count if stem.count else None]


def patch_count(backbone: Backbone, stem: Stem) -> int:
    """N: how many patches an image has in the patch embedding's equations."""
    return stem.count or backbone.num_tokens


def view_of(backbone: Backbone, stem: Stem) -> View | None:
    """The map from an image to the patch embedding's input; None where that is simply the image's patches."""
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
    return torch.stack([view.image(inputs.double())[0] for inputs in patches])


def patches_of(images: Tensor, backbone: Backbone, stem: Stem) -> Tensor:
    """Normalised images [B, C, H, W] -> the patch embedding's input, [B, N, K]."""
    if stem.layout == "patches":
        return patchify(images, stem.patch_size)
    return Feed(backbone, stem.product)(images.double())


def find_stem(backbone: Backbone) -> Stem | str:
    """The stem, or the reason why pixels cannot be solved for: one sentence for a reader."""
    if isinstance(backbone, StemBackbone):
        return backbone.stem
    if reason := _no_patches(backbone):
        return reason
    table = _find_table(backbone)
    if isinstance(table, str):
        return table
    embedding = find_embedding(backbone)
    if isinstance(embedding, str):
        return embedding
    if not dict(backbone.named_parameters())[embedding.weight].requires_grad:
        return f"the patch embedding ({embedding.weight}) is frozen, so its gradient is neither computed nor sent"
    if not _is_additive(backbone):
        return "the position table is not simply added to the patch tokens"
    return replace(embedding, table=table[0], first=table[1])


def writable_stem(backbone: Backbone) -> Stem | str:
    """The stem also where it is frozen: a server that chooses the weights writes frozen ones too."""
    frozen = [parameter for parameter in backbone.parameters() if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(parameter.is_floating_point())
    try:
        return find_stem(backbone)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def find_embedding(backbone: Backbone) -> Stem | str:
    """The patch embedding alone, with any positions and trained or not (its `table` is ""); else the reason."""
    if reason := _no_patches(backbone):
        return reason
    assert backbone.input.patch is not None
    size = pair(backbone.input.patch)
    weight = _find_weight(backbone, size)
    if weight is None:
        return (
            "the patch embedding is not a single linear map of each patch: it has a norm, overlapping "
            "patches or several layers. The gradient of its weight is therefore not a product "
            "with the pixels"
        )
    bias = f"{weight.removesuffix('weight')}bias"
    return Stem(weight, bias if bias in dict(backbone.named_parameters()) else None, "", 0, size)


def _no_patches(backbone: Backbone) -> str | None:
    if "tokens" in backbone.refusals:
        return f"{backbone.refusals['tokens']}, so there is no patch embedding to solve for"
    if backbone.input.shape is None or not backbone.input.channels:
        return "the model takes no images"
    return None


_POSITIONAL = re.compile(r"(^|[._])((abs_|rel_)?pos(ition(s|al)?)?(_|$|\.)|relative_|rope|rotary)")


def position_names(backbone: Backbone) -> tuple[str, ...]:
    """The trained parameters that hold a model's positions, of every kind: those its positions are computed from, and
    those whose name says so."""
    trained = {name: p for name, p in backbone.named_parameters() if p.requires_grad}
    positional = {name for name in trained if _POSITIONAL.search(name)}
    if isinstance(backbone, StemBackbone):
        stem = backbone.stem
        tables = {backbone.table, None if isinstance(stem, str) or stem.table == stem.bias else stem.table}
        return tuple(name for name in trained if name in positional | tables)
    if "tokens" in backbone.refusals:
        return tuple(name for name in trained if name in positional)
    with torch.enable_grad():
        places = backbone.positions()
        parts = [places.table, places.rotary, None if places.bias is None else places.bias.values]
        parts = [part.sum() for part in parts if part is not None and part.requires_grad]
        if parts:
            gradients = torch.autograd.grad(torch.stack(parts).sum(), list(trained.values()), allow_unused=True)
            positional |= {name for name, g in zip(trained, gradients, strict=True) if g is not None}
    return tuple(name for name in trained if name in positional)


def require_stem(backbone: Backbone) -> Stem:
    """The stem; an error with the reason where there is none."""
    stem = find_stem(backbone)
    if isinstance(stem, str):
        raise SitusError(f"{backbone.name}: {stem}")
    return stem


def noise_for(backbone: Backbone, *shape: int) -> Tensor:
    """Normal numbers of the model's device and type, the same each time; no global generator is used."""
    like = next(backbone.parameters())
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)


def _find_table(backbone: Backbone) -> tuple[str, int] | str:
    """(name of the table's parameter, its first patch row), or the reason why no gradient of the table exists."""
    with torch.enable_grad():
        places = backbone.positions()
        table = places.table
        if table is None:
            kinds = {"rotary": "rotates queries and keys", "bias": "adds a position bias to pairs of tokens"}
            how = " and ".join(kinds[kind] for kind in places.kinds)
            lacks = (
                f"the model {how} and adds no position table to the tokens"
                if how
                else "the model adds no positions to its tokens"
            )
            return f"{lacks}, so no row of a gradient belongs to a single patch"
        if not table.requires_grad:
            return "the position table is fixed or frozen, so its gradient is neither computed nor sent"
        probe = noise_for(backbone, *table.shape)
        trained = {name: p for name, p in backbone.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad((table * probe).sum(), list(trained.values()), allow_unused=True)
    reached = [(name, g) for name, g in zip(trained, gradients, strict=True) if g is not None]
    if len(reached) == 1:
        [(name, gradient)] = reached
        rows = gradient.reshape(-1, gradient.shape[-1])
        first = rows.shape[0] - probe.shape[0]
        if first >= 0 and torch.equal(rows[first:], probe):
            return name, first
    return (
        "the model computes the position table from other weights at every step, so each row of the gradient of "
        "these weights mixes several positions"
    )


@torch.no_grad()
def _find_weight(backbone: Backbone, size: tuple[int, int]) -> str | None:
    """The weight whose product with the patches is the output of `embed`."""
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
    """Whether the stream depends on tokens and table by their sum alone."""
    places = backbone.positions()
    assert places.table is not None
    tokens, shift = noise_for(backbone, 2, backbone.num_tokens, backbone.dim)
    streams = []
    for sign in (0, 1):
        moved = replace(places, table=places.table - sign * shift)
        with torch.random.fork_rng(devices=[]):  # the same dropout in both passes
            torch.manual_seed(0)
            streams.append(backbone.assemble((tokens + sign * shift)[None], moved).z)
    return _same(*streams)


def _same(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= 1e-3 * other.norm())


# ---------------------------------------------------------------------------------------------------------------------
# The real input of the patch embedding in a step, as pictures: the reference of a score.
#
# A module may flip, crop, shift, colour or mix its images before its first layer. An attacker recovers the input of
# that layer; compared with the images given to the module, an exact recovery would look like a failure.


SAME = 1e-3
"""Relative: a layer that is fed what the images say differs by rounding alone."""


def reading_stem(backbone: Backbone) -> Stem | None:
    """The layer whose input is recorded: the patch embedding, with or without a table behind it."""
    stem = find_stem(backbone)
    stem = find_embedding(backbone) if isinstance(stem, str) else stem
    return None if isinstance(stem, str) else stem


@contextmanager
def recorded(backbone: nn.Module, stem: Stem | None) -> Iterator[list[Tensor]]:
    """Records the inputs [B, N, K] of the patch embedding, pass after pass, also those of copies of the model; none
    where its weight does not belong to a convolution or linear layer."""
    inputs: list[Tensor] = []
    handle = on_input(backbone, stem, inputs.append)
    try:
        yield inputs
    finally:
        if handle is not None:
            handle.remove()


def on_input(backbone: nn.Module, stem: Stem | None, take: Callable[[Tensor], None]) -> RemovableHandle | None:
    """Calls `take` with the input [B, N, K] of the patch embedding in each forward pass; None where it has no layer."""
    layer = embedding_of(backbone, stem)
    if stem is None or layer is None:
        return None
    return layer.register_forward_pre_hook(lambda part, args: take(rows_of(part, args[0].detach(), stem)))


def embedding_of(backbone: nn.Module, stem: Stem | None) -> nn.Conv2d | nn.Linear | None:
    """The layer of the patch embedding; None where its weight belongs to no convolution or linear layer."""
    name, _, last = ("" if stem is None else stem.weight).rpartition(".")
    layer = dict(backbone.named_modules()).get(name)
    if last == "weight" and (isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1)):
        return layer
    return None


def rows_of(layer: nn.Module, inputs: Tensor, stem: Stem) -> Tensor:
    """The rows [B, N, K] that a layer multiplies with its weight, in the order of the stem's equations."""
    if isinstance(layer, nn.Linear):
        return inputs.reshape(len(inputs), -1, inputs.shape[-1])
    assert isinstance(layer, nn.Conv2d)
    rows = unfold(inputs, layer.weight.shape[2:], layer.stride, layer.padding, layer.dilation)
    if stem.layout != "patches":
        return rows
    return rows.unflatten(-1, (inputs.shape[1], -1)).mT.flatten(-2)  # the channels of a pixel beside one another


@torch.no_grad()
def pictures_fed(backbone: Backbone, stem: Stem | None, inputs: list[Tensor], images: Tensor) -> Tensor | None:
    """The normalised images [B, C, H, W] that the layer was fed; None where those are `images`, or cannot be known.

    inputs: as recorded. Of several passes over as many images the first counts.
    """
    rows = torch.cat(inputs)[: len(images)] if inputs and len({part.shape[1:] for part in inputs}) == 1 else None
    if stem is None or rows is None or len(rows) < len(images):
        return None
    usual = patches_of(images, backbone, stem)
    if usual.shape == rows.shape and float((usual - rows).norm()) <= SAME * float(usual.norm()):
        return None
    return to_images(rows.double(), backbone, stem).to(images.dtype)
