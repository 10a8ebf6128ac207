"""DropPos: reconstructing dropped positions (Wang et al., 2023, arXiv 2309.03576).

Show the encoder a quarter of the patches, keep the positions of only a quarter of those (the anchors), give the others
one learned vector instead of a position, and let a small decoder classify each of their positions among all N.

One error of the text is corrected: the softmax runs over all N positions. The published code is in `methods.official`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.backbones.base import Backbone, Features
from situs.config import Checked
from situs.core.masking import kept_of
from situs.core.position import smoothed_targets
from situs.core.random import uniform
from situs.core.selection import Selection
from situs.core.when import When
from situs.errors import SitusError, counted
from situs.limits import Count, Natural, NotNegative, Positive, Within
from situs.methods.base import Batch, Draws, Output, UnknownPosition
from situs.methods.heads import Decoder, check_decoder, place_ranks, position_accuracy, query_weights
from situs.methods.measured import Puzzle, SolvesPuzzles
from situs.methods.retired import RETIRED


@dataclass(frozen=True)
class DropPosConfig(Checked):
    """Settings of DropPos. The defaults are the paper's."""

    retired: ClassVar = RETIRED["droppos"]

    mask_ratio: Annotated[float, Within("[0, 1)")] = 0.75
    """γ: fraction of patches that are hidden from the encoder."""

    position_mask_ratio: Annotated[float, Within("(0, 1]")] = 0.75
    """γ_pos: fraction of visible patches whose position is dropped. With a fraction of 1, no patch keeps its position
    as a hint."""

    decoder_width: Count = 512
    """Width of the decoder's tokens."""

    decoder_depth: Natural = 2
    """Number of blocks of the decoder."""

    decoder_heads: Count = 16
    """Number of attention heads of the decoder."""

    sigma_start: NotNegative = 1.0
    """σ_0: width of the smoothed target at the start of training. With 0, the target is one-hot."""

    sigma_end: NotNegative = 0.0
    """σ_T: width of the smoothed target at the end of training. σ falls linearly from σ_0 to σ_T."""

    affinity: Literal["full", "visible"] | None = "full"
    """Features that determine the attentive weights of the loss. full (as in the paper): features of a second forward
    pass without gradient, over all patches, each with its position. This nearly doubles the cost. visible: features of
    the same forward pass, at no cost. none: no attentive weights (τ = ∞)."""

    tau: Positive = 0.1
    """τ: temperature of the attentive weights."""

    def check(self) -> None:
        check_decoder(self.decoder_width, self.decoder_heads)


