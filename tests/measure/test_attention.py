"""Averages over heads against plain loops, and laws that hold for attention one can write down."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import small_vit
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from situs.backbones.attention_maps import watch_attention
from situs.backbones.base import Backbone
from situs.errors import SitusError
from situs.measure import attention
from situs.measure.attention import (
    Attention,
    AttentionMaps,
    check_layer,
    image_maps,
    offset_counts,
    offset_distances,
    query_maps,
    relative_sums,
    row_entropy,
    survey,
    top_share,
    uniform_distance,
)
from situs.methods.base import Batch
from situs.pages import make_page
from situs.results import Provenance

GRIDS = st.tuples(st.integers(1, 4), st.integers(1, 4))


def make(name: str = "vit_tiny_patch16_224", **fields: Any) -> Backbone:
    torch.manual_seed(0)
    backbone = small_vit((8, 12), name=name, **fields).double().eval()
    for parameter in backbone.parameters():
        torch.nn.init.normal_(parameter, std=0.5)  # as it is made, a ViT attends almost evenly
    return backbone


def batches(count: int = 5, size: int = 2) -> list[Batch]:
    images = torch.randn(count, 3, 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return [Batch(part, torch.arange(len(part))) for part in images.split(size)]


def all_weights(backbone: Backbone, *, positions: bool) -> Tensor:
    """[L, B, H, S, S] of all images of `batches`."""
    layers: dict[int, list[Tensor]] = {}
    with torch.no_grad():
        for batch in batches():
            stream = backbone.assemble(backbone.embed(batch.inputs), backbone.positions() if positions else None)
            watch_attention(backbone, stream, lambda layer, weights: layers.setdefault(layer, []).append(weights))
    return torch.stack([torch.cat(layers[layer]) for layer in range(backbone.depth)])


@given(GRIDS, st.integers(1, 3), st.integers(1, 2))
@settings(deadline=None, max_examples=25)
def test_sums_by_offset_equal_a_loop(grid: tuple[int, int], batch: int, heads: int) -> None:
    height, width = grid
    count = height * width
    weights = torch.rand(batch, heads, count, count, dtype=torch.float64)
    expected = torch.zeros(heads, 2 * height - 1, 2 * width - 1, dtype=torch.float64)
    pairs = torch.zeros(2 * height - 1, 2 * width - 1, dtype=torch.float64)
    for query in range(count):
        for key in range(count):
            down, right = key // width - query // width, key % width - query % width
            expected[:, down + height - 1, right + width - 1] += weights[:, :, query, key].sum(dim=0)
            pairs[down + height - 1, right + width - 1] += 1
            length = offset_distances(grid)[down + height - 1, right + width - 1]
            assert math.isclose(float(length), math.hypot(down, right), abs_tol=1e-12)
    torch.testing.assert_close(relative_sums(weights, grid), expected)
    assert torch.equal(offset_counts(grid), pairs)


def test_a_head_that_looks_right_is_bright_at_its_offset_alone() -> None:
    """Every patch takes all from its right neighbour; those of the last column from themselves."""
    grid = (3, 4)
    weights = torch.zeros(1, 1, 12, 12)
    for query in range(12):
        weights[0, 0, query, query if query % 4 == 3 else query + 1] = 1.0
    mean = relative_sums(weights, grid)[0] / offset_counts(grid)
    assert mean[2, 4] == 1.0  # (0, +1): every pair that has it, although only 9 of 12 queries do
    assert mean[2, 3] == 3 / 12
    assert mean.sum() == 1.25


@pytest.mark.parametrize("grid", [(1, 5), (3, 4)])
def test_even_attention_is_flat_whatever_an_offsets_number_of_pairs(grid: tuple[int, int]) -> None:
    count = grid[0] * grid[1]
    weights = torch.full((2, 3, count, count), 1 / count, dtype=torch.float64)
    mean = relative_sums(weights, grid) / (2 * offset_counts(grid))
    torch.testing.assert_close(mean, torch.full_like(mean, 1 / count))
    sums = relative_sums(weights, grid)
    far = (sums * offset_distances(grid)).sum(dim=(1, 2)) / sums.sum(dim=(1, 2))
    torch.testing.assert_close(far, torch.full_like(far, uniform_distance(grid)))


def test_entropy_of_attention_that_is_known() -> None:
    rows = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
    torch.testing.assert_close(row_entropy(rows), torch.tensor([0.0, math.log(2), math.log(4)]))


def test_maps_of_cls_and_of_the_average_patch() -> None:
    weights = torch.rand(2, 3, 8, 8, dtype=torch.float64).softmax(dim=-1)  # CLS, one register, 2x3 patches
    of_cls = query_maps(weights, 2, (2, 3), cls=True)
    of_all = query_maps(weights, 2, (2, 3), cls=False)
    for image in range(2):
        for head in range(3):
            row = weights[image, head, 0, 2:]
            torch.testing.assert_close(of_cls[image, head].flatten(), row / row.sum())
            mean = sum(weights[image, head, query, 2:] for query in range(2, 8))
            torch.testing.assert_close(of_all[image, head].flatten(), mean / mean.sum())


def test_share_on_the_brightest_places() -> None:
    even = torch.ones(2, 5, 7)
    torch.testing.assert_close(top_share(even, 0.1), torch.full((2,), 0.1))
    one = torch.zeros(5, 8)
    one[2, 3] = 1.0
    assert top_share(one, 0.1) == 1.0
    ramp = torch.arange(1.0, 11.0).view(2, 5)
    torch.testing.assert_close(top_share(ramp, 0.25), torch.tensor((10 + 9 + 0.5 * 8) / 55))


@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "vit_base_patch16_reg4_gap_256", "vit_relpos_small_patch16_224"]
)
def test_survey_equals_loops_over_all_weights(name: str, positions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_WEIGHTS_AT_ONCE", 1)  # one image at a time: parts must add up
    backbone = make(name)
    found = survey(backbone, batches(), positions=positions)
    weights, p, (height, width) = all_weights(backbone, positions=positions), backbone.num_prefix, backbone.grid
    assert found.images == 5
    assert found.tokens == p + 6
    for layer in range(2):
        for head in range(2):
            own = weights[layer, :, head, p:]  # [B, N, S]
            entropy = -sum(a * math.log(a) for a in own.flatten().tolist()) / (5 * 6)
            assert math.isclose(float(found.entropy[layer, head]), entropy, rel_tol=1e-9)
            share = float(own[..., :p].sum()) / (5 * 6)
            assert math.isclose(float(found.prefix_share[layer, head]), share, rel_tol=1e-9, abs_tol=1e-12)
            by_offset: dict[tuple[int, int], list[float]] = {}
            far, total = 0.0, 0.0
            for query in range(6):
                for key in range(6):
                    offset = key // width - query // width, key % width - query % width
                    values = own[:, query, p + key].tolist()
                    by_offset.setdefault(offset, []).extend(values)
                    far, total = far + math.hypot(*offset) * sum(values), total + sum(values)
            for (down, right), values in by_offset.items():
                mean = float(found.relative[layer, head, down + height - 1, right + width - 1])
                assert math.isclose(mean, sum(values) / len(values), rel_tol=1e-9)
            assert math.isclose(float(found.distance[layer, head]), far / total, rel_tol=1e-9)


def test_maps_are_those_of_the_layer_asked_for() -> None:
    backbone = make()
    images = torch.cat([batch.inputs for batch in batches()])
    weights = all_weights(backbone, positions=True)
    for layer in range(2):
        expected = query_maps(weights[layer], 1, (2, 3), cls=True)
        torch.testing.assert_close(image_maps(backbone, images, layer), expected)
    without = image_maps(backbone, images, 1, positions=False)
    assert not torch.allclose(without, expected)


def test_layers_are_counted_as_people_do() -> None:
    backbone = make()
    assert (check_layer(backbone, None), check_layer(backbone, 1), check_layer(backbone, 2)) == (1, 0, 1)
    for wrong in (0, 3, -1):
        with pytest.raises(SitusError, match=rf"layer={wrong}: must be in 1 to 2, the layers of .*"):
            check_layer(backbone, wrong)


def test_no_images_is_one_sentence() -> None:
    with pytest.raises(SitusError, match=r"no samples to measure"):
        survey(make(), [])


def page_of(name: str) -> tuple[str, dict[str, Any], dict[str, bytes]]:
    backbone = make(name)
    images = batches()[0].inputs
    shown = AttentionMaps(images.clamp(0, 1), image_maps(backbone, images, 1), 1, cls="reg4" not in name)
    found = survey(backbone, batches())
    result = Attention(found, shown, provenance=Provenance({"seed": 0}))
    assert [row[0] for row in result.summary().tables[0].rows] == ["1", "2"]
    page = make_page(result)
    return page.render(), result.numbers(), page.pictures


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vit_tiny_patch16_224", "Attention of the CLS token to the patches"),
        ("vit_base_patch16_reg4_gap_256", "Mean attention of all patches"),
    ],
)
def test_page_says_in_words_what_the_numbers_say(name: str, said: str) -> None:
    text, numbers, pictures = page_of(name)
    assert said in text
    entropy = torch.tensor(numbers["entropy"])
    layer, head = divmod(int(entropy.argmin()), 2)
    assert f"head {head + 1} of layer {layer + 1} ({entropy.min():.2f} nats" in text
    assert f"{numbers['uniform_entropy']:.2f} nats" in text
    assert set(pictures) == {"images", "heads", "relative"}
    assert text.count("<figure>") == 3
    assert "<dt>seed</dt>" in text
    assert numbers["maps"]["layer"] == 2


def test_numbers_are_the_same_whatever_the_batches() -> None:
    backbone = make()
    runs: list[Callable[[], Any]] = [
        lambda: survey(backbone, batches(size=1)),
        lambda: survey(backbone, batches(size=5)),
    ]
    one, other = (run() for run in runs)
    for name in ("entropy", "relative", "distance", "prefix_share"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name))
