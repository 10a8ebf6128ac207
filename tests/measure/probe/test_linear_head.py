"""A fine-tuning begins with the head of a linear probe, and with gentle rates below it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import small_method, small_vit
from memory_kinds import CLASSES, SIDE, pictures
from torch import Tensor

import situs
from situs.data.config import DataConfig
from situs.data.loader import make_loader
from situs.data.sources.base import TensorSource
from situs.errors import SitusError
from situs.measure.finetune import FinetuneConfig
from situs.measure.probe import linear
from situs.measure.probe.linear import ProbeHead, fit_probe, head_inputs, head_of, probe_head
from situs.models.open import open_model
from situs.progress import notes_to
from situs.train.assemble import rates_of
from situs.train.optim import OptimConfig, groups, peak_rate
from situs.train.private import DpConfig
from situs.train.run import load_run
from situs.train.tuning import TuningConfig


def shades(count: int) -> tuple[Tensor, Tensor]:
    pixels, labels = pictures(count)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels)


def loader_of(count: int = 30, **data: Any) -> Any:
    images, labels = shades(count)
    config = DataConfig(path="samples", batch=8, img_size=(SIDE, SIDE), **data)
    source = TensorSource(images, labels, CLASSES, "shades")
    return config, make_loader(config, None, "cpu", source=source)


def test_the_head_is_the_probe_of_timms_own_features() -> None:
    data, loader = loader_of()
    method = small_method("supervised", small_vit(SIDE, num_classes=3), classes=3)
    before = {name: value.clone() for name, value in method.state_dict().items()}
    said: list[str] = []
    with notes_to(said.append):
        ProbeHead(FinetuneConfig(data=data, init="x"), loader, "fp32").begin(method)
    assert len(said) == 1 and "starts from a linear probe" in said[0]
    changed = {name for name, value in method.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"backbone.model.head.weight", "backbone.model.head.bias"}

    model: Any = method.backbone.model.eval()
    inputs = torch.cat([batch.inputs for batch in loader])
    labels = torch.cat([batch.targets["label"] for batch in loader])
    with torch.no_grad():
        features: Tensor = model.forward_head(model.forward_features(inputs), pre_logits=True)
        probe = fit_probe(features, labels, 3, seed=0).linear
        torch.testing.assert_close(model(inputs), probe(features), rtol=1e-3, atol=1e-3)


def test_head_inputs_are_what_the_head_reads() -> None:
    _, loader = loader_of()
    backbone = small_vit(SIDE, num_classes=3)
    features, labels, rows = head_inputs(backbone, 3, loader)
    order = [int(row) for row in rows]
    assert sorted(order) == list(range(30)) and torch.equal(labels.cpu(), shades(30)[1][rows.cpu()])
    inputs = torch.cat([batch.inputs for batch in loader])
    with torch.no_grad():
        torch.testing.assert_close(head_of(backbone, 3)(features), backbone.eval()(inputs))


def test_a_head_is_one_linear_layer_with_a_bias() -> None:
    backbone = small_vit(SIDE, num_classes=3)
    assert head_of(backbone, 3) is backbone.model.head
    cases = [(backbone, 4), (small_vit(SIDE), 3), (small_vit(SIDE, num_classes=3), 3)]
    cases[2][0].model.head = torch.nn.Linear(16, 3, bias=False)
    cases.append((small_vit(SIDE, name="deit_tiny_distilled_patch16_224", num_classes=3), 3))  # has two
    for model, classes in cases:
        with pytest.raises(SitusError, match="its classifier cannot be initialised from a probe") as caught:
            head_of(model, classes)
        assert caught.value.field == "source"
    with pytest.raises(SitusError, match="none of the labelled samples can be read") as caught:
        head_inputs(backbone, 3, [])
    assert caught.value.field == "data" and not backbone.model.head._forward_pre_hooks


@pytest.mark.parametrize(
    ("change", "used"),
    [
        ({"init": "x"}, True),
        ({}, False),
        ({"init": "x", "init_positions": False}, False),  # new positions: the frozen features are not those trained
        ({"init": "x", "tuning": TuningConfig(head="new")}, False),
        ({"init": "x", "init_positions": False, "tuning": TuningConfig(head="probe")}, True),
        ({"init": "x", "tuning": TuningConfig("lora")}, True),
        ({"init": "x", "dp": DpConfig(epsilon=1.0)}, False),
    ],
)
def test_where_a_head_begins_with_the_probe(change: dict[str, Any], used: bool) -> None:
    data, loader = loader_of()
    assert bool(probe_head(replace(FinetuneConfig(data=data), **change), loader, "fp32")) == used


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "no pretrained weights"),
        ({"init": "x", "dp": DpConfig(epsilon=1.0)}, "private"),
    ],
)
def test_a_probe_that_cannot_be_is_refused_where_it_was_asked_for(change: dict[str, Any], reason: str) -> None:
    data, loader = loader_of()
    with pytest.raises(SitusError, match=reason):
        probe_head(replace(FinetuneConfig(data=data, tuning=TuningConfig(head="probe")), **change), loader, "fp32")


@pytest.mark.parametrize(
    ("change", "decay", "peak"),
    [
        ({"init": "x"}, 0.75, 1.2e-6 * 64),
        ({}, None, None),
        ({"init": "x", "init_positions": False}, None, None),
        ({"init": "x", "tuning": TuningConfig("lora")}, None, None),
        ({"init": "x", "dp": DpConfig(epsilon=1.0)}, None, None),
        ({"init": "x", "optim": OptimConfig(lr=1e-3)}, None, 1e-3),
        ({"init": "x", "optim": OptimConfig(base_lr=1e-3)}, None, 1e-3 * 64 / 512),
        ({"init": "x", "optim": OptimConfig(layer_decay=1.0)}, 1.0, None),
    ],
)
def test_rates_are_gentle_where_all_of_a_pretrained_model_learns_classes(
    change: dict[str, Any], decay: float | None, peak: float | None
) -> None:
    data, _ = loader_of()
    method = small_method("supervised", small_vit(SIDE, num_classes=3), classes=3)
    optim = rates_of(replace(FinetuneConfig(data=data), **change), method)
    assert optim.layer_decay == decay
    assert peak_rate(optim, 64) == pytest.approx(peak_rate(OptimConfig(), 64) if peak is None else peak)
    scales = {group["scale"] for group in groups(method, optim)}
    blocks = len(method.backbone.block_modules())
    assert scales == ({0.75**depth for depth in range(blocks + 2)} if decay == 0.75 else {1.0})


def test_a_fine_tuning_of_one_tiny_update_is_the_probe_and_needs_no_validation(tmp_path: Path) -> None:
    pixels, named = pictures(40)
    labels = torch.tensor(named)
    torch.manual_seed(0)
    model = small_vit(SIDE, num_classes=0)
    shared: dict[str, Any] = {
        "data": list(zip(pixels, named, strict=True)), "validate_every": 0, "steps": 1, "device": "cpu",
        "quiet": True, "optim": {"lr": 1e-12, "min_lr": 0.0}, "batch": 40,
    }  # fmt: skip
    logits, source = {}, TensorSource(*shades(40), CLASSES, "shades")
    for head in ("default", "new"):
        tuning = {"head": head} if head == "new" else {}
        run = situs.finetune(model, out=tmp_path / head, tuning=tuning, **shared)
        data = load_run(run).config.data  # normalised as the model wants it
        inputs = torch.cat([batch.inputs for batch in make_loader(data, None, "cpu", source=source)])
        with torch.no_grad():
            logits[head] = open_model(run).backbone(inputs)
    timm_model: Any = model.model.eval()
    with torch.no_grad():
        features = timm_model.forward_head(timm_model.forward_features(inputs), pre_logits=True)
    expected = fit_probe(features, labels, 3, seed=0).linear(features)
    torch.testing.assert_close(logits["default"], expected, rtol=1e-3, atol=1e-3)
    assert (logits["new"] - expected).abs().max() > 0.1


@pytest.mark.parametrize("head", [None, "probe"])
def test_where_no_probe_can_be_fitted_the_head_stays_or_the_run_is_refused(
    head: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any, **__: Any) -> Any:
        raise SitusError("too few samples")

    monkeypatch.setattr(linear, "fit_probe", none)
    data, loader = loader_of()
    torch.manual_seed(0)
    method = small_method("supervised", small_vit(SIDE, num_classes=3), classes=3)
    before = {name: value.clone() for name, value in method.state_dict().items()}
    config = replace(FinetuneConfig(data=data), init="x", tuning=TuningConfig(head=head))
    said: list[str] = []
    with notes_to(said.append):
        if head == "probe":
            with pytest.raises(SitusError, match="too few samples"):
                linear.ProbeHead(config, loader, "fp32").begin(method)
        else:
            linear.ProbeHead(config, loader, "fp32").begin(method)
            [note] = said
            assert note.endswith("random weights, because a linear probe cannot initialise it: too few samples")
    assert all(torch.equal(before[name], value) for name, value in method.state_dict().items())


@pytest.mark.parametrize(
    ("count", "world", "head", "used"),
    [(linear.SMALL, 1, None, True), (linear.SMALL + 1, 1, None, False), (5, 2, None, False),
     (linear.SMALL + 1, 2, "probe", True)],
)  # fmt: skip
def test_the_probe_is_the_default_for_small_sets_in_one_process(count: int, world: int, head: Any, used: bool) -> None:
    source = SimpleNamespace(classes=CLASSES, target="label", multi_label=False)
    set_: Any = type("Set", (), {**vars(source), "__len__": lambda _: count})()
    train: Any = SimpleNamespace(source=set_, plan=SimpleNamespace(world=world), classes=CLASSES)
    data, _ = loader_of()
    config = replace(FinetuneConfig(data=data), init="x", tuning=TuningConfig(head=head))
    assert bool(linear.probe_head(config, train, "fp32")) == used


@pytest.mark.parametrize("change", [{"classes": None}, {"target": "mask"}, {"multi_label": True}])
def test_samples_without_one_class_each_have_no_probe(change: dict[str, Any]) -> None:
    data, loader = loader_of()
    source = SimpleNamespace(**{"classes": CLASSES, "target": "label", "multi_label": False, **change})
    train: Any = SimpleNamespace(source=source, plan=loader.plan)
    config = replace(FinetuneConfig(data=data), init="x")
    assert linear.probe_head(config, train, "fp32") == []
    with pytest.raises(SitusError, match=r"tuning\.head=probe: it needs samples with one class each"):
        linear.probe_head(replace(config, tuning=TuningConfig(head="probe")), train, "fp32")
