"""The patch-embedding attack of one who has seen other images: for gradients that were sent with noise.

`patchembed` takes the table's gradient for G and damps what noise drowns. But a photograph is smooth also across
patches, a model's gradients lie in few directions of its channels, as they do for images that the attacker has himself,
and ∂l/∂W says as much about G as about X. All of that together (`images`, `factor`) gives several dB. It finds, and
proves nothing where it finds little: a better prior gives more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from situs.audit.attacks.base import (
    Attack,
    Fact,
    Knowledge,
    Normalisation,
    Ready,
    Recovery,
    Refused,
    absent,
    known_numbers,
    rounded_off,
)
from situs.audit.attacks.patchembed.attack import PatchEmbedding, patch_rows
from situs.audit.deadline import Deadline
from situs.audit.defences import Gradients
from situs.audit.stem import Stem, View, find_stem, flat_weight, require_stem, table_rows, view_of
from situs.backbones.base import Backbone
from situs.core.precision import full_float32
from situs.core.tokens import pair, patchify, unpatchify
from situs.core.when import When
from situs.methods.base import Batch, Method

# ---------------------------------------------------------------------------------------------------------------------
# What images are like before anything is seen of them: a normal distribution over the cosines of the whole image.
#
# Cosines diagonalise what neighbouring pixels share, also across the borders of patches, and the directions in which
# colours vary together are rotated out. The variance of each cosine is that of public images, averaged over its
# neighbours, and of photographs in general (it falls with the square of the frequency) as far as those are few.


GENERAL = 8.0
"""So many public images count as much as what is known of photographs in general."""

GREY, SPREAD, SHARED = 0.46, 0.25, 0.9
"""Of photographs in general, in [0, 1]: mean and deviation of a pixel, and the correlation of two colours."""

FREE = 4.0
"""So many cosines of one image count as much as the distribution, where the image's own variance in a band is asked."""


@dataclass(frozen=True)
class ImagePrior:
    """Normal images [C, H, W]: mean [C, 1, 1]; rotation [C, C], whose columns are directions of colour; variance
    [C, H, W] of each cosine along each of them."""

    mean: Tensor
    rotation: Tensor
    variance: Tensor

    @cached_property
    def _bases(self) -> tuple[Tensor, Tensor]:
        height, width = self.variance.shape[1:]
        return _basis(height, self.variance), _basis(width, self.variance)

    def cosines(self, images: Tensor) -> Tensor:
        """Images without their mean [..., C, H, W] -> cosines along the directions of colour; orthogonal."""
        turned = torch.einsum("cd,...chw->...dhw", self.rotation, images)
        down, along = self._bases
        return down @ turned @ along.T

    def images(self, cosines: Tensor) -> Tensor:
        """The inverse of `cosines`."""
        down, along = self._bases
        plain = down.T @ cosines @ along
        return torch.einsum("cd,...dhw->...chw", self.rotation, plain)

    def to(self, device: torch.device) -> ImagePrior:
        """The same on a device."""
        return ImagePrior(self.mean.to(device), self.rotation.to(device), self.variance.to(device))

    def draw(self, count: int, chance: torch.Generator) -> Tensor:
        """Images of this kind, [count, C, H, W]."""
        like = torch.randn(count, *self.variance.shape, generator=chance, dtype=torch.float64).to(self.variance)
        return self.mean + self.images(like * self.variance.sqrt())

    def fitted(self, power: Tensor) -> ImagePrior:
        """The prior with this image's own contrast in each octave and colour. power [C, H, W]: the expected squares of
        its cosines."""
        band = _bands(*power.shape[1:]).to(power.device).flatten()
        ratio = (power / self.variance).flatten(1)
        total = ratio.new_full((len(ratio), int(band.max()) + 1), FREE).index_add_(1, band, ratio)
        count = ratio.new_full(total.shape, FREE).index_add_(1, band, torch.ones_like(ratio))
        return replace(self, variance=self.variance * (total / count)[:, band].view_as(power))


