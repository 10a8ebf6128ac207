"""Each operation forced in turn and compared with Pillow; then the law of the draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from scipy import stats

from situs.core.random import uniform
from situs.data.augment import geometry, randaugment
from situs.data.augment.randaugment import OPERATIONS, AugmentPlan

SIZE = 24
ARRAY = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
LEVELS = torch.from_numpy(ARRAY.transpose(2, 0, 1).copy()).float()[None]
IMAGE = Image.fromarray(ARRAY)


def forced(*names: str, strength: float = 0.9, sign: float = 1.0, active: bool = True) -> AugmentPlan:
    shape = (1, len(names))
    return AugmentPlan(
        torch.tensor([[OPERATIONS.index(name) for name in names]]),
        torch.full(shape, active),
        torch.full(shape, strength),
        torch.full(shape, sign),
    )


def enhance(kind, sign: float):
    return lambda image: kind(image).enhance(1 + 0.81 * sign)


PILLOW = {
    "auto_contrast": ImageOps.autocontrast,
    "equalize": ImageOps.equalize,
    "invert": ImageOps.invert,
    "posterize": lambda image: ImageOps.posterize(image, 4 - int(0.9 * 4)),
    "solarize": lambda image: ImageOps.solarize(image, 256 - int(0.9 * 256)),
    "solarize_add": lambda image: image.point([min(255, i + 99) if i < 128 else i for i in range(256)] * 3),
    "brightness": enhance(ImageEnhance.Brightness, 1),
    "contrast": enhance(ImageEnhance.Contrast, 1),
    "colour": enhance(ImageEnhance.Color, 1),
    "sharpness": enhance(ImageEnhance.Sharpness, 1),
}


@pytest.mark.parametrize("name", PILLOW)
def test_a_colour_operation_alone(name):
    got = randaugment.recolour(LEVELS, forced(name))
    wanted = torch.from_numpy(np.array(PILLOW[name](IMAGE))).permute(2, 0, 1).float()
    assert (got[0] - wanted).abs().max() <= 1
    assert not torch.equal(got, LEVELS) or name == "auto_contrast"
    assert torch.equal(randaugment.recolour(LEVELS, forced(name, active=False)), LEVELS)
    assert torch.equal(randaugment.matrices(forced(name), SIZE, SIZE)[0, 0], torch.eye(2, 3))


def test_two_colour_operations_in_turn():
    got = randaugment.recolour(LEVELS, forced("posterize", "equalize"))
    wanted = ImageOps.equalize(PILLOW["posterize"](IMAGE))
    assert (got[0] - torch.from_numpy(np.array(wanted)).permute(2, 0, 1)).abs().max() == 0
    assert not torch.equal(got, randaugment.recolour(LEVELS, forced("equalize", "posterize")))


GEOMETRIC = {
    "shear_x": (1, 0.27, 0, 0, 1, 0),
    "shear_y": (1, 0, 0, 0.27, 1, 0),
    "translate_x": (1, 0, 0.405 * SIZE, 0, 1, 0),
    "translate_y": (1, 0, 0, 0, 1, 0.405 * SIZE),
}


@pytest.mark.parametrize("name", [*GEOMETRIC, "rotate"])
def test_a_geometric_operation_alone(name):
    drawn = forced(name)
    matrices = randaugment.matrices(drawn, SIZE, SIZE)
    boxes = geometry.whole_boxes(1, SIZE, SIZE, LEVELS.device)
    still, fill = torch.zeros(1, dtype=torch.bool), torch.full((3,), 0.5)
    got = geometry.warp(LEVELS / 255, boxes, still, (SIZE, SIZE), fill, matrices, "bilinear") * 255
    colour, bilinear = (127.5,) * 3, Image.Resampling.BILINEAR
    planes = [Image.fromarray(plane.astype(np.float32)) for plane in ARRAY.transpose(2, 0, 1)]
    if name == "rotate":
        wanted = [plane.rotate(27.0, bilinear, fillcolor=colour[0]) for plane in planes]
    else:
        wanted = [
            plane.transform((SIZE, SIZE), Image.Transform.AFFINE, GEOMETRIC[name], bilinear, fillcolor=colour[0])
            for plane in planes
        ]
    expected = torch.from_numpy(np.stack([np.array(plane) for plane in wanted]))
    assert ((got[0] - expected).abs() > 0.05).float().mean() < 0.005
    assert torch.equal(randaugment.recolour(LEVELS, drawn), LEVELS)


def test_the_sign_turns_the_change_around():
    darker = randaugment.recolour(LEVELS, forced("brightness", sign=-1.0))
    wanted = ImageEnhance.Brightness(IMAGE).enhance(1 - 0.81)
    assert (darker[0] - torch.from_numpy(np.array(wanted)).permute(2, 0, 1)).abs().max() <= 1
    left, right = (randaugment.matrices(forced("translate_x", sign=s), SIZE, SIZE)[0, 0, 0, 2] for s in (-1.0, 1.0))
    assert left == -right != 0


def test_the_law_of_the_draws():
    noise = uniform(0, 0, torch.arange(30000), "x", (2, randaugment.NOISE))
    drawn = randaugment.plan(noise)
    assert stats.chisquare(drawn.operation.flatten().bincount(minlength=15).numpy()).pvalue > 1e-3
    assert abs(float(drawn.active.float().mean()) - 0.5) < 0.01
    assert abs(float(drawn.sign.mean())) < 0.02
    # Normal with mean 9 and deviation .5, cut at 10: the exact mean and the mass at the cut.
    z = (10 - 9) / 0.5
    mean = 9 + 0.5 * (-stats.norm.pdf(z) + z * (1 - stats.norm.cdf(z)))
    assert math.isclose(float(drawn.strength.mean()) * 10, mean, abs_tol=0.01)
    assert abs(float((drawn.strength == 1).float().mean()) - (1 - stats.norm.cdf(z))) < 0.003
    columns = [drawn.operation[:, 0], drawn.operation[:, 1]]
    table = torch.zeros(15, 15).index_put((columns[0], columns[1]), torch.ones(30000), accumulate=True)
    assert stats.chi2_contingency(table.numpy()).pvalue > 1e-3  # the two slots are independent


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_saturation_leaves_what_is_not_rgb(channels):
    x = torch.randint(0, 256, (1, channels, 8, 8)).float()
    assert torch.equal(randaugment.recolour(x, forced("colour")), x)
    for name in ("contrast", "sharpness", "equalize"):
        assert randaugment.recolour(x, forced(name)).shape == x.shape
