"""The one warp against torchvision and Pillow, each doing its step alone."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from torchvision.transforms.v2 import InterpolationMode, RandomResizedCrop
from torchvision.transforms.v2 import functional as tv

from situs.core.random import uniform
from situs.data.augment import geometry

STILL = torch.zeros(1, dtype=torch.bool)
FILL = torch.tensor([0.25])


def picture(height: int = 24, width: int = 32, count: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 1, height, width, generator=generator)


def pillow(image: torch.Tensor) -> Image.Image:
    return Image.fromarray(image[0, 0].numpy())


def whole(image: torch.Tensor) -> torch.Tensor:
    return geometry.whole_boxes(len(image), *image.shape[2:], image.device)


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
def test_enlarging_the_whole_image_is_torchvisions_resize(mode):
    image = picture()
    got = geometry.warp(image, whole(image), STILL, (60, 50), FILL, mode=mode)
    wanted = tv.resize(image, [60, 50], InterpolationMode(mode), antialias=False).clamp(0, 1)
    assert torch.allclose(got, wanted, atol=2e-5)


def test_a_crop_is_torchvisions_away_from_the_boxs_rim():
    """At the rim torchvision repeats the crop's last pixel; ours sees the image that goes on there."""
    image = picture()
    box = torch.tensor([[3.0, 5.0, 10.0, 20.0]])
    got = geometry.warp(image, box, STILL, (30, 40), FILL)
    wanted = tv.resized_crop(image, 3, 5, 10, 20, [30, 40], InterpolationMode.BICUBIC, antialias=False).clamp(0, 1)
    assert torch.allclose(got[..., 6:-6, 4:-4], wanted[..., 6:-6, 4:-4], atol=2e-5)
    assert not torch.allclose(got, wanted, atol=1e-2)


def test_flip_mirrors_the_crop():
    image = picture(count=2)
    boxes = torch.tensor([[2.0, 1.0, 20.0, 17.0]]).expand(2, 4)
    straight = geometry.warp(image, boxes, torch.tensor([False, False]), (24, 32), FILL)
    mixed = geometry.warp(image, boxes, torch.tensor([False, True]), (24, 32), FILL)
    assert torch.equal(mixed[0], straight[0])
    assert torch.allclose(mixed[1], straight[1].flip(-1), atol=1e-5)


@pytest.mark.parametrize("shift", [(-4, 4), (0, 0), (3, -1)])
def test_pad_and_crop_is_torchvisions(shift):
    image = picture()
    padded = tv.pad(image, [4], fill=0.25)
    wanted = padded[..., 4 + shift[0] : 28 + shift[0], 4 + shift[1] : 36 + shift[1]]
    noise = torch.tensor([[(shift[0] + 4.5) / 9, (shift[1] + 4.5) / 9]])
    boxes = geometry.pad_crop_boxes(noise, 24, 32, 4)
    assert torch.allclose(geometry.warp(image, boxes, STILL, (24, 32), FILL), wanted, atol=1e-5)


AFFINE = {
    "shear_x": (geometry.shear(torch.tensor([0.3]), torch.zeros(1)), (1, 0.3, 0, 0, 1, 0)),
    "shear_y": (geometry.shear(torch.zeros(1), torch.tensor([-0.23])), (1, 0, 0, -0.23, 1, 0)),
    "translate": (geometry.translation(torch.tensor([4.5]), torch.tensor([-3.0])), (1, 0, 4.5, 0, 1, -3)),
}


@pytest.mark.parametrize("name", AFFINE)
def test_affine_changes_are_pillows(name):
    image = picture()
    matrix, numbers = AFFINE[name]
    got = geometry.warp(image, whole(image), STILL, (24, 32), FILL, matrix[:, None], "bilinear")
    wanted = pillow(image).transform(
        (32, 24), Image.Transform.AFFINE, numbers, Image.Resampling.BILINEAR, fillcolor=0.25
    )
    assert torch.allclose(got[0, 0], torch.from_numpy(np.array(wanted)), atol=1e-4)


