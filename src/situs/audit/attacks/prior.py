"""The patch-embedding attack with priors from public images: for gradients that were sent with noise.

`patchembed` takes the table's gradient for G and damps the directions that noise drowns. But photographs are smooth
across patches too, a model's gradients lie in few directions of its channels, which the attacker's own images show, and
∂l/∂W says as much about G as about X. All of that together gives several dB. A low figure proves nothing: a better
prior gives more.
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
from situs.audit.attacks.equations import conjugate
from situs.audit.attacks.patchembed import PatchEmbedding, patch_rows
from situs.audit.deadline import Deadline
from situs.audit.defences import Gradients
from situs.audit.stem import Stem, find_stem, flat_weight, require_stem, table_rows, view_of
from situs.backbones.base import Backbone
from situs.core.precision import full_float32
from situs.core.tokens import pair, patchify, unpatchify
from situs.core.when import When
from situs.methods.base import Batch, Method

# ---------------------------------------------------------------------------------------------------------------------
# The prior of images: a normal distribution over the cosine coefficients of the whole image.
#
# Cosines diagonalise the correlation of neighbouring pixels, also across the borders of patches, and the directions in
# which colours vary together are rotated out. The variance of each cosine is that of public images, averaged over its
# neighbours, mixed with that of photographs in general (it falls with the square of the frequency) where those are few.


GENERAL = 8.0
"""The weight of photographs in general, as a number of public images."""

GREY, SPREAD, SHARED = 0.46, 0.25, 0.9
"""Of photographs in general, in [0, 1]: mean and deviation of a pixel, and the correlation of two colours."""

FREE = 4.0
"""The weight of the prior, as a number of cosines, when an image's own variance in a band is estimated."""


@dataclass(frozen=True)
class ImagePrior:
    """Normal images [C, H, W]: mean [C, 1, 1]; rotation [C, C], whose columns are directions of colour; variance
    [..., C, H, W] of each cosine along each of them."""

    mean: Tensor
    rotation: Tensor
    variance: Tensor

    @cached_property
    def _bases(self) -> tuple[Tensor, Tensor]:
        height, width = self.variance.shape[-2:]
        return cosine_basis(height, self.variance), cosine_basis(width, self.variance)

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

    def root(self, images: Tensor) -> Tensor:
        """Images without their mean times the root of the covariance: unit noise becomes images of this prior."""
        return self.images(self.variance.sqrt() * self.cosines(images))

    def to(self, device: torch.device) -> ImagePrior:
        """The same on a device."""
        return ImagePrior(self.mean.to(device), self.rotation.to(device), self.variance.to(device))

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Random images of this distribution, [count, C, H, W]."""
        noise = torch.randn(count, *self.variance.shape, generator=generator, dtype=torch.float64).to(self.variance)
        return self.mean + self.images(noise * self.variance.sqrt())

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
    """The prior of normalised images [C, H, W]. public: [n, C, H, W] of the same kind. Without a normalisation a number
    has mean 0 and deviation 1."""
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
    public_colours = torch.einsum("nchw,ndhw->cd", centred, centred) / (height * width)
    values, rotation = torch.linalg.eigh((public_colours + GENERAL * colours) / (count + GENERAL))
    prior = ImagePrior(mean[:, None, None], rotation, values.clamp(min=1e-6)[:, None, None] * falling)
    power = _smooth(prior.cosines(centred).square().sum(dim=0) / falling) * falling
    return replace(prior, variance=(power + GENERAL * prior.variance) / (count + GENERAL))


def cosine_basis(size: int, like: Tensor) -> Tensor:
    """The orthonormal cosine transform (DCT-II) as a matrix [size, size]."""
    place = torch.arange(size, dtype=like.dtype, device=like.device)
    basis = torch.cos(math.pi / size * torch.outer(place, place + 0.5)) * math.sqrt(2 / size)
    basis[0] /= math.sqrt(2)
    return basis


def _falling(height: int, width: int) -> Tensor:
    """1 / frequency² of each cosine, with a mean of 1, [height, width]; the mean grey varies as the slowest cosine."""
    power = 1 / _frequency(height, width).square().clamp(min=1.0)
    return power / power.mean()


def _frequency(height: int, width: int) -> Tensor:
    """Half waves over the longer side, [height, width]."""
    down, along = (torch.arange(size, dtype=torch.float64) / size for size in (height, width))
    return max(height, width) * (down[:, None].square() + along.square()).sqrt()


def _bands(height: int, width: int) -> Tensor:
    """The octave of each cosine, 0 for the mean grey alone, [height, width]."""
    frequency = _frequency(height, width)
    return torch.where(frequency == 0, 0.0, 1 + frequency.clamp(min=1).log2()).long()


def _smooth(power: Tensor) -> Tensor:
    """Each number replaced by the mean over frequencies up to a third higher or lower, [C, height, width]."""
    for dim in (1, 2):
        size = power.shape[dim]
        place = torch.arange(size, device=power.device)
        low, high = place - place // 3, (place + place // 3 + 1).clamp(max=size)
        sums = torch.cat([torch.zeros_like(power.narrow(dim, 0, 1)), power.cumsum(dim)], dim)
        shape = [-1 if axis == dim else 1 for axis in range(3)]
        power = (sums.index_select(dim, high) - sums.index_select(dim, low)) / (high - low).view(shape)
    return power


# ---------------------------------------------------------------------------------------------------------------------
# A matrix of noisy gradients factorised into G^T X, with G itself known under noise, by variational Bayes.
#
# T = G + σ E and W = G^T X + σ E' are sent, and b = G^T 1 + σ E'' where the embedding has a bias. The rows of G are
# normal with a covariance over channels, the image behind X has the prior above. The posterior is approximated by a
# product q(G) q(X) of normal distributions. For a fixed X the best q(G) is exact, so that the bound on the evidence is
# a function of the mean of X, which L-BFGS maximises; the covariance of X follows from q(G), and what q(G) needs of it
# is estimated from draws by conjugate gradients.


ROUNDS = 3
"""Maximisations over the mean of X; its covariance and the image's contrast are updated before each."""

