"""A client's round by torch itself, for the tests of engines."""

from __future__ import annotations

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

RATE = 0.05


def build() -> nn.Module:
    torch.manual_seed(0)
    shape = {"img_size": 16, "patch_size": 4, "embed_dim": 48, "depth": 1, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", **shape, num_classes=5)


X = torch.randint(0, 256, (1, 3, 16, 16), generator=torch.Generator().manual_seed(1)) / 255 * 2 - 1


def step(module: nn.Module, noise: float = 0.0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights before and after a round, by torch itself."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module.zero_grad(set_to_none=True)
    F.cross_entropy(module(X), torch.tensor([2])).backward()
    torch.optim.SGD(module.parameters(), lr=RATE).step()
    chance = torch.Generator().manual_seed(3)
    return before, {n: v + noise * torch.randn(v.shape, generator=chance) for n, v in module.state_dict().items()}
