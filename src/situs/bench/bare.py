"""A backbone alone as a case: forward and backward over whole inputs, without any head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from situs.backbones.base import Backbone
from situs.config import Checked
from situs.core.when import When
from situs.methods import Batch, Draws, Method, Output, method_class

BARE = "backbone"
"""The name of this case, beside those of methods."""


@dataclass(frozen=True)
class BareConfig(Checked):
    """There is nothing to set."""


class Bare(Method):
    """The mean square of the backbone's features, whose gradient reaches every block."""

    Config: ClassVar[type[BareConfig]] = BareConfig

    def __init__(self, backbone: Backbone, config: BareConfig) -> None:
        super().__init__(backbone)
        self.config = config

    def draw(self, batch: Batch, when: When) -> Draws:  # noqa: ARG002
        return {}

    def forward(self, batch: Batch, draws: Draws) -> Output:  # noqa: ARG002
        features = self.backbone.encode(self.backbone.embed(batch.inputs), self.backbone.positions())
        return Output(features.patches.float().square().mean(), {}, {})


def measured_class(name: str) -> type[Method]:
    """A method by name, or the backbone alone."""
    return Bare if name == BARE else method_class(name)
