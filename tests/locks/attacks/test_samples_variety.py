"""Whether samples are enough to judge an attack by: which are left out, and what is said of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import leaves, small_vit
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from situs.locks.attacks.images import at_places, shifted
from situs.locks.attacks.samples import (
    DIRECTIONS,
    ENOUGH,
    STEADY,
    Samples,
    Variety,
    _cells,
    distinct_samples,
    stability_of,
    varied_images,
)
from situs.locks.groups import residual_only


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def seen(pixels: Tensor, scale: float = 0.25) -> Variety:
    return varied_images((pixels - 0.5) / scale, pixels, [f"{number}.png" for number in range(len(pixels))])


def slopes(count: int, side: int) -> Tensor:
    """Pictures that go evenly from one colour to another."""
    ends = torch.rand(2, count, 3, 1, 1, generator=seeded(2))
    return (ends[0] + (ends[1] - ends[0]) * torch.linspace(0, 1, side)).expand(-1, -1, side, -1)


def grain(count: int, side: int, width: int) -> Tensor:
    noise = torch.randn(count, 3, side + width - 1, side + width - 1, generator=seeded(1))
    noise = F.avg_pool2d(noise, width, 1)
    return (0.5 + 0.2 * noise / noise.std()).clamp(0, 1)


@pytest.mark.parametrize("side", [32, 64, 112])
def test_pictures_with_edges_count_and_flat_ones_are_named(side: int) -> None:
    good = leaves(6, side)
    assert seen(good).used == tuple(range(6)) and not seen(good).left_out
    flat = torch.rand(3, 3, 1, 1, generator=seeded(0)).expand(-1, -1, side, side)
    dull = 0.5 + 0.02 * (leaves(2, side, 3) - 0.5)  # hardly any contrast
    black = torch.zeros(1, 3, side, side)
    told = seen(torch.cat([good, flat, slopes(2, side), dull, black]))
    assert told.used == tuple(range(6))
    assert told.flat == tuple(f"{number}.png" for number in range(6, 14))
    assert told.left_out == "too flat: 6.png, 7.png, 8.png, 9.png, 10.png and 3 more"


@pytest.mark.parametrize(("height", "width", "cell"), [(112, 80, (7, 5)), (111, 95, (6, 5)), (32, 3, (4, 3))])
def test_an_image_has_sixteen_cells_a_side_unless_they_are_too_small(height: int, width: int, cell: Any) -> None:
    pixels = torch.rand(2, 3, height, width, generator=seeded(4))
    tiles = pixels.unfold(2, cell[0], cell[0]).unfold(3, cell[1], cell[1])  # [B, C, rows, columns, *cell]
    assert torch.equal(_cells(pixels), tiles.flatten(2, 3).flatten(3).movedim(2, 3))


@pytest.mark.parametrize("side", [32, 64, 112])
@pytest.mark.parametrize("width", [1, 3, 5])
def test_noise_of_every_grain_tells_nothing(side: int, width: int) -> None:
    told = seen(torch.cat([grain(4, side, width), leaves(2, side)]))
    assert told.used == (4, 5) and told.noise == ("0.png", "1.png", "2.png", "3.png")
    even = torch.rand(4, 1, side, side, generator=seeded(3)).expand(-1, 3, -1, -1)  # grey, and of another distribution
    assert seen(even).used == ()


def test_a_copy_counts_once_mirrored_lighter_or_coarser() -> None:
    one, other = leaves(2, 64)
    coarse = (one * 12).round() / 12
    told = seen(torch.stack([one, other, one, one.flip(-1), (1.2 * one).clamp(0, 1), coarse]))
    assert told.used == (0, 1)
    assert told.copies == ("2.png", "3.png", "4.png", "5.png") and not told.flat + told.noise
    assert seen(one.expand(24, -1, -1, -1)).used == (0,)
    beside = seen(torch.stack([one, one, other, other.flip(-1)]))
    assert (beside.used, beside.repeated) == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("count", "directions", "stability", "said", "more"),
    [
        (ENOUGH, DIRECTIONS, STEADY, "", 0),
        (ENOUGH, DIRECTIONS - 1, STEADY, f"the {ENOUGH} images vary in only {DIRECTIONS - 1} directions", 2 * ENOUGH),
        (ENOUGH, 1, 1.0, f"the {ENOUGH} images vary in only 1 direction;", 2 * ENOUGH),
        (ENOUGH, DIRECTIONS, STEADY - 1e-6, f"the two halves of the {ENOUGH} images do not show the same", 2 * ENOUGH),
        (ENOUGH + 3, 7, 0.0, f"the {ENOUGH + 3} images vary in only 7 directions", 2 * ENOUGH + 6),
        (ENOUGH - 1, 0, 0.0, f"there are only {ENOUGH - 1} varied images, but {ENOUGH} are needed", ENOUGH),
        (1, 0, 0.0, f"there is only 1 varied image, but {ENOUGH} are needed", ENOUGH),
    ],
)
def test_samples_are_enough_from_their_bounds_on(
    count: int, directions: int, stability: float, said: str, more: int
) -> None:
    found = Variety(tuple(range(count))).doubt(directions, stability, 64)
    assert found.startswith(said) and bool(found) == bool(said)
    assert (
        not said or f"; give {more} photographs or more that differ from each other and resemble the training" in found
    )


def test_values_that_no_training_had_are_said() -> None:
    good = leaves(20, 32)
    assert seen(good).doubt(99, 1.0, 64) == ""
    assert "mean" in seen(good, 1.0).doubt(99, 1.0, 64)  # as if nobody had divided by the deviation
    assert "heck mean and std" in seen(good, 1 / 255).doubt(99, 1.0, 64)
    unit = (good - good.mean()) / good.std()
    for mean, deviation, fits in (
        (0, 0.25, False),
        (0, 0.5, True),
        (1, 1, True),
        (0, 1.3, True),
        (-4, 1, False),
        (0, 4, False),
    ):
        problem = varied_images(deviation * unit + mean, good, [""] * 20).range_problem
        assert problem.startswith(
            "" if fits else f"the inputs have mean {mean:.2f} and standard deviation {deviation:.2f}."
        )
        assert bool(problem) != fits


def test_what_is_missing_is_said_and_what_to_give() -> None:
    few = Variety(tuple(range(3)), flat=("a.png",), copies=("b.png",)).doubt(99, 1.0, 64)
    assert few.startswith(
        "there are only 3 varied images, but 16 are needed (too flat: a.png; copies of others: b.png); give 16 photo"
    )
    assert "1 varied text," in Variety((0,), "texts").doubt(99, 1.0, 64)
    whole = Variety(tuple(range(20)))
    assert "only 3 directions" in whole.doubt(3, 1.0, 64)
    assert whole.doubt(4, 1.0, 16) == whole.doubt(8, 0.8, 64) == ""
    assert "do not show the same correlations; give 40 photographs" in whole.doubt(9, 0.79, 64)


def test_equal_texts_count_once() -> None:
    told = distinct_samples([torch.tensor([row]) for row in ([1, 2], [1, 2, 3], [1, 2])], ["a", "b", "c"], "texts")
    assert (told.used, told.copies, told.things) == ((0, 1), ("c",), "texts")


def test_directions_and_steadiness_are_those_of_the_covariances() -> None:
    turned = torch.linalg.qr(torch.randn(6, 6, generator=seeded(0), dtype=torch.float64))[0]
    values = torch.tensor([1.0, 0.5, 0.02, 0.009, 1e-9, 0.0], dtype=torch.float64)
    gram = (turned * values) @ turned.T
    assert stability_of([gram, gram]) == (3, pytest.approx(1.0))
    other = torch.randn(6, 6, generator=seeded(1), dtype=torch.float64)
    assert stability_of([gram, other @ other.T])[1] < 0.8
    assert stability_of([torch.zeros(6, 6), torch.zeros(6, 6)]) == (0, 0.0)


@pytest.fixture(scope="module")
def backbone() -> Any:
    torch.manual_seed(0)
    return small_vit(32, width=48, heads=4, num_classes=3).eval()


def samples(pixels: Tensor) -> Samples:
    return Samples(((pixels - 0.5) / 0.25).split(1), "", seen(pixels), (4, 4))


@pytest.mark.parametrize(
    ("pixels", "said"),
    [
        (leaves(24, 32), ""),
        (leaves(ENOUGH, 32, 5), ""),
        (leaves(24, 32).mean(dim=1, keepdim=True).expand(-1, 3, -1, -1), ""),  # grey ones tell enough
        (leaves(1, 32), "only 1 varied image, but 16 are needed"),
        (leaves(4, 32), "only 4 varied images, but 16"),
        (leaves(1, 32).expand(24, -1, -1, -1), "only 1 varied image, but 16"),
        (torch.rand(2, 3, 1, 1, generator=seeded(0)).expand(-1, -1, 32, 32), "only 0 varied images, but 16"),
        (torch.rand(24, 3, 1, 1, generator=seeded(0)).expand(-1, -1, 32, 32), "too flat: 0.png"),
        (torch.cat([leaves(4, 32), slopes(20, 32)]), "only 4 varied images"),
        (grain(24, 32, 1), "noise: 0.png"),
        (grain(24, 32, 5), "noise: 0.png"),
        (0.05 * leaves(24, 32), "too flat"),
    ],
)
def test_from_pictures_to_what_is_said(backbone: Any, pixels: Tensor, said: str) -> None:
    told = samples(pixels).doubt(backbone, residual_only(backbone.groups()))
    assert told.startswith(said) if said[:1].isdigit() else said in told
    assert bool(told) == bool(said)


def test_only_what_counts_is_attacked_with(backbone: Any) -> None:
    good = samples(leaves(20, 32))
    mixed = samples(torch.cat([leaves(20, 32), slopes(9, 32), grain(3, 32, 1)]))
    assert all(map(torch.equal, good.batches, mixed.batches))
    twice = samples(torch.cat([leaves(2, 32), leaves(2, 32)]))
    assert next(iter(twice.batches)).shape[0] == 4 and len(twice.variety.used) == 2  # seen from more places
    none = samples(slopes(9, 32))
    assert next(iter(none.batches)).shape[0] == 9  # nothing counts, and so all are tried


def test_what_varies_at_a_place_is_what_its_mean_leaves(backbone: Any) -> None:
    groups, images = residual_only(backbone.groups()), (leaves(5, 32) - 0.5) / 0.25
    with torch.no_grad():
        z = backbone.assemble(backbone.embed(images), backbone.positions()).z
        z = F.layer_norm(z, z.shape[-1:]).double()
    apart = (z - z.mean(dim=0)).flatten(0, 1)
    assert torch.allclose(at_places(backbone, groups, [images]), apart.T @ apart / len(apart), atol=1e-6)
    assert at_places(backbone, groups, shifted(images, (4, 4))).shape == (48, 48)


@pytest.mark.shared_data
@pytest.mark.slow
def test_every_photograph_counts(shared_data: Path) -> None:
    files = sorted((shared_data / "imagenet-samples").glob("*.JPEG"))[::9]
    for side in (32, 224):
        pixels = [np.asarray(Image.open(file).convert("RGB").resize((side, side))) for file in files]
        told = seen(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255)
        assert len(told.used) >= 0.98 * len(files), told.left_out
