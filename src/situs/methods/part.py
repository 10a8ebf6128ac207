"""PART: predicting the offset between two patches cut at random places (Ayoughi et al., 2025, arXiv 2506.03682).

Cut N patches at continuous places of the input, overlapping as they fall. Give the encoder no positions. For random
pairs of patches a small head answers how far the second lies from the first, and how much larger it is.

What the abstract and public reimplementations leave open is decided here: places are uniform over all that keep the
patch inside; a pair is of two different patches; its query is a projection of both tokens, which attends to all patch
tokens with one head; offsets are in units of the model's patch; CLS bears no loss and is always in the context, as in
MP3. Pairs are drawn for each sample (published reimplementations share them in a batch). Sizes are drawn for each side
on a logarithmic scale, and asked for as log ratios. On an axis with one patch (the channel axis of a series) nothing
is drawn or asked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.backbones.base import Backbone
from situs.config import Checked
from situs.core.jigsaw import patch_size_of
from situs.core.masking import kept_of
from situs.core.random import uniform
from situs.core.tokens import Grid, take, unpatchify
from situs.core.when import When
from situs.errors import SitusError
from situs.limits import Natural, Within
from situs.methods.base import Batch, Draws, Method, Output
from situs.methods.heads import init_classifier


@dataclass(frozen=True)
class PARTConfig(Checked):
    """Settings of PART."""

    mask_ratio: Annotated[float, Within("[0, 1)")] = 0.0
    """Fraction of masked patches, as in MP3. They attend to the other patches, but no patch attends to them."""

    pairs: Natural = 0
    """Number of patch pairs per sample whose offset is predicted. With 0, it is the number of patches."""

    scale: Annotated[float, Within("[1, inf)")] = 1.0
    """Range of patch sizes. The side is drawn between 1/scale and scale times the model's patch size. With 1, the patch
    size is always the model's."""


class PART(Method):
    """`draw` places the patches and pairs them; `forward` cuts, encodes and asks."""

    Config: ClassVar[type[Any]] = PARTConfig
    needs: ClassVar[tuple[str, ...]] = ("tokens", "context", "images")

    def __init__(self, backbone: Backbone | nn.Module, config: PARTConfig | None = None) -> None:
        super().__init__(backbone, config)
        self.check()
        numbers = self.axes.stop - self.axes.start
        self.relation_head = RelationHead(self.backbone.out_dim, numbers if self.config.scale == 1 else 2 * numbers)

    @property
    def axes(self) -> slice:
        """The axes with more than one patch, of rows and columns."""
        return slice(0 if self.grid[0] > 1 else 1, 2 if self.grid[1] > 1 else 1)

    @property
    def pairs(self) -> int:
        """P: how many pairs of each sample are asked for."""
        return self.config.pairs or self.backbone.num_tokens

    def check(self) -> None:
        patch = self.backbone.input.patch or (0, 0)
        tiled = self.backbone.input.shape == (self.grid[0] * patch[0], self.grid[1] * patch[1])
        if self.backbone.num_tokens < 2 or not tiled:
            raise SitusError(f"{self.backbone.name} does not cut its input into a grid of two or more patches")
        if self.config.scale > (shortest := min(self.grid[self.axes])):
            reason = (
                f"scale={self.config.scale}: must be at most {shortest}, the number of patches along the shorter side"
            )
            raise SitusError(reason, field="method.scale")

    def draw(self, batch: Batch, when: When) -> Draws:
        """sizes, corners: [B, N, 2], in patches; a corner is the upper left one. pairs: [B, P, 2], slots of patches."""
        count = self.backbone.num_tokens

        def noise(stream: str, number: int) -> tuple[Tensor, ...]:
            return uniform(when.seed, when.epoch, batch.ids, f"part.{stream}", (number, 2)).unbind(dim=-1)

        scales = [math.log(self.config.scale) if side > 1 else 0.0 for side in self.grid]
        sizes = [(scale * (2 * u - 1)).exp() for scale, u in zip(scales, noise("sizes", count), strict=True)]
        corners = [u * (side - size) for u, side, size in zip(noise("corners", count), self.grid, sizes, strict=True)]
        one, other = noise("pairs", self.pairs)
        first = whole_below(one, count)
        pairs = [first, (first + 1 + whole_below(other, count - 1)) % count]
        drawn = {"sizes": sizes, "corners": corners, "pairs": pairs}
        return {name: torch.stack(values, dim=-1) for name, values in drawn.items()}

    def forward(self, batch: Batch, draws: Draws) -> Output:
        pieces = cut(batch.inputs, self.grid, draws["corners"], draws["sizes"])
        # The places are random, so the first patches are as good a context as any others.
        context = kept_of(self.config.mask_ratio, self.backbone.num_tokens) if self.config.mask_ratio else None
        patches = self.backbone.encode(self.backbone.embed(pieces), None, context).patches
        answers = self.relation_head(patches, draws["pairs"]).float()
        relations = self.relations(draws)
        loss = F.mse_loss(answers, relations)
        offsets = self.axes.stop - self.axes.start  # the first answers; ratios of sizes follow
        error = (answers - relations)[..., :offsets].detach().square().mean()
        explained = 1 - error / relations[..., :offsets].square().mean()
        metrics = {"offset_error": error.sqrt(), "explained": explained}
        return Output(loss, metrics, {"answers": answers.detach(), "relations": relations})

    def relations(self, draws: Draws) -> Tensor:
        """What is asked of each pair, [B, P, answers]: the offset of the second patch's centre from the first one's, in
        patches; with sizes, the log ratio of their sides."""
        sizes, corners = draws["sizes"][..., self.axes], draws["corners"][..., self.axes]
        facts = corners + sizes / 2
        if self.config.scale > 1:
            facts = torch.cat([facts, sizes.log()], dim=-1)
        first, second = draws["pairs"].unbind(dim=-1)
        return take(facts, second) - take(facts, first)

    @classmethod
    def uses_positions(cls, config: PARTConfig) -> bool:
        return False


