"""Which tensors each side of a split model has."""

from __future__ import annotations

import pytest
import torch
from builders import small_vit

from situs.backbones import create_backbone
from situs.errors import SitusError
from situs.methods import Supervised
from situs.methods.supervised import SupervisedConfig
from situs.split.parts import cut, server_names, side_names


def test_the_server_has_the_blocks_and_the_client_all_else() -> None:
    torch.manual_seed(0)
    backbone = small_vit(8, depth=2, num_classes=3)
    names = server_names(backbone)
    every = set(backbone.state_dict())
    assert names < every
    inner = {name for name in every if ".blocks." in name or name.startswith("blocks.")}
    assert inner and {name for name in every - names if "blocks" in name} == set()
    assert any("patch_embed" in name for name in every - names) and any("head" in name for name in every - names)
    method = Supervised(backbone, SupervisedConfig())
    sides = [side_names(method, side) for side in ("server", "client")]
    assert sides[0] | sides[1] == set(method.state_dict()) and not sides[0] & sides[1]
    assert sides[0] == {f"backbone.{name}" for name in names}
    assert set(cut(method, "client").state_dict()) == sides[1]


def test_a_model_without_tokens_or_known_blocks_is_refused_with_the_reason() -> None:
    with pytest.raises(SitusError, match="convolutional network and has no tokens"):
        server_names(create_backbone("test_resnet"))
