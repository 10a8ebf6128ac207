"""What is known of images: cosines that lose nothing, variances that public images tell, contrast of one image."""

from __future__ import annotations

import pytest
import torch

from situs.audit.attacks.prior import GREY, _smooth, image_prior

COLOUR = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize("shape", [(3, 12, 20), (1, 9, 9)])
def test_cosines_keep_lengths_and_come_back(shape: tuple[int, int, int]) -> None:
    prior = image_prior(shape)
    images = torch.randn(2, *shape, dtype=torch.float64)
    found = prior.cosines(images)
    assert torch.allclose(found.flatten(1).norm(dim=1), images.flatten(1).norm(dim=1))
    assert torch.allclose(prior.images(found), images)


def test_a_cosine_is_what_scipy_says() -> None:
    fft = pytest.importorskip("scipy.fft")
    prior, image = image_prior((1, 8, 6)), torch.randn(1, 8, 6, dtype=torch.float64)
    known = torch.from_numpy(fft.dctn(image[0].numpy(), norm="ortho"))
    assert torch.allclose(prior.cosines(image)[0].abs(), known.abs())


def test_without_public_images_pixels_vary_as_those_of_photographs() -> None:
    prior = image_prior((3, 32, 32), None, COLOUR)
    drawn = prior.draw(400, torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(part, dtype=torch.float64)[:, None, None] for part in COLOUR)
    pixels = drawn * std + mean
    assert float(pixels.mean()) == pytest.approx(0.46, abs=0.02)
    assert float((pixels - 0.46).square().mean().sqrt()) == pytest.approx(0.25, rel=0.05)
    flat = (pixels - 0.46).movedim(1, 0).flatten(1)
    assert float(torch.corrcoef(flat)[0, 1]) == pytest.approx(0.9, abs=0.03)


@pytest.mark.parametrize("public", [0, 5])
def test_the_prior_is_the_same_in_every_normalisation(public: int) -> None:
    """In pixels: the same mean and the same covariance of the colours at each frequency."""
    pixels = torch.rand(public, 3, 8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain = image_prior((3, 8, 6), pixels, ((0.0,) * 3, (1.0,) * 3))
    mean, std = (torch.tensor(part, dtype=torch.float64)[:, None, None] for part in ((0.1, 0.5, 0.9), (0.3,) * 3))
    other = image_prior((3, 8, 6), (pixels - mean) / std, ((0.1, 0.5, 0.9), (0.3,) * 3))
    assert public or torch.allclose(plain.mean, torch.full((3, 1, 1), GREY, dtype=torch.float64))
    assert torch.allclose(other.mean * std + mean, plain.mean)
    colours = [torch.einsum("ac,chw,bc->abhw", p.rotation, p.variance, p.rotation) for p in (plain, other)]
    assert torch.allclose(0.3**2 * colours[1], colours[0])


def test_the_variance_of_a_cosine_is_a_mean_over_a_third_of_its_frequency() -> None:
    power = torch.rand(2, 7, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.empty_like(power)
    for row in range(7):
        for column in range(11):
            near = (slice(at - at // 3, at + at // 3 + 1) for at in (row, column))
            expected[:, row, column] = power[:, *near].mean(dim=(1, 2))
    torch.testing.assert_close(_smooth(power), expected)


def test_public_images_tell_their_variances() -> None:
    smooth = image_prior((3, 16, 16))
    steep = smooth.__class__(smooth.mean, smooth.rotation, smooth.variance**1.5)
    public = steep.draw(300, torch.Generator().manual_seed(0))
    found = image_prior((3, 16, 16), public)
    ratio = (found.variance.sum(dim=0) / steep.variance.sum(dim=0)).log().abs()
    before = (smooth.variance.sum(dim=0) / steep.variance.sum(dim=0)).log().abs()
    assert float(ratio[:8, :8].mean()) < 0.3 * float(before[:8, :8].mean())


def test_an_image_of_more_contrast_has_a_prior_of_more() -> None:
    prior = image_prior((3, 16, 16))
    found = prior.fitted(9 * prior.variance)
    wide = found.variance / prior.variance
    assert float(wide[:, 8:, 8:].min()) > 8  # many cosines: the image decides
    assert 1 < float(wide[0, 0, 0]) < 4  # one alone: the prior does
    assert torch.allclose(prior.fitted(prior.variance).variance, prior.variance)
