"""The image behind a layer's input: exact for every fixed map, by steps for others, and what is not seen is counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.audit.products import Feed
from situs.audit.stem import View, fill

SHAPE = (3, 8, 8)


class Before(nn.Module):
    """Patches of 4 x 4 of what `map` makes of the image."""

    def __init__(self, made: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.made, self.patches = made, nn.Conv2d(3, 5, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.patches(self.made(x))


def view(made: Callable[[Tensor], Tensor]) -> View:
    return View(Feed(Before(made), 0), SHAPE, torch.device("cpu"))


def picture(seed: int = 5) -> Tensor:
    return torch.randn(1, *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


BLUR = torch.tensor([[0.0, 0.1, 0.0], [0.1, 0.6, 0.1], [0.0, 0.1, 0.0]])
MIX = torch.tensor([[0.3, 0.6, 0.1], [0.5, -0.5, 0.0], [0.2, 0.2, -0.7]], dtype=torch.float64)
MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda x: x * 0.5 + 0.1,
    "channels": lambda x: x.flip(1) * torch.tensor([1.0, 2.0, -3.0]).view(3, 1, 1).to(x) - 7,
    "rolled": lambda x: x.roll((1, 3), (-2, -1)),
    "colour": lambda x: torch.einsum("dc,bchw->bdhw", MIX.to(x), x) + 0.3,
    "blurred": lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1)), BLUR.to(x).expand(3, 1, 3, 3), groups=3),
}


@pytest.mark.parametrize("name", MAPS)
def test_fixed_maps_are_undone(name: str) -> None:
    seen, image = view(MAPS[name]), picture()
    found, left = seen.image(seen.feed(image)[0])
    assert seen.affine
    assert left < 1e-6
    assert float((found - image[0]).norm() / image.norm()) < 1e-6
    assert seen.unseen() == 0


@pytest.mark.parametrize(("gain", "offset"), [(0.5, 0.0), (-2.0, 7.0), (1e-6, 1e-3), (1e4, -1e4)])
def test_centre_and_spread_are_the_mean_and_deviation_of_the_layers_input(gain: float, offset: float) -> None:
    seen = view(lambda x: gain * x + offset)
    inputs = seen.feed(torch.randn(200, *SHAPE, generator=torch.Generator().manual_seed(9), dtype=torch.float64))
    assert float((seen.centre - offset).abs().max()) <= 1e-12 * abs(offset)
    assert seen.spread == pytest.approx(float(inputs.std()), rel=0.15)


def test_a_single_number_of_a_photograph_that_is_not_seen_is_counted() -> None:
    def without(x: Tensor) -> Tensor:
        kept = torch.ones_like(x)
        kept[:, 1, 40, 50] = 0
        return x * kept

    shape = (3, 224, 224)
    device = torch.device("cpu")
    assert [View(Feed(Before(made), 0), shape, device).unseen() for made in (without, lambda x: x)] == [1, 0]


def test_maps_that_move_and_scale_are_known_entry_by_entry() -> None:
    for name in ("scaled", "channels", "rolled"):
        seen, image = view(MAPS[name]), picture()
        assert seen.scaled is not None
        index, scale, shift = seen.scaled
        torch.testing.assert_close(scale * image.flatten()[index] + shift, seen.feed(image)[0])
        assert sorted(index.flatten().tolist()) == list(range(192))
    assert view(MAPS["colour"]).scaled is None
    assert view(torch.tanh).scaled is None


@pytest.mark.parametrize(
    ("made", "lost"),
    [
        (lambda x: x[..., :4, :].repeat(1, 1, 2, 1), 96),
        (lambda x: x.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1), 128),
        (lambda x: F.interpolate(F.avg_pool2d(x, 2), scale_factor=2), 144),
    ],
)
def test_what_a_map_does_not_see_is_counted_and_grey(made: Callable[[Tensor], Tensor], lost: int) -> None:
    seen, image = view(made), picture()
    found, left = seen.image(seen.feed(image)[0])
    assert left < 1e-9
    assert abs(seen.unseen() - lost) < 0.15 * lost
    torch.testing.assert_close(seen.feed(found[None]), seen.feed(image))
    assert float(found.norm()) < float(image.norm())
    # Of all images with that input the one of least norm: no multiple of what is unseen makes it shorter.
    other = seen.image(seen.feed(picture(6))[0])[0]
    hidden = picture(6)[0] - other
    assert abs(float((found * hidden).sum())) < 1e-5 * float(found.norm() * hidden.norm())


@pytest.mark.parametrize(
    ("made", "invariant"),
    [
        (lambda x: (x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True), "image"),
        (lambda x: F.instance_norm(x, eps=1e-9), "channel"),
        (torch.tanh, None),
        pytest.param(lambda x: x.clamp(-9, 9) ** 3 + x, None, marks=pytest.mark.slow),
    ],
)
def test_what_depends_on_the_image_is_undone_by_steps(made: Callable[[Tensor], Tensor], invariant: str | None) -> None:
    seen, image = view(made), picture()
    found, left = seen.image(seen.feed(image)[0])
    assert not seen.affine
    assert seen.invariant == invariant
    assert left < 1e-4
    flat, real = (each.flatten(0 if invariant != "channel" else 1) for each in (found, image[0]))
    if invariant:
        flat, real = (each - each.mean(dim=-1, keepdim=True) for each in (flat, real))
        assert float(F.cosine_similarity(flat, real, dim=-1).min()) > 1 - 1e-6
    else:
        torch.testing.assert_close(flat, real, rtol=1e-4, atol=1e-4)


def test_gain_and_offset_fill_black_to_white() -> None:
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.1)
    m, s = (torch.tensor(part).view(3, 1, 1).double() for part in (mean, std))
    plain = fill(picture()[0], "channel", (mean, std)) * s + m
    assert plain.amin(dim=(1, 2)).tolist() == pytest.approx([0, 0, 0], abs=1e-7)
    assert plain.amax(dim=(1, 2)).tolist() == pytest.approx([1, 1, 1])
    one = fill(picture()[0], "image", ((0.5,) * 3, (0.25,) * 3)) * 0.25 + 0.5
    assert (float(one.min()), float(one.max())) == pytest.approx((0, 1), abs=1e-6)
    ratio = (one - one.mean()) / (picture()[0] - picture()[0].mean())
    torch.testing.assert_close(ratio, ratio.flatten()[0].expand_as(ratio))
