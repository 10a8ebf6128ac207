"""Every method of the visible dict through the same demands, on every backbone family it claims."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from situs.backbones import create_backbone
from situs.backbones.shapes import shapes_alone
from situs.core.when import When
from situs.data.objects import pack_masks
from situs.methods import METHODS, Batch, Method, create_method

SEEING = [name for name in METHODS if "words" not in METHODS[name].needs_targets]
"""Methods that learn from what these backbones take; tests/train/test_run_texts.py holds the one that reads words."""
SMALL: dict[str, Any] = {"depth": 1, "embed_dim": 32, "num_heads": 2}
BACKBONES: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": dict(img_size=(16, 24), patch_size=4, model_args=SMALL),
    "deit_tiny_patch16_224": dict(  # frames of 10 coefficients: a line of tokens
        img_size=(14, 10), patch_size=(1, 10), in_chans=1, positions="learned_sincos", model_args=SMALL
    ),
    "vit_small_patch14_reg4_dinov2": dict(img_size=(28, 42), model_args=SMALL),
    "deit_tiny_distilled_patch16_224": dict(img_size=(32, 48), model_args=SMALL),
    "eva02_tiny_patch14_224": dict(img_size=(28, 42), model_args=SMALL),
    "vit_small_patch16_rope_mixed_224": dict(img_size=(32, 48), model_args=SMALL),
    "vit_relpos_small_patch16_224": dict(img_size=(32, 48), model_args=SMALL),
    "swin_tiny_patch4_window7_224": dict(img_size=(32, 64), model_args={"depths": (1, 1, 1, 1), "embed_dim": 24}),
    "resnet18": dict(model_args={"channels": (16, 16, 24, 32)}),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "detection": dict(width=8, hidden=8, anchor=2.0, proposals=8, anchors=32, regions=8),
    "droppos": dict(mask_ratio=0.5, decoder_width=32, decoder_heads=2),
    "mae": dict(decoder_width=32, decoder_depth=1, decoder_heads=2),
    "mjp": dict(mask_ratio=0.3),
    "mjp-official": dict(mask_ratio=0.6, start_epoch=0, chance=1.0),
    "droppos-official": dict(mask_ratio=0.5, decoder_width=32, decoder_heads=2),
    "mp3": dict(mask_ratio=0.5),
    "part": dict(mask_ratio=0.5, scale=1.5),
    "segmentation": dict(width=16, auxiliary_width=16, dropout=0.0),
}
ONLY_SHUFFLED: dict[str, Any] = dict(unknown=False, dal="none", pixel_grid=(4, 4))
PECULIAR: dict[tuple[str, str], dict[str, Any]] = {
    # DAL needs a table of positions, and a network without tokens has none to hide either.
    ("mjp", "vit_small_patch16_rope_mixed_224"): dict(dal="none"),
    ("mjp", "vit_relpos_small_patch16_224"): dict(dal="none"),
    ("mjp", "swin_tiny_patch4_window7_224"): dict(dal="none"),
    ("mjp", "resnet18"): ONLY_SHUFFLED,
}
PECULIAR |= {("mjp-official", name): more for (_, name), more in PECULIAR.items()}
"""(method, backbone) -> settings that this backbone needs beside those above."""
UNFIT = {
    ("droppos", "swin_tiny_patch4_window7_224"),
    ("droppos-official", "swin_tiny_patch4_window7_224"),
    ("mjp-official", "deit_tiny_patch16_224"),
    ("detection", "deit_tiny_patch16_224"),
}
"""Pairs that run at other sizes only: this Swin's 1x2 output has no 2x2 cells, frames are no square patches, and a line
of them holds no block.
tests/methods has ones that do."""


DENSE = {"detection": ("vit_tiny", "eva02", "swin"), "segmentation": ("vit_tiny", "deit_tiny_patch16", "swin")}
"""Methods whose own parts take longer than the backbone: over three kinds of it here, over all among the slow."""


def pairs() -> list[Any]:
    with shapes_alone():
        refused = {name: set(create_backbone(name, **fields).refusals) for name, fields in BACKBONES.items()}
    every = [(method, name) for method in SEEING for name in BACKBONES]
    every = [pair for pair in every if not refused[pair[1]] & set(METHODS[pair[0]].needs) and pair not in UNFIT]
    slow = [not name.startswith(DENSE.get(method, "")) for method, name in every]
    return [pytest.param(*pair, marks=[pytest.mark.slow] * late) for pair, late in zip(every, slow, strict=True)]


PAIRS = pairs()


def make(method: str, name: str) -> Method:
    return deepcopy(made_once(method, name))


@cache
def made_once(method: str, name: str) -> Method:
    torch.manual_seed(0)
    backbone = create_backbone(name, num_classes=4, **BACKBONES[name])
    settings = SETTINGS.get(method, {}) | PECULIAR.get((method, name), {})
    return create_method(method, backbone, METHODS[method].Config(**settings), classes=4)


def batch(method: Method, count: int = 4) -> Batch:
    torch.manual_seed(1)
    count = min(count, 2) if "objects" in method.needs_targets else count  # which goes through images one by one
    size = method.backbone.input.shape or (32, 32)
    inputs, labels = torch.randn(count, method.backbone.input.channels, *size), torch.arange(count) % 4
    masks = labels[:, None, None].expand(count, *size)
    return Batch(inputs, torch.arange(100, 100 + count), {"label": labels, "mask": masks} | objects(labels, size))


def objects(labels: torch.Tensor, size: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """In the middle of each image one object of its class."""
    (height, width), count = size, len(labels)
    masks = torch.zeros(count, 1, height, width, dtype=torch.bool)
    masks[..., height // 4 : -height // 4, width // 4 : -width // 4] = True
    box = torch.tensor([width // 4, height // 4, width - width // 4, height - height // 4])
    held = {"boxes": box.float().expand(count, 1, 4), "classes": labels[:, None], "masks": pack_masks(masks)}
    return held | {"crowd": torch.zeros(count, 1, dtype=torch.bool), "sides": torch.tensor([[height, width]] * count)}


@pytest.mark.thin(3)
@pytest.mark.parametrize(("method", "name"), PAIRS)
def test_it_trains_a_few_samples_to_a_lower_loss(method: str, name: str) -> None:
    model = make(method, name)
    data = batch(model)
    draws = model.draw(data, When(seed=0, epoch=0))
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3, fused=True)
    losses = []
    while len(losses) < 25 and not (losses and losses[-1] < 0.9 * losses[0]):  # most need far fewer
        loss = model(data, draws).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert all(torch.isfinite(torch.tensor(losses)))
    assert 0 < losses[-1] < 0.9 * losses[0]


@pytest.mark.thin(3)
@pytest.mark.parametrize(("method", "name"), PAIRS)
def test_it_is_deterministic_and_survives_save_and_load(method: str, name: str) -> None:
    first = make(method, name).eval()
    second = deepcopy(first)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.add_(1.0)
    second.load_state_dict(load(save(first.state_dict())))
    data = batch(first)
    draws = first.draw(data, When(seed=4, epoch=2))
    again = second.draw(data, When(seed=4, epoch=2))
    assert draws.keys() == again.keys()
    assert all(torch.equal(draws[key], again[key]) for key in draws)
    assert torch.equal(first(data, draws).loss, second(data, again).loss)


@pytest.mark.parametrize("method", [name for name in SEEING if name != "mjp-official"])  # which draws for a batch
def test_draws_belong_to_the_sample_whatever_the_batch(method: str) -> None:
    model = make(method, "vit_tiny_patch16_224")
    ids = torch.tensor([7, 123456789, 3, 42])
    whole = model.draw(Batch(ids, ids), When(seed=9, epoch=1))
    for row, each in enumerate(ids):
        alone = model.draw(Batch(each[None], each[None]), When(seed=9, epoch=1))
        for key, value in whole.items():  # a scalar is a schedule's value, the same for every sample
            assert torch.equal(alone[key][0] if value.dim() else alone[key], value[row] if value.dim() else value), key


CHANCES: dict[str, tuple[str, dict[str, Any]]] = {
    "droppos": ("droppos", {}),
    "mae": ("mae", {}),
    "mjp": ("mjp", {}),
    "mjp-spp": ("mjp", dict(shuffle="spp", unknown=False)),
    "mp3": ("mp3", dict(anchor_ratio=0.3)),
}
"""Settings in which each method draws everything that it can draw."""


def chances(case: str, seed: int, epoch: int) -> dict[str, torch.Tensor]:
    """What 3,000 samples drew, by name, [3000, C]: of a choice of places, each place's rank in it (0 where not)."""
    method, settings = CHANCES[case]
    backbone = create_backbone("vit_tiny_patch16_224", num_classes=4, **BACKBONES["vit_tiny_patch16_224"])
    model = create_method(method, backbone, METHODS[method].Config(**(SETTINGS[method] | settings)))
    found = {}
    for name, value in model.draw(Batch(torch.zeros(3000), torch.arange(3000)), When(seed=seed, epoch=epoch)).items():
        if value.dim() and value.dtype == torch.bool:
            found[name] = value.double()
        elif value.dim():
            ranks = torch.arange(1.0, value.shape[1] + 1, dtype=torch.float64).expand(3000, -1)
            found[name] = torch.zeros(3000, int(value.max()) + 1, dtype=torch.float64).scatter(1, value, ranks)
    return found


