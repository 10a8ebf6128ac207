"""The classification probe agrees with scikit-learn on the same frozen features."""

from __future__ import annotations

import warnings

import pytest
import torch
from builders import small_vit

from situs.backbones import create_backbone
from situs.data.config import DataConfig
from situs.errors import SitusError
from situs.measure.probe.classes import evaluate_probe, probe_class
from situs.methods import Batch
from situs.models import Model


def batches(count: int, start: int, labels: bool = True) -> list[Batch]:
    """Three classes of grey, noisy enough to be confused."""
    generator = torch.Generator().manual_seed(start)
    truth = torch.randint(3, (count,), generator=generator)
    images = torch.randn(count, 3, 8, 8, generator=generator) + 0.15 * truth[:, None, None, None]
    ids = start + torch.arange(count)
    return [Batch(images[a:b], ids[a:b], {"label": truth[a:b]} if labels else {}) for a, b in ((0, 50), (50, count))]


@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_accuracy_and_loss_are_scikit_learns(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    torch.manual_seed(0)
    backbone = small_vit(8, depth=1, width=12, num_classes=3)
    monkeypatch.setattr("situs.measure.probe.linear.WEIGHT_DECAYS", (1e-2,))
    found = probe_class(backbone, batches(150, 0), batches(90, 1000), 3, pool=pool)  # type: ignore[arg-type]
    sets = []
    with torch.no_grad():
        for parts in (batches(150, 0), batches(90, 1000)):
            z = torch.cat([backbone.model.eval().forward_features(part.inputs) for part in parts])
            features = z[:, 0] if pool == "cls" else z[:, 1:].mean(dim=1)
            sets.append(
                (
                    features.double().numpy(),
                    torch.cat([part.targets["label"] for part in parts if "label" in part.targets]),
                )
            )
    (train, labels), (test, truth) = sets
    scaler = StandardScaler().fit(train)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = LogisticRegression(C=1 / (1e-2 * 150), tol=1e-9, max_iter=5000).fit(
            scaler.transform(train), labels.numpy()
        )
    likely = torch.from_numpy(peer.predict_proba(scaler.transform(test)))
    assert found.score.accuracy == pytest.approx(peer.score(scaler.transform(test), truth.numpy()), abs=1e-9)
    assert found.score.loss == pytest.approx(float(-likely.log().gather(1, truth[:, None]).mean()), abs=1e-4)
    assert (found.score.count, found.train_count) == (90, 150)
    assert 0.4 < found.score.accuracy < 1.0


def test_mistakes_are_named() -> None:
    with pytest.raises(SitusError, match="has no tokens"):
        probe_class(create_backbone("test_resnet", num_classes=3), [], [], 3)
    backbone = small_vit(8, depth=1, width=12)
    with pytest.raises(SitusError, match="kind='place': must be position, class or segments"):
        evaluate_probe(backbone, kind="place")  # type: ignore[arg-type]
    images = DataConfig("", img_size=8)
    other = Model("other", small_vit(16, depth=1, width=12), input=images)
    with pytest.raises(SitusError, match=r"same grid.* \(2, 2\) and \(4, 4\)"):  # before any image is looked for
        evaluate_probe(Model("one", backbone, input=images), after=other)
    with pytest.raises(SitusError, match="needs labels, and the data has none"):
        probe_class(backbone, batches(60, 0, labels=False), batches(60, 1), 3)
