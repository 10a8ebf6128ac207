"""Where a backbone keeps its patch embedding and its position table, by parameter name, found by behaviour.

Nothing here knows a library's layout: a weight is the patch embedding if multiplying patches by it *is* `embed`, and
a parameter holds the table if the table's gradient arrives in its rows unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from situs.backbones.base import Backbone
from situs.core.tokens import pair, patchify, unpatchify
from situs.errors import SitusError
from situs.models.module import OwnModule

# ---------------------------------------------------------------------------------------------------------------------
# What a model multiplies with its weights: every product of something made of the image with one parameter.
#
# The model is run and watched (`_Watcher`), so nothing here knows its layout, nor what it does to an image before the
# first weight: scaling, channels, padding, resizing, patches that overlap, layers. `Feed` gives the input of one
# product as a function of the image, in float64 and differentiable.


Kind = Literal["unfolded", "matrix", "turned"]
"""How a weight holds its rows [D, K]: as a convolution in the order of `F.unfold`, as they are, or as [K, D]."""


class Product(NamedTuple):
    """A product with the parameter `name`: inputs [B, N, K], and how the weight holds its rows [D, K]."""

    name: str
    kind: Kind
    inputs: Tensor


class EnoughError(Exception):
    """What was asked for was seen: the rest of the model need not run."""


class _Watcher(TorchFunctionMode):
    """Notes the products of one forward pass, whoever makes them; after number `until` it ends."""

    def __init__(self, names: dict[int, str], until: int | None = None) -> None:
        super().__init__()
        self.names, self.until = names, until
        self.seen: list[Product] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = self._product(func, args, kwargs)
        if found is not None:
            self.seen.append(found)
            if self.until is not None and len(self.seen) > self.until:
                raise EnoughError
        return func(*args, **kwargs)

    def _product(self, func: Any, args: Any, kwargs: Any) -> Product | None:
        if func in _MATMULS:
            name = self.names.get(id(args[1]))
            inputs = args[0]
            return None if name is None or inputs.dim() < 2 else Product(name, "turned", _rows(inputs))
        if func not in (F.linear, torch.conv2d):
            return None
        given = dict(zip(_ARGUMENTS[func], args, strict=False)) | kwargs
        inputs, name = given["input"], self.names.get(id(given["weight"]))
        if name is None or given.get("groups", 1) != 1:
            return None
        if func is F.linear:
            return Product(name, "matrix", _rows(inputs))
        return Product(name, "unfolded", unfold(inputs, given)) if inputs.dim() == 4 else None


_MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    F.linear: ("input", "weight", "bias"),
    torch.conv2d: ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
}


def _rows(inputs: Tensor) -> Tensor:
    """[B, ..., K] -> [B, N, K]; one row of a batch is one place."""
    return inputs.reshape(len(inputs), -1, inputs.shape[-1])


def unfold(inputs: Tensor, given: dict[str, Any]) -> Tensor:
    """What a convolution multiplies: [B, C, H, W] -> [B, N, C · P_h · P_w]."""
    kernel, dilation = tuple(given["weight"].shape[2:]), given.get("dilation", 1)
    padding = given.get("padding", 0)
    if isinstance(padding, str):
        wide = [d * (k - 1) for k, d in zip(kernel, _both(dilation), strict=True)] if padding == "same" else [0, 0]
        before = [total // 2 for total in wide]
        inputs = F.pad(inputs, (before[1], wide[1] - before[1], before[0], wide[0] - before[0]))
        padding = 0
    return F.unfold(inputs, kernel, dilation, padding, given.get("stride", 1)).mT


def _both(number: Any) -> tuple[int, int]:
    return (number, number) if isinstance(number, int) else (number[0], number[-1])


def watch_products(model: nn.Module, images: Tensor, until: int | None = None) -> tuple[Any, list[Product]]:
    """What the model says to images, and its products in their order; None where it was stopped behind number `until`.

    Where a model draws in its forward pass, it draws the same each time.
    """
    watcher = _Watcher({id(p): name for name, p in model.named_parameters()}, until)
    said = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            with watcher:
                said = model(images)
        except EnoughError:
            pass
    return said, watcher.seen


class Feed:
    """The input [B, N, K] of product `number` as a function of images [B, C, H, W]. copied: whether the model is a
    `precise` one already, which is then taken as it is."""

    def __init__(self, model: nn.Module, number: int, copied: bool = False) -> None:
        self.model, self.number = model if copied else precise(model).requires_grad_(False), number

    def __call__(self, images: Tensor) -> Tensor:
        return watch_products(self.model, images, self.number)[1][self.number].inputs

    def derivative(self, image: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """The input for one image [1, C, H, W], v -> J v and u -> J^T u at it."""
        with torch.enable_grad():
            image = image.detach().requires_grad_()
            value = self(image)
            weights = torch.zeros_like(value, requires_grad=True)
            [back] = torch.autograd.grad(value, image, weights, create_graph=True)

        def along(direction: Tensor) -> Tensor:
            if not back.requires_grad:  # it does not see the image at all
                return torch.zeros_like(value)
            return torch.autograd.grad(back, weights, direction, retain_graph=True)[0]

        def against(direction: Tensor) -> Tensor:
            return torch.autograd.grad(value, image, direction, retain_graph=True)[0]

        return value.detach(), along, against


def precise(model: nn.Module) -> nn.Module:
    """A copy in float64, in eval mode."""
    return deepcopy(model).double().eval()


# ---------------------------------------------------------------------------------------------------------------------
# From what a layer was fed back to the image, through whatever the model does before that layer.
#
# A fixed linear map (scaling, channels mixed, padding, resizing) is undone by one least-squares solve with products of
# autograd; what it does not see of an image comes out as 0 and is counted. Anything else, a normalisation by the
# image's own mean and deviation among them, by Gauss-Newton steps, which are that solve again and again.


DAMPING = 1e-6
"""Directions weaker than this share of the strongest are left at 0: what they say drowns in rounding."""

STEPS = 25
"""Gauss-Newton steps at most."""

REACHED = 1e-9
"""Gauss-Newton ends when this share of the layer's input is left."""

