"""What is sent against the gradient of the step, number by number: factors, noise of one deviation, and units."""

from __future__ import annotations

import math
import random
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn

from situs.audit.captured import Captured
from situs.audit.defences import NoDefence, Noise, create_defence
from situs.audit.reference import (
    IMAGENET,
    Chance,
    Match,
    Pass,
    _stands_out,
    _unlike_stated,
    chance_kept,
    compare,
    cross_entropy_slopes,
    dropout_of,
    guessed_passes,
    logits_of,
    replay,
    same,
    units,
)

SHAPES = {"a": (40, 30), "b": (64,), "c": (80, 20), "d": (7,), "e": (9,)}


def drawn(seed: int, size: float = 1.0) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {name: size * torch.randn(shape, generator=chance) for name, shape in SHAPES.items()}


CLEAN = drawn(0)


def noisy(sigma: float, factor: float = 1.0, seed: int = 1) -> dict[str, Tensor]:
    return {name: factor * CLEAN[name] + noise for name, noise in drawn(seed, sigma).items()}


@pytest.mark.parametrize("factor", [1.0, 0.25, 3.0])
@pytest.mark.parametrize("sigma", [0.0, 1e-6, 0.01, 0.5])
def test_a_factor_and_the_deviation_of_the_noise_are_measured(factor: float, sigma: float) -> None:
    found = compare(noisy(sigma * factor, factor), CLEAN)
    assert not found.wrong and found.resolved and found.quiet is (sigma < 1e-4)
    assert found.factor == pytest.approx(factor, rel=0.1 * sigma + 1e-5)
    assert found.sigma == (0.0 if found.quiet else pytest.approx(sigma * factor, rel=0.06))
    numbers = torch.cat([(g.double() - found.factor * CLEAN[n]).flatten() for n, g in noisy(sigma, 1.0).items()])
    assert found.quiet or factor != 1 or found.sigma == pytest.approx(float(numbers.square().mean().sqrt()))


def test_noise_that_hides_the_gradient_leaves_no_factor_to_be_seen() -> None:
    """As many deviations as a factor must be off to be no chance, on either side."""
    size = math.sqrt(sum(float(g.square().sum()) for g in CLEAN.values()))
    assert not compare(noisy(size / 7), CLEAN).resolved and compare(noisy(size / 20), CLEAN).resolved
    match = Match(CLEAN, 0.5, 2.0, False, True)
    sent = Captured("it", {"a": torch.ones(2)}, "gradient", rounding=0.5)
    upload, noise = match.in_units(sent)
    assert upload.gradients["a"].tolist() == [2, 2] and noise == Noise(4.0) and upload.rounding == 1.0
    upload, noise = match._replace(resolved=False).in_units(sent)
    assert upload.gradients["a"].tolist() == [1, 1] and noise == Noise(2.0) and upload.rounding == 0.5
    assert match._replace(quiet=True).in_units(sent)[1] == NoDefence()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"a": lambda g: 2 * g}, r"scaled by different factors \(a × 2\)"),
        ({"a": lambda g: 2 * g, "b": lambda g: g / 3}, r"different factors \(b × 0.333, a × 2\)"),
        (
            {"a": lambda g: 2 * g, "b": lambda g: 9 * g, "c": lambda g: 4 * g, "d": lambda g: 3 * g},
            r"and 1 more\)",
        ),
        ({"a": lambda g: g.flip(0)}, "not the gradient of one step on these images: the relative error of a is "),
    ],
)
def test_tensors_with_factors_of_their_own_are_named(change: dict[str, Any], said: str) -> None:
    found = compare({name: change.get(name, lambda g: g)(g) for name, g in CLEAN.items()}, CLEAN)
    assert re.search(said, found.wrong), found.wrong
    assert found.factors.keys() == CLEAN.keys()
    if "factors" in said:
        assert found.factors["a"] / found.factors["e"] == pytest.approx(2, rel=1e-5)


