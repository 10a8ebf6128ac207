"""The model of the NVFlare job of test_nvflare.py."""

import timm
import torch
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shape = {"img_size": 28, "patch_size": 7, "in_chans": 1, "embed_dim": 96, "depth": 2, "num_heads": 3}
        self.vit = timm.create_model("vit_tiny_patch16_224", **shape, num_classes=10)

    def forward(self, images: Tensor) -> Tensor:
        return self.vit(images)


def build() -> nn.Module:
    return Net().vit
