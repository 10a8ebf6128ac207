"""What does one training step of my model reveal? python examples/audit_my_model.py"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import situs


class MyModel(nn.Module):
    """Any module from images to logits: here a small transformer with a position table."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 8, 8)
        self.places = nn.Parameter(0.02 * torch.randn(1, 16, 64))
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.block = nn.TransformerEncoderLayer(64, 4, 128, **options)
        self.classifier = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.classifier(self.block(tokens).mean(dim=1))


parser = argparse.ArgumentParser()
parser.add_argument("--data", default="samples", help="a folder of images")
parser.add_argument("--out", type=Path, default=Path("audit"), help="a folder for the page and its numbers")
parser.add_argument("--count", type=int, default=4, help="images to attack, one per step")
args = parser.parse_args()
torch.manual_seed(0)

# 1. Attack the gradients of one step on each image, without and with a defence.
audit = situs.audit_gradients(
    MyModel(),
    args.data,
    img_size=32,
    count=args.count,
    attacks=["patchembed", "tokens"],
    defences=["none", "no-pe-gradient", "noise=1"],
)
print(audit)

# 2. A gate for your tests. A defence that was not attacked does not pass.
verdict = audit.judge(psnr=20)
print("passed" if verdict.passed else "not passed")

# 3. The page and its numbers, here without the private images.
print(situs.publish(audit.without_pictures(), args.out))
