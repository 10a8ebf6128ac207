"""Every colour operation against Pillow on random, smooth, flat and dark images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from situs.data.augment import randaugment as colour

RNG = np.random.default_rng(0)
RAMP = np.linspace(30, 200, 20 * 17 * 3).reshape(20, 17, 3).astype(np.uint8)
IMAGES = {
    "random": RNG.integers(0, 256, (20, 17, 3), dtype=np.uint8),
    "ramp": RAMP,
    "flat": np.full((20, 17, 3), 77, np.uint8),
    "black": np.zeros((20, 17, 3), np.uint8),
    "few": RNG.choice(np.array([3, 90, 91, 255], np.uint8), (20, 17, 3)),
    "tiny": RNG.integers(0, 256, (2, 2, 3), dtype=np.uint8),
}


def levels(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.transpose(2, 0, 1).copy()).float()[None]


def furthest(got: torch.Tensor, wanted: Image.Image) -> float:
    assert torch.equal(got, got.round())
    return float((got - levels(np.array(wanted))).abs().max())


def look_up(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return colour.look_up(x.flatten(2).long(), table).view(x.shape)


def one(value: float) -> torch.Tensor:
    return torch.tensor([value])


@pytest.mark.parametrize("name", IMAGES)
def test_tables_are_pillows(name):
    array = IMAGES[name]
    image, x = Image.fromarray(array), levels(array)
    counts = colour.histogram(x.flatten(2).long())
    assert torch.equal(counts[0, 1], torch.from_numpy(np.bincount(array[..., 1].ravel(), minlength=256)).float())
    assert furthest(look_up(x, colour.equalize_table(counts)), ImageOps.equalize(image)) == 0
    # Pillow truncates products of doubles, ours quotients of whole numbers: now and then one level apart.
    assert furthest(look_up(x, colour.autocontrast_table(counts)), ImageOps.autocontrast(image)) <= 1
    for bits in (1, 4, 7, 8):
        table = colour.posterize_table(one(bits)).expand(counts.shape)
        assert furthest(look_up(x, table), ImageOps.posterize(image, bits)) == 0
    for threshold in (0, 100, 256):
        table = colour.solarize_table(one(threshold)).expand(counts.shape)
        assert furthest(look_up(x, table), ImageOps.solarize(image, threshold)) == 0
    table = colour.solarize_table(one(0)).expand(counts.shape)
    assert furthest(look_up(x, table), ImageOps.invert(image)) == 0
    added = image.point([min(255, i + 40) if i < 128 else i for i in range(256)] * 3)
    assert furthest(look_up(x, colour.solarize_add_table(one(40)).expand(counts.shape)), added) == 0


@pytest.mark.parametrize("factor", [0.1, 0.55, 1.0, 1.9])
@pytest.mark.parametrize("name", IMAGES)
def test_enhancers_are_pillows(name, factor):
    array = IMAGES[name]
    image, x, f = Image.fromarray(array), levels(array), one(factor)
    luma = colour.grey(x)
    assert torch.equal(luma[0, 0], torch.from_numpy(np.array(image.convert("L"))).float())
    bright = look_up(x, colour.blend_table(f, 0.0).expand(1, 3, 256))
    assert furthest(bright, ImageEnhance.Brightness(image).enhance(factor)) <= 1
    contrast = look_up(x, colour.blend_table(f, colour.mean_grey(luma)).expand(1, 3, 256))
    assert furthest(contrast, ImageEnhance.Contrast(image).enhance(factor)) <= 1
    assert furthest(colour.blend(x, luma, f), ImageEnhance.Color(image).enhance(factor)) <= 1
    assert furthest(colour.blend(x, colour.smooth(x), f), ImageEnhance.Sharpness(image).enhance(factor)) <= 1
    if factor == 1.0:
        for unchanged in (bright, contrast, colour.blend(x, luma, f), colour.blend(x, colour.smooth(x), f)):
            assert torch.equal(unchanged, x)


def test_jitter_is_pillows_three_enhancers_in_turn():
    for name in ("random", "ramp"):
        image = Image.fromarray(IMAGES[name])
        for enhancer, factor in (
            (ImageEnhance.Brightness, 1.3),
            (ImageEnhance.Contrast, 0.7),
            (ImageEnhance.Color, 1.4),
        ):
            image = enhancer(image).enhance(factor)
        got = colour.jitter(levels(IMAGES[name]), torch.tensor([[1.3, 0.7, 1.4]]))
        assert furthest(got, image) <= 3  # each of the three may differ by one, and a later factor enlarges it


def test_other_numbers_of_channels():
    x = torch.randint(0, 256, (2, 5, 8, 8)).float()
    assert colour.grey(x).shape == (2, 1, 8, 8)
    changed = colour.jitter(x, torch.tensor([[1.0, 1.0, 0.0]] * 2))
    assert torch.equal(changed, x)  # saturation means nothing here
    assert colour.grey(x[:, :1]).equal(x[:, :1])


def test_levels_round():
    assert colour.to_levels(torch.tensor([0.0, 0.4999 / 255, 0.501 / 255, 1.0])).tolist() == [0, 0, 1, 255]