PROBES = 4
"""Random images that count what a map does not see."""


class StoppedError(Exception):
    """Whoever asked has no more time."""


class Scaled(NamedTuple):
    """A map that only moves and scales numbers: input i is scale[i] · image[index[i]] + shift[i], [N, K] each."""

    index: Tensor
    scale: Tensor
    shift: Tensor


class View:
    """What a layer sees of an image of `shape` (C, H, W). affine: whether that is a fixed affine map.

    centre [N, K] and spread: what is usual for the layer's input, for images of normalised pixels. stop: asked while a
    map that is not affine is undone; stopped: whether it ended one.
    """

    def __init__(self, feed: Feed, shape: tuple[int, int, int], device: torch.device) -> None:
        self.feed, self.shape, self.stopped = feed, shape, False
        self.stop: Callable[[], bool] = lambda: False
        chance = torch.Generator().manual_seed(0)
        images = torch.randn(2, *shape, generator=chance, dtype=torch.float64).to(device)
        with torch.no_grad():
            one, other, both = (feed(image) for image in (images[:1], images[1:], images.sum(dim=0, keepdim=True)))
            none, twice = feed(torch.zeros_like(images[:1])), feed(2 * images[:1])
        size = float((one - none).norm())
        bent = float((both - one - other + none).norm()) + float((twice - 2 * one + none).norm())
        self.affine = bool(none.isfinite().all()) and bent <= 1e-6 * size
        self.start = images[:1]
        self.centre = none[0] if self.affine else torch.zeros_like(one[0])
        self.spread = max(float((one[0] - self.centre).square().mean().sqrt()), 1e-12)
        self.scaled = self._scaled() if self.affine else None
        self.loose = () if self.affine else self._loose(one)

    @torch.no_grad()
    def _scaled(self) -> Scaled | None:
        """The map as moved and scaled numbers, where it is one."""
        count = int(np.prod(self.shape))
        numbers = torch.arange(count, dtype=torch.float64, device=self.start.device).view(1, *self.shape)
        scale = self.feed(torch.ones_like(numbers))[0] - self.centre
        there = scale.abs() > 1e-9 * scale.abs().max()
        index = ((self.feed(numbers)[0] - self.centre) / torch.where(there, scale, 1.0)).round().long()
        index = index.clamp(0, count - 1)
        scale = torch.where(there, scale, 0.0)
        made = scale * self.start.flatten()[index] + self.centre
        if not bool((made - self.feed(self.start)[0]).norm() <= 1e-9 * made.norm()):
            return None
        return Scaled(index, scale, self.centre)

    @torch.no_grad()
    def _loose(self, value: Tensor) -> tuple[str, ...]:
        """Whose gain and offset the layer cannot tell: ("image",), or ("channel",) for each channel's own."""
        channels = torch.linspace(0.7, 1.3, self.shape[0], dtype=torch.float64, device=value.device).view(1, -1, 1, 1)
        for kind, gain in (("channel", channels), ("image", 1.3)):
            other = self.feed(gain * self.start + 0.2 * gain)
            if float((other - value).norm()) <= 1e-3 * float(value.norm()):
                return (kind,)
        return ()

    def unseen(self) -> int:
        """How many of the image's numbers the map does not see: its null space, estimated; 0 is sure."""
        _, along, against = self.feed.derivative(self.start)
        count, chance = int(np.prod(self.shape)), torch.Generator().manual_seed(1)
        missing = []
        for _ in range(PROBES):
            signs = (torch.randint(2, self.start.shape, generator=chance) * 2 - 1).to(self.start)
            left = signs - self._solve(along, against, along(signs))
            missing.append(float((signs * left).sum()))
        lost = float(np.mean(missing))
        return 0 if lost < 1e-3 * count**0.5 else max(1, round(lost))

    def image(self, inputs: Tensor) -> tuple[Tensor, float]:
        """The image [C, H, W] whose layer's input [N, K] is nearest to this one, and the share that is then left."""
        wanted = inputs.unsqueeze(0)
        value, along, against = self.feed.derivative(self.start)
        try:  # of least norm, so that what nothing tells is grey
            image = self._solve(along, against, wanted - value + along(self.start))
        except StoppedError:
            image = torch.zeros_like(self.start)
        left = self._left(image, wanted)
        if self.affine:
            return image[0], left
        image, left = self._descend(image, left, wanted)
        if left > REACHED and not self.loose:  # from grey, where saturation is farthest
            grey = torch.zeros_like(image)
            other = self._descend(grey, self._left(grey, wanted), wanted)
            image, left = min((image, left), other, key=lambda found: found[1])
        return image[0], left

    def _descend(self, image: Tensor, left: float, wanted: Tensor) -> tuple[Tensor, float]:
        """Gauss-Newton steps, each halved until it helps."""
        for _ in range(STEPS):
            if not REACHED < left < np.inf:
                break
            value, along, against = self.feed.derivative(image)
            try:
                step, before = self._solve(along, against, wanted - value), left
            except StoppedError:
                break
            for factor in (1.0, 0.5, 0.25, 0.1, 0.01):
                after = self._left(image + factor * step, wanted)
                if after < left:
                    image, left = image + factor * step, after
                    break
            if left >= before * (1 - 1e-3):
                break
        return image, left

    @torch.no_grad()
    def _left(self, image: Tensor, wanted: Tensor) -> float:
        size = float((wanted - self.centre).norm()) or 1.0
        left = float((self.feed(image) - wanted).norm()) / size
        return left if np.isfinite(left) else float("inf")

    def _solve(self, along: Any, against: Any, right: Tensor) -> Tensor:
        """The image of least norm among those with the least |J image - right|."""
        from scipy.sparse import linalg

        like, shape = self.start, right.shape

        def go(vector: Any, to: torch.Size, product: Any) -> Any:
            if not self.affine and (self.stopped or self.stop()):
                self.stopped = True
                raise StoppedError
            return product(torch.from_numpy(np.array(vector)).view(to).to(like)).detach().cpu().flatten().numpy()

        made: Any = linalg.LinearOperator
        operator = made(
            (right.numel(), like.numel()),
            matvec=lambda v: go(v, like.shape, along),
            rmatvec=lambda u: go(u, shape, against),
            dtype=np.float64,
        )
        flat = right.detach().cpu().flatten().numpy()
        damping = DAMPING * self.spread * (right.numel() / like.numel()) ** 0.5
        most = 2000 if self.affine else 300
        found = linalg.lsmr(operator, flat, damp=damping, atol=1e-13, btol=1e-13, conlim=0, maxiter=most)[0]
        return torch.from_numpy(found).view(like.shape).to(like)


def fill(image: Tensor, loose: Sequence[str], normalisation: tuple[Sequence[float], Sequence[float]]) -> Tensor:
    """A normalised image [C, H, W] with the gain and offset, which nothing tells, that make it fill black to white."""
    mean, std = (torch.tensor(part, dtype=image.dtype, device=image.device).view(-1, 1, 1) for part in normalisation)
    each = "channel" in loose
    dims = (1, 2) if each else (0, 1, 2)
    low, high = image.amin(dim=dims, keepdim=True), image.amax(dim=dims, keepdim=True)
    mean, std = (mean, std) if each else (mean.mean(), std.mean())  # one gain for all channels
    return ((image - low) / (high - low).clamp(min=1e-12) - mean) / std


# --- the stem --------------------------------------------------------------------------------------------------------


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
