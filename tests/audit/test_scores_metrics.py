"""Metrics against torchmetrics and hand cases; a wrong range is one clear sentence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from situs.audit.scores import (
    BEST_PSNR,
    METRICS,
    baselines,
    denormalise,
    fft2d,
    match_patches,
    mean_of,
    measure_all,
    mse,
    psnr,
    reidentify,
    ssim,
)
from situs.core.jigsaw import move_patches
from situs.errors import SitusError

PAIR = torch.rand(2, 4, 3, 24, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_against_torchmetrics() -> None:
    """Noise, ramps, one against the other, grey and low, flat, and flat beside black."""
    from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

    found, real = PAIR
    expected = peak_signal_noise_ratio(found, real, data_range=1.0, reduction="none", dim=(1, 2, 3))
    torch.testing.assert_close(psnr(found, real), expected)
    smooth, flat = PAIR.flip(2).cumsum(dim=-1) / 24, torch.full_like(PAIR, 0.3)
    for found, real in (PAIR, smooth, (smooth[0], PAIR[0]), PAIR[:, :, :1, :7], flat, (flat[0], 0 * flat[1])):
        expected = structural_similarity_index_measure(found, real, data_range=1.0, reduction="none")
        torch.testing.assert_close(ssim(found, real), expected, rtol=0, atol=1e-12)
        single = ssim(found, real, torch.float32)
        torch.testing.assert_close(single, expected.float(), rtol=0, atol=1e-4)


def test_ends() -> None:
    real = PAIR[1]
    assert psnr(real, real).tolist() == [BEST_PSNR] * 4
    torch.testing.assert_close(ssim(real, real), torch.ones(4, dtype=torch.float64))
    assert mse(torch.zeros_like(real), torch.ones_like(real)).tolist() == [1.0] * 4
    assert psnr(torch.zeros_like(real), torch.ones_like(real)).tolist() == [0.0] * 4


def test_images_smaller_than_half_the_window_of_ssim_have_none() -> None:
    found = measure_all(*PAIR[..., :5, :6], (1, 1))
    assert found["ssim"] is None and len(found["psnr"] or ()) == 4
    assert len(measure_all(*PAIR[..., :6, :6], (1, 1))["ssim"] or ()) == 4


def test_fft2d_by_hand() -> None:
    """One row of three pixels: u·v = 3 Σ x(p) y(-p), so x = (1, 2, 3), y = (3, 1, 2) give |1 - 10/13|."""
    x, y = (torch.tensor(row, dtype=torch.float64).view(1, 1, 1, 3) for row in ([1, 2, 3], [3, 1, 2]))
    torch.testing.assert_close(fft2d(x, y), torch.tensor([3 / 13], dtype=torch.float64))


def test_a_black_image_has_a_distance() -> None:
    """0 / 0 would stand as NaN in the file, which is then no JSON."""
    black = torch.zeros_like(PAIR[0])
    assert fft2d(black, PAIR[0]).tolist() == fft2d(PAIR[0], black).tolist() == [1.0] * 4
    assert fft2d(black, black).tolist() == [0.0] * 4


def test_fft2d_by_numpy() -> None:
    found, real = PAIR
    for value, f, r in zip(fft2d(found, real), found.numpy(), real.numpy(), strict=True):
        u, v = np.fft.fft2(f).ravel(), np.fft.fft2(r).ravel()
        assert float(value) == pytest.approx(abs(1 - (u @ v) / np.sqrt((u @ u) * (v @ v))))
    assert float(fft2d(real, real).max()) < 1e-12


def test_a_shuffle_of_patches_hides_nothing_from_the_match() -> None:
    real = PAIR[0]
    order = torch.arange(9)
    order[[0, 5, 7]] = torch.tensor([5, 7, 0])
    shuffled = move_patches(real, (3, 3), order)
    found = match_patches(shuffled, real, 8)
    assert psnr(shuffled, real).max() < 20
    assert found.psnr.tolist() == [BEST_PSNR] * 4
    assert found.order.tolist() == pytest.approx([6 / 9] * 4)


def test_equal_patches_are_in_order_whichever_way_they_are_matched() -> None:
    flat = torch.full((1, 3, 16, 16), 0.25)
    assert match_patches(flat, flat, 8).order.tolist() == [1.0]


def test_reidentification() -> None:
    gallery = PAIR[0]
    noisy = (gallery + 0.05 * torch.randn(gallery.shape)).clamp(0, 1)
    assert reidentify(noisy, gallery, torch.arange(4)).tolist() == [1.0] * 4
    assert reidentify(noisy, gallery, torch.tensor([0, 2, 1, 3])).tolist() == [1.0, 0.0, 0.0, 1.0]
    twice = torch.cat([gallery, gallery[:1]])
    assert reidentify(noisy[[0, 0]], twice, torch.tensor([0, 4])).tolist() == [1.0, 1.0]


def test_the_gallery_is_all_images_and_one_image_makes_none() -> None:
    """Noise is nearest to the one image there is; among several of which it saw the first, the others count too."""
    gallery, noise = PAIR[0], torch.rand(1, *PAIR[0].shape[1:], generator=torch.Generator().manual_seed(9))
    assert measure_all(noise, gallery[:1], 8)["reidentified"] is None
    assert measure_all(gallery[:1], gallery[:1], 8)["reidentified"] is None
    # Nearer to the third than to its own: in a gallery of the attacked alone it would count as re-identified.
    wrong = 0.1 * gallery[:2] + 0.9 * gallery[[2, 3]]
    found = measure_all(wrong, gallery, 8)
    assert found["reidentified"] == [0.0, 0.0]
    assert found["psnr"] == measure_all(wrong, gallery[:2], 8)["psnr"]


def test_denormalise_is_the_inverse() -> None:
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    m, s = (torch.tensor(part, dtype=torch.float64).view(1, 3, 1, 1) for part in (mean, std))
    torch.testing.assert_close(denormalise((PAIR[0] - m) / s, mean, std), PAIR[0])
    assert float(denormalise(torch.full((1, 3, 2, 2), 99.0), mean, std).max()) == 1.0


def test_all_of_them_and_no_lpips_without_weights() -> None:
    found = measure_all(*PAIR, 8)
    assert set(found) == METRICS.keys()
    assert found["lpips"] is None
    assert all(len(values) == 4 for name, values in found.items() if name != "lpips" and values is not None)
    with pytest.raises(SitusError, match="but the original images have the shape"):
        measure_all(PAIR[0], PAIR[1][:, :, :16, :16], 8)


def test_a_picture_beyond_black_and_white_is_aligned_before_it_is_cut_off() -> None:
    real = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    raw = 5 * real - 2
    cut, whole = (measure_all(raw.clamp(0, 1), real, 4, raw=each)["aligned_psnr"] for each in (None, raw))
    assert cut is not None and whole is not None and max(cut) < 40 and min(whole) > 100


def test_baselines_do_not_see_the_image_itself() -> None:
    real = PAIR[0]
    found = baselines(real)
    torch.testing.assert_close(found["mean image"][0], real[1:].mean(dim=0))
    assert torch.equal(found["random pair"], real[[3, 0, 1, 2]])  # another one
    part = baselines(real, slice(1, 3))
    assert part.keys() == found.keys() and all(torch.equal(part[name], found[name][1:3]) for name in part)
    assert set(baselines(real[:1])) == {"grey"}
    assert set(found) == {"grey", "mean image", "random pair"} and found["grey"].unique().tolist() == [0.5]
    level = torch.tensor([0.4, 0.5, 0.6], dtype=real.dtype).view(3, 1, 1)
    assert torch.equal(baselines(real, slice(1, 2), level)["grey"], level.expand_as(real[1:2]))


def test_intervals_against_scipy() -> None:
    values = [3.0, 5.0, 4.0, 9.0]
    low, high = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert mean_of(values) == pytest.approx((5.25, low, high))
    for hits in (0, 1, 5, 11, 12):
        expected = stats.binomtest(hits, 12).proportion_ci(method="wilson")
        ends = (hits / 12, expected.low, expected.high)
        assert mean_of([1.0] * hits + [0.0] * (12 - hits), share=True) == pytest.approx(ends)
    assert mean_of([2.0]) == (2.0, None, None)
    assert mean_of([0.0, 0.0, 1e-9]).low == 0.0
    assert mean_of([-1.0, 5.0]).low == pytest.approx(stats.t.interval(0.95, 1, loc=2, scale=3)[0])
    assert mean_of([7.0, 9.0]) == pytest.approx((8.0, 0.0, stats.t.interval(0.95, 1, loc=8, scale=1)[1]))
