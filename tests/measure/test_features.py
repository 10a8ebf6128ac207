from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import small_swin, small_vit
from safetensors import safe_open
from safetensors.torch import load_file

from situs.backbones import create_backbone
from situs.backbones.base import Backbone, Features
from situs.errors import SitusError
from situs.measure.features import (
    FeatureSet,
    Layer,
    encoded,
    extract,
    layer_features,
    patch_layers,
    pool_features,
    write_features,
)
from situs.methods.base import Batch


def make(**fields) -> Backbone:
    torch.manual_seed(0)
    return small_vit((8, 12), depth=3, **fields)


def batches(labels: bool = True) -> list[Batch]:
    torch.manual_seed(1)
    return [
        Batch(torch.randn(size, 3, 8, 12), torch.arange(size) + start, {"label": torch.arange(size)} if labels else {})
        for size, start in ((4, 0), (3, 4))
    ]


def test_pools() -> None:
    features = Features(torch.arange(4.0).view(1, 2, 2), torch.tensor([[[1.0, 2.0], [3.0, 6.0]]]))
    assert pool_features(features).tolist() == [[2.0, 4.0]]
    assert pool_features(features, "cls").tolist() == [[0.0, 1.0]]
    with pytest.raises(SitusError, match="no CLS token"):
        pool_features(features._replace(prefix=features.prefix[:, :0]), "cls")
    with pytest.raises(SitusError, match="pool='max'"):
        pool_features(features, "max")


@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_they_are_those_of_timms_own_forward(pool: str) -> None:
    backbone = make(drop_path=0.2).train()
    found = extract(backbone, batches(), pool)
    assert backbone.training
    backbone.eval()
    tokens = torch.cat([backbone.model.forward_features(batch.inputs) for batch in batches()])
    expected = tokens[:, 0] if pool == "cls" else tokens[:, 1:].mean(1)
    torch.testing.assert_close(found.features, expected.detach(), rtol=1e-5, atol=1e-6)
    assert found.ids.tolist() == list(range(7))
    assert found.labels is not None
    assert found.labels.tolist() == [0, 1, 2, 3, 0, 1, 2]


@pytest.mark.parametrize("make_model", [make, small_swin])
def test_every_patch_is_that_of_the_models_own_forward(make_model: Callable[[], Backbone]) -> None:
    backbone = make_model().eval()
    torch.manual_seed(1)
    images = torch.randn(3, 3, *(backbone.input.shape or (32, 32)))
    given = [Batch(images[:2], torch.tensor([0, 1])), Batch(images[2:], torch.tensor([2]))]
    found = extract(backbone, given, tokens="patches").features
    with torch.no_grad():
        own = backbone.model.forward_features(images)
    expected = own.flatten(1, 2) if own.dim() == 4 else own[:, backbone.num_prefix :]
    assert found.shape == (3, math.prod(backbone.out_grid), backbone.out_dim)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(SitusError, match="tokens='words': must be pooled or patches"):
        extract(backbone, given, tokens="words")


def test_positions_can_be_left_out() -> None:
    backbone = make().eval()
    without = extract(backbone, batches(), positions=False).features
    assert not torch.allclose(without, extract(backbone, batches()).features)
    backbone.erase_positions()
    torch.testing.assert_close(extract(backbone, batches()).features, without)


def test_layers_end_in_the_features() -> None:
    backbone = make().eval()
    images = batches()[0].inputs
    with torch.no_grad():
        layers, first = layer_features(backbone, images, ("mean", "cls"))
        assert torch.equal(layer_features(backbone, images)[0], layers) and first.shape == layers.shape
        assert layers.shape == (3, 4, 16)
        torch.testing.assert_close(layers[-1], pool_features(encoded(backbone, images, positions=True)))
        seen = []
        hook = backbone.model.blocks[0].register_forward_hook(lambda _, __, z: seen.append(z))
        backbone.model.forward_features(images)  # timm's own, whose blocks call their hooks
        hook.remove()
        torch.testing.assert_close(layers[0], backbone.model.norm(seen[0])[:, 1:].mean(1))


def test_a_model_whose_depths_differ_gives_its_last() -> None:
    swin = small_swin()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(
            layer_features(swin.eval(), images)[0], pool_features(encoded(swin, images, positions=True))[None]
        )


