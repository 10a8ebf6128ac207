"""Correlation maps against np.corrcoef over every image and every pair of them."""

from __future__ import annotations

import json
from itertools import permutations

import numpy as np
import pytest
import torch
from builders import small_vit
from hypothesis import given
from hypothesis import strategies as st

from situs.backbones.base import Backbone
from situs.data.batch import Batch
from situs.data.config import DataConfig
from situs.errors import SitusError
from situs.measure.correlation import (
    Correlation,
    Correlations,
    analyze_correlation,
    correlate,
    distances,
    standardised,
)
from situs.measure.features import Layer, patch_layers
from situs.models import Model
from situs.pages import make_page


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    torch.manual_seed(0)
    found = small_vit((8, 12), width=24, heads=3).double().eval()
    with torch.no_grad():
        found.model.pos_embed.normal_(std=0.5)
    return found


def batches(count: int, sizes: tuple[int, ...]) -> list[Batch]:
    images = torch.randn(count, 3, 8, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ids = torch.arange(count)
    return [Batch(part, which) for part, which in zip(images.split(sizes), ids.split(sizes), strict=True)]


@pytest.mark.parametrize("told", [True, False])
def test_every_depth_slowly(backbone: Backbone, told: bool) -> None:
    sets = batches(5, (2, 2, 1))
    found = correlate(backbone, sets, positions=told)
    with torch.no_grad():
        tokens = backbone.embed(torch.cat([batch.inputs for batch in sets]))
        layers: list[Layer] = []
        patch_layers(backbone, tokens, backbone.positions() if told else None, layers.append)
    assert list(found) == [layer.depth for layer in layers]
    for layer in layers:
        features = layer.patches.numpy()
        within = np.mean([np.corrcoef(image) for image in features], axis=0)
        pairs = [np.corrcoef(a, b)[:6, 6:] for a, b in permutations(features, 2)]
        assert len(pairs) == 20
        result = found[layer.depth]
        assert (result.grid, result.images) == ((2, 3), 5)
        np.testing.assert_allclose(result.within, within, atol=1e-12)
        np.testing.assert_allclose(result.across, np.mean(pairs, axis=0), atol=1e-12)


def test_batches_do_not_matter(backbone: Backbone) -> None:
    one, many = (correlate(backbone, batches(6, sizes))["norm"] for sizes in ((6,), (1, 3, 2)))
    assert torch.allclose(one.within, many.within, atol=1e-13)
    assert torch.allclose(one.across, many.across, atol=1e-13)


def test_shared_place_counts_with_positions_and_not_without(backbone: Backbone) -> None:
    """Images of noise have nothing in common but their places."""
    sets = batches(40, (40,))
    told, untold = (correlate(backbone, sets, positions=each)["norm"].means for each in (True, False))
    assert told["position"] > 0.3
    assert abs(untold["position"]) < 0.05


def test_means_by_hand() -> None:
    within = torch.tensor([[1.0, 0.6, 0.2], [0.6, 1.0, 0.4], [0.2, 0.4, 1.0]], dtype=torch.float64)
    across = torch.tensor([[0.5, 0.1, 0.0], [0.1, 0.3, 0.2], [0.0, 0.2, 0.1]], dtype=torch.float64)
    found = Correlation((1, 3), within, across, 4)
    expected = {"within_near": 0.5, "within": 0.4, "across_same": 0.3, "across": 0.1, "position": 0.2, "image": 0.3}
    assert found.means == pytest.approx(expected)
    steps, inside, between = found.by_distance()
    assert steps == [0, 1, 2]
    assert inside == pytest.approx([1.0, 0.5, 0.2])
    assert between == pytest.approx([0.3, 0.15, 0.0])


@given(st.integers(2, 8), st.integers(0, 50))
def test_standardised_rows_multiply_to_pearson(dim: int, seed: int) -> None:
    rows = torch.randn(3, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 5 + 2
    z = standardised(rows)
    np.testing.assert_allclose(z @ z.T, np.corrcoef(rows.numpy()), atol=1e-10)
    assert not standardised(torch.full((1, dim), 3.0)).any()  # a constant row correlates with nothing


def test_distances_by_hand() -> None:
    assert distances((2, 2)).tolist()[0] == pytest.approx([0, 1, 1, 2**0.5])


def test_one_image_is_refused(backbone: Backbone) -> None:
    for count, sizes in ((1, (1,)), (0, (0,))):
        with pytest.raises(SitusError, match=r"at least two samples"):
            correlate(backbone, batches(count, sizes) if count else [])


def of_three(place: float, image: float) -> Correlation:
    """Three places in a row that correlate 0.3 in two images; a shared place and a shared image add so much."""
    across = torch.full((3, 3), 0.3, dtype=torch.float64)
    within = (across + image).fill_diagonal_(1.0)
    return Correlation((1, 3), within, across + place * torch.eye(3, dtype=torch.float64), 4)


@pytest.mark.parametrize(
    ("place", "image", "said"),
    [
        (0.005, 0.005, ("finds no position", "form no cluster")),
        (0.02, 0.02, ("depend on position", "sample form a cluster")),
        (0.4, 0.0, ("0.70", "0.40 more", "0.30", "form no cluster")),
    ],
)
def test_a_gain_of_a_hundredth_is_worth_a_word(place: float, image: float, said: tuple[str, str]) -> None:
    depths = {"embedding": of_three(0.3, 0.1), "1": of_three(0.1, 0.1), "norm": of_three(place, image)}
    words = Correlations(depths).summary().sentence
    assert all(each in words for each in said)
    assert ("largest after the final norm: 0.40." in words) == (place == 0.4)
    assert ("largest before the first block: 0.30." in words) == (place < 0.4)


def test_a_row_for_every_depth() -> None:
    depths = {"embedding": of_three(0.3, 0.1), "norm": of_three(0.02, 0.2)}
    _, header, rows, _ = Correlations(depths).summary().tables[0]
    assert header == [
        "after",
        "near",
        "1 sample",
        "same position",
        "2 samples",
        "shared position",
        "shared sample",
    ]
    assert rows == [
        ["embedding", "0.400", "0.400", "0.600", "0.300", "0.300", "0.100"],
        ["norm", "0.500", "0.500", "0.320", "0.300", "0.020", "0.200"],
    ]


def test_page_says_first_what_was_found(backbone: Backbone) -> None:
    found = correlate(backbone, batches(12, (12,)))
    page, said = make_page(Correlations(found)), Correlations(found).summary().sentence
    text = page.render()
    assert set(page.pictures) == {"maps", "distance", "layers"}
    assert all(picture.startswith(b"\x89PNG") for picture in page.pictures.values())
    assert text.index(said[:60]) < text.index("<figure>") < text.index("<table")
    assert "features depend on position" in said
    untold = correlate(backbone, batches(60, (60,)), positions=False)
    last = untold["norm"].means
    assert ("finds no position" in Correlations(untold).summary().sentence) == (last["position"] < 0.01)
    numbers = json.loads(json.dumps(Correlations(found).to_json()))
    assert numbers["images"] == 12
    assert numbers["depths"]["norm"]["within"] == pytest.approx(found["norm"].means["within"])
    assert np.array(numbers["across"]).shape == (6, 6)


def random_maps(grid: tuple[int, int], seed: int = 0) -> Correlation:
    maps = torch.randn(2, grid[0] * grid[1], grid[0] * grid[1], generator=torch.Generator().manual_seed(seed)).double()
    return Correlation(grid, *maps, 7)


def test_what_the_figures_draw() -> None:
    depths = {"embedding": random_maps((3, 7), 1), "1": random_maps((3, 7), 2), "norm": random_maps((3, 7), 3)}
    distance, maps, layers = Correlations(depths, "1").figures()
    steps, within, across = depths["1"].by_distance()
    assert steps == [0, 1, 2, 3, 4, 5, 6]
    assert distance.values[0] == {
        "within one sample": (steps[1:], within[1:]), "across two samples": (steps, across),
    }  # fmt: skip
    assert distance.caption.startswith("After block 1. If")
    drawn, rows, columns, _ = maps.values
    assert (rows, columns) == ([0, 1, 2], [0, 2, 3, 4, 6])
    for title, whole in (("within one sample", depths["1"].within), ("across two samples", depths["1"].across)):
        assert drawn[title].shape == (3, 5, 3, 7)
        for r, row in enumerate(rows):
            for c, column in enumerate(columns):
                assert torch.equal(drawn[title][r, c].flatten(), whole[7 * row + column])
    assert layers.options["x_names"] == ["embed", "1", "norm"]
    assert layers.values[0]["2 samples, same position"] == (
        range(3), [each.means["across_same"] for each in depths.values()],
    )  # fmt: skip


def test_the_first_screen_is_of_the_depth_that_is_drawn() -> None:
    depths = {"1": random_maps((1, 3), 1), "norm": random_maps((1, 3), 2)}
    for depth, found in depths.items():
        means = found.means
        shown = [value for value, _ in Correlations(depths, depth).summary().numbers]
        assert shown == [f"{means[key]:.2f}" for key in ("within", "across_same", "across")]
        titles = [figure.caption.partition(".")[0] for figure in Correlations(depths, depth).figures()[:1]]
        assert titles == ["After the final norm" if depth == "norm" else "After block 1"]


@pytest.mark.parametrize(("count", "kept"), [(400, True), (401, False)])
def test_large_maps_stay_out_of_the_json(count: int, kept: bool) -> None:
    numbers = Correlations({"norm": random_maps((1, count))}).numbers()
    assert (numbers["within"] is not None, numbers["across"] is not None) == (kept, kept)
    if kept:
        assert numbers["within"][0][1] == round(float(random_maps((1, count)).within[0, 1]), 5)


def test_neighbours_are_one_apart_and_not_across_a_corner() -> None:
    within = torch.tensor([[1.0, 0.1, 0.2, 0.9], [0.1, 1.0, 0.9, 0.4], [0.2, 0.9, 1.0, 0.5], [0.9, 0.4, 0.5, 1.0]])
    assert Correlation((2, 2), within.double(), within.double(), 2).means["within_near"] == pytest.approx(0.3)


def test_two_images_are_enough(backbone: Backbone) -> None:
    found = correlate(backbone, batches(2, (2,)))["norm"]
    assert found.images == 2 and torch.isfinite(found.across).all()


def test_the_maps_of_a_depth_that_the_model_has_are_drawn() -> None:
    model = Model("m", small_vit(28, in_chans=1), input=DataConfig(img_size=28, channels=1, workers=0))
    for depth in ("embedding", "2", "norm"):
        found = analyze_correlation(model, "samples", depth=depth, count=3)
        assert (found.depth, [*found.depths]) == (depth, ["embedding", "1", "2", "norm"])
    with pytest.raises(SitusError, match="unknown depth '3'; choose one of: 1, 2, embedding, norm") as caught:
        analyze_correlation(model, "samples", depth="3", count=3)
    assert caught.value.field == "depth"
