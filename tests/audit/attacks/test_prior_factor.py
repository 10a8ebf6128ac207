"""The factorisation against dense normal distributions in float64: the posterior of X, the evidence, the climb."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from situs.audit.attacks.base import Knowledge
from situs.audit.attacks.prior import (
    Gradient,
    ImagePrior,
    Layer,
    Sent,
    _sigma,
    best_gradient,
    best_image,
    climb,
    image_prior,
    turned,
)
from situs.audit.defences import Noise, Step
from situs.audit.stem import Stem
from situs.core.tokens import patchify, unpatchify

SHAPE, PATCH, GRID = (2, 6, 6), (3, 2), (2, 3)
N, K, D, SIGMA = 6, 12, 5, 0.3

LAYER = Layer(lambda x: patchify(x, PATCH), lambda p: unpatchify(p, GRID, PATCH), 0.2)


def prior_of() -> ImagePrior:
    return image_prior(SHAPE, None, ((0.4, 0.5), (0.25, 0.3)))


def step(seed: int = 0, bias: bool = True) -> tuple[Sent, Tensor, Tensor]:
    """What is sent, G and X."""
    chance = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance, dtype=torch.float64)

    variance = torch.linspace(0.3, 2.0, D, dtype=torch.float64)
    gradient = draw(N, D) * variance.sqrt()
    patches = (LAYER.along(prior_of().draw(1, chance)) + LAYER.centre)[0]
    sums = gradient.sum(dim=0) + SIGMA * draw(D) if bias else None
    weight = gradient.T @ patches + SIGMA * draw(D, K)
    return Sent(gradient + SIGMA * draw(N, D), weight, sums, SIGMA, variance), gradient, patches


def dense_prior(prior: ImagePrior) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the image's numbers, in their order."""
    size = prior.variance.numel()
    basis = prior.images(torch.eye(size, dtype=torch.float64).view(size, *prior.variance.shape)).flatten(1)
    return prior.mean.expand(prior.variance.shape).flatten(), basis.T @ (prior.variance.flatten()[:, None] * basis)


def dense_layer() -> Tensor:
    size = SHAPE[0] * SHAPE[1] * SHAPE[2]
    return LAYER.along(torch.eye(size, dtype=torch.float64).view(size, *SHAPE)).flatten(1).T


def dense_posterior(sent: Sent, gradient: Tensor, prior: ImagePrior) -> tuple[Tensor, Tensor]:
    """Of the image for a G that is known: conditioning of the joint normal distribution of image and W."""
    mean, covariance = dense_prior(prior)
    operator = torch.einsum("nd,kl->dknl", gradient, torch.eye(K, dtype=torch.float64)).reshape(D * K, N * K)
    seen = operator @ dense_layer()
    at = operator @ (dense_layer() @ mean + 0.2)
    total = seen @ covariance @ seen.T + sent.sigma**2 * torch.eye(D * K, dtype=torch.float64)
    gain = covariance @ seen.T @ torch.linalg.inv(total)
    return mean + gain @ (sent.weight.flatten() - at), covariance - gain @ seen @ covariance


def test_for_a_known_gradient_the_image_is_the_conditional_mean() -> None:
    sent, gradient, _ = step()
    known = Gradient(torch.zeros(()), gradient, gradient @ gradient.T)
    prior = prior_of()
    found = prior.mean + best_image(sent, known, prior, LAYER, close=1e-12)[0]
    mean, _ = dense_posterior(sent, gradient, prior)
    assert torch.allclose(found.flatten(), mean, atol=1e-9)


def test_draws_have_the_conditional_covariance() -> None:
    sent, gradient, _ = step()
    known = Gradient(torch.zeros(()), gradient, gradient @ gradient.T)
    prior = prior_of()
    moved = LAYER.along(best_image(sent, known, prior, LAYER, draws=1000, close=1e-4)[1:])
    found = torch.einsum("snk,smk->nm", moved, moved) / 1000
    _, covariance = dense_posterior(sent, gradient, prior)
    layer = dense_layer().view(N, K, -1)
    wanted = torch.einsum("nki,ij,mkj->nm", layer, covariance, layer)
    assert float((found - wanted).norm() / wanted.norm()) < 0.1


