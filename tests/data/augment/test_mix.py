from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch.nn import functional as F

from situs.core.random import uniform
from situs.data.augment import mix

ON = {"mixup": 0.8, "cutmix": 1.0}


def inputs(count: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(count, 2, size, size + 4, generator=generator)
    labels = torch.randint(0, 7, (count,), generator=generator)
    return images, mix.soft_labels(labels, 7), uniform(0, 0, torch.arange(count), "x", (mix.NOISE,))


@pytest.mark.parametrize("alpha", [0.4, 0.8, 1.0, 3.0])
def test_beta_numbers_have_their_law(alpha):
    numbers = mix.beta(uniform(1, 0, torch.arange(20000), "x", ()), alpha)
    assert stats.kstest(numbers.double().numpy(), stats.beta(alpha, alpha).cdf).pvalue > 1e-3
    assert 0 <= float(numbers.min()) <= float(numbers.max()) <= 1


def test_mixup_is_the_convex_combination_of_a_pair():
    images, targets, noise = inputs(8)
    got, soft = mix.mix(images, targets, noise, **{**ON, "cutmix": 0.0})
    keep = mix.beta(noise[:, 2], 0.8)
    for row in range(8):
        other = row + 1 if row % 2 == 0 else row - 1
        assert torch.allclose(got[row], keep[row] * images[row] + (1 - keep[row]) * images[other], atol=1e-6)
        assert torch.allclose(soft[row], keep[row] * targets[row] + (1 - keep[row]) * targets[other], atol=1e-6)


def test_cutmix_pastes_a_box_and_counts_its_pixels():
    images, targets, noise = inputs(200)
    got, soft = mix.mix(images, targets, noise, **{**ON, "mixup": 0.0})
    other = images[mix.partners(200, images.device)]
    pasted = (got == other).all(1)
    assert torch.equal(got, torch.where(pasted[:, None], other, images))
    share = pasted.float().mean((1, 2))
    wanted = (1 - share)[:, None] * targets + share[:, None] * targets[mix.partners(200, images.device)]
    assert torch.allclose(soft, wanted, atol=1e-6)
    rows, columns = pasted.any(2), pasted.any(1)
    assert torch.equal(pasted, rows[:, :, None] & columns[:, None, :])


def test_any_number_of_classes_mixes_class_by_class_and_what_is_unknown_stays_so():
    images, _, noise = inputs(8)
    hot = torch.randint(-1, 2, (8, 5), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    targets = mix.soft_multi_labels(hot, 0.2)
    assert torch.equal(targets.isnan(), hot < 0)
    assert torch.allclose(targets[hot == 1], torch.tensor(0.9)) and torch.allclose(targets[hot == 0], torch.tensor(0.1))
    _, soft = mix.mix(images, targets, noise, **{**ON, "cutmix": 0.0})
    keep = mix.beta(noise[:, 2], 0.8)
    for row in range(8):
        wanted = keep[row] * targets[row] + (1 - keep[row]) * targets[row ^ 1]
        assert torch.allclose(soft[row], wanted, atol=1e-6, equal_nan=True)
    noise[:, 2] = 1.0  # an empty box: nothing of the other image, and nothing that is unknown of it
    assert torch.allclose(mix.mix(images, targets, noise, mixup=0.0, cutmix=1.0)[1], targets, equal_nan=True)


def test_the_mean_share_of_a_cutmix_box():
    """A square side s = √(1 − λ) around a uniform centre shows s − s²/4 a side: mean 1/2 − 1/5 + 1/48 for uniform λ."""
    noise = uniform(0, 0, torch.arange(4000), "x", (3,))
    share = mix._boxes(noise[:, 0], noise[:, 1:], 96, 96).float().mean((1, 2))
    assert abs(float(share.mean()) - (1 / 2 - 1 / 5 + 1 / 48)) < 0.02


def test_each_mixes_half_of_the_samples():
    images, targets, noise = inputs(2000)
    both, soft = mix.mix(images, targets, noise, **ON)
    other = images[mix.partners(2000, images.device)]
    whole = ((both == images) | (both == other)).flatten(1).all(1)
    assert abs(float(whole.float().mean()) - 0.5) < 0.04
    assert torch.allclose(soft.sum(1), torch.ones(2000), atol=1e-5)


def test_a_batch_cut_into_even_parts_mixes_the_same_pairs():
    images, targets, noise = inputs(24)
    whole = mix.mix(images, targets, noise, **ON)
    parts = [mix.mix(images[s], targets[s], noise[s], **ON) for s in (slice(0, 8), slice(8, 14), slice(14, 24))]
    assert torch.equal(whole[0], torch.cat([images for images, _ in parts]))
    assert torch.equal(whole[1], torch.cat([soft for _, soft in parts]))


def test_the_last_of_an_odd_batch_stays_alone():
    images, targets, noise = inputs(5)
    got, soft = mix.mix(images, targets, noise, **ON)
    assert torch.equal(got[4], images[4])
    assert torch.allclose(soft[4], targets[4])


def test_smoothing_is_torchs():
    labels, logits = torch.tensor([0, 3, 6]), torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    wanted = F.cross_entropy(logits, labels, label_smoothing=0.1)
    assert torch.allclose(F.cross_entropy(logits, mix.soft_labels(labels, 7, 0.1)), wanted)