STEPS = 60
"""Steps of L-BFGS in a round."""

DRAWS = 4
"""Draws from q(X): the covariance of two patches is the mean over these and over the numbers of a patch."""

CLOSE = 1e-2
"""Relative residual at which conjugate gradients end: for draws, and for a start."""

LONG = 300
"""Steps of conjugate gradients, at most."""


@dataclass(frozen=True)
class Layer:
    """The input of a patch embedding for an image: along(image) + centre. along: [B, C, H, W] -> [B, N, K], linear;
    against: its transpose."""

    along: Callable[[Tensor], Tensor]
    against: Callable[[Tensor], Tensor]
    centre: Tensor | float = 0.0


@dataclass(frozen=True)
class Sent:
    """The upload in coordinates in which channels are uncorrelated: table T [N, D], weight W [D, K], bias [D] or None;
    sigma: the deviation of the noise; variance [D]: of G along each channel."""

    table: Tensor
    weight: Tensor
    bias: Tensor | None
    sigma: float
    variance: Tensor


class Gradient(NamedTuple):
    """q(G). bound: on the log evidence, without the terms of X alone and a constant. mean [N, D]; second: E[G G^T]."""

    bound: Tensor
    mean: Tensor
    second: Tensor


def turned(table: Tensor, weight: Tensor, bias: Tensor | None, sigma: float, covariance: Tensor) -> Sent:
    """The upload in the axes of G's covariance over channels [D, D]. That is known up to a factor, which the size of T
    gives, also under clipping."""
    values, axes = torch.linalg.eigh(covariance)
    values = values.clamp(min=1e-9 * float(values[-1]))
    least = sigma**2 * math.sqrt(2 / table.numel())  # the error of T's mean square
    size = max(float(table.square().mean()) - sigma**2, least)
    bias = None if bias is None else bias @ axes
    return Sent(table @ axes, axes.T @ weight, bias, sigma, size * values / values.mean())


def best_gradient(sent: Sent, patches: Tensor, spread: Tensor) -> Gradient:
    """The best q(G) for a q(X) with mean `patches` [N, K] and covariance `spread` [N, N], summed over K."""
    noise = sent.sigma**2
    right = sent.table + patches @ sent.weight.T
    gram = patches @ patches.T + spread + torch.eye(len(patches), dtype=patches.dtype, device=patches.device)
    size = sent.table.square().sum() + sent.weight.square().sum()
    if sent.bias is not None:
        right, gram, size = right + sent.bias, gram + 1, size + sent.bias.square().sum()
    values, axes = torch.linalg.eigh(gram)
    precision = values[:, None] / noise + 1 / sent.variance
    along = axes.T @ right / noise
    coordinates = along / precision
    misfit = size / noise - (along * coordinates).sum()
    bound = -0.5 * (misfit + (precision * sent.variance).log().sum())
    mean = axes @ coordinates
    return Gradient(bound, mean, mean @ mean.T + (axes * (1 / precision).sum(dim=1)) @ axes.T)