def test_the_bound_is_the_evidence_where_the_image_is_known() -> None:
    for bias in (True, False):
        sent, _, patches = step(bias=bias)
        columns = [torch.eye(N, dtype=torch.float64), patches]
        seen = [sent.table, sent.weight.T]
        if sent.bias is not None:
            columns.append(torch.ones(N, 1, dtype=torch.float64))
            seen.append(sent.bias[None])
        design, values = torch.cat(columns, dim=1).T, torch.cat(seen)  # values = design @ G + noise, by channel
        size = len(design)
        noise = SIGMA**2 * torch.eye(size, dtype=torch.float64)
        wanted = sum(
            MultivariateNormal(torch.zeros(size, dtype=torch.float64), noise + v * design @ design.T).log_prob(column)
            for v, column in zip(sent.variance, values.T, strict=True)
        )
        known = best_gradient(sent, patches, torch.zeros(N, N, dtype=torch.float64)).bound
        constant = 0.5 * values.numel() * torch.log(torch.tensor(2 * torch.pi * SIGMA**2, dtype=torch.float64))
        assert torch.allclose(known - constant, torch.as_tensor(wanted))


def test_a_climb_ends_higher_where_the_bound_is_flat() -> None:
    sent, _, _ = step()
    prior = prior_of()
    spread = 0.5 * torch.eye(N, dtype=torch.float64)
    start = prior.draw(1, torch.Generator().manual_seed(5))[0]
    found = climb(sent, start, spread, prior, LAYER, steps=400)

    def bound(image: Tensor) -> Tensor:
        given = best_gradient(sent, (LAYER.along(image[None]) + LAYER.centre)[0], spread).bound
        cosines = prior.cosines(image - prior.mean)
        return given - 0.5 * (cosines.square() / prior.variance).sum()

    slopes = [torch.autograd.functional.jacobian(bound, each).norm() for each in (start, found)]
    assert float(slopes[1]) < 1e-4 * float(slopes[0])
    assert float(bound(found)) > float(bound(start))


def test_the_scale_of_the_gradient_is_read_off_the_table() -> None:
    """Clipping leaves a factor on all gradients, which nobody tells."""
    chance = torch.Generator().manual_seed(0)
    gradient = 0.03 * torch.randn(40, D, generator=chance, dtype=torch.float64)
    table = gradient + 0.05 * torch.randn(40, D, generator=chance, dtype=torch.float64)
    sent = turned(table, torch.zeros(D, K, dtype=torch.float64), None, 0.05, torch.eye(D, dtype=torch.float64) * 7)
    assert 0.02**2 < float(sent.variance.mean()) < 0.04**2


def test_what_the_layer_adds_is_no_part_of_the_image() -> None:
    sent, gradient, patches = step()
    prior = prior_of()
    quiet = replace(sent, sigma=1e-6, weight=gradient.T @ patches)
    known = Gradient(torch.zeros(()), gradient, gradient @ gradient.T)
    wide = replace(prior, variance=prior.variance * 1e6)
    found = prior.mean + best_image(quiet, known, wide, LAYER, close=1e-14)[0]
    again = (LAYER.along(found[None]) + LAYER.centre)[0]
    assert torch.allclose(gradient.T @ again, quiet.weight, atol=1e-6)


@pytest.mark.parametrize(("rows", "columns", "patches"), [(64, 48, 16), (64, 24, 16), (24, 64, 16), (64, 23, 16)])
@pytest.mark.parametrize(("stated", "real"), [(1e-2, 1e-2), (1e-2, 1e-3), (1e-2, 3e-2), (1e-2, 1.1e-2), (1e-2, 1.6e-2)])
def test_the_stated_noise_is_believed_only_as_far_as_the_gradient_bears_it_out(
    rows: int, columns: int, patches: int, stated: float, real: float
) -> None:
    """The directions beyond those of the patches hold noise alone: fewer than eight of them say too little."""
    chance = torch.Generator().manual_seed(0)
    made = torch.randn(rows, patches, generator=chance) @ torch.randn(patches, columns, generator=chance)
    weight = made + real * torch.randn(rows, columns, generator=chance)
    stem, table = Stem("w", None, "t", 0, (1, 1)), torch.randn(patches, rows, generator=chance)
    found = _sigma(weight.double(), patches, {"w": weight, "t": table}, stem, Knowledge(Noise(stated), Step()))
    believed = min(rows, columns) - patches < 8 or 1 / 1.25 < real / stated < 1.25
    assert found == pytest.approx(stated if believed else real, rel=1e-3 if believed else 0.15)
