"""One matrix of noisy gradients taken apart into two: G^T X, with G itself seen under noise, by variational Bayes.

T = G + σ E and W = G^T X + σ E' are what is sent, and b = G^T 1 + σ E'' where the embedding has a bias. The rows of G
are normal with a covariance over channels, the image behind X as `images` says. The posterior is approximated by a
product q(G) q(X) of normal distributions. For a given X the best q(G) is exact, so that the bound on the evidence is a
function of the mean of X, which is climbed by L-BFGS; the covariance of X follows from q(G), and what q(G) needs of it
is estimated from draws, which conjugate gradients make.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from situs.audit.attacks.prior.images import ImagePrior

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