def best_image(
    sent: Sent, gradient: Gradient, prior: ImagePrior, layer: Layer, draws: int = 0, seed: int = 0, close: float = CLOSE
) -> Tensor:
    """The mean of the best q(X) for a q(G), then centred draws from it: [1 + draws, C, H, W].

    Its precision is J^T (E[G G^T] ⊗ 1) J / σ² + C^-1 with the layer J and the prior's covariance C.
    """
    noise = sent.sigma**2
    start = layer.along(prior.mean.expand(prior.variance.shape)[None]) + layer.centre
    rights = [layer.against(gradient.mean @ sent.weight - gradient.second @ start) / noise]
    if draws:
        generator = torch.Generator().manual_seed(seed)
        values, axes = torch.linalg.eigh(gradient.second)
        one, other = (
            torch.randn(draws, *shape, generator=generator, dtype=torch.float64).to(start)
            for shape in (start.shape[1:], prior.variance.shape)
        )
        along = layer.against((axes * values.clamp(min=0).sqrt()) @ one) / sent.sigma
        rights.append(along + prior.images(other / prior.variance.sqrt()))
    mean = gradient.second.diagonal().mean() / noise * _gain(layer, prior)

    def precision(image: Tensor) -> Tensor:
        information = layer.against(gradient.second @ layer.along(image)) / noise
        return information + prior.images(prior.cosines(image) / prior.variance)

    def precondition(image: Tensor) -> Tensor:
        return prior.images(prior.cosines(image) / (mean + 1 / prior.variance))

    return conjugate(precision, torch.cat(rights), LONG, close**2, precondition, dims=(1, 2, 3))


def _gain(layer: Layer, prior: ImagePrior) -> float:
    """The layer's mean gain on the square of a pixel."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, *prior.variance.shape, generator=generator, dtype=torch.float64).to(prior.variance)
    return float(layer.along(image).square().sum() / image.square().sum())


def climb(
    sent: Sent,
    image: Tensor,
    spread: Tensor,
    prior: ImagePrior,
    layer: Layer,
    steps: int = STEPS,
    stop: Callable[[], bool] = lambda: False,
) -> Tensor:
    """The mean of q(X), [C, H, W], with the largest bound for a given covariance `spread` [N, N], from `image` on, by
    L-BFGS in cosines scaled by how well each is known."""
    from scipy.optimize import minimize

    known = best_gradient(sent, _patches(layer, image), spread).second.diagonal().mean() / sent.sigma**2
    scale = (known * _gain(layer, prior) + 1 / prior.variance).rsqrt()

    def unscaled(vector: Any) -> Tensor:
        return torch.from_numpy(np.asarray(vector)).to(scale).view_as(scale)

    def value(vector: Any) -> tuple[float, Any]:
        cosines = scale * unscaled(vector)
        patches = _patches(layer, prior.mean + prior.images(cosines))
        gradient = best_gradient(sent, patches, spread)
        bound = gradient.bound - 0.5 * (cosines.square() / prior.variance).sum()
        slope = layer.against(((gradient.mean @ sent.weight - gradient.second @ patches) / sent.sigma**2)[None])[0]
        slope = scale * (prior.cosines(slope) - cosines / prior.variance)
        return -float(bound), -slope.flatten().cpu().numpy()

    def after_step(_: Any) -> None:
        if stop():
            raise StopIteration

    first = (prior.cosines(image - prior.mean) / scale).flatten().cpu().numpy()
    options = {"maxiter": steps, "maxcor": 20, "ftol": 1e-12, "gtol": 1e-6}
    maximum: Any = minimize(value, first, jac=True, method="L-BFGS-B", callback=after_step, options=options)
    return prior.mean + prior.images(scale * unscaled(maximum.x))


def factorise(
    sent: Sent, prior: ImagePrior, layer: Layer, first: Tensor, stop: Callable[[], bool] = lambda: False
) -> Tensor:
    """The image [C, H, W] behind an upload. first: an image to begin with, if it has a larger bound than the estimate
    from T alone. stop: asked at each step; the image so far is then returned."""
    count = len(sent.table)
    zero = torch.zeros(count, sent.weight.shape[1], dtype=sent.table.dtype, device=sent.table.device)
    gradient = best_gradient(sent, zero, zero.new_zeros(count, count))  # of T and the bias alone
    image, fitted = first, prior
    for number in range(ROUNDS):
        mean, draws = best_image(sent, gradient, fitted, layer, DRAWS, number).split([1, DRAWS])
        moved = layer.along(draws)
        spread = torch.einsum("snk,smk->nm", moved, moved) / DRAWS
        if number == 0:
            candidates = (prior.mean + mean[0], first)
            image = max(candidates, key=lambda candidate: _bound(sent, candidate, spread, prior, layer))
        power = prior.cosines(image - prior.mean).square() + prior.cosines(draws).square().mean(dim=0)
        fitted = prior.fitted(power)
        image = climb(sent, image, spread, fitted, layer, stop=stop)
        if stop():
            break
        gradient = best_gradient(sent, _patches(layer, image), spread)
    return image


def _bound(sent: Sent, image: Tensor, spread: Tensor, prior: ImagePrior, layer: Layer) -> float:
    power = prior.cosines(image - prior.mean).square()
    return float(best_gradient(sent, _patches(layer, image), spread).bound - 0.5 * (power / prior.variance).sum())


def _patches(layer: Layer, image: Tensor) -> Tensor:
    """The layer's input [N, K] for an image [C, H, W]."""
    return (layer.along(image[None]) + layer.centre)[0]


