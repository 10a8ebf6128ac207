from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from situs.backbones import BackboneConfig, create_backbone
from situs.core.when import When
from situs.errors import SitusError
from situs.methods import create_method
from situs.methods.base import Batch, Draws, Method, Output
from situs.train.optim import (
    OptimConfig,
    clip_gradients,
    groups,
    layer_numbers,
    make_optimizer,
    peak_rate,
    rate_at,
    set_rate,
    spared_names,
    trains_few,
    warmup_steps,
)
from situs.train.tuning import TuningConfig, attach, freeze


class Plain(Method):
    """A method with a head, a token and a decoder whose blocks carry numbers like the backbone's."""

    def __init__(self, backbone) -> None:
        super().__init__(backbone)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, backbone.dim))
        self.places = nn.Parameter(torch.zeros(4, 4))
        self.decoder = nn.Module()
        self.decoder.blocks = nn.ModuleList([nn.Linear(4, 4)])

    def draw(self, batch: Batch, when: When) -> Draws:
        return {}

    def forward(self, batch: Batch, draws: Draws) -> Output:
        raise NotImplementedError

    def no_decay(self) -> set[str]:
        return {"places", "mask_token"}


VIT = ("vit_tiny_patch16_224", {"img_size": 32, "embed_dim": 32, "depth": 3, "num_heads": 2, "reg_tokens": 2})
SWIN = (
    "swin_tiny_patch4_window7_224",
    {"img_size": 56, "embed_dim": 8, "depths": (1, 2), "num_heads": (1, 2)},
)


def method_of(name: str, model_args: dict) -> Plain:
    import timm

    from situs.backbones.timm.backbone import SwinBackbone, VitBackbone

    kind = SwinBackbone if name.startswith("swin") else VitBackbone
    return Plain(kind(timm.create_model(name, num_classes=3, **model_args), name))


@pytest.fixture(params=[VIT, SWIN], ids=["vit", "swin"])
def method(request) -> Plain:
    return method_of(*request.param)


@pytest.mark.parametrize("layer_decay", [1.0, 0.7])
def test_every_trainable_parameter_stands_in_exactly_one_group(method: Plain, layer_decay: float) -> None:
    method.backbone.model.patch_embed.proj.bias.requires_grad_(False)
    found = [p for group in groups(method, OptimConfig(layer_decay=layer_decay)) for p in group["params"]]
    assert len(found) == len(set(found))
    assert set(found) == {p for p in method.parameters() if p.requires_grad}


def test_decay_is_for_matrices_and_kernels_alone(method: Plain) -> None:
    decayed = {name for g in groups(method, OptimConfig(weight_decay=0.3)) if g["weight_decay"] for name in g["names"]}
    linear = {f"{name}.weight" for name, part in method.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)}
    assert decayed == linear


def test_depth_of_a_vit() -> None:
    numbers = layer_numbers(method_of(*VIT))
    own = {name.removeprefix("backbone.model."): depth for name, depth in numbers.items()}
    assert {own["cls_token"], own["reg_token"], own["pos_embed"], own["patch_embed.proj.weight"]} == {0}
    assert [own[f"blocks.{i}.attn.qkv.weight"] for i in range(3)] == [1, 2, 3]
    assert {own["norm.weight"], own["head.weight"], own["mask_token"], own["decoder.blocks.0.weight"]} == {4}


def test_depth_of_a_swin_counts_through_the_stages() -> None:
    numbers = layer_numbers(method_of(*SWIN))
    own = {name.removeprefix("backbone.model."): depth for name, depth in numbers.items()}
    assert own["patch_embed.proj.weight"] == 0
    assert own["layers.0.blocks.0.attn.qkv.weight"] == 1
    assert own["layers.1.downsample.reduction.weight"] == 2
    assert own["layers.1.blocks.0.attn.relative_position_bias_table"] == 2
    assert own["layers.1.blocks.1.mlp.fc1.weight"] == 3
    assert {own["norm.weight"], own["head.fc.weight"], own["decoder.blocks.0.weight"]} == {4}


