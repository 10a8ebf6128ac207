"""A training method of your own, which predicts the row of a patch: python examples/add_a_method.py"""

import argparse
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from situs.backbones import Backbone, create_backbone
from situs.config import Checked
from situs.core.random import uniform
from situs.data.sources.samples import load_samples
from situs.limits import Within
from situs.methods import Batch, Draws, Method, Output, When


@dataclass(frozen=True)
class RowsConfig(Checked):
    """Settings. Each field is also a flag of the command line: `--method.share 0.5`."""

    share: Annotated[float, Within("(0, 1]")] = 0.75
    """The mean ratio of patches that lose their position."""


class Rows(Method):
    """Some patches lose their position; the model predicts the row of each of them."""

    Config = RowsConfig

    def __init__(self, backbone: Backbone, config: RowsConfig) -> None:
        super().__init__(backbone)
        self.config = config
        self.unknown = nn.Parameter(torch.zeros(backbone.dim))
        self.row_head = nn.Linear(backbone.dim, self.grid[0])
        self.register_buffer("rows", torch.arange(backbone.num_tokens) // self.grid[1])

    def draw(self, batch: Batch, when: When) -> Draws:
        """All random choices: a hash of the sample's number, so they are the same in any batch."""
        noise = uniform(when.seed, when.epoch, batch.ids, "rows.forget", (self.backbone.num_tokens,))
        return {"forgotten": noise < self.config.share}

    def forward(self, batch: Batch, draws: Draws) -> Output:
        """A pure function of the batch and its draws, so that it can be compiled."""
        places = self.backbone.positions().forget(draws["forgotten"], self.unknown)
        features = self.backbone.encode(self.backbone.embed(batch.inputs), places)
        logits = self.row_head(features.patches)
        truth = self.rows.expand(logits.shape[:2])
        asked = draws["forgotten"].to(logits.dtype)
        losses = cross_entropy(logits.transpose(1, 2), truth, reduction="none")
        right = ((logits.argmax(dim=-1) == truth) * asked).sum() / asked.sum()
        loss = (losses * asked).sum() / asked.sum()
        return Output(loss, {"right": right}, {"logits": logits.detach()})

    def no_decay(self) -> set[str]:
        return {"unknown"}


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
args = parser.parse_args()

torch.manual_seed(0)
small = {"embed_dim": 64, "depth": 2, "num_heads": 4}
shape = {"img_size": 28, "patch_size": 7, "in_chans": 1, "model_args": small}
backbone = create_backbone("vit_tiny_patch16_224", **shape)
method = Rows(backbone, RowsConfig())
optimizer = torch.optim.AdamW(method.parameters(), lr=2e-3)

images = load_samples("train").images.float() / 255
losses = []
for step in range(args.steps):
    ids = torch.arange(64 * step, 64 * step + 64) % len(images)
    batch = Batch(images[ids], ids)
    output = method(batch, method.draw(batch, When(seed=0, epoch=0)))
    optimizer.zero_grad()
    output.loss.backward()
    optimizer.step()
    losses.append(output.loss.item())
    if step % 10 == 9:
        right = 100 * output.metrics["right"]
        print(f"step {step + 1}: loss {losses[-1]:.3f}, {right:.0f} % of the rows right")