STRIPES = torch.randn(80, 1, generator=torch.Generator().manual_seed(3)) * torch.tensor([1.0, 1, -1, -1]).repeat(5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"b": lambda noise: 3 * noise}, "on b, but"),
        ({"d": lambda noise: 3 * noise, "e": lambda noise: 3 * noise}, "on the small tensors, but"),
        ({"a": lambda noise: noise.abs()}, "the noise in a is not independent noise: its mean is not 0"),
        ({"c": lambda noise: noise.sort(dim=1).values}, "the noise in c is not independent noise: its mean is not 0"),
        (
            {"c": lambda noise: noise + 0.2 * STRIPES},
            "What is left of c is not noise, because it is larger",
        ),
        ({}, ""),
    ],
)
def test_a_rest_that_is_no_noise_of_one_deviation_is_named(change: dict[str, Any], said: str) -> None:
    noise = drawn(2, 0.3)
    found = compare({n: g + change.get(n, lambda rest: rest)(noise[n]) for n, g in CLEAN.items()}, CLEAN)
    assert said in found.wrong and bool(found.wrong) is bool(said), found.wrong


def test_numbers_that_overflowed_and_tensors_of_rounding_alone_do_not_count() -> None:
    sent = noisy(0.0)
    sent["a"][3, 4], sent["c"][0] = torch.inf, torch.nan
    clean = {**CLEAN, "faint": 1e-9 * torch.randn(30, generator=torch.Generator().manual_seed(5))}
    sent |= {"faint": -7 * clean["faint"], "other": torch.ones(3)}
    found = compare(sent, clean)
    assert not found.wrong and found.quiet and found.factor == pytest.approx(1)
    nothing = compare(sent, {name: 0 * g for name, g in CLEAN.items()})
    assert nothing.wrong == "the gradient of these images is 0" and not nothing.resolved


@pytest.mark.parametrize("scale", [1e-9, 1e9])
@pytest.mark.parametrize(("sigma", "doubled"), [(0.0, ""), (0.0, "a"), (0.01, ""), (0.01, "b")])
def test_the_size_of_all_numbers_together_changes_no_finding(scale: float, sigma: float, doubled: str) -> None:
    """One tensor is far smaller than all others, and another is not the gradient."""
    clean = {n: (5e-3 if n == "e" else 1.0) * g.double() for n, g in CLEAN.items()}
    sent = {n: (2 if n == doubled else 1) * g + sigma * drawn(1)[n].double() for n, g in clean.items()}
    if not sigma:
        sent["c"] = sent["c"].flip(0)
    plain = compare(sent, clean)
    other = compare({n: scale * g for n, g in sent.items()}, {n: scale * g for n, g in clean.items()})
    assert (other.wrong, other.quiet, other.resolved) == (plain.wrong, plain.quiet, plain.resolved)
    assert other.factor == pytest.approx(plain.factor) and other.sigma == pytest.approx(scale * plain.sigma)


def test_chance_makes_no_direction_of_noise_stand_out() -> None:
    for shape in ((40, 40), (5, 200), (200, 5)):
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
        assert not _stands_out(noise)
        u, s, v = torch.linalg.svd(noise, full_matrices=False)
        s[0] = 1.1 * (math.sqrt(shape[0]) + math.sqrt(shape[1])) + 4.99
        assert not _stands_out(u * s @ v)
        s[0] += 0.02
        assert _stands_out(u * s @ v)