def test_rates_fall_by_depth() -> None:
    config = OptimConfig(layer_decay=0.5)
    optimizer = make_optimizer(method_of(*VIT), config)
    set_rate(optimizer, 0.8)
    rates = {name: g["lr"] for g in optimizer.param_groups for name in g["names"]}
    assert rates["backbone.model.head.weight"] == rates["decoder.blocks.0.weight"] == 0.8
    assert rates["backbone.model.blocks.2.attn.qkv.weight"] == 0.4
    assert rates["backbone.model.blocks.0.norm1.bias"] == 0.1
    assert rates["backbone.model.pos_embed"] == 0.05
    assert len(optimizer.param_groups) <= 2 * 5


def test_a_model_s_own_rule_spares_what_no_other_does(monkeypatch: pytest.MonkeyPatch) -> None:
    method = method_of(*VIT)
    name = "blocks.1.attn.qkv.weight"
    assert f"backbone.model.{name}" not in spared_names(method)
    monkeypatch.setattr(method.backbone.model, "no_weight_decay", lambda: {name})
    assert f"backbone.model.{name}" in spared_names(method)


def test_layer_decay_needs_numbered_blocks() -> None:
    method = method_of(*VIT)
    method.backbone.model.blocks = nn.ModuleList()
    with pytest.raises(SitusError, match=r"layer_decay=0\.5: must be 1"):
        groups(method, OptimConfig(layer_decay=0.5))


def test_nothing_to_train_is_an_error() -> None:
    method = method_of(*VIT).requires_grad_(False)
    with pytest.raises(SitusError, match="nothing to train"):
        groups(method, OptimConfig())


# --- the rate -----------------------------------------------------------------------------------------------


def slow_rates(kind: str, total: int, warmup: int, peak: float, low: float) -> list[float]:
    """All rates one after another, written another way: angles for the cosine, equal falls for the line."""
    rates = [peak / warmup * (i + 1) for i in range(min(warmup, total))]
    left = max(1, total - warmup)
    for i in range(total - len(rates)):
        if kind == "cosine":
            rates.append(low + (peak - low) * math.cos(math.pi * i / (2 * left)) ** 2)
        elif kind == "linear":
            rates.append(peak - i * (peak - low) / left)
        else:
            rates.append(peak)
    return rates


@given(st.sampled_from(["cosine", "linear", "constant"]), st.integers(1, 60), st.integers(0, 80))
def test_schedule_is_the_slow_formula(kind: str, total: int, warmup: int) -> None:
    config = OptimConfig(schedule=kind, min_lr=1e-5)
    fast = [rate_at(step, total, warmup, 2e-3, config) for step in range(total)]
    assert fast == pytest.approx(slow_rates(kind, total, warmup, 2e-3, 1e-5), rel=1e-9)


def test_the_papers_schedule_of_speech_update_by_update() -> None:
    """MP3, section 4.3: 500 updates at 1e-4, then 1e-3, halved every 10 k; whatever the run's length is."""
    config = OptimConfig(lr=1e-3, schedule="halving", warmup_steps=500, warmup_lr=1e-4, min_lr=0.0)
    for total in (12_000, 50_000):
        warmup = warmup_steps(config, 86, total)
        rates = [rate_at(step, total, warmup, peak_rate(config, 256), config) for step in range(total)]
        assert rates[:500] == [1e-4] * 500 and set(rates[500:10_000]) == {1e-3}
        assert set(rates[10_000:20_000]) == {5e-4}
        assert len(set(rates)) == 1 + (total + 9_999) // 10_000
    assert rate_at(45_000, 50_000, 500, 1e-3, dataclasses.replace(config, min_lr=2e-4)) == 2e-4


def test_the_rate_of_detectors_drops_twice() -> None:
    """DropPos, section A.2: 88,750 updates, to a tenth at the 78,889th and the 85,463rd."""
    config = OptimConfig(lr=3e-4, schedule="steps", warmup_steps=250, min_lr=0.0, drop_at=(78_889 / 88_750, 0.962963))
    rates = [rate_at(step, 88_750, 250, 3e-4, config) for step in (0, 249, 250, 78_888, 78_889, 85_462, 85_463, 88_749)]
    assert rates == pytest.approx([3e-4 / 250, 3e-4, 3e-4, 3e-4, 3e-5, 3e-5, 3e-6, 3e-6])
    assert rate_at(88_749, 88_750, 250, 3e-4, dataclasses.replace(config, min_lr=1e-5)) == 1e-5


