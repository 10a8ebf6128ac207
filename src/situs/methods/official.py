"""DropPos and MJP as in their published code, which differs from their papers.

Two errors of DropPos's code are not repeated: the mask token is never repeated for the batch's count, and accuracy is
plain top-1. MJP's code has its Swin targets off by one; ours are not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from situs.backbones.base import Backbone
from situs.core.masking import draw_block_mask
from situs.core.position import cut_targets
from situs.core.random import uniform
from situs.core.when import When
from situs.errors import SitusError
from situs.limits import Natural, NotNegative, Share
from situs.methods.base import Batch
from situs.methods.droppos import DropPos, DropPosConfig
from situs.methods.mjp import MJP, MJPConfig, Regressor


def share_of_epochs(when: When) -> float:
    """epoch / epochs: the share of a run that is done, for a schedule by epochs."""
    return when.progress if when.epochs is None else when.epoch / when.epochs


@dataclass(frozen=True)
class OfficialDropPosConfig(DropPosConfig):
    """Settings of DropPos as in the published code."""

    retired: ClassVar = {}

    target_grid: tuple[int, int] = (16, 16)
    """Grid on which distances between positions are measured. The published code takes 16x16, even if an image
    has 14x14 patches."""


class OfficialDropPos(DropPos):
    """σ is constant within an epoch; targets by squared distances on another grid, with columns that sum to 1; shares
    rounded down (12 anchors of 49, not 13); weights normalised over the batch."""

    Config: ClassVar[type[Any]] = OfficialDropPosConfig
    reads_text: ClassVar[bool] = False
    floor: ClassVar[bool] = True
    per_sample: ClassVar[bool] = False

    def check(self) -> None:
        super().check()
        cut_targets(self.count, self.config.target_grid, 0.0)  # refuses a grid that is too small

    def sigma(self, when: When) -> float:
        return super().sigma(when._replace(progress=share_of_epochs(when)))

    def targets(self, sigma: Tensor) -> Tensor:
        return cut_targets(self.count, self.config.target_grid, sigma)


@dataclass(frozen=True)
class OfficialMJPConfig(MJPConfig):
    """Settings of MJP as in the published code."""

    retired: ClassVar = {}

    chance: Share = 0.5
    """Probability that a batch is shuffled."""

    start_epoch: Natural = 20
    """First epoch in which patches are shuffled."""

    dal_warmup: Natural = 20
    """Number of epochs in which λ rises from 0 to dal_weight."""

    dal_final: NotNegative = 0.005
    """Final λ. λ follows a cosine over the epochs after the warm-up."""

    def check(self) -> None:
        super().check()
        if self.shuffle == "spp":
            raise SitusError(
                field="shuffle", value=self.shuffle, allowed="'jigsaw' or 'none' ('spp' exists only in the method mjp)"
            )


class OfficialMJP(MJP):
    """One mask and shuffle per batch, drawn by its first sample, with γ as an upper bound; a smaller regressor, whose
    components are not fitted to the grid; tables of deviation 1, with weight decay."""

    Config: ClassVar[type[Any]] = OfficialMJPConfig
    reads_text: ClassVar[bool] = False
    regressor: ClassVar[Regressor] = Regressor(depth=2, fit=False, mean_axes=True)
    unknown_std: ClassVar[float] = 1.0

    def __init__(self, backbone: Backbone | nn.Module, config: OfficialMJPConfig | None = None) -> None:
        backbone = self.wrapped(backbone)
        if backbone.num_tokens and (len(backbone.grid) < 2 or min(backbone.grid) == 1):
            raise SitusError(
                f"{backbone.name}: its grid has only one row or column ({max(backbone.grid)} positions), so "
                "MJP's published code finds no block to shuffle; use the method mjp",
                field="method",
            )
        fill_table(backbone, std=1.0)
        super().__init__(backbone, config)

    def draw_mask(self, batch: Batch, when: When) -> Tensor:
        share, first = self.config.mask_ratio, batch.ids[:1]
        fires = uniform(when.seed, when.epoch, first, "mjp.chance", (1,)) < self.config.chance
        mask = draw_block_mask(when.seed, when.epoch, first, "mjp.mask", self.grid, share, rule="official")
        mask = mask & fires if when.epoch >= self.config.start_epoch else torch.zeros_like(mask)
        return mask.expand(len(batch.ids), -1).contiguous()

    def draw_order(self, ids: Tensor, count: int, when: When) -> Tensor:
        return super().draw_order(ids[:1], count, when).expand(len(ids), -1).contiguous()

    def dal_weight(self, when: When) -> float:
        """λ rises to its full weight in the last epoch of the warm-up, then falls by a cosine."""
        config = self.config
        if when.epoch < config.dal_warmup:
            return config.dal_weight * when.epoch / max(config.dal_warmup - 1, 1)
        if when.epochs is None or when.epochs <= config.dal_warmup:
            return config.dal_weight
        done = (when.epoch - config.dal_warmup) / (when.epochs - config.dal_warmup)
        return config.dal_final + (config.dal_weight - config.dal_final) * 0.5 * (1.0 + math.cos(math.pi * done))

    def decayed(self) -> set[str]:
        tables = {f"backbone.{name}" for name, role in self.backbone.roles().items() if role.part == "table"}
        return {*tables, "unknown"} if self.config.unknown else tables


@torch.no_grad()
def fill_table(backbone: Backbone, std: float) -> None:
    """Initialises the rows of the positions, and those of prefix tokens where they are in the same table."""
    table = backbone.positions().table if backbone.num_tokens else None
    if table is None:
        return
    table.normal_(std=std)
    roles = backbone.roles()
    for name, parameter in backbone.named_parameters():
        if roles[name].part == "table" and parameter.shape[-2] == backbone.num_prefix + backbone.num_tokens:
            parameter[..., : backbone.num_prefix, :].normal_(std=std)