@pytest.mark.parametrize(
    ("factor", "sigma", "resolved", "stated", "said"),
    [
        (1.0, 0.009, True, "none", ""),  # the gradient shows
        (1.0, 0.011, True, "none", ""),  # 0 deviations off
        (0.2, 0.011, True, "none", ""),  # all of it clipped
        (1.04, 0.011, True, "none", "but the stated noise is 0"),
        (1.0, 1.14, False, "noise=1", ""),
        (1.0, 1.15, False, "noise=1", ""),
        (1.0, 1.16, False, "noise=1", "1 times the gradient of these images plus a difference with the"),
        (3.9, 1.0, False, "noise=1", ""),
        (4.1, 1.0, False, "noise=1", "but the stated noise is 1"),
        (-1.9, 1.0, False, "noise=1", ""),
        (-2.1, 1.0, False, "noise=1", "but the stated noise is 1"),
        (1.0, 1.0, False, "fedavg-adam=1+noise=1", "the update of a step of Adam"),
        (1.0, 1.0, False, "fedavg=3+noise=1", "the update of 3 local steps"),
        (1.0, 0.009, True, "fedavg=3", ""),
    ],
)
def test_larger_noise_must_be_the_stated_noise(
    factor: float, sigma: float, resolved: bool, stated: str, said: str
) -> None:
    """A gradient of length 1 in 10,000 numbers, so that a deviation of 0.01 is as large."""
    clean = {"a": torch.full((100, 100), 0.01)}
    found = _unlike_stated(Match(clean, factor, sigma, False, resolved), create_defence(stated), 1, 1)
    assert said in found and bool(found) is bool(said), found
    assert _unlike_stated(Match(clean, factor, sigma, True, resolved), create_defence(stated), 1, 1) == ""


def test_every_generator_is_as_it_was_afterwards() -> None:
    def draw() -> tuple[float, float, float]:
        return float(torch.rand(1)), random.random(), float(np.random.rand())

    before = Chance.now()
    with chance_kept():
        first = draw()
    assert before.same(Chance.now()) and draw() == first and not before.same(Chance.now())
    for number in range(3):
        before.restore()
        if number == 0:
            torch.rand(1)
        elif number == 1:
            random.random()
        else:
            np.random.rand()
        assert not before.same(Chance.now())
    before.restore()


def test_slopes_are_those_of_torchs_own_cross_entropy() -> None:
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 3, 3, 1, 2])
    [expected] = torch.autograd.grad(nn.functional.cross_entropy(logits, labels), logits)
    torch.testing.assert_close(cross_entropy_slopes(logits.detach(), labels), expected)
    seen = Pass((), {}, [], Chance.now())
    seen.add(expected)
    seen.add(2 * expected)
    torch.testing.assert_close(seen.slopes, 3 * expected)


