"""The fine-tuning study: four ways, of which two are the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from situs.backbones import BackboneConfig
from situs.backbones.weights import HEADS
from situs.data.augment.recipes import AugmentConfig
from situs.data.config import DataConfig
from situs.data.loader import make_loader
from situs.data.sources.base import TensorSource
from situs.errors import SitusError
from situs.locks.groups import invert_keys, permute_state, random_keys, residual_only
from situs.locks.tuning.finetune import make_way, run_ways
from situs.locks.tuning.result import WAYS, TuningConfig
from situs.locks.tuning.start import Pretrained, pretrain
from situs.methods import SupervisedConfig
from situs.train.run import RunConfig, make_method

CLASSES = ("a", "b", "c")


def recipe() -> RunConfig:
    return RunConfig(
        method=SupervisedConfig(),
        backbone=BackboneConfig(
            "vit_tiny_patch16_224", patch_size=4, model_args={"embed_dim": 24, "depth": 2, "num_heads": 3}
        ),
        data=DataConfig(img_size=8, channels=1, batch=8),
        augment=AugmentConfig(crop="none", flip=0.0),
    )


def images(count: int, seed: int) -> TensorSource:
    labels = torch.arange(count) % 3
    noise = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return TensorSource(0.6 * noise + 0.2 * labels[:, None, None, None], labels, CLASSES)


def weights(config: RunConfig) -> dict[str, torch.Tensor]:
    """Another model's weights, far from any symmetry."""
    method = make_method(replace(config, train=replace(config.train, seed=9)), CLASSES)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    state = method.backbone.model.state_dict()
    return {name: value.clone() for name, value in state.items() if not name.startswith(HEADS)}


@pytest.fixture(scope="module")
def pretrained() -> Pretrained:
    return Pretrained(recipe(), weights(recipe()), images(24, 0), images(15, 1), "a tiny ViT")


def test_normal_and_authorised_are_one_training_in_float64(pretrained: Pretrained) -> None:
    config = pretrained.config
    groups = residual_only(make_method(config, CLASSES).backbone.groups())
    keys = random_keys(groups, torch.Generator().manual_seed(3))
    batch = next(iter(make_loader(config.data, None, source=pretrained.train)))
    batch = batch._replace(inputs=batch.inputs.double())
    ended: dict[str, Any] = {}
    for way in WAYS[:3]:
        method = make_way(way, config, CLASSES, pretrained.state, groups, keys).double()
        optimiser = torch.optim.AdamW(method.parameters(), lr=1e-3, weight_decay=0.05)
        for _ in range(20):
            optimiser.zero_grad()
            # The method's own loss is taken in float32, whose rounding AdamW would carry into every weight.
            torch.nn.functional.cross_entropy(method.backbone(batch.inputs), batch.targets["label"]).backward()
            optimiser.step()
        ended[way] = {name: value.detach() for name, value in method.backbone.model.state_dict().items()}
    back = permute_state(ended["authorised"], groups, invert_keys(keys))
    moved = [float((ended["normal"][name] - pretrained.state[name]).abs().max()) for name in back if "head" not in name]
    assert min(moved) > 1e-4  # it was trained
    for name in back:
        assert torch.allclose(ended["normal"][name], back[name], atol=1e-9, rtol=0), name
    stolen = permute_state(ended["unauthorised"], groups, invert_keys(keys))
    assert max(float((stolen[name] - back[name]).abs().max()) for name in back) > 1e-3


def test_what_each_way_starts_from(pretrained: Pretrained) -> None:
    config = pretrained.config
    fresh = make_method(config, CLASSES).backbone.model.state_dict()
    groups = residual_only(make_method(config, CLASSES).backbone.groups())
    keys = random_keys(groups, torch.Generator().manual_seed(3))
    locked = permute_state(pretrained.state, groups, keys)
    expected = {
        "normal": pretrained.state,
        "authorised": locked,
        "unauthorised": locked,
        "from scratch": fresh,
    }
    for way, state in expected.items():
        method = make_way(way, config, CLASSES, pretrained.state, groups, keys)
        for name, value in method.backbone.model.state_dict().items():
            assert torch.equal(value, fresh[name] if name.startswith(HEADS) else state[name]), (way, name)
        assert {name for name, _ in method.named_parameters()} == {
            name for name, _ in make_method(config, CLASSES).named_parameters()
        }


def test_the_study_through_the_engine(pretrained: Pretrained, tmp_path: Path) -> None:
    said: list[str] = []
    config = TuningConfig(count=24, test=15, epochs=4, batch=8, looks=3)
    before = torch.random.get_rng_state()
    study = run_ways(pretrained, config, tmp_path, said.append)
    assert torch.equal(before, torch.random.get_rng_state())
    assert tuple(study.curves) == WAYS and len(said) == 4
    for curve in study.curves.values():
        assert curve.steps == [0, 4, 8, 12]
        assert len(curve.loss) == len(curve.accuracy) == 4
    normal, authorised, unauthorised, scratch = study.curves.values()
    assert normal.loss == pytest.approx(authorised.loss, rel=1e-4)
    assert study.logits_gap < 1e-3 and study.weights_gap < 1e-3
    assert abs(unauthorised.loss[0] - normal.loss[0]) > 1e-3
    assert study.chance == pytest.approx(1 / 3)
    # The first point of the curve, slowly: a fresh model on each image by itself.
    model = make_method(replace(pretrained.config, train=replace(pretrained.config.train, seed=1)), CLASSES).eval()
    losses, right = [], 0
    for batch in make_loader(replace(pretrained.config.data, batch=1), None, source=pretrained.test):
        with torch.no_grad():
            logits = model.backbone(batch.inputs)[0].double()
        losses.append(float(logits.exp().sum().log() - logits[int(batch.targets["label"][0])]))
        right += int(logits.argmax()) == int(batch.targets["label"][0])
    assert scratch.loss[0] == pytest.approx(sum(losses) / 15, rel=1e-5)
    assert scratch.accuracy[0] == right / 15


def test_pretraining_keeps_the_study_images_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from situs.locks.tuning import start as study

    seen: list[Any] = []

    def stop(method: Any, loader: Any, *_: Any, **__: Any) -> Any:
        seen.append(loader)
        return type("Result", (), {"interrupted": False})()

    monkeypatch.setattr(study, "fit", stop)
    made = pretrain(TuningConfig(count=200, test=50), tmp_path)
    assert (len(seen[0].source), len(made.train), len(made.test)) == (8000, 200, 50)
    trained_on = {seen[0].source.read(i)["image"].numpy().tobytes() for i in range(8000)}
    apart = [made.train.read(i)["image"].numpy().tobytes() not in trained_on for i in range(200)]
    assert sum(apart) >= 199  # Fashion-MNIST has a few images twice


def test_mistakes() -> None:
    with pytest.raises(SitusError, match="epochs=0"):
        TuningConfig(epochs=0)
    with pytest.raises(SitusError, match=r"batch=50.*at most the 20 samples"):
        TuningConfig(count=20)
