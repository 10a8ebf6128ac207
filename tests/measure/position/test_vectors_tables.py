"""What stands for a place in each kind of model, and the sentence where nothing does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import small_swin, small_vit

from situs.backbones import create_backbone
from situs.core.position import sincos
from situs.errors import SitusError
from situs.measure.position.vectors import PositionTable, reference_tables, rotation_features, tables_of


def make(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    return small_vit(name=name, **{"img_size": (32, 48), "width": 24, "heads": 3, "patch_size": None, **more})


def kinds(tables: tuple[PositionTable, ...]) -> list[str]:
    return [table.kind for table in tables]


def test_learned_table_is_its_patch_rows() -> None:
    backbone = make("vit_tiny_patch16_224")
    (table,) = tables_of(backbone)
    assert (table.kind, table.grid, table.rows.dtype) == ("learned table", (2, 3), torch.float64)
    assert torch.equal(table.rows, backbone.model.pos_embed[0, 1:].detach().double())  # no row of CLS


def test_sincos_is_known_by_its_values() -> None:
    backbone = make("vit_tiny_patch16_224")
    with torch.no_grad():
        backbone.model.pos_embed[0, 1:] = sincos((2, 3), 24)
    assert kinds(tables_of(backbone)) == ["sin-cos table"]
    with torch.no_grad():
        backbone.model.pos_embed.copy_(backbone.model.pos_embed.bfloat16())
    assert kinds(tables_of(backbone)) == ["sin-cos table"]  # as half precision rounds it
    with torch.no_grad():
        backbone.model.pos_embed[0, 3] += 0.01  # a little training is training
    assert kinds(tables_of(backbone)) == ["learned table"]
    backbone.model.pos_embed.requires_grad_(False)
    assert kinds(tables_of(backbone)) == ["fixed table"]


def test_rotation_beside_a_table_and_alone() -> None:
    both = make("eva02_tiny_patch14_224", img_size=(28, 42))
    assert kinds(tables_of(both)) == ["learned table", "rotation"]
    mixed = make("vit_small_patch16_rope_mixed_224")
    (table,) = tables_of(mixed)
    rotary = mixed.positions().rotary.detach().double()
    layers, _, heads, count, width = rotary.shape
    assert (layers, heads, count) == (2, 3, 6)
    assert table.rows.shape == (6, layers * heads * width)
    for place in range(count):  # slowly, place by place
        expected = torch.cat([rotary[layer, 0, head, place] for layer in range(layers) for head in range(heads)])
        assert torch.equal(table.rows[place], expected)


def test_rotation_has_sines_and_cosines_of_the_place() -> None:
    (table,) = tables_of(make("vit_small_patch16_rope_224"))
    half = table.rows.shape[1] // 2
    assert torch.allclose(table.rows[:, :half] ** 2 + table.rows[:, half:] ** 2, torch.ones(6, half).double())
    shared = torch.randn(1, 1, 1, 6, 4)
    assert torch.equal(rotation_features(shared), shared[0, 0, 0].double())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vit_relpos_small_patch16_224", r"biases between pairs .* no position has a vector; .*evaluate attention"),
        ("swin_tiny_patch4_window7_224", r"no table of positions: its windows.*; .*evaluate position` \(kind `all`\)"),
        ("test_resnet", r"convolutional network and has no tokens"),
    ],
)
def test_models_without_a_vector_are_refused_with_the_reason(name: str, said: str) -> None:
    made = {"swin": lambda: small_swin((32, 48), heads=(2, 3)), "test": lambda: create_backbone(name)}
    backbone = made.get(name[:4], lambda: make(name))()
    with pytest.raises(SitusError, match=said):
        tables_of(backbone)


def test_a_model_without_positions_has_nothing_to_analyse() -> None:
    backbone = create_backbone(
        "vit_tiny_patch16_224", img_size=32, positions="none", model_args={"depth": 1, "embed_dim": 24, "num_heads": 3}
    )
    with pytest.raises(SitusError, match=r"has no positions, so there is nothing to analyse; .*\(kind `all`\)"):
        tables_of(backbone)


def test_tables_that_say_nothing_are_refused() -> None:
    backbone = make("vit_tiny_patch16_224")
    for value, said in ((0.0, "all zeros"), (0.5, "same vector"), (float("nan"), "NaN or infinite")):
        with torch.no_grad():
            backbone.model.pos_embed.fill_(value)
        with pytest.raises(SitusError, match=said):
            tables_of(backbone)
    with pytest.raises(SitusError, match="single position"):
        tables_of(make("vit_tiny_patch16_224", img_size=(16, 16)))
    assert tables_of(make("vit_tiny_patch16_224", img_size=(16, 32)))[0].grid == (1, 2)


def test_references_have_the_shape_asked_for_and_are_the_same_twice() -> None:
    first, again = reference_tables(12, (3, 4), 26), reference_tables(12, (3, 4), 26)
    assert [tuple(table.shape) for table in first.values()] == [(12, 24), (12, 26)]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["random (reference)"], reference_tables(12, (3, 4), 26, 1)[[*first][1]])
    for dim, even in ((1, 4), (4, 4), (7, 4), (8, 8), (11, 8)):  # sines and cosines of rows and columns
        assert [table.shape[1] for table in reference_tables(12, (3, 4), dim).values()] == [even, dim]
