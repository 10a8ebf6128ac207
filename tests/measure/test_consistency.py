"""Consistency under shuffled patches: against one image at a time by hand, and the laws it must obey."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from situs.backbones import Backbone, create_backbone
from situs.core.jigsaw import move_patches
from situs.core.masking import count_of
from situs.errors import SitusError
from situs.measure.consistency import Consistency, measure_consistency, puzzle, shuffled
from situs.methods import MJP, Batch, Supervised
from situs.methods.mjp import VARIANTS
from situs.methods.supervised import SupervisedConfig

SHAPE = {"depth": 2, "embed_dim": 16, "num_heads": 2}
SIZE = (8, 12)


def make(positions: str | None = "learned", *, name: str = "vit_tiny_patch16_224", **fields: object) -> Backbone:
    torch.manual_seed(0)
    args = {"model_args": SHAPE, "patch_size": 2, "positions": positions, "num_classes": 3} | fields
    backbone = create_backbone(name, img_size=SIZE, drop_path=0.3, **args)
    for parameter in backbone.parameters():
        nn.init.normal_(parameter, std=0.3)
    return backbone.double()


def batches(*sizes: int, labels: bool = True, pixels: tuple[int, int] = SIZE) -> list[Batch]:
    torch.manual_seed(1)
    rows = []
    for start, size in enumerate(sizes):
        images = torch.randn(size, 3, *pixels, dtype=torch.float64)
        targets = {"label": torch.randint(3, (size,))} if labels else {}
        rows.append(Batch(images, 10 * start + torch.arange(size), targets))
    return rows


def by_hand(
    backbone: Backbone, ratio: float, mask_known: bool, unknown: Tensor, sets: list[Batch], seed: int
) -> Consistency:
    """One image at a time, patches moved one by one, the table written row by row."""
    model, (rows, columns) = backbone.model.eval(), backbone.grid
    side = SIZE[0] // rows
    norms, same, right = [], 0, 0
    view = shuffled(backbone, size=SIZE)
    masks, indices = zip(*(puzzle(view.grid, b.ids, ratio, seed) for b in sets), strict=True)
    items = zip(
        torch.cat([b.inputs for b in sets]),
        torch.cat([b.targets["label"] for b in sets if "label" in b.targets]),
        strict=True,
    )
    count = 0
    for (image, label), mask, index in zip(items, torch.cat(masks), torch.cat(indices), strict=True):
        assert int(mask.sum()) == count_of(ratio, rows * columns)
        moved = image.clone()
        for place in range(rows * columns):
            (r, c), (a, b) = divmod(place, columns), divmod(int(index[place]), columns)
            assert mask[place] or int(index[place]) == place
            block = image[:, a * side : a * side + side, b * side : b * side + side]
            moved[:, r * side : r * side + side, c * side : c * side + side] = block
        clean = model.forward_features(image[None])[0, 0]
        kept = model.pos_embed.data.clone()
        if mask_known:
            for place in range(rows * columns):
                if mask[place]:
                    model.pos_embed.data[0, 1 + place] = unknown
        puzzled = model.forward_features(moved[None])[0, 0]
        model.pos_embed.data = kept
        norms.append(float((clean - puzzled).square().sum().sqrt()))
        answers = [int(model.head(each).argmax()) for each in (clean, puzzled)]
        same, right, count = same + (answers[0] == answers[1]), right + (answers[1] == int(label)), count + 1
    mean, square = sum(norms) / count, sum(norm**2 for norm in norms) / count
    masked = count_of(ratio, rows * columns)
    return Consistency(ratio, masked, mask_known, count, right / count, mean, square, same / count, 0.0)


@pytest.mark.thin(2)
@torch.no_grad()
@pytest.mark.parametrize("kind", ["backbone", "supervised", "mjp"])
def test_every_number_is_that_of_one_image_at_a_time(kind: str) -> None:
    backbone = make()
    unknown = torch.zeros(16, dtype=torch.float64)
    model = backbone if kind == "backbone" else Supervised(backbone, SupervisedConfig())
    if kind == "mjp":
        model = MJP(backbone, VARIANTS["J"]).double()
        unknown = nn.init.normal_(model.unknown, std=2.0).detach()
    sets = batches(7, 7, 4)
    rows = measure_consistency(model.train(), sets, (0.1, 0.6), seed=5).rows
    assert [(row.ratio, row.mask_known) for row in rows] == [(0.1, True), (0.1, False), (0.6, True), (0.6, False)]
    for row in rows:
        hand = by_hand(backbone, row.ratio, row.mask_known, unknown, sets, 5)
        assert (row.count, row.masked, row.top1, row.consistency) == (18, hand.masked, hand.top1, hand.consistency)
        assert row.diff_norm == pytest.approx(hand.diff_norm, rel=1e-9)
        assert row.diff_norm_squared == pytest.approx(hand.diff_norm_squared, rel=1e-9)
    assert len({row.diff_norm for row in rows}) == 4  # γ matters, and so does telling
    assert model.training


@settings(max_examples=10)
@given(st.floats(0, 1), st.integers(0, 2**31))
def test_a_model_without_positions_does_not_mind_any_shuffle(ratio: float, seed: int) -> None:
    sets = batches(5, 3)
    views = [make("none"), MJP(make("learned"), VARIANTS["B"]).double()]
    for model in views:
        (row,) = measure_consistency(model, sets, (ratio,), seed=seed).rows
        assert (row.mask_known, row.consistency) == (False, 1.0)
        assert row.diff_norm < 1e-9
        assert row.clean_norm > 1
    (row,) = measure_consistency(make("learned"), sets, (ratio,), seed=seed, positions=False).rows
    assert row.diff_norm < 1e-9


@pytest.mark.parametrize("positions", ["learned", "sincos", "relative"])
def test_nothing_shuffled_changes_nothing(positions: str) -> None:
    for row in measure_consistency(make(positions), batches(5), (0.0,)).rows:
        assert (row.masked, row.diff_norm, row.diff_norm_squared, row.consistency) == (0, 0.0, 0.0, 1.0)


@torch.no_grad()
def test_told_the_order_inside_the_mask_means_nothing_and_not_told_it_does() -> None:
    for model in (make(), make("relative"), MJP(make(), VARIANTS["J"]).double()):
        view = shuffled(model.eval(), size=SIZE)
        (batch,) = batches(4)
        mask, index = puzzle(view.grid, batch.ids, 0.5, 0)
        told = view.read(batch.inputs, index, mask)[0]
        assert (told - view.read(batch.inputs, None, mask)[0]).abs().max() < 1e-9
        assert (view.read(batch.inputs, index)[0] - view.read(batch.inputs)[0]).abs().max() > 1e-4


def test_a_samples_puzzle_does_not_depend_on_its_batch() -> None:
    (whole,) = batches(9)
    assert "label" in whole.targets
    parts = [whole.part(slice(start, start + 3)) for start in (0, 3, 6)]
    together, apart = (measure_consistency(make(), sets, (0.5,)).rows for sets in ([whole], parts))
    for one, other in zip(together, apart, strict=True):
        assert one.diff_norm == pytest.approx(other.diff_norm, rel=1e-12)
        assert one.consistency == other.consistency
    assert measure_consistency(make(), [whole], (0.5,), seed=1).rows[0].diff_norm != together[0].diff_norm


def test_swin_with_a_table_can_be_told_and_one_without_cannot() -> None:
    fields = {"model_args": {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2), "window_size": 2}}
    rows = measure_consistency(make("learned", name="swin_tiny_patch4_window7_224", **fields), batches(3), (0.5,)).rows
    assert [row.mask_known for row in rows] == [True, False]
    assert min(row.diff_norm for row in rows) > 1e-3
    plain = make(None, name="swin_tiny_patch4_window7_224", **fields)
    assert [row.mask_known for row in measure_consistency(plain, batches(3), (0.5,)).rows] == [False]
    assert "windows" in str(shuffled(plain, size=SIZE).no_mask)


def test_a_convolutional_network_is_shuffled_by_pixels_and_never_told() -> None:
    torch.manual_seed(0)
    backbone = create_backbone("test_resnet", num_classes=3).double()
    sets = batches(2, pixels=(32, 32))
    (row,) = measure_consistency(backbone, sets, (0.5,), grid=(4, 4)).rows
    assert (row.mask_known, row.masked) == (False, 8)
    view = shuffled(backbone.eval(), grid=(4, 4), size=(32, 32))
    with torch.no_grad():
        _, index = puzzle(view.grid, sets[0].ids, 0.5, 0)
        pooled, logits = view.read(sets[0].inputs)
        moved, _ = view.read(sets[0].inputs, index)
        assert torch.allclose(logits, backbone(sets[0].inputs))
    assert row.diff_norm == pytest.approx((pooled - moved).norm(dim=1).mean().item())
    assert "convolutional" in str(view.no_mask)
    method = MJP(backbone, VARIANTS["E"])
    with pytest.raises(SitusError, match=r"grid=\(14, 14\): must divide the input size 32x32"):
        measure_consistency(method, sets, (0.5,))


@torch.no_grad()
def test_what_the_head_reads_is_named_and_its_last_layer_makes_the_logits_of_it() -> None:
    swin = {"model_args": {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2), "window_size": 2}}
    for backbone, reads in (
        (make(), "CLS token"),
        (make(model_args=SHAPE | {"global_pool": "avg"}), "mean of the patches"),
        (make(model_args=SHAPE | {"global_pool": "avg", "class_token": False}), "mean of the patches"),
        (make(None, name="swin_tiny_patch4_window7_224", **swin), "mean of the patches"),
    ):
        (batch,) = batches(3)
        vector, logits = shuffled(backbone.eval(), size=SIZE).read(batch.inputs)
        assert backbone.head_input == reads
        assert torch.allclose(backbone.model.get_classifier()(vector), logits)


def test_rotary_tokens_can_be_told() -> None:
    fields = {"model_args": {"depth": 1, "embed_dim": 16, "num_heads": 2}, "patch_size": 2}
    backbone = make(None, name="vit_small_patch16_rope_224", **fields)
    view = shuffled(backbone, size=SIZE)
    assert view.no_mask is None
    assert "no rotation" in view.unknown
    assert [row.mask_known for row in measure_consistency(backbone, batches(3), (0.5,)).rows] == [True, False]


def test_a_transformers_model_is_read_by_its_cls() -> None:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=2,
        num_labels=3,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    model = ViTForImageClassification(config).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    backbone = create_backbone(model)
    (batch,) = batches(3, pixels=(8, 8))
    told, untold = measure_consistency(backbone, [batch], (0.5,)).rows
    view = shuffled(backbone.eval(), size=(8, 8))
    with torch.no_grad():
        mask, index = puzzle(view.grid, batch.ids, 0.5, 0)
        moved = move_patches(batch.inputs, (4, 4), index)
        clean, after = (model.vit(images).last_hidden_state[:, 0] for images in (batch.inputs, moved))
    assert untold.diff_norm == pytest.approx((clean - after).norm(dim=1).mean().item())
    assert told.mask_known
    assert told.diff_norm != untold.diff_norm
    assert int(mask.sum()) == 3 * 8


def test_without_classifier_or_fitting_labels_the_norms_stay() -> None:
    whole = measure_consistency(make(), batches(5), (0.5,)).rows[0]
    for row in (
        measure_consistency(make(), batches(5), (0.5,), no_top1="other classes").rows[0],
        measure_consistency(make(), batches(5, labels=False), (0.5,)).rows[0],
        measure_consistency(make(), batches(5), (0.5,), classes=4).rows[0],
    ):
        assert (row.top1, row.consistency, row.diff_norm) == (None, whole.consistency, whole.diff_norm)
    row = measure_consistency(make(), batches(5), (0.5,), classifier=False).rows[0]
    assert (row.top1, row.consistency, row.diff_norm) == (None, None, whole.diff_norm)


def test_mistakes_are_named() -> None:
    with pytest.raises(SitusError, match="no samples"):
        measure_consistency(make(), [])
    with pytest.raises(SitusError, match=r"ratios=1.2: must be in \[0, 1\]"):
        measure_consistency(make(), batches(3), (1.2,))
    with pytest.raises(SitusError, match=r"ratios=\(\)"):
        measure_consistency(make(), batches(3), ())
    with pytest.raises(SitusError, match=r"grid=\(2, 2\): .* has the fixed grid \(4, 6\)"):
        measure_consistency(make(), batches(3), (0.5,), grid=(2, 2))


@pytest.mark.parametrize(
    ("size", "grid", "fits"),
    [((8, 12), (8, 12), True), ((8, 12), (1, 1), True), ((8, 12), (12, 4), False), ((8, 12), (4, 8), False)],
)
def test_each_side_of_a_grid_divides_its_own_side_of_the_input(size: Any, grid: Any, fits: bool) -> None:
    with nullcontext() if fits else pytest.raises(SitusError, match="must divide the input size 8x12"):
        assert shuffled(create_backbone("test_resnet"), size=size, grid=grid).grid == grid


@pytest.mark.parametrize(
    ("size", "grid"), [((28, 28), (14, 14)), ((32, 32), (8, 8)), ((28, 32), (8, 8)), ((32, 28), (8, 8))]
)
def test_a_network_without_tokens_is_cut_as_the_papers_do_where_that_divides(size: Any, grid: Any) -> None:
    backbone = create_backbone("test_resnet")
    if any(side % 8 for side in size) and grid == (8, 8):
        with pytest.raises(SitusError, match=r"grid=\(8, 8\): must divide the input size"):
            shuffled(backbone, size=size)
        return
    assert shuffled(backbone, size=size).grid == grid
    with pytest.raises(SitusError, match=r"grid=\(0, 4\): must divide"):
        shuffled(backbone, size=size, grid=(0, 4))