def image_prior(
    shape: tuple[int, int, int], public: Tensor | None = None, normalisation: Normalisation | None = None
) -> ImagePrior:
    """What is known of normalised images [C, H, W]. public: [n, C, H, W] of the same kind. Without a normalisation a
    number has mean 0 and deviation 1."""
    channels, height, width = shape
    count = 0 if public is None else len(public)
    device = None if public is None else public.device
    centre, scale = ((0.0,) * channels, (1.0,) * channels) if normalisation is None else normalisation
    grey, spread = (0.0, 1.0) if normalisation is None else (GREY, SPREAD)
    middle, unit = (torch.tensor(part, dtype=torch.float64, device=device) for part in (centre, scale))
    mean, deviation = (grey - middle) / unit, spread / unit
    together = SHARED + (1 - SHARED) * torch.eye(channels, dtype=torch.float64, device=device)
    colours = together * torch.outer(deviation, deviation)
    falling = _falling(height, width).to(mean)
    if public is None or not count:
        values, rotation = torch.linalg.eigh(colours)
        return ImagePrior(mean[:, None, None], rotation, values.clamp(min=1e-6)[:, None, None] * falling)
    images = public.double()
    mean = (count * images.mean(dim=(0, 2, 3)) + GENERAL * mean) / (count + GENERAL)
    centred = images - mean[:, None, None]
    seen = torch.einsum("nchw,ndhw->cd", centred, centred) / (height * width)
    values, rotation = torch.linalg.eigh((seen + GENERAL * colours) / (count + GENERAL))
    prior = ImagePrior(mean[:, None, None], rotation, values.clamp(min=1e-6)[:, None, None] * falling)
    power = _smooth(prior.cosines(centred).square().sum(dim=0) / falling) * falling
    return replace(prior, variance=(power + GENERAL * prior.variance) / (count + GENERAL))


def _basis(size: int, like: Tensor) -> Tensor:
    """The orthogonal matrix of cosines (DCT-II), [size, size]."""
    place = torch.arange(size, dtype=like.dtype, device=like.device)
    basis = torch.cos(math.pi / size * torch.outer(place, place + 0.5)) * math.sqrt(2 / size)
    basis[0] /= math.sqrt(2)
    return basis


def _falling(height: int, width: int) -> Tensor:
    """1 / frequency² of each cosine, with a mean of 1, [height, width]; the mean grey varies as the slowest cosine."""
    square = _frequency(height, width).square()
    found = 1 / square.clamp(min=1.0)
    return found / found.mean()


def _frequency(height: int, width: int) -> Tensor:
    """Half waves over the longer side, [height, width]."""
    down, along = (torch.arange(size, dtype=torch.float64) / size for size in (height, width))
    return max(height, width) * (down[:, None].square() + along.square()).sqrt()


def _bands(height: int, width: int) -> Tensor:
    """The octave of each cosine, 0 for the mean grey alone, [height, width]."""
    frequency = _frequency(height, width)
    return torch.where(frequency == 0, 0.0, 1 + frequency.clamp(min=1).log2()).long()


def _smooth(power: Tensor) -> Tensor:
    """Each number the mean of those around it, a third of its own frequency up and down, [C, height, width]."""
    for dim in (1, 2):
        size = power.shape[dim]
        place = torch.arange(size, device=power.device)
        low, high = place - place // 3, (place + place // 3 + 1).clamp(max=size)
        sums = torch.cat([torch.zeros_like(power.narrow(dim, 0, 1)), power.cumsum(dim)], dim)
        shape = [-1 if axis == dim else 1 for axis in range(3)]
        power = (sums.index_select(dim, high) - sums.index_select(dim, low)) / (high - low).view(shape)
    return power


# ---------------------------------------------------------------------------------------------------------------------
# One matrix of noisy gradients taken apart into two: G^T X, with G itself seen under noise, by variational Bayes.
#
# T = G + σ E and W = G^T X + σ E' are what is sent, and b = G^T 1 + σ E'' where the embedding has a bias. The rows of
# G are normal with a covariance over channels, the image behind X as `images` says. The posterior is approximated by a
# product q(G) q(X) of normal distributions. For a given X the best q(G) is exact, so that the bound on the evidence is
# a function of the mean of X, which is climbed by L-BFGS; the covariance of X follows from q(G), and what q(G) needs
# of it is estimated from draws, which conjugate gradients make.


ROUNDS = 3
"""Times that the mean of X is climbed to, its covariance and the image's contrast taken anew before each."""

STEPS = 60
"""Steps of L-BFGS in a round."""

DRAWS = 4
"""Draws from q(X): the covariance of two patches is the mean over these and over the numbers of a patch."""

CLOSE = 1e-2
"""Conjugate gradients end when this share of the right side is left: for draws, and for a place to begin at."""

