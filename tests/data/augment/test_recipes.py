from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from recipes import RECIPES, recipe
from scipy import stats
from torchvision.transforms.v2 import functional as tv

from situs.data.augment.recipes import AugmentConfig, apply, apply_mix, denormalise, draw, normalise
from situs.data.sampler import draw_ids
from situs.errors import SitusError

MEAN, STD = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.25, 0.3])
EVERYTHING = AugmentConfig(operations=3, jitter=0.4, erasing=0.5)
CONFIGS = {**RECIPES, "everything": EVERYTHING, "pad": AugmentConfig(crop="pad", operations=1)}


def pictures(count: int, channels: int = 3, size: int = 20) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, channels, size, size), dtype=torch.uint8, generator=generator)


def views(images, ids, config, seed=0, epoch=0, size=20):
    mean, std = (MEAN, STD) if images.shape[1] == 3 else (MEAN[:1].expand(images.shape[1]),) * 2
    return apply(images, draw(config, ids, seed=seed, epoch=epoch), config, (size, size), mean, std)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "none"])
def test_seed_epoch_and_id_each_change_the_view(name):
    images, ids = pictures(1).expand(64, -1, -1, -1).contiguous(), torch.arange(64)
    first = views(images, ids, CONFIGS[name])
    for other in (views(images, ids, CONFIGS[name], seed=1), views(images, ids, CONFIGS[name], epoch=1)):
        assert not torch.equal(first, other)
    assert len(first.flatten(1).unique(dim=0)) > (1 if CONFIGS[name].crop == "none" else 30)


def test_nothing_but_normalising():
    images = pictures(4)
    wanted = tv.normalize(images.float() / 255, MEAN.tolist(), STD.tolist())
    assert torch.allclose(views(images, torch.arange(4), recipe("none")), wanted, atol=1e-6)
    floats = images.float() / 255
    assert torch.equal(views(floats, torch.arange(4), recipe("none")), views(images, torch.arange(4), recipe("none")))


def test_denormalising_gives_the_picture_back_and_cuts_what_lies_outside():
    mean, std = torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.2, 0.25, 0.3])
    images = torch.rand(2, 3, 4, 5)
    torch.testing.assert_close(denormalise(normalise(images, mean, std), mean, std), images)
    far = denormalise(torch.tensor([9.0, -9.0, 0.0]).view(1, 3, 1, 1), mean, std)
    torch.testing.assert_close(far.flatten(), torch.tensor([1.0, 0.0, 0.6]))


def test_flips_half_of_them():
    images = pictures(1).expand(2000, -1, -1, -1).contiguous()
    flipped = views(images, torch.arange(2000), AugmentConfig(crop="none"))
    plain = views(images[:1], torch.arange(1), recipe("none"))[0]
    same, turned = ((flipped == other).flatten(1).all(1) for other in (plain, plain.flip(-1)))
    assert (same ^ turned).all()
    assert abs(float(turned.float().mean()) - 0.5) < 0.04


@pytest.mark.parametrize("most", [0.4, 1.0])
def test_brightness_changes_by_a_uniform_factor(most):
    """Of a grey image of one level: its contrast and saturation leave it as it is."""
    images = torch.full((4000, 1, 2, 2), 100, dtype=torch.uint8)
    got = views(images, torch.arange(4000), AugmentConfig(crop="none", flip=0.0, jitter=most))
    factors = denormalise(got, *(MEAN[:1],) * 2)[:, 0, 0, 0].double() * 2.55  # a level is cut to the whole one below
    assert stats.kstest(factors.numpy(), stats.uniform(1 - most - 0.005, 2 * most).cdf).pvalue > 1e-3
    assert 1 - most - 0.011 < float(factors.min()) and float(factors.max()) < 1 + most + 0.001


def test_a_large_change_of_contrast_flattens_an_image_but_never_turns_it():
    images = torch.tensor([100, 150], dtype=torch.uint8).view(1, 1, 1, 2).repeat(500, 1, 1, 1)
    config = AugmentConfig(crop="none", flip=0.0, jitter=5.0)
    dark, light = apply(images, draw(config, torch.arange(500), seed=0, epoch=0), config, (1, 2), MEAN[:1], STD[:1])[
        :, 0, 0
    ].unbind(-1)
    assert (dark <= light).all() and (dark == light).any()


@pytest.mark.parametrize("name", ["cifar", "cifar-deit"])
def test_cifar_moves_an_image_by_up_to_four_pixels(name):
    """As He et al. 2016 pad by four and crop: a dot comes to each of 9 x 9 places, and to no other."""
    images = torch.zeros(3000, 1, 20, 20)
    images[..., 9, 9] = 1
    config = dataclasses.replace(recipe(name), flip=0.0, operations=0, erasing=0.0)
    dots = (views(images, torch.arange(3000), config).flatten(1).argmax(1)).tolist()
    assert {divmod(dot, 20) for dot in dots} == {(row, column) for row in range(5, 14) for column in range(5, 14)}


@pytest.mark.parametrize("channels", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["everything", "deit", "cifar", "none"])
def test_any_number_of_channels_and_another_size(name, channels):
    images = pictures(6, channels)
    got = views(images, torch.arange(6), CONFIGS[name], size=32)
    assert got.shape == (6, channels, 32, 32)
    assert got.dtype == torch.float32
    assert got.isfinite().all()