@pytest.mark.parametrize("degrees", [30.0, -12.5, 90.0])
def test_rotation_is_pillows(degrees):
    image = picture()
    matrix = geometry.rotation(torch.tensor([degrees]), 24, 32)
    got = geometry.warp(image, whole(image), STILL, (24, 32), FILL, matrix[:, None], "bilinear")[0, 0]
    wanted = torch.from_numpy(np.array(pillow(image).rotate(degrees, Image.Resampling.BILINEAR, fillcolor=0.25)))
    # A pixel whose place lies within rounding of the border may be filled by one and not by the other.
    assert ((got - wanted).abs() > 1e-4).float().mean() < 0.005


def test_changes_follow_each_other_and_what_leaves_is_lost():
    """Three pixels right and back again: the columns that left are filled, as when one change follows the other."""
    image = picture()
    there, back = (geometry.translation(torch.tensor([x]), torch.zeros(1)) for x in (-3.0, 3.0))
    got = geometry.warp(image, whole(image), STILL, (24, 32), FILL, torch.stack([there, back], 1))
    assert torch.allclose(got[..., :-3], image[..., :-3], atol=1e-5)
    assert (got[..., -3:] == 0.25).all()
    turn, move = (
        geometry.rotation(torch.tensor([90.0]), 24, 32),
        geometry.translation(torch.tensor([5.0]), torch.zeros(1)),
    )
    both = geometry.warp(image, whole(image), STILL, (24, 32), FILL, torch.stack([turn, move], 1))
    first = geometry.warp(image, whole(image), STILL, (24, 32), FILL, turn[:, None])
    second = geometry.warp(first, whole(image), STILL, (24, 32), FILL, move[:, None])
    assert torch.allclose(both, second, atol=1e-4)


def test_shrinking_averages_instead_of_aliasing():
    stripes = torch.arange(64).remainder(2).float().expand(1, 1, 64, 64)
    small = geometry.warp(stripes, whole(stripes), STILL, (16, 16), FILL, mode="bilinear")
    assert torch.allclose(small, torch.full_like(small, 0.5), atol=1e-5)


def test_resized_crops_follow_torchvisions_law():
    """Areas, aspects and places of 4,000 boxes against torchvision's own sampler: two-sample Kolmogorov–Smirnov."""
    height, width = 120, 200
    noise = uniform(3, 0, torch.arange(4000), "x", (geometry.CROP_NOISE,))
    ours = geometry.resized_crop_boxes(noise, height, width, (0.08, 1.0))
    torch.manual_seed(0)
    sampler = RandomResizedCrop(10, antialias=True)
    image = torch.empty(1, height, width)
    drawn = [sampler.make_params([image]) for _ in range(4000)]
    theirs = torch.tensor([[p["top"], p["left"], p["height"], p["width"]] for p in drawn])
    assert ((ours[:, :2] >= 0) & (ours[:, 2:] >= 1)).all()
    assert (ours[:, 0] + ours[:, 2] <= height).all()
    assert (ours[:, 1] + ours[:, 3] <= width).all()
    for name, value in {
        "area": lambda b: b[:, 2] * b[:, 3],
        "aspect": lambda b: (b[:, 3] / b[:, 2]).log(),
        "top": lambda b: b[:, 0],
        "left": lambda b: b[:, 1],
    }.items():
        p = stats.ks_2samp(value(ours.double()).numpy(), value(theirs.double()).numpy()).pvalue
        assert p > 1e-3, name


def test_a_box_that_never_fits_is_the_centred_one():
    """A strip far wider than the largest ratio, asked for its whole area: torchvision's fallback."""
    noise = torch.rand(3, geometry.CROP_NOISE)
    boxes = geometry.resized_crop_boxes(noise, 10, 100, (1.0, 1.0))
    assert boxes.tolist() == [[0.0, 43.0, 10.0, 13.0]] * 3
    each = geometry.resized_crop_boxes(noise, torch.tensor([10, 100, 10]), torch.tensor([100, 10, 10]), (1, 1))
    assert each.tolist() == [[0, 43, 10, 13], [43, 0, 13, 10], [0, 0, 10, 10]]


