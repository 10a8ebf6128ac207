"""Snow, frost, fog and brightness against formulas worked out apart."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
from scipy import ndimage

from situs.measure.corruptions import Draw, brightness, clouds, fog, frost, ice, snow, trail, trail_kernels, zoom


def images(channels: int = 3, side: int = 24) -> torch.Tensor:
    return torch.rand(2, channels, side, side, generator=torch.Generator().manual_seed(0))


def draw(name: str, count: int = 2) -> Draw:
    return Draw(1, 3, torch.arange(count) + 2, name)


def test_brightness_raises_the_value_of_hsv() -> None:
    clean = images()
    clean[0, :, 0, 0] = 0.0  # black has no hue
    clean[0, :, 0, 1] = 1.0
    found = brightness(clean, draw("brightness"), 0.3)
    for sample in range(2):
        hsv = rgb_to_hsv(clean[sample].permute(1, 2, 0).double().numpy())
        hsv[..., 2] = np.clip(hsv[..., 2] + 0.3, 0, 1)
        np.testing.assert_allclose(found[sample].permute(1, 2, 0).numpy(), hsv_to_rgb(hsv), atol=1e-5)
    grey = images(1)
    torch.testing.assert_close(brightness(grey, draw("brightness"), 0.1), (grey + 0.1).clamp(max=1.0))


def test_fog_is_clouds_over_an_image_whose_brightest_value_stays_the_limit() -> None:
    clean = 0.8 * images()
    found = fog(clean, draw("fog"), 1.5, 2.0)
    layer = clouds(draw("fog"), "clouds", (24, 24), 2.0)
    for sample in range(2):
        top = clean[sample].max().item()
        slow = (clean[sample].double().numpy() + 1.5 * layer[sample].double().numpy()) * top / (top + 1.5)
        np.testing.assert_allclose(found[sample].numpy(), slow, atol=1e-6)
        assert found[sample].max() <= top + 1e-6


def test_snow_by_its_parts() -> None:
    clean, strength = images(), (0.3, 0.3, 1.5, 0.5, 6, 3.0, 0.7)
    found = snow(clean, draw("snow"), *strength)
    for sample in range(2):
        one = Draw(1, 3, torch.tensor([sample + 2]), "snow")
        flakes = zoom(0.3 + 0.3 * one.normal("flakes", 1, 24, 24), 1.5)
        flakes[flakes < 0.5] = 0
        angle = math.radians(-135 + 90 * float(one.uniform("angle")))
        fallen = trail(flakes.clamp(0, 1), torch.tensor([angle]), 6, 3.0)[0, 0].clamp(0, 1).double().numpy()
        image = clean[sample].double().numpy()
        grey = np.tensordot([0.299, 0.587, 0.114], image, 1)
        slow = 0.7 * image + 0.3 * np.maximum(image, 1.5 * grey + 0.5) + fallen + np.rot90(fallen, 2)
        np.testing.assert_allclose(found[sample].numpy(), slow, atol=1e-5)


def test_frost_is_ice_over_the_image() -> None:
    dark = torch.zeros(2, 3, 64, 64)
    only = frost(dark, draw("frost"), 0.7, 0.5)
    image = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(frost(image, draw("frost"), 0.7, 0.5), 0.7 * image + only)
    assert only.max() <= 0.5 and only.min() >= 0.0
    red, green, blue = only.mean((0, 2, 3)).tolist()
    assert red < green <= blue  # ice is bluish


@pytest.mark.parametrize("side", [28, 64, pytest.param(224, marks=pytest.mark.slow)])
def test_ice_has_the_brightness_and_relief_of_frosted_windows(side: int) -> None:
    """Photographs of them have a mean of 0.44 to 0.80, within one a deviation of 0.06 to 0.14."""
    layer = ice(Draw(0, 1, torch.arange(24), "frost"), (side, side))
    assert layer.shape == (24, 1, side, side)
    means, deviations = layer.mean((1, 2, 3)), layer.std((1, 2, 3))
    assert 0.55 < means.mean() < 0.7 and means.std() > 0.08
    assert deviations.min() > 0.06 and deviations.max() < 0.16


def preference(layer: torch.Tensor) -> float:
    """How far small patches of [B, H, W] prefer one direction: 0 not at all, 1 wholly (2nd circular moment)."""
    patches = layer.unfold(1, 20, 20).unfold(2, 20, 20).reshape(-1, 20, 20)
    patches = patches - patches.mean((1, 2), keepdim=True)
    spectrum = torch.fft.fft2(patches).abs().square()
    at = torch.fft.fftfreq(20)
    angle = torch.atan2(at[:, None].expand(20, 20), at.expand(20, 20))
    return float(((spectrum * torch.exp(2j * angle)).sum((1, 2)).abs() / spectrum.sum((1, 2))).mean())


def test_ice_lies_in_needles() -> None:
    """Within a crystal the relief runs in one direction, which noise does not."""
    layer = ice(Draw(0, 1, torch.arange(3), "frost"), (200, 200))[:, 0]
    noise = torch.randn(3, 200, 200, generator=torch.Generator().manual_seed(0))
    assert preference(layer) > 4 * preference(noise)


@pytest.mark.parametrize("size", [(64, 72), (30, 26)])
def test_ice_by_its_parts(size: tuple[int, int]) -> None:
    """Crystals whose needles run one way, each with its tone, over haze: one sample after the other, by SciPy."""
    found, side = ice(draw("frost"), size), min(size)
    for sample in range(2):
        one = Draw(1, 3, torch.tensor([sample + 2]), "frost")

        def noise(what: str, *shape: int, one: Draw = one) -> np.ndarray:
            return one.uniform(what, *shape)[0].double().numpy()

        fields = [ndimage.gaussian_filter(each, 0.05 * side, truncate=3.0) for each in noise("crystals", 6, *size)]
        owner = np.argmax(fields, axis=0)
        points = (noise("seeds", 1, *size)[0] < 0.07) * noise("height", 1, *size)[0]
        needles, length = np.zeros(size), max(1.5, 0.035 * side)
        for way, angle in enumerate(one.uniform("angles", 6)[0] * math.pi):
            half = trail_kernels(angle[None], length, length / 1.5)[0].double().numpy()
            whole = ndimage.convolve(points, (half + np.rot90(half, 2)) / 2)
            needles[owner == way] = whole[owner == way]
        relief = (needles - needles.mean()) / needles.std(ddof=1)
        haze = clouds(one, "haze", size, 1.7)[0, 0].double().numpy() - 0.5
        shade = 0.40 + 0.46 * float(noise("shade"))
        slow = shade + 0.08 * relief + 0.12 * (noise("tone", 6)[owner] - 0.5) + 0.25 * haze
        np.testing.assert_allclose(found[sample, 0].numpy(), slow, atol=2e-5)


def test_ice_is_a_tenth_darker_in_red_and_bluest_in_the_light() -> None:
    layer, strength = ice(draw("frost"), (40, 40)), (0.0, 0.5)
    for channels, tint in ((3, (0.90, 1.02, 1.08)), (1, (1.0,)), (4, (1.0,) * 4)):  # only of RGB are the colours known
        found = frost(torch.zeros(2, channels, 40, 40), draw("frost"), *strength)
        for channel, share in enumerate(tint):
            torch.testing.assert_close(found[:, channel], 0.5 * (share * layer[:, 0]).clamp(0.0, 1.0))
