"""Neighbours of each layer against timm's own intermediates and scikit-learn's classifier."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from builders import small_swin

from situs.backbones import Backbone, create_backbone
from situs.errors import SitusError
from situs.measure.knn import knn_by_layer
from situs.methods import Batch

SHAPE = {"depth": 3, "embed_dim": 12, "num_heads": 2}


def make(**fields: Any) -> Backbone:
    torch.manual_seed(0)
    backbone = create_backbone(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, model_args=SHAPE | fields, drop_path=0.4, num_classes=3
    )
    for parameter in backbone.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return backbone


def batches(count: int, start: int, labels: bool = True) -> list[Batch]:
    generator = torch.Generator().manual_seed(start)
    truth = torch.randint(3, (count,), generator=generator)
    images = torch.randn(count, 3, 8, 8, generator=generator) + 0.3 * truth[:, None, None, None]
    ids = start + torch.arange(count)
    return [Batch(images[a:b], ids[a:b], {"label": truth[a:b]} if labels else {}) for a, b in ((0, 40), (40, count))]


@pytest.mark.parametrize("temperature", [None, 0.1])
def test_each_layer_and_pool_is_scikit_learns(temperature: float | None) -> None:
    from sklearn.neighbors import KNeighborsClassifier

    backbone = make().train()
    found = knn_by_layer(backbone, batches(90, 0), batches(60, 1000), k=7, temperature=temperature)
    assert backbone.training
    backbone.eval()
    sets = []
    for parts in (batches(90, 0), batches(60, 1000)):
        images, labels = (
            torch.cat([part.inputs for part in parts]),
            torch.cat([part.targets["label"] for part in parts]),
        )  # type: ignore[arg-type]
        with torch.no_grad():
            layers = backbone.model.forward_intermediates(
                images, norm=True, return_prefix_tokens=True, intermediates_only=True, output_fmt="NLC"
            )
        pooled = {"cls": [prefix[:, 0] for _, prefix in layers], "mean": [patches.mean(1) for patches, _ in layers]}
        sets.append((pooled, labels.numpy()))
    (train, train_labels), (test, labels) = sets
    weights: Any = "uniform" if temperature is None else (lambda distance: np.exp(-distance / temperature))
    expected = []
    for pool in ("cls", "mean"):
        for layer in range(3):
            peer = KNeighborsClassifier(7, metric="cosine", algorithm="brute", weights=weights)
            peer.fit(train[pool][layer].numpy(), train_labels)
            expected.append((layer + 1, pool, peer.score(test[pool][layer].numpy(), labels)))
    got = [(row.layer, row.pool, row.accuracy) for row in found.rows]
    assert [row[:2] for row in got] == [row[:2] for row in expected]
    # Ties between classes may fall either way where every neighbour counts as one.
    slack = 1e-9 if temperature else 3 / 60
    assert [row[2] for row in got] == pytest.approx([row[2] for row in expected], abs=slack)
    assert len({row[2] for row in got}) > 2
    assert (found.bank, found.count, found.why_last) == (90, 60, None)


def test_without_cls_only_the_mean_and_without_layers_only_the_last() -> None:
    found = knn_by_layer(make(class_token=False, global_pool="avg"), batches(60, 0), batches(50, 100), k=3)
    assert [(row.layer, row.pool) for row in found.rows] == [(1, "mean"), (2, "mean"), (3, "mean")]
    swin = small_swin(8, width=8, depths=(1, 2), patch_size=1, model_args={"window_size": 2})
    found = knn_by_layer(swin, batches(60, 0), batches(50, 100), k=3)
    assert [(row.layer, row.pool) for row in found.rows] == [(3, "mean")]
    assert "merges change grid and width" in str(found.why_last)


@pytest.mark.parametrize(("bank", "k"), [(90, 20), (42, 14), (2, 1)])
def test_in_a_small_bank_as_many_decide_as_a_class_has(bank: int, k: int) -> None:
    """Of 2 samples and 3 classes the nearest alone; a user with 15 images need not know of k."""
    parts = [part for part in batches(bank, 0) if len(part.ids)]
    found = knn_by_layer(make(), parts, batches(50, 100), ("a", "b", "c"))
    assert found.k == k
    assert found.rows == knn_by_layer(make(), parts, batches(50, 100), ("a", "b", "c"), k=k).rows


def test_mistakes_are_named() -> None:
    with pytest.raises(SitusError, match=r"needs labels \(one class per sample\), but the data has no labels"):
        knn_by_layer(make(), batches(60, 0, labels=False), batches(60, 1))
    with pytest.raises(SitusError, match="no samples"):
        knn_by_layer(make(), [], batches(60, 1))
    with pytest.raises(SitusError, match=r"k=99: must be in \[1, 60\]"):
        knn_by_layer(make(), batches(60, 0), batches(50, 1), k=99)
    with pytest.raises(SitusError, match="has no tokens"):
        knn_by_layer(create_backbone("test_resnet", num_classes=3), [], [])