@pytest.mark.parametrize("labels", [True, False])
def test_a_file_gives_them_back(tmp_path: Path, labels: bool) -> None:
    found = extract(make(), batches(labels))
    path = tmp_path / "deep" / "x.safetensors"
    write_features(path, replace(found, facts={"model": "m", "pool": "mean"}))
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["situs"]) == {"model": "m", "pool": "mean"}
    back = load_file(path)
    assert torch.equal(back["features"], found.features)
    assert torch.equal(back["ids"], found.ids)
    assert ("labels" in back) is labels
    assert [file.name for file in path.parent.iterdir()] == ["x.safetensors"]
    before = path.read_bytes()
    write_features(path, replace(found, facts={"pool": "mean", "model": "m"}))
    assert path.read_bytes() == before


NAMED = FeatureSet(torch.rand(3, 2), torch.tensor([4, 7, 9]), torch.tensor([1, 0, 1]), ("a/ü,1.png", 'b"2', "c\udcff"))


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".npy", ".NPY"])
def test_the_ending_names_the_form_and_a_table_the_images(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    write_features(path, replace(NAMED, facts={"pool": "mean"}, classes=("cat", "dog")))
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([path.name, "x.names.csv"])
    with (tmp_path / "x.names.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["row", "id", "name", "label", "class"],
        ["0", "4", "a/ü,1.png", "1", "dog"],
        ["1", "7", 'b"2', "0", "cat"],
        ["2", "9", "c\\udcff", "1", "dog"],
    ]
    if suffix == ".safetensors":
        assert torch.equal(load_file(path)["features"], NAMED.features)
        return
    loaded = np.load(path, allow_pickle=False)
    features = loaded if suffix.lower() == ".npy" else loaded["features"]
    assert np.array_equal(features, NAMED.features.numpy())
    if suffix == ".npz":
        assert (loaded["ids"].tolist(), loaded["labels"].tolist()) == ([4, 7, 9], [1, 0, 1])
        assert json.loads(str(loaded["metadata"])) == {"pool": "mean"}


def test_an_ending_of_no_form_is_refused(tmp_path: Path) -> None:
    for name in ("x", "x.pt", "x.csv"):
        with pytest.raises(SitusError, match=r"must be a file ending in \.safetensors, \.npz, \.npy"):
            write_features(tmp_path / name, NAMED)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    one = FeatureSet(torch.ones(2, 3), torch.arange(2), None)
    write_features(path, one)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(SitusError, match=r"x.safetensors: could not be written: .*no space left"):
        write_features(path, FeatureSet(torch.zeros(2, 3), torch.arange(2), None))
    assert torch.equal(load_file(path)["features"], one.features)
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]


def test_mistakes_are_named() -> None:
    with pytest.raises(SitusError, match="no samples"):
        extract(make(), [])
    with pytest.raises(SitusError, match="does not support running on a sequence of tokens"):
        extract(create_backbone("test_resnet"), [Batch(torch.zeros(1, 3, 32, 32), torch.zeros(1).long())])


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch14_reg4_dinov2"])
@pytest.mark.parametrize("told", [True, False])
def test_depths_of_a_flat_model(name: str, told: bool) -> None:
    torch.manual_seed(0)
    backbone = small_vit((56, 84), name=name, depth=3, width=24, heads=3, patch_size=14).double().eval()
    tokens = backbone.embed(torch.randn(2, 3, 56, 84, dtype=torch.float64))
    places = backbone.positions() if told else None
    found: list[Layer] = []
    patch_layers(backbone, tokens, places, found.append)
    assert [layer.depth for layer in found] == ["embedding", "1", "2", "3", "norm"]
    assert {layer.grid for layer in found} == {(4, 6)}
    assert places is None or places.table is not None
    entering = tokens if places is None else tokens + places.table
    assert torch.equal(found[0].patches, entering)
    assert torch.equal(found[-1].patches, backbone.encode(tokens, places).patches)
    # The wrapped model's own blocks, one by one.
    z = backbone.assemble(tokens, places).z
    for block, layer in zip(backbone.model.blocks, found[1:-1], strict=True):
        z = block(z)
        assert torch.allclose(layer.patches, z[:, backbone.num_prefix :], atol=1e-12)


def test_swin_shows_its_two_ends_on_their_own_grids() -> None:
    backbone = small_swin((32, 48), depths=(1, 2), heads=(2, 3), model_args={"window_size": 4}).eval()
    tokens = backbone.embed(torch.randn(2, 3, 32, 48))
    found: list[Layer] = []
    patch_layers(backbone, tokens, backbone.positions(), found.append)
    first, last = found
    assert (first.depth, first.grid, tuple(first.patches.shape)) == ("embedding", (8, 12), (2, 96, 12))
    assert (last.depth, last.grid, tuple(last.patches.shape)) == ("norm", (4, 6), (2, 24, 24))