def likeness(a: torch.Tensor, b: torch.Tensor) -> float:
    """The strongest correlation between a column of one and a column of the other, in its standard deviations."""
    scores = [(each - each.mean(0)) / each.std(0).clamp(min=1e-9) for each in (a, b)]
    return float((scores[0].T @ scores[1]).abs().max()) / len(a) ** 0.5


@pytest.mark.parametrize("case", CHANCES)
def test_draws_are_independent_over_samples_epochs_and_seeds(case: str) -> None:
    base = chances(case, seed=1, epoch=2)
    others = {
        "another epoch": chances(case, seed=1, epoch=3),
        "another seed": chances(case, seed=2, epoch=2),
        "seed and epoch swapped": chances(case, seed=2, epoch=1),
        "the next sample": {name: value.roll(1, 0) for name, value in base.items()},
    }
    for name, value in base.items():
        assert (value.std(0) > 0).all(), name
        assert likeness(value, value) > 50  # the measure itself: a draw is like itself
        for what, other in others.items():
            assert likeness(value, other[name]) < 5.5, (name, what)


@pytest.mark.parametrize(
    ("case", "one", "two"), [("mp3", "order", "anchors"), ("mjp-spp", "index", "pixels")], ids=lambda each: each
)
def test_two_draws_of_a_sample_are_independent(case: str, one: str, two: str) -> None:
    found = chances(case, seed=1, epoch=2)
    assert likeness(found[one], found[two]) < 5.5