def test_peak_scales_with_the_global_batch() -> None:
    assert peak_rate(OptimConfig(base_lr=1.5e-4, lr_reference=256), 1024) == pytest.approx(6e-4)
    assert peak_rate(OptimConfig(lr=0.1), 1024) == 0.1
    assert peak_rate(OptimConfig(lr_reference=256), 512) == pytest.approx(1e-3)


def test_by_default_the_rate_follows_the_batch_the_updates_and_what_is_trained() -> None:
    plain = OptimConfig()
    for batch in (256, 384, 512, 4096):  # what recipes of this field have: 5e-4 for 512, in proportion
        assert peak_rate(plain, batch, updates=1000) == pytest.approx(5e-4 * batch / 512)
    assert peak_rate(plain, 64) == pytest.approx(peak_rate(plain, 256) / 2)  # the root below
    assert peak_rate(plain, 255) == pytest.approx(peak_rate(plain, 256), rel=0.01)
    rates = [peak_rate(plain, 16, updates=updates, few=True) for updates in (1, 100, 300, 1000, 10**6)]
    assert rates == pytest.approx([3e-3, 1e-3 * 3**0.5, 1e-3, 1e-3 * 0.3**0.5, 3e-4])
    for named in (OptimConfig(lr=1e-5), OptimConfig(base_lr=1e-4), OptimConfig(base_lr=5e-4, lr_reference=512)):
        assert peak_rate(named, 128, updates=100, few=True) == peak_rate(named, 128)  # who names a rate gets it


@pytest.mark.thin(2)
@pytest.mark.parametrize(("parts", "few"), [("all", False), ("head", True), ("lora", True)])
def test_a_head_or_lora_is_a_small_part_of_the_weights(parts: Any, few: bool) -> None:
    backbone = create_backbone(BackboneConfig("vit_tiny_patch16_224", img_size=32, num_classes=6))
    method = create_method("supervised", backbone)
    tuning = TuningConfig(parts=parts)
    freeze(attach(method, tuning), tuning, new_positions=False)
    assert trains_few(method) is few


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.0), ("base_lr", -1.0), ("lr_reference", 0), ("weight_decay", -0.1), ("betas", (0.9, 1.0)),
        ("eps", 0.0),
        ("schedule", "step"), ("warmup_epochs", -1.0), ("min_lr", -1.0), ("layer_decay", 0.0), ("clip", 0.0),
        ("clip_mode", "value"), ("ema", 1.0),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_its_field(field: str, value: object) -> None:
    with pytest.raises(SitusError) as caught:
        dataclasses.replace(OptimConfig(), **{field: value})
    assert (caught.value.field or "").partition("[")[0] == field


# --- clipping -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["norm", "parameter"])
def test_clipping_is_torchs_own(mode: str) -> None:
    torch.manual_seed(0)
    shapes, scales = [(3, 4), (5,), (2, 2)], [10.0, 0.01, 3.0]
    ours = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    theirs = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for mine, peer, scale in zip(ours, theirs, scales, strict=True):
        mine.grad = torch.randn(mine.shape) * scale
        peer.grad = mine.grad.clone()
    norm = clip_gradients([*ours, nn.Parameter(torch.zeros(1))], OptimConfig(clip=2.0, clip_mode=mode))
    expected = torch.cat([p.grad.flatten() for p in theirs]).norm()
    torch.testing.assert_close(norm, expected)
    if mode == "norm":
        nn.utils.clip_grad_norm_(theirs, 2.0)
    else:
        for peer in theirs:
            nn.utils.clip_grad_norm_(peer, 2.0)
    for mine, peer in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, peer.grad)


def test_a_loss_that_trains_nothing_is_an_error() -> None:
    with pytest.raises(SitusError, match="no parameter has a gradient"):
        clip_gradients([nn.Parameter(torch.zeros(2))], OptimConfig())


def test_a_warm_up_ends_within_the_run() -> None:
    config = OptimConfig(warmup_epochs=2.5)
    assert [warmup_steps(config, 10, total) for total in (100, 26, 25, 10, 9)] == [25, 25, 2, 1, 0]
    assert warmup_steps(OptimConfig(warmup_epochs=0), 10, 1) == 0
