"""MP3 for running text: predicting the distance between two tokens, not the position of each token.

Running text is cut anywhere, so a position in a piece of it has no meaning. Each token is paired with the next one in
MP3's random order, and their signed distance is classified, up to W positions either way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from situs.backbones.base import Backbone
from situs.core.selection import Selection
from situs.core.tokens import take
from situs.limits import Count
from situs.methods.base import Batch, Draws, Output
from situs.methods.heads import init_classifier, position_accuracy, position_loss
from situs.methods.mp3 import DrawnContext, MP3Config


@dataclass(frozen=True)
class OffsetsConfig(MP3Config):
    """Settings of MP3 for running text, which predicts distances between tokens."""

    retired: ClassVar = {}

    window: Count = 8
    """W: the largest distance that is predicted. Larger distances count as W."""


class Offsets(DrawnContext):
    """MP3 whose head takes two tokens and classifies their distance."""

    Config: ClassVar[type[Any]] = OffsetsConfig

    def __init__(self, backbone: Backbone | nn.Module, config: OffsetsConfig | None = None) -> None:
        super().__init__(backbone, config)
        self.position_head = init_classifier(nn.Linear(2 * self.backbone.out_dim, 2 * self.config.window + 1))

    def forward(self, batch: Batch, draws: Draws) -> Output:
        features, selected = self.encode_drawn(batch, draws)
        other, paired = partners(selected)
        logits = self.position_head(torch.cat([features.patches, take(features.patches, other)], dim=-1))
        distance = selected.order - selected.order.gather(1, other)
        window = self.config.window
        offsets = distance.clamp(-window, window) + window
        metrics = {"position_accuracy": position_accuracy(logits, offsets, paired)}
        return Output(position_loss(logits, offsets, paired), metrics, {"logits": logits.detach(), "places": offsets})


def partners(selected: Selection) -> tuple[Tensor, Tensor]:
    """The slot of each token's partner (the next one; the first for the last), and whether it has one; [B, K] both."""
    slots, count = selected.slots, selected.order.shape[1]
    length = count if selected.length is None else selected.length
    other = torch.where(slots + 1 < length, slots + 1, selected.special).expand_as(selected.order).clamp(max=count - 1)
    _, queries = selected.behind(0)
    alone = other == slots
    return other, ~alone if queries is None else queries & ~alone