@pytest.mark.parametrize("bias", [True, False])
def test_the_slopes_of_a_step_follow_from_the_classifiers_gradient(bias: bool) -> None:
    """Of no more images than it has inputs, the constant of a bias among them."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 4, bias=bias)).double()
    for count, known in ((1, True), (6, True), (7, bias), (8, False)):
        images, labels = torch.randn(count, 3, 2, 2).double(), torch.arange(count) % 4
        loss = nn.functional.cross_entropy(module(images), labels)
        values = torch.autograd.grad(loss, list(module.parameters()))
        gradients = {name: g for (name, _), g in zip(module.named_parameters(), values, strict=True)}
        guesses = guessed_passes(module, images, gradients)
        assert len(guesses) == 2 * known
        for guess in guesses:
            assert guess.slopes is not None and guess.images is images
            torch.testing.assert_close(guess.slopes, cross_entropy_slopes(module(images).detach(), labels))
            again = replay(module, [guess])
            assert isinstance(again, dict)
            torch.testing.assert_close(again, gradients)
            doubled = replay(module, [guess, guess])
            assert isinstance(doubled, dict)
            torch.testing.assert_close(doubled, {name: 2 * g for name, g in gradients.items()})
    lost = {name: g.clone() for name, g in gradients.items()}
    lost["3.weight"][1, 2] = torch.inf
    assert guessed_passes(module, images[:1], lost) == [] == guessed_passes(module, images[:1], {"1.weight": values[0]})
    assert guessed_passes(nn.Sequential(module, nn.Softmax(dim=1)), images[:1], gradients) == []


def test_logits_and_images_are_found_in_what_modules_take_and_give() -> None:
    x = torch.ones(2)
    assert all(logits_of(given) is x for given in (x, {"logits": x}, SimpleNamespace(logits=x)))
    assert logits_of({"other": x}) is None and logits_of((x,)) is None and logits_of({"logits": [x]}) is None
    assert Pass(("a", x), {"b": 2 * x}, [], Chance.now()).images is x
    assert Pass(("a",), {"b": x}, [], Chance.now()).images is x and Pass((), {}, [], Chance.now()).images is None


def test_the_largest_dropout_that_was_on_counts() -> None:
    module = nn.Sequential(nn.Dropout(0.1), nn.Sequential(nn.Dropout2d(0.3), nn.Linear(2, 2)), nn.Dropout(0.2))
    parts = [type(part).__name__ for part in module.modules()]
    assert parts == ["Sequential", "Dropout", "Sequential", "Dropout2d", "Linear", "Dropout"]
    passes = [
        Pass((), {}, [False, True, False, False, True, False], Chance.now()),
        Pass((), {}, [False, False, False, False, True, True], Chance.now()),
    ]
    assert [dropout_of(module, passes[:count]) for count in (0, 1, 2)] == [0.0, 0.1, 0.2]
    assert dropout_of(module.eval(), [Pass((), {}, [True] * 6, Chance.now())]) == 0.3


def test_inputs_that_differ_by_rounding_are_the_same() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert same(x, x) and same(x * (1 + 1e-7), x) and not same(x * 1.01, x) and not same(x[:50], x)


def test_imagenets_normalisation_is_timms() -> None:
    assert IMAGENET == (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)


HALF = ((0.5,) * 3, (0.5,) * 3)
PLAIN = ((0.0,) * 3, (1.0,) * 3)


def pictures(kind: str) -> Tensor:
    chance = torch.Generator().manual_seed(0)
    if kind == "bytes":
        return torch.randint(0, 256, (2, 3, 8, 8), generator=chance) / 255
    if kind == "few":
        return torch.randint(0, 15, (2, 3, 8, 8), generator=chance) / 255
    return 0.05 + 0.9 * torch.rand(2, 3, 8, 8, generator=chance)


def scaled(images: Tensor, to: Any) -> Tensor:
    mean, deviation = (torch.tensor(part).view(-1, 1, 1) for part in to)
    return (images - mean) / deviation


@pytest.mark.parametrize("stated", [PLAIN, HALF, IMAGENET])
@pytest.mark.parametrize("true", [PLAIN, HALF, IMAGENET])
def test_bytes_speak_for_their_normalisation(true: Any, stated: Any) -> None:
    found, said = units(scaled(pictures("bytes"), true), stated)
    assert found == true and bool(said) is (true != stated)
    name = {PLAIN: "0 and 1", HALF: "0.5 and 0.5", IMAGENET: "ImageNet's"}
    assert not said or f"deviation are {name[stated]}, but the images fit {name[true]}" in said


def test_other_numbers_keep_the_stated_normalisation_as_long_as_they_are_pictures_in_it() -> None:
    own = ((0.4, 0.4, 0.4), (0.3, 0.3, 0.3))
    for kind in ("smooth", "few"):
        assert units(scaled(pictures(kind), own), own) == (own, "")
    wide = scaled(pictures("smooth"), own) * 4
    found, said = units(wide, own)
    low, high = float(wide.min()), float(wide.max())
    assert found == ((low,) * 3, (high - low,) * 3) and "assumed mean and deviation are the stated ones" in said
    assert "With this mean and deviation, image values would lie outside 0 to 1" in said
    grey = units(torch.zeros(1, 1, 4, 4) + 7, ((0.5,), (0.5,)))[0]
    assert grey == ((7.0,), (1e-6,))


@pytest.mark.parametrize(("beyond", "kept"), [(7, True), (8, False)])
def test_a_few_numbers_may_lie_beyond_the_range(beyond: int, kept: bool) -> None:
    """Of 384 numbers one in fifty is 7.68."""
    images = pictures("smooth")
    images.flatten()[:beyond] = 1.5
    own = ((0.4, 0.4, 0.4), (0.3, 0.3, 0.3))
    assert (units(scaled(images, own), own)[1] == "") is kept
    images.flatten()[:200] = 1.02
    assert beyond > 7 or units(scaled(images, own), own)[1] == ""