@pytest.mark.parametrize(
    ("method", "backend"),
    [  # what breaks a graph breaks it with either; autograd's own tracing takes longer
        pytest.param("droppos", "eager", marks=pytest.mark.slow),
        *(pytest.param(name, "aot_eager", marks=pytest.mark.slow) for name in SEEING),
    ],
)
def test_forward_compiles_as_one_graph(method: str, backend: str) -> None:
    model = make(method, "vit_tiny_patch16_224").eval()
    data = batch(model)
    draws = model.draw(data, When(seed=0, epoch=0))
    torch.compiler.reset()  # what other tests compiled would make shapes dynamic, which takes longer
    wanted = model(data, draws).loss
    if (part := model.compiled_part) != "forward":  # what a run compiles of it
        setattr(model, part, torch.compile(getattr(model, part), fullgraph=True, backend=backend))
        assert torch.allclose(model(data, draws).loss, wanted, atol=1e-5)
        return
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert torch.allclose(compiled(data, draws).loss, wanted, atol=1e-5)


@pytest.mark.parametrize("method", SEEING)
def test_what_a_method_adds_stands_beside_the_backbone(method: str) -> None:
    model = make(method, "vit_tiny_patch16_224")
    own = {name for name, _ in model.named_parameters() if not name.startswith("backbone.model.")}
    assert model.no_decay() <= own
    exported = create_backbone("vit_tiny_patch16_224", num_classes=4, **BACKBONES["vit_tiny_patch16_224"])
    assert model.backbone.model.state_dict().keys() == exported.model.state_dict().keys()