# --- the attack ------------------------------------------------------------------------------------------------------


GRADIENTS = 40
"""Images whose gradients the attacker computes, for the channels' covariance."""

EVEN = 0.1
"""The share of an isotropic part in that covariance: the gradient of another image may lie in any direction."""

SPARE = 8
"""Directions that are noise alone in ∂l/∂W which an estimate of its deviation needs."""

BELIEVED = 1.25
"""The stated deviation is used if the estimate is within this factor."""


class PatchEmbeddingPrior(Attack):
    """∂l/∂W_patch = G^T X under noise, factorised with priors of images and of gradients."""

    needs: ClassVar[str] = "the gradients that the attack `patchembed` needs, for one image under noise"
    knows: ClassVar[str] = "other images of the same kind"
    difference: ClassVar[str] = "variational factorisation with priors of images and of gradients"
    measured: ClassVar[str] = "benchmarks/verdicts.py"
    name: ClassVar[str] = "patchembed-prior"
    about: ClassVar[str] = (
        "`patchembed` for noisy gradients, with statistical priors for photographs and for the model's gradients"
    )

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._cached: tuple[object, ImagePrior, Tensor] | None = None

    def prepare(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> Ready | Refused:
        stem = find_stem(backbone)
        if isinstance(stem, str):
            return Refused(stem)
        if missing := absent(sent, (stem.weight, stem.table)):
            return missing
        if known.defence.noise_level(known.step.batch) == 0:
            return Refused("no noise is added, so the attack `patchembed` solves the equations without a prior")
        if known.step.batch > 1:
            return Refused(
                f"in a batch of {known.step.batch}, the rows of the position table's gradient are sums over the "
                "images, so the equations mix the images"
            )
        if known.step.adam:
            return Refused(
                "Adam divides every entry of the noisy gradient by its magnitude, so the attack's equations do not hold"
            )
        if known.hides(backbone):
            return Refused(
                "the hidden patches do not appear in the gradient of the position table, so the attack cannot recover "
                "them"
            )
        view = view_of(backbone, stem)
        if view is not None and not view.affine:
            return Refused(
                "the attack needs an affine transform before the patch embedding, but this model's transform is not "
                "affine"
            )
        return Ready((stem.weight, stem.table, *(() if stem.bias is None else (stem.bias,))))

    def recover(
        self, backbone: Backbone, uploads: Sequence[Gradients], known: Knowledge, deadline: Deadline
    ) -> Recovery:
        stem, stop = require_stem(backbone), deadline.over
        layer = _layer(backbone, stem)
        prior, covariance = self._priors(backbone, stem, known)
        images, facts, cut = list[Tensor](), list[dict[str, Fact]](), None
        for upload in uploads:
            if images and stop():
                break
            table = patch_rows(known.trained(backbone), stem, upload, known)
            weight = flat_weight(known_numbers(upload[stem.weight]), stem)
            bias = known_numbers(upload[stem.bias]) if stem.bias in upload else None
            finite = table.isfinite().all(dim=0) & weight.isfinite().all(dim=1)
            if bias is not None:
                finite &= bias.isfinite()
                bias = bias[finite]
            table, weight = table[:, finite], weight[finite]
            sigma = _sigma(weight, len(table), upload, stem, known)
            sent = turned(table, weight, bias, sigma, covariance[finite][:, finite])
            plain = PatchEmbedding().recover(backbone, [upload], replace(known, normalisation=None), Deadline())
            images.append(factorise(sent, prior, layer, plain.images[0].double(), stop))
            facts.append({"sigma": sigma})
            cut = "a part of the search for the image that was attacked last" if stop() else None
        return Recovery(torch.stack(images).float(), facts, partial=cut)

    def _priors(self, backbone: Backbone, stem: Stem, known: Knowledge) -> tuple[ImagePrior, Tensor]:
        """The prior of images and the channels' covariance, computed once for the same weights and public images."""
        weights = tuple((id(p), p._version) for p in backbone.parameters())
        key = (weights, id(known.public), known.normalisation, type(known.trained(backbone)))
        if self._cached is None or self._cached[0] != key:
            assert backbone.input.shape is not None
            shape = (backbone.input.channels, *pair(backbone.input.shape))
            prior = image_prior(shape, known.public, known.normalisation)
            prior = prior.to(next(backbone.parameters()).device)
            self._cached = key, prior, channel_covariance(backbone, stem, prior, known)
        return self._cached[1], self._cached[2]


def channel_covariance(backbone: Backbone, stem: Stem, prior: ImagePrior, known: Knowledge) -> Tensor:
    """The second moment [D, D] of the table's gradient over the rows of public images, each image's gradient of size 1;
    where there are too few images, others are drawn from the prior.

    Every second image has the class that the model predicts, the others a random one: how sure the model is of the
    attacked images is unknown, and both gradients lie in the same directions.
    """
    generator = torch.Generator().manual_seed(0)
    images = prior.draw(GRADIENTS, generator).float() if known.public is None else known.public[:GRADIENTS]
    if len(images) < GRADIENTS:
        images = torch.cat([images.to(prior.mean.device), prior.draw(GRADIENTS - len(images), generator).float()])
    images = images.to(next(backbone.parameters()).device)
    method = known.trained(backbone)
    count, dim = table_rows(dict(backbone.named_parameters())[stem.table], stem).shape
    covariance = EVEN * torch.eye(dim, dtype=torch.float64, device=images.device)
    for number, image in enumerate(images):
        gradient = _table_gradient(method, stem, image[None], number, generator)
        size = float(gradient.square().mean())
        if 0 < size < math.inf:
            covariance = covariance + gradient.T @ gradient / (size * count * len(images))
    return covariance


def _table_gradient(method: Method, stem: Stem, image: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """∂l/∂E_pos on the patch rows for one image [1, C, H, W] of the attacker's own, [N, D] in float64."""
    with torch.no_grad():
        logits = method.backbone(image)
    random = torch.randint(logits.shape[-1], (1,), generator=generator).to(image.device)
    label = logits.argmax(dim=-1) if number % 2 else random
    batch = Batch(image, torch.zeros(1, dtype=torch.int64, device=image.device), {"label": label})
    with torch.enable_grad(), full_float32():
        loss = method(batch, method.draw(batch, When())).loss
        [gradient] = torch.autograd.grad(loss, [dict(method.backbone.named_parameters())[stem.table]])
    return table_rows(gradient, stem).double()


def _sigma(weight: Tensor, patches: int, upload: Gradients, stem: Stem, known: Knowledge) -> float:
    """The deviation of a number's error: the stated noise and the rounding, or an estimate from the directions of ∂l/∂W
    [D, K] beyond the number of patches, where that disagrees."""
    names = (stem.weight, stem.table)
    rounding = max(rounded_off(upload[name], known.type_of(upload[name])) for name in names)
    stated = math.hypot(max(known.noise_on(upload[name]) for name in names), rounding)
    spare = min(weight.shape) - patches
    if spare < SPARE:
        return stated
    rest = torch.linalg.svdvals(weight)[patches:].square().sum()
    estimate = math.sqrt(float(rest) / ((weight.shape[0] - patches) * (weight.shape[1] - patches)))
    return stated if 1 / BELIEVED < estimate / stated < BELIEVED else max(estimate, rounding)


def _layer(backbone: Backbone, stem: Stem) -> Layer:
    """The patch embedding's input as a linear map of the image, and its transpose; a transform before it is affine."""
    view = view_of(backbone, stem)
    if view is None:
        return Layer(
            lambda images: patchify(images, stem.patch_size),
            lambda patches: unpatchify(patches, backbone.grid, stem.patch_size),
        )
    if view.scaled is not None:
        index, scale = view.scaled.index.flatten(), view.scaled.scale

        def spread(patches: Tensor) -> Tensor:
            numbers = patches.new_zeros(len(patches), math.prod(view.shape))
            return numbers.index_add_(1, index, (scale * patches).flatten(1)).view(-1, *view.shape)

        return Layer(lambda images: scale * images.flatten(1)[:, index].view(-1, *scale.shape), spread, view.centre)
    _, along, against = view.feed.derivative(view.start)
    return Layer(
        lambda images: torch.cat([along(image[None]) for image in images]),
        lambda patches: torch.cat([against(inputs[None]) for inputs in patches]),
        view.centre,
    )