LONG = 300
"""Conjugate gradients at most."""


@dataclass(frozen=True)
class Layer:
    """What a patch embedding is fed of an image: along(image) + centre. along: [B, C, H, W] -> [B, N, K], linear;
    against: its transpose."""

    along: Callable[[Tensor], Tensor]
    against: Callable[[Tensor], Tensor]
    centre: Tensor | float = 0.0


@dataclass(frozen=True)
class Sent:
    """What was sent, in coordinates in which channels are uncorrelated: table T [N, D], weight W [D, K], bias [D] or
    None; sigma: the deviation of the noise; variance [D]: of G along each channel."""

    table: Tensor
    weight: Tensor
    bias: Tensor | None
    sigma: float
    variance: Tensor


class Gradient(NamedTuple):
    """q(G). bound: of the log evidence, but for what X alone adds and a constant. mean [N, D]; second: E[G G^T]."""

    bound: Tensor
    mean: Tensor
    second: Tensor


def turned(table: Tensor, weight: Tensor, bias: Tensor | None, sigma: float, covariance: Tensor) -> Sent:
    """What was sent, turned to the axes of G's covariance over channels [D, D], which is known up to a factor: the size
    of T tells it, whatever clipping left of the gradients."""
    values, axes = torch.linalg.eigh(covariance)
    values = values.clamp(min=1e-9 * float(values[-1]))
    least = sigma**2 * math.sqrt(2 / table.numel())  # what T's own mean square is off by
    size = max(float(table.square().mean()) - sigma**2, least)
    moved = None if bias is None else bias @ axes
    return Sent(table @ axes, axes.T @ weight, moved, sigma, size * values / values.mean())


def best_gradient(sent: Sent, patches: Tensor, spread: Tensor) -> Gradient:
    """The best q(G) for a q(X) with mean `patches` [N, K] and covariance `spread` [N, N], summed over K."""
    noise = sent.sigma**2
    given = sent.table + patches @ sent.weight.T
    seen = patches @ patches.T + spread + torch.eye(len(patches), dtype=patches.dtype, device=patches.device)
    size = sent.table.square().sum() + sent.weight.square().sum()
    if sent.bias is not None:
        given, seen, size = given + sent.bias, seen + 1, size + sent.bias.square().sum()
    values, axes = torch.linalg.eigh(seen)
    precision = values[:, None] / noise + 1 / sent.variance
    along = axes.T @ given / noise
    mean = along / precision
    misfit = size / noise - (along * mean).sum()
    bound = -0.5 * (misfit + (precision * sent.variance).log().sum())
    found = axes @ mean
    return Gradient(bound, found, found @ found.T + (axes * (1 / precision).sum(dim=1)) @ axes.T)


def best_image(
    sent: Sent, gradient: Gradient, prior: ImagePrior, layer: Layer, draws: int = 0, seed: int = 0, close: float = CLOSE
) -> Tensor:
    """The mean of the best q(X) for a q(G), and behind it draws from it less the mean: [1 + draws, C, H, W].

    Its precision is J^T (E[G G^T] ⊗ 1) J / σ² + C^-1 with the layer J and the prior's covariance C.
    """
    noise = sent.sigma**2
    start = layer.along(prior.mean.expand(prior.variance.shape)[None]) + layer.centre
    rights = [layer.against(gradient.mean @ sent.weight - gradient.second @ start) / noise]
    if draws:
        chance = torch.Generator().manual_seed(seed)
        values, axes = torch.linalg.eigh(gradient.second)
        one, other = (
            torch.randn(draws, *shape, generator=chance, dtype=torch.float64).to(start)
            for shape in (start.shape[1:], prior.variance.shape)
        )
        along = layer.against((axes * values.clamp(min=0).sqrt()) @ one) / sent.sigma
        rights.append(along + prior.images(other / prior.variance.sqrt()))
    right = torch.cat(rights)
    mean = gradient.second.diagonal().mean() / noise * _gain(layer, prior)

    def times(image: Tensor) -> Tensor:
        return layer.against(gradient.second @ layer.along(image)) / noise + prior.images(
            prior.cosines(image) / prior.variance
        )

    def nearly(image: Tensor) -> Tensor:
        return prior.images(prior.cosines(image) / (mean + 1 / prior.variance))

    return _conjugate(times, nearly, right, close)


