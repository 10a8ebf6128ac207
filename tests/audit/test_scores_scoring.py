"""Which recovered image is which, one solution for many, facts per image, patches to measure on."""

from __future__ import annotations

from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from situs.audit.attacks.base import Recovery
from situs.audit.scores import baselines, facts_of, measure_all, measure_guesses, patch_size_of, pictures_of, psnr
from situs.backbones import create_backbone

REAL = torch.rand(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PLAIN = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
SMALL = {"depth": 1, "embed_dim": 24, "num_heads": 2}


def test_the_order_is_the_best_of_all() -> None:
    """Against every permutation by hand."""
    found = torch.rand(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    means = {order: float(psnr(found[list(order)], REAL).mean()) for order in permutations(range(4))}
    best = max(means, key=means.__getitem__)
    torch.testing.assert_close(pictures_of(Recovery(found, [{}]), REAL, 4, PLAIN), found[list(best)])


def test_an_exact_image_is_not_given_up_for_the_sum_of_errors() -> None:
    """The mixture is nearer to the first original than to the second, by more than these two differ."""
    first, second = torch.full_like(REAL[0], 0.5), torch.full_like(REAL[0], 0.6)
    mixture, truth = torch.full_like(first, 0.1), torch.stack([first, second])
    found = torch.stack([mixture, first])
    assert (first - second).square().sum() + (mixture - first).square().sum() < (mixture - second).square().sum()
    torch.testing.assert_close(pictures_of(Recovery(found, [{}]), truth, 2, PLAIN), torch.stack([first, mixture]))


def test_images_of_a_batch_come_back_in_their_places() -> None:
    mixed = torch.cat([REAL[:2].flip(0), REAL[2:]])
    found = Recovery(mixed, [{}, {}])
    torch.testing.assert_close(pictures_of(found, REAL, 2, PLAIN), REAL)
    # Never across uploads.
    crossed = Recovery(REAL[[2, 3, 0, 1]], [{}, {}])
    assert not torch.allclose(pictures_of(crossed, REAL, 2, PLAIN), REAL)


def test_one_solution_stands_for_each_and_a_stop_for_the_first() -> None:
    one = pictures_of(Recovery(REAL[[0, 2]], [{}, {}]), REAL, 2, PLAIN)
    torch.testing.assert_close(one, REAL[[0, 0, 2, 2]])
    stopped = pictures_of(Recovery(REAL[[1, 0]], [{}]), REAL, 2, PLAIN)
    torch.testing.assert_close(stopped, REAL[:2])


def test_facts_and_labels() -> None:
    found = Recovery(REAL, [{"a": 1}, {"a": 2}], labels=torch.tensor([[3, 3], [1, 4]]))
    facts = facts_of(found, torch.tensor([3, 5, 4, 1]), 2)
    assert [fact["a"] for fact in facts] == [1, 1, 2, 2]
    assert [fact["labels_right"] for fact in facts] == [1, 1, 2, 2]
    assert facts[0]["labels_inferred"] == "3, 3"


@pytest.mark.parametrize(
    ("name", "size", "patch"),
    [
        ("vit_tiny_patch16_224", (224, 224), (16, 16)),
        ("resnet18", (32, 24), (8, 8)),
        ("swin_tiny_patch4_window7_224", (224, 224), (16, 16)),
    ],
)
def test_patches_that_are_measured(name: str, size: tuple[int, int], patch: tuple[int, int]) -> None:
    with torch.device("meta"):  # no weights are drawn
        backbone = create_backbone(name)
    assert patch_size_of(backbone, size) == patch


@pytest.mark.parametrize(
    ("tokens", "grid", "size", "patch"),
    [
        (1024, (32, 32), (64, 32), (2, 1)),
        (1025, (25, 41), (64, 32), (16, 16)),
        (0, (0, 0), (24, 8), (8, 8)),
        (0, (0, 0), (12, 8), (4, 4)),
        (0, (0, 0), (10, 6), (2, 2)),
        (0, (0, 0), (9, 16), (1, 1)),
    ],
)
def test_too_many_patches_or_none_are_small_squares(
    tokens: int, grid: tuple[int, int], size: tuple[int, int], patch: tuple[int, int]
) -> None:
    backbone: Any = SimpleNamespace(num_tokens=tokens, grid=grid)
    assert patch_size_of(backbone, size) == patch


def test_blind_guesses_at_many_images_are_scored_as_those_at_all_of_them() -> None:
    real = torch.rand(19, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    backbone: Any = SimpleNamespace(num_tokens=4, grid=(2, 2))
    found, whole = measure_guesses(real, backbone, None), baselines(real)
    assert found.keys() == whole.keys()
    for name, guess in whole.items():
        expected = measure_all(guess, real, 4)
        assert found[name].keys() == expected.keys()
        for metric, values in expected.items():
            assert found[name][metric] == (None if values is None else pytest.approx(values, abs=1e-9)), (name, metric)


@pytest.mark.parametrize("mean", [(0.485, 0.456, 0.406), (0.7, 0.2, 0.1), (0.5, 0.5, 0.5)])
def test_the_blind_grey_is_what_a_model_sees_as_nothing(mean: tuple[float, float, float]) -> None:
    """Whoever finds nothing shows it: a picture of that colour has not leaked, however near it is."""
    backbone = create_backbone("vit_tiny_patch16_224", img_size=8, patch_size=4, model_args=SMALL)
    level = torch.tensor(mean, dtype=torch.float64).view(3, 1, 1)
    guess = measure_guesses(REAL, backbone, None, (mean, (0.2, 0.2, 0.2)))["grey"]["psnr"]
    torch.testing.assert_close(torch.tensor(guess), psnr(level.expand_as(REAL), REAL).float(), check_dtype=False)