class DropPos(SolvesPuzzles):
    """`draw` orders the visible patches, anchors first; `forward` reads like Figure 2."""

    Config: ClassVar[type[DropPosConfig]] = DropPosConfig
    needs: ClassVar[tuple[str, ...]] = ("tokens",)
    puzzle_ratios: ClassVar[tuple[str, ...]] = ("mask_ratio", "position_mask_ratio")
    reads_text: ClassVar[bool] = True
    floor: ClassVar[bool] = False  # how shares of the patches are rounded, see `kept_of`
    per_sample: ClassVar[bool] = True  # whether weights sum to 1 in each sample: Eq. 8 is for one sample

    def __init__(self, backbone: Backbone | nn.Module, config: DropPosConfig | None = None) -> None:
        super().__init__(backbone, config)
        self.grid = self.backbone.out_grid
        self.check()
        width, depth, heads = self.config.decoder_width, self.config.decoder_depth, self.config.decoder_heads
        self.decoder = Decoder(self.backbone.out_dim, width, depth, heads, self.count)
        self.mask_token = nn.Parameter(torch.empty(self.backbone.token_dim).normal_(std=0.02))

    def check(self) -> None:
        self.backbone.ready_to_select(self.visible)
        if not self.backbone.positions().kinds:
            reason = f"{self.backbone.name} has no positions to drop: choose positions='sincos'"
            raise SitusError(reason, field="backbone.positions")
        if self.visible == self.anchors:
            visible = f"{counted(self.visible, 'visible patches')} (of {self.count} patches in all)"
            ratio = self.config.position_mask_ratio
            reason = f"position_mask_ratio={ratio}: is so small that no position of the {visible} is dropped"
            raise SitusError(reason, field=("position_mask_ratio", "mask_ratio"))

    @property
    def count(self) -> int:
        """N: number of patches and of positions."""
        return math.prod(self.grid)

    @property
    def visible(self) -> int:
        """V: number of patches that the encoder sees, 49 of 196."""
        return kept_of(self.config.mask_ratio, self.count, floor=self.floor)

    @property
    def anchors(self) -> int:
        """Number of visible patches that keep their position, 13 of 49."""
        return kept_of(self.config.position_mask_ratio, self.visible, floor=self.floor)

    def draw(self, batch: Batch, when: When) -> Draws:
        """visible: [B, V], anchors first: the order is random, so one sort draws both. sigma: σ."""
        tokens, config = self.tokens(batch), self.config
        noise = uniform(when.seed, when.epoch, batch.ids, "droppos.mask", (tokens.total,))
        visible = tokens.select(self.backbone.shuffle(noise, tokens), config.mask_ratio, floor=self.floor).order
        return {"visible": visible, "sigma": torch.full((), self.sigma(when), device=batch.ids.device)}

    def sigma(self, when: When) -> float:
        """σ of a step: linear from sigma_start to sigma_end."""
        return self.config.sigma_start + when.progress * (self.config.sigma_end - self.config.sigma_start)

    def forward(self, batch: Batch, draws: Draws) -> Output:
        visible = self.tokens(batch).select(draws["visible"], self.config.mask_ratio, floor=self.floor)
        anchors = visible.kept(self.config.position_mask_ratio, floor=self.floor)
        dropped = visible.slots >= anchors
        features = self.backbone.encode_at(batch.inputs, visible, forgotten=dropped, unknown=self.mask_token)
        start, queries = visible.behind(anchors)
        logits = self.decoder(features, start)
        weights = query_weights(self.weigh(batch, features, visible), start, queries, per_sample=self.per_sample)
        places = visible.order[:, start:]
        loss = dropped_loss(logits, places, self.targets(draws["sigma"]), weights)
        metrics = {"position_accuracy": position_accuracy(logits, places, queries)}
        return Output(loss, metrics, {"logits": logits.detach(), "places": places})

    @torch.no_grad()
    def weigh(self, batch: Batch, features: Features, visible: Selection) -> Tensor | None:
        """The weights A of the visible patches, [B, V], from their features; None: equal weights."""
        if self.config.affinity is None:
            return None
        if self.config.affinity == "full":  # in the model's own mode: with its drop path, where it has one
            z = self.backbone.embed(batch.inputs)
            features = self.encode_tokens(z, self.tokens(batch), self.backbone.positions())
        likeness = cls_likeness(features, self.backbone.special)
        if self.config.affinity == "full":
            likeness = likeness.gather(1, visible.order)  # the softmax over all, gathered, is that over the visible
        return (visible.or_nothing(likeness) / self.config.tau).softmax(dim=-1)

    def targets(self, sigma: Tensor) -> Tensor:
        """The smoothed target of each position, [N, N]."""
        return smoothed_targets(self.grid, sigma)

    def unknown_position(self) -> UnknownPosition:
        return UnknownPosition(self.mask_token.detach(), "the [MASK] vector that this DropPos run learned")

    def solve(self, batch: Batch, *, seed: int) -> Puzzle:
        """The anchors come first, with their positions; the positions of the other visible patches are predicted."""
        self.check_puzzle(batch)
        draws = self.draw(batch, When(seed=seed, progress=1.0))
        visible, extras = draws["visible"], self.under(affinity=None)(batch, draws).extras  # without the second forward
        guesses = torch.cat([visible[:, : self.anchors], extras["logits"].argmax(dim=-1)], dim=1)
        ranks = place_ranks(extras["logits"], extras["places"])
        return Puzzle(visible, guesses, self.anchors, self.anchors, self.grid, ranks=ranks)

    def no_decay(self) -> set[str]:
        return {"mask_token"}


def cls_likeness(features: Features, special: int) -> Tensor:
    """cos(f_cls, f_i), [B, N] float32. special: whether CLS is the first of the patches; without CLS, their mean is
    used."""
    patches, prefix = features.filled().patches.float(), features.prefix.float()
    whole = patches if special else prefix if prefix.shape[1] else patches.mean(dim=1, keepdim=True)
    return F.cosine_similarity(whole[:, :1], patches, dim=-1)


def dropped_loss(logits: Tensor, places: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Cross entropy with smoothed targets, Σ(loss · A) / ΣA over the dropped patches.

    logits: [B, K, N], classes on the LAST axis. places: [B, K]. targets: [N, N], a row per position. weights: A [B, K].
    """
    losses = -(targets[places] * logits.float().log_softmax(dim=-1)).sum(dim=-1)
    return losses.mean() if weights is None else (losses * weights).sum() / weights.sum().clamp(min=1e-12)