def _changes(count: int, seed: int = 0):
    """Boxes, flips and two affine changes a sample, for sources of 24 x 32 pixels and results of 12 x 18."""
    draw = torch.Generator().manual_seed(seed)
    boxes = torch.tensor([0.0, 0, 10, 14]) + torch.rand(count, 4, generator=draw) * torch.tensor([6.0, 6, 8, 10])
    turn = geometry.rotation(torch.rand(count, generator=draw) * 40 - 20, 12, 18)
    lean = geometry.shear(torch.rand(count, generator=draw) * 0.4 - 0.2, torch.zeros(count))
    return boxes, torch.arange(count) % 2 == 0, torch.stack([turn, lean], 1)


def test_masks_lie_where_the_pixels_do():
    """Slowly: the place of each pixel by matrix products, and the number of the pixel it falls in."""
    boxes, flip, matrices = _changes(4)
    masks = torch.randint(0, 200, (4, 24, 32), generator=torch.Generator().manual_seed(1))
    got = geometry.warp_masks(masks, boxes, flip, (12, 18), matrices)
    filled = 0
    for n, row, column in product(range(4), range(12), range(18)):
        at, inside = torch.tensor([column + 0.5, row + 0.5, 1.0], dtype=torch.float64), True
        for slot in (1, 0):
            at[:2] = matrices[n, slot].double() @ at
            inside = inside and 0 <= at[0] < 18 and 0 <= at[1] < 12
        x = (18 - at[0] if flip[n] else at[0]) * boxes[n, 3].double() / 18 + boxes[n, 1]
        y = at[1] * boxes[n, 2].double() / 12 + boxes[n, 0]
        inside = inside and 0 <= x < 32 and 0 <= y < 24
        filled += not inside
        near = min(float(x % 1), 1 - float(x % 1), float(y % 1), 1 - float(y % 1)) < 1e-3  # between two pixels
        assert near or int(got[n, row, column]) == (int(masks[n, int(y), int(x)]) if inside else 255)
    assert 0 < filled < got.numel() / 2
    still = torch.zeros(4, dtype=torch.bool)
    assert torch.equal(
        geometry.warp_masks(masks, geometry.whole_boxes(4, 24, 32, masks.device), still, (24, 32)), masks
    )


def test_boxes_go_the_way_back():
    """A corner that is moved is taken from where it was: the places of the result lead back to it."""
    boxes, flip, matrices = _changes(5)
    points = torch.rand(5, 7, 2, generator=torch.Generator().manual_seed(2)) * torch.tensor([8.0, 6.0]) + 9
    moved = geometry.warp_boxes(torch.cat([points, points], -1), boxes, flip, (12, 18), matrices)
    assert torch.allclose(moved[..., :2], moved[..., 2:], atol=1e-4)
    back = 0
    for n, k in product(range(5), range(7)):
        x, y = moved[n, k, :2].tolist()
        if not (0 < x < 18 and 0 < y < 12):
            continue  # cut at the border
        at = torch.tensor([x, y, 1.0])
        for slot in (1, 0):
            at[:2] = matrices[n, slot] @ at
        x = (18 - at[0] if flip[n] else at[0]) * boxes[n, 3] / 18 + boxes[n, 1]
        y = at[1] * boxes[n, 2] / 12 + boxes[n, 0]
        assert torch.allclose(torch.stack([x, y]), points[n, k], atol=1e-3)
        back += 1
    assert back > 10
    whole = torch.tensor([[[2.0, 3.0, 10.0, 9.0]]])
    upright = geometry.warp_boxes(whole, torch.tensor([[0.0, 0, 24, 32]]), torch.tensor([True]), (12, 16))
    assert upright.tolist() == [[[11.0, 1.5, 15.0, 4.5]]]
