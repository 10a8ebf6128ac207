"""The baselines on the features that a fine-tuning starts from: those of the evaluations, and their commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from builders import small_vit

from situs.config import from_dict
from situs.data.batch import Batch
from situs.errors import SitusError
from situs.measure import hooks
from situs.measure.features import extract
from situs.measure.hooks import PASSES, Frozen, frozen_start
from situs.measure.knn import knn_accuracy, small_k
from situs.train.run import RunConfig


def config(init: str = "start", **data: Any) -> RunConfig:
    tables = {"method": {"name": "supervised"}, "backbone": {"name": "test_vit"}, "train": {"epochs": PASSES}}
    return from_dict(RunConfig, {**tables, "data": {"path": "set", "img_size": (8, 12), **data}, "init": init})


class Set(list[Batch]):
    """Batches of images of three classes, with what a loader has beside them."""

    def __init__(self, seed: int, count: int, world: int = 1, **source: Any) -> None:
        chance = torch.Generator().manual_seed(seed)
        labels = torch.arange(count) % 3
        images = torch.randn(count, 3, 8, 8, generator=chance) + 2 * labels.view(-1, 1, 1, 1)
        rows = torch.arange(count).split(9)
        super().__init__(Batch(images[at], at, {"label": labels[at]}) for at in rows)
        facts = {"classes": ("a", "b", "c"), "target": "label", "__len__": lambda _: count, **source}
        self.source: Any = type("Source", (), facts)()
        self.classes, self.device = ("a", "b", "c"), torch.device("cpu")
        self.plan, self.steps_per_epoch = SimpleNamespace(batch=9, world=world), len(rows)


@pytest.mark.parametrize("positions", [False, True])
def test_the_baselines_are_those_of_the_evaluations(positions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    method: Any = SimpleNamespace(backbone=small_vit(8))
    torch.nn.init.normal_(method.backbone.model.pos_embed, std=3.0)
    train, val = Set(1, 24), Set(2, 20)
    monkeypatch.setattr(hooks, "make_loader", lambda *_, **__: train)
    frozen: Any = Frozen(config(), train.source, positions)
    best = {}
    for pool in ("cls", "mean"):
        fit, test = (extract(method.backbone, each, positions=positions, pool=pool) for each in (train, val))
        k = small_k(24, 3)
        best[pool] = knn_accuracy(fit.features, fit.labels, test.features, test.labels, k)
    monkeypatch.setattr(hooks, "fit_probe", lambda *_: SimpleNamespace(linear=None))
    monkeypatch.setattr(hooks, "score", lambda *_: SimpleNamespace(accuracy=0.0))
    named = frozen.look(method, val, "fp32")
    assert named.top1 == max(best.values()) > 0.5
    assert named.command == f"situs evaluate knn start --k {k} --data set"
    monkeypatch.setattr(hooks, "score", lambda *_: SimpleNamespace(accuracy=1.5))
    assert frozen.look(method, val, "fp32").command.startswith("situs evaluate probe start --kind class --pool ")
    method.backbone.refusals = {"tokens": "none"}
    assert frozen.look(method, val, "fp32") is None


def test_where_no_linear_classifier_can_be_fitted_neighbours_are_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    method: Any = SimpleNamespace(backbone=small_vit(8))
    train, val = Set(1, 24), Set(2, 20)
    monkeypatch.setattr(hooks, "make_loader", lambda *_, **__: train)

    def refused(*_: Any) -> Any:
        raise SitusError("too few samples")

    monkeypatch.setattr(hooks, "fit_probe", refused)
    found: Any = Frozen(config(), cast(Any, train.source), True).look(method, cast(Any, val), "fp32")
    assert found.name.startswith("kNN on its ") and 0 < found.top1 <= 1


def test_a_command_repeats_the_data_and_the_model(tmp_path: Path) -> None:
    source: Any = None
    assert Frozen(config(held_out=0.2), source, True).command("knn", k=3) == (
        "situs evaluate knn start --k 3 --data set --held-out 0.2"
    )
    file = tmp_path / "w.safetensors"
    file.touch()
    assert Frozen(config(str(file)), source, True).command("knn", train_count=3) == (
        f"situs evaluate knn test_vit={file} --train-count 3 --img-size 8,12 --data set"
    )
    assert Frozen(config(count=5), source, True).command("knn") == ""
    assert Frozen(config(per_class=5), source, True).command("knn") == ""


@pytest.mark.parametrize(
    ("changes", "applies"),
    [
        ({}, True), ({"world": 2}, False), ({"classes": None}, False), ({"target": "mask"}, False),
        ({"count": hooks.SMALL - 20}, True), ({"count": hooks.SMALL - 19}, False),
    ],
)  # fmt: skip
def test_baselines_are_for_small_labelled_sets(changes: dict[str, Any], applies: bool) -> None:
    count, world = changes.pop("count", 24), changes.pop("world", 1)
    train, val = Set(1, 24, world, **{**changes, "__len__": lambda _: count}), Set(2, 20)
    loaders: Any = (train, val)
    assert (frozen_start(config(), *loaders) is not None) is applies
    assert frozen_start(replace(config(), init=None), *loaders) is None
    short = replace(config(), train=replace(config().train, epochs=PASSES - 1))
    assert frozen_start(short, *loaders) is None