def _gain(layer: Layer, prior: ImagePrior) -> float:
    """What the layer makes of a pixel's square, the mean over an image."""
    chance = torch.Generator().manual_seed(0)
    image = torch.randn(1, *prior.variance.shape, generator=chance, dtype=torch.float64).to(prior.variance)
    return float(layer.along(image).square().sum() / image.square().sum())


def _conjugate(
    times: Callable[[Tensor], Tensor], nearly: Callable[[Tensor], Tensor], right: Tensor, close: float
) -> Tensor:
    """Solves times(x) = right for each of a batch; nearly: an approximate inverse."""
    found, left = torch.zeros_like(right), right
    near = nearly(left)
    way, size = near, _dot(left, near)
    least = close**2 * size
    for _ in range(LONG):
        if bool((size <= least).all()):
            break
        made = times(way)
        step = (size / _dot(way, made)).nan_to_num(0.0, 0.0, 0.0)
        found, left = found + step * way, left - step * made
        near = nearly(left)
        after = _dot(left, near)
        way, size = near + (after / size).nan_to_num(0.0, 0.0, 0.0) * way, after
    return found


def _dot(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum(dim=(1, 2, 3), keepdim=True)


class Climb(NamedTuple):
    """image [C, H, W]: the mean of q(X). bounds: of the evidence, before the first step of a round and behind each."""

    image: Tensor
    bounds: list[float]


def climb(
    sent: Sent,
    image: Tensor,
    spread: Tensor,
    prior: ImagePrior,
    layer: Layer,
    steps: int = STEPS,
    stop: Callable[[], bool] = lambda: False,
) -> Climb:
    """The mean of q(X) with the largest bound for a given covariance `spread` [N, N], from `image` on, by L-BFGS in
    cosines scaled by how well each is known."""
    from scipy.optimize import minimize

    known = best_gradient(sent, _patches(layer, image), spread).second.diagonal().mean() / sent.sigma**2
    scale = (known * _gain(layer, prior) + 1 / prior.variance).rsqrt()
    bounds: list[float] = []

    def place(vector: Any) -> Tensor:
        return torch.from_numpy(np.asarray(vector)).to(scale).view_as(scale)

    def value(vector: Any) -> tuple[float, Any]:
        cosines = scale * place(vector)
        patches = _patches(layer, prior.mean + prior.images(cosines))
        found = best_gradient(sent, patches, spread)
        bound = found.bound - 0.5 * (cosines.square() / prior.variance).sum()
        slope = layer.against(((found.mean @ sent.weight - found.second @ patches) / sent.sigma**2)[None])[0]
        slope = scale * (prior.cosines(slope) - cosines / prior.variance)
        if not bounds:
            bounds.append(float(bound))
        return -float(bound), -slope.flatten().cpu().numpy()

    def told(intermediate_result: Any) -> None:
        bounds.append(-float(intermediate_result.fun))
        if stop():
            raise StopIteration

    first = (prior.cosines(image - prior.mean) / scale).flatten().cpu().numpy()
    options = {"maxiter": steps, "maxcor": 20, "ftol": 1e-12, "gtol": 1e-6}
    found: Any = minimize(value, first, jac=True, method="L-BFGS-B", callback=told, options=options)
    return Climb(prior.mean + prior.images(scale * place(found.x)), bounds)


def factorise(
    sent: Sent, prior: ImagePrior, layer: Layer, first: Tensor, stop: Callable[[], bool] = lambda: False
) -> Tensor:
    """The image [C, H, W] behind what was sent. first: an image to begin at, where it explains more than what T alone
    makes of it. stop: asked at each step; what is there is then returned."""
    count = len(sent.table)
    nothing = torch.zeros(count, sent.weight.shape[1], dtype=sent.table.dtype, device=sent.table.device)
    gradient = best_gradient(sent, nothing, nothing.new_zeros(count, count))  # of T and the bias alone
    image, own = first, prior
    for number in range(ROUNDS):
        drawn = best_image(sent, gradient, own, layer, DRAWS, number)
        draws, moved = drawn[1:], layer.along(drawn[1:])
        spread = torch.einsum("snk,smk->nm", moved, moved) / DRAWS
        if number == 0:
            image = max((prior.mean + drawn[0], first), key=lambda each: _bound(sent, each, spread, prior, layer))
        own = prior.fitted(prior.cosines(image - prior.mean).square() + prior.cosines(draws).square().mean(dim=0))
        image = climb(sent, image, spread, own, layer, stop=stop).image
        if stop():
            break
        gradient = best_gradient(sent, _patches(layer, image), spread)
    return image


def _bound(sent: Sent, image: Tensor, spread: Tensor, prior: ImagePrior, layer: Layer) -> float:
    power = prior.cosines(image - prior.mean).square()
    return float(best_gradient(sent, _patches(layer, image), spread).bound - 0.5 * (power / prior.variance).sum())


def _patches(layer: Layer, image: Tensor) -> Tensor:
    """What the layer is fed of an image [C, H, W], [N, K]."""
    return (layer.along(image[None]) + layer.centre)[0]


# --- the attack ------------------------------------------------------------------------------------------------------


GRADIENTS = 40
"""Images whose gradients the attacker makes himself, for the channels' covariance."""

EVEN = 0.1
"""Of that covariance, beside what the images show: the gradient of another may lie in any direction."""

SPARE = 8
"""Directions that noise alone must have in ∂l/∂W before its deviation is read off them."""

BELIEVED = 1.25
"""The stated deviation is taken if what is read off is within this factor."""


class PatchEmbeddingPrior(Attack):
    """∂l/∂W_patch = G^T X with noise on all of it, factorised with what is known of images and of gradients."""

    knows: ClassVar[str] = "as patchembed, and other images of the same kind"
    name: ClassVar[str] = "patchembed-prior"
    about: ClassVar[str] = (
        "patchembed under noise, with what public images tell of photographs and of the model's gradients"
    )

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._seen: tuple[object, ImagePrior, Tensor] | None = None

    def prepare(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> Ready | Refused:
        stem = find_stem(backbone)
        if isinstance(stem, str):
            return Refused(stem)
        if missing := absent(sent, (stem.weight, stem.table)):
            return missing
        if known.defence.noise_level(known.step.batch) == 0:
            return Refused("no noise is added, and without it the equations need no prior (patchembed)")
        if known.step.batch > 1:
            return Refused(f"a batch of {known.step.batch}: the rows of the table's gradient are sums over the images")
        if known.step.adam:
            return Refused("Adam divides every number by its own size, and the noise with it")
        if known.hides(backbone):
            return Refused("hidden patches are no part of the table's gradient")
        view = view_of(backbone, stem)
        if view is not None and not view.affine:
            return Refused("what the model does to an image before its patch embedding is not affine")
        return Ready((stem.weight, stem.table, *(() if stem.bias is None else (stem.bias,))))

    def recover(
        self,
        backbone: Backbone,
        uploads: Sequence[Gradients],
        known: Knowledge | None = None,
        deadline: Deadline | None = None,
    ) -> Recovery:
        known = Knowledge() if known is None else known
        stem, stop = require_stem(backbone), (lambda: False) if deadline is None else deadline.over
        layer = _layer(backbone, stem)
        prior, covariance = self._learned(backbone, stem, known)
        images, facts, cut = list[Tensor](), list[dict[str, Fact]](), None
        for upload in uploads:
            if images and stop():
                break
            table = patch_rows(known.trained(backbone), stem, upload, known)
            weight = flat_weight(known_numbers(upload[stem.weight]), stem)
            bias = known_numbers(upload[stem.bias]) if stem.bias in upload else None
            whole = table.isfinite().all(dim=0) & weight.isfinite().all(dim=1)
            if bias is not None:
                whole &= bias.isfinite()
                bias = bias[whole]
            table, weight = table[:, whole], weight[whole]
            sigma = _sigma(weight, len(table), upload, stem, known)
            sent = turned(table, weight, bias, sigma, covariance[whole][:, whole])
            plain = PatchEmbedding().recover(backbone, [upload], replace(known, normalisation=None))
            images.append(factorise(sent, prior, layer, plain.images[0].double(), stop))
            facts.append({"sigma": sigma})
            cut = "a part of the search for the last image" if stop() else None
        return Recovery(torch.stack(images).float(), facts, partial=cut)

    def _learned(self, backbone: Backbone, stem: Stem, known: Knowledge) -> tuple[ImagePrior, Tensor]:
        """What is known of images, and the channels' covariance: once for the same weights and public images."""
        weights = tuple((id(p), p._version) for p in backbone.parameters())
        key = (weights, id(known.public), known.normalisation, type(known.trained(backbone)))
        if self._seen is None or self._seen[0] != key:
            assert backbone.input.shape is not None
            shape = (backbone.input.channels, *pair(backbone.input.shape))
            prior = image_prior(shape, known.public, known.normalisation)
            prior = prior.to(next(backbone.parameters()).device)
            self._seen = key, prior, channel_covariance(backbone, stem, prior, known)
        return self._seen[1], self._seen[2]


def channel_covariance(backbone: Backbone, stem: Stem, prior: ImagePrior, known: Knowledge) -> Tensor:
    """The second moment [D, D] of the table's gradient over the rows of images that are not under attack, each image's
    gradient of size 1; where there are too few, of images drawn from the prior.

    The class is the one that the model says in every other image, and any in the rest: nobody knows how sure the model
    is of what is under attack, and both lie in the same directions.
    """
    chance = torch.Generator().manual_seed(0)
    images = prior.draw(GRADIENTS, chance).float() if known.public is None else known.public[:GRADIENTS]
    if len(images) < GRADIENTS:
        images = torch.cat([images.to(prior.mean.device), prior.draw(GRADIENTS - len(images), chance).float()])
    images = images.to(next(backbone.parameters()).device)
    method = known.trained(backbone)
    count, dim = table_rows(dict(backbone.named_parameters())[stem.table], stem).shape
    found = EVEN * torch.eye(dim, dtype=torch.float64, device=images.device)
    for number, image in enumerate(images):
        gradient = _table_gradient(method, stem, image[None], number, chance)
        size = float(gradient.square().mean())
        if 0 < size < math.inf:
            found = found + gradient.T @ gradient / (size * count * len(images))
    return found


def _table_gradient(method: Method, stem: Stem, image: Tensor, number: int, chance: torch.Generator) -> Tensor:
    """∂l/∂E_pos on the patch rows for one image [1, C, H, W] of the attacker's own, [N, D] in float64."""
    with torch.no_grad():
        logits = method.backbone(image)
    anything = torch.randint(logits.shape[-1], (1,), generator=chance).to(image.device)
    label = logits.argmax(dim=-1) if number % 2 else anything
    batch = Batch(image, torch.zeros(1, dtype=torch.int64, device=image.device), {"label": label})
    with torch.enable_grad(), full_float32():
        loss = method(batch, method.draw(batch, When())).loss
        [found] = torch.autograd.grad(loss, [dict(method.backbone.named_parameters())[stem.table]])
    return table_rows(found, stem).double()


def _sigma(weight: Tensor, patches: int, upload: Gradients, stem: Stem, known: Knowledge) -> float:
    """The deviation of what is wrong with a number: as stated with what rounding adds, or as it is read off the
    directions of ∂l/∂W [D, K] beyond as many as there are patches, where that says otherwise."""
    names = (stem.weight, stem.table)
    rounding = max(rounded_off(upload[name], known.type_of(upload[name])) for name in names)
    stated = math.hypot(max(known.noise_on(upload[name]) for name in names), rounding)
    spare = min(weight.shape) - patches
    if spare < SPARE:
        return stated
    rest = torch.linalg.svdvals(weight)[patches:].square().sum()
    read = math.sqrt(float(rest) / ((weight.shape[0] - patches) * (weight.shape[1] - patches)))
    return stated if 1 / BELIEVED < read / stated < BELIEVED else max(read, rounding)


def _layer(backbone: Backbone, stem: Stem) -> Layer:
    """What the patch embedding is fed of an image, as a linear map and its transpose."""
    view = view_of(backbone, stem)
    if view is None:
        return Layer(
            lambda images: patchify(images, stem.patch_size),
            lambda patches: unpatchify(patches, backbone.grid, stem.patch_size),
        )
    return _seen_through(view)


def _seen_through(view: View) -> Layer:
    """The same of a model that does something affine to the image first."""
    if view.scaled is not None:
        index, scale = view.scaled.index.flatten(), view.scaled.scale

        def spread(patches: Tensor) -> Tensor:
            numbers = patches.new_zeros(len(patches), math.prod(view.shape))
            return numbers.index_add_(1, index, (scale * patches).flatten(1)).view(-1, *view.shape)

        return Layer(lambda images: scale * images.flatten(1)[:, index].view(-1, *scale.shape), spread, view.centre)
    _, along, against = view.feed.derivative(view.start)
    return Layer(
        lambda images: torch.cat([along(each[None]) for each in images]),
        lambda patches: torch.cat([against(each[None]) for each in patches]),
        view.centre,
    )
