"""Every name in `timm.list_models()`: refused in one sentence, or exactly timm's own model.

Exactness is held in float64 at two blocks (Swin: one to two a stage) and 2 x 3 patches, all other arguments being
those of the name, but for widths above 384, which become 384. Convolutional networks are opened alone: their forward
is timm's. A dozen names are one test.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
import timm
import torch
from timm.models import model_entrypoint
from torch import nn

from situs.backbones import create_backbone
from situs.backbones.base import Backbone, join
from situs.backbones.timm.create import READ
from situs.errors import SitusError

NAMES: dict[str, list[str]] = defaultdict(list)
for _name in timm.list_models():
    NAMES[model_entrypoint(_name).__module__.rpartition(".")[2]].append(_name)


def dozens(modules: Iterable[str]) -> list[Any]:
    """(module, a dozen of its names) for pytest."""
    return [
        pytest.param(module, NAMES[module][start : start + 12], id=f"{module}-{NAMES[module][start]}")
        for module in modules
        for start in range(0, len(NAMES[module]), 12)
    ]


NARROW = {"embed_dim": 384, "num_heads": 6}
TRANSFORMERS = sorted(READ - {"resnet"})
KNOWN_REFUSALS = {
    "vision_transformer": {"ParallelScalingBlock", "ParallelThingsBlock", "DiffAttention", "DiffParallelScalingBlock"},
    "vision_transformer_hybrid": {"HybridEmbed"},
}
"""Part of a class that is ours -> why names of its module are refused; everywhere else no name may be."""


def opened(name: str, **fields: Any) -> Backbone | str:
    """The backbone on the meta device, or the sentence that refuses it. Anything else that is raised fails the test."""
    try:
        with torch.device("meta"):
            return create_backbone(name, **fields)
    except SitusError as error:
        sentence = str(error)
        assert "\n" not in sentence and sentence.startswith((name, "img_size=")) and len(sentence) < 400, sentence
        return sentence


def side_of(name: str) -> int:
    """A side that its patches fill, and its windows too where they must."""
    return 192 if name.startswith("swin") else 224


def shallow(name: str, module: str) -> dict[str, Any]:
    """The arguments that leave two blocks of a model, none of them wide."""
    if module.startswith("swin_transformer"):
        windows = {} if module == "swin_transformer" else {"window_size": (2, 3)}  # its second version fills none up
        return {"depths": (2, 2, 1, 1), "embed_dim": 32, "num_heads": (2, 2, 4, 4), **windows}
    backbone = opened(name, img_size=224, model_args={"depth": 2})
    if isinstance(backbone, str) and "num_kv_heads sequence" in backbone:  # one entry a block
        return {"depth": 2, **NARROW, "num_kv_heads": (3, 6)}
    wide = not isinstance(backbone, str) and backbone.dim > NARROW["embed_dim"]
    return {"depth": 2, **NARROW} if wide else {"depth": 2}


@torch.no_grad()
def assert_exact(name: str, arguments: dict[str, Any]) -> None:
    probe = opened(name, img_size=side_of(name), model_args=arguments)
    assert isinstance(probe, Backbone), probe
    ph, pw = (side_of(name) // side for side in probe.grid)
    unit = 8 if name.startswith("swin") else 1  # a merge, and windows that are shifted
    torch.manual_seed(0)
    backbone = create_backbone(name, img_size=(2 * ph * unit, 3 * pw * unit), model_args=arguments).double().eval()
    if "mixed" in name:
        backbone.model.rope.float()  # timm computes mixed frequencies in float32 whatever the model's type
    for parameter in backbone.parameters():
        if parameter.dim() == 1 or parameter.numel() < 2**16:  # norms, biases, scales, tables and tokens must matter
            nn.init.normal_(parameter, std=0.3)
    assert backbone.input.shape is not None
    x = torch.randn(2, backbone.input.channels, *backbone.input.shape, dtype=torch.float64)
    for found, own in (
        (backbone(x), backbone.model(x)),
        (join(backbone.encode(backbone.embed(x), backbone.positions())), backbone.model.forward_features(x)),
    ):
        own = own.flatten(1, 2) if own.dim() == 4 else own
        assert found.shape == own.shape and own.isfinite().all() and own.std() > 0, name
        assert (found - own).abs().max() < 1e-10 * own.abs().max().clamp(min=1), name


def test_the_modules_that_are_read_exist() -> None:
    assert set(NAMES) >= READ


@pytest.mark.slow
@pytest.mark.parametrize(("module", "names"), dozens(TRANSFORMERS))
def test_every_transformer_is_exact_or_refused(module: str, names: list[str]) -> None:
    counts: Counter[str] = Counter()
    for name in names:
        arguments = shallow(name, module)
        backbone = opened(name, img_size=side_of(name), model_args=arguments)
        if isinstance(backbone, str):
            assert any(reason in backbone for reason in KNOWN_REFUSALS.get(module, ())), backbone
            counts["refused"] += 1
        else:
            assert_exact(name, arguments)
            counts["exact"] += 1
    print(f"\n{module}: {dict(counts)}")


@pytest.mark.slow
@pytest.mark.parametrize(("module", "names"), dozens(sorted(set(NAMES) - set(TRANSFORMERS))))
def test_every_other_name_is_opened_or_refused(module: str, names: list[str]) -> None:
    counts: Counter[str] = Counter()
    for name in names:
        found = opened(name)
        counts["refused" if isinstance(found, str) else "opened"] += 1
        if not isinstance(found, str):
            assert type(found.model).__name__ == "ResNet", name
    print(f"\n{module}: {dict(counts)}")