class RelationHead(nn.Module):
    """Answers pairs of tokens: a query made of both attends to all tokens, and one linear layer reads the result."""

    def __init__(self, dim: int, answers: int) -> None:
        super().__init__()
        self.query = nn.Linear(2 * dim, dim)
        self.attention = nn.MultiheadAttention(dim, num_heads=1, batch_first=True)
        self.answer = init_classifier(nn.Linear(dim, answers))

    def forward(self, tokens: Tensor, pairs: Tensor) -> Tensor:
        """tokens: [B, N, D]; pairs: [B, P, 2] -> [B, P, answers]."""
        both = take(tokens, pairs.flatten(1)).unflatten(1, pairs.shape[1:]).flatten(2)
        mixed, _ = self.attention(self.query(both), tokens, tokens, need_weights=False)
        return self.answer(mixed)


def whole_below(noise: Tensor, limit: int) -> Tensor:
    """Noise in [0, 1) as whole numbers from 0 to limit - 1; float32 may round a product up to the limit."""
    return (noise * limit).long().clamp(max=limit - 1)


def cut(images: Tensor, grid: Grid, corners: Tensor, sizes: Tensor) -> Tensor:
    """Patches of images at any places and sizes, laid out on the grid as images that a model can embed, [B, C, H, W].

    corners, sizes: [B, N, 2], in patches, rows before columns. Bilinear, without smoothing where a patch shrinks.
    """
    patch = patch_size_of(images, grid)
    steps = [(torch.arange(side, device=images.device) + 0.5) / side for side in patch]  # pixels' centres, in patches
    corners, sizes = corners.to(images.dtype), sizes.to(images.dtype)
    rows, columns = (corners[..., axis, None] + sizes[..., axis, None] * steps[axis] for axis in (0, 1))
    places = torch.stack(
        [
            (2 * columns / grid[1] - 1)[:, :, None, :].expand(-1, -1, patch[0], -1),  # grid_sample wants x before y
            (2 * rows / grid[0] - 1)[:, :, :, None].expand(-1, -1, -1, patch[1]),
        ],
        dim=-1,
    )
    pixels = F.grid_sample(images, places.flatten(1, 2), padding_mode="border", align_corners=False)
    patches = pixels.unflatten(2, (-1, patch[0])).permute(0, 2, 3, 4, 1).flatten(2)  # [B, N, P_h · P_w · C]
    return unpatchify(patches, grid, patch)