def test_everything_stays_within_the_range_of_an_image():
    got = views(pictures(200), torch.arange(200), dataclasses.replace(EVERYTHING, erasing=0.0))
    pixels = got * STD.view(-1, 1, 1) + MEAN.view(-1, 1, 1)
    assert float(pixels.min()) > -1e-6
    assert float(pixels.max()) < 1 + 1e-6


LONG = ("cifar", "cifar-deit", "crop", "deit", "deit-pretrain", "none", "pad")
"""Recipes that hold hardly anything that "everything" does not hold too."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in CONFIGS])
def test_it_is_one_graph_without_host_sync(name):
    """torch.compile(fullgraph=True) fails on .item(), on shapes that depend on data and on every graph break."""
    images, ids, config = pictures(4), torch.arange(4), CONFIGS[name]
    noise = draw(config, ids, seed=0, epoch=0)
    torch.compiler.reset()
    compiled = torch.compile(apply, fullgraph=True, backend="eager")
    got = compiled(images, noise, config, (20, 20), MEAN, STD)
    assert torch.allclose(got, apply(images, noise, config, (20, 20), MEAN, STD), atol=1e-5)


def test_labels_become_soft_only_where_they_must():
    images, labels = torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 1])
    config = recipe("crop")
    assert apply_mix(images, labels, {}, config, 3) == (images, labels)
    _, smooth = apply_mix(images, labels, {}, AugmentConfig(label_smoothing=0.3), 3)
    assert smooth is not None
    assert torch.allclose(smooth[0], torch.tensor([0.8, 0.1, 0.1]))
    config = recipe("deit")
    mixed, soft = apply_mix(images, labels, draw(config, torch.arange(4), seed=0, epoch=0), config, 3)
    assert not torch.equal(mixed, images)
    assert soft is not None
    assert torch.allclose(soft.sum(1), torch.ones(4))
    assert apply_mix(images, None, {}, config, None)[1] is None


@pytest.mark.parametrize(
    ("change", "field", "allowed"),
    [
        ({"flip": 1.2}, "flip", "in [0, 1]"),
        ({"scale": (0.5, 0.2)}, "scale", "two rising numbers in (0, 1]"),
        ({"scales": (0.0, 1.0)}, "scales[0]", "> 0"),
        ({"scales": (2.0, 1.0)}, "scales", "two rising numbers"),
        ({"label_smoothing": 1.0}, "label_smoothing", "in [0, 1)"),
        ({"mixup": -1.0}, "mixup", ">= 0"),
        ({"repeated": 0}, "repeated", ">= 1"),
    ],
)
def test_wrong_values_are_refused(change, field, allowed):
    with pytest.raises(SitusError) as caught:
        AugmentConfig(**change)
    assert (caught.value.field, caught.value.allowed) == (field, allowed)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_on_a_gpu_there_is_no_sync_and_the_view_is_the_same(name):
    images, ids, config = pictures(64), torch.arange(64), CONFIGS[name]
    draw(config, ids.cuda(), seed=0, epoch=0)  # makes the tables
    arguments = images.cuda(), ids.cuda(), MEAN.cuda(), STD.cuda()
    labels = torch.arange(64).cuda() % 10
    apply_mix(arguments[0].float(), labels, draw(config, arguments[1], seed=0, epoch=0), config, 10)
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            noise = draw(config, arguments[1], seed=0, epoch=0)
            got = apply(arguments[0], noise, config, (20, 20), *arguments[2:])
            apply_mix(got, labels, noise, config, 10)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    close = (got.cpu() - views(images, ids, config)).abs() < 0.02
    # The two devices' sines and roots differ in the last bit, which may move a pixel across a level.
    assert close.float().mean() > 0.98


def test_no_two_numbers_of_any_two_augmentations_are_related(related):
    """Every number that an image draws is its own: in all augmentations, samples, copies, epochs and seeds."""
    config = AugmentConfig(operations=2, jitter=0.4, erasing=0.5, mixup=0.8)
    ids = torch.arange(4000)
    noise = draw(config, ids, seed=0, epoch=0)
    assert set(noise) == {"crop", "flip", "jitter", "operations", "erasing", "mix", "table"}
    own = {
        f"{name} {place}": column
        for name, values in noise.items()
        if name != "table"
        for place, column in enumerate(values.flatten(1).T if values.ndim > 1 else values[None])
    }
    assert len(own) == 22 + 1 + 3 + 2 * 5 + 24 + 5
    assert related(own) == {}
    others = {
        "epoch": draw(config, ids, seed=0, epoch=1),
        "seed": draw(config, ids, seed=1, epoch=0),
        "copy": draw(config, draw_ids(ids, torch.ones_like(ids)), seed=0, epoch=0),
        "next sample": draw(config, ids + 1, seed=0, epoch=0),
    }
    for name, values in noise.items():
        if name != "table":
            first = {name: values.flatten(1)[:, 0] if values.ndim > 1 else values}
            rest = {
                f"{name} of another {what}": (each[name].flatten(1)[:, 0] if values.ndim > 1 else each[name])
                for what, each in others.items()
            }
            assert related(first | rest) == {}
