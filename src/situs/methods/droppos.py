"""DropPos: reconstructing dropped positions (Wang et al., 2023, arXiv 2309.03576).

Show the encoder a quarter of the patches, tell only a quarter of those where they stand (the anchors), give the
others one learned vector instead of a place, and ask a small decoder for each of their places among all N.

The text with one error mended: the softmax runs over all N places, not over the visible ones. [CLS] of a sentence is
always an anchor. What the published code runs is `methods.official`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.backbones.base import Backbone, Features, join
from situs.config import Checked
from situs.core.masking import kept_of
from situs.core.position import smoothed_targets
from situs.core.random import uniform
from situs.core.selection import Selection
from situs.core.when import When
from situs.errors import SitusError, counted, verb
from situs.limits import Count, Natural, NotNegative, Positive, Within
from situs.methods.base import Batch, Draws, Method, Output, Puzzle, UnknownPosition
from situs.methods.heads import Decoder, check_decoder, place_ranks, position_accuracy

PUBLISHED = "the method droppos-official is what the published code runs"


@dataclass(frozen=True)
class DropPosConfig(Checked):
    """DropPos's own settings; the defaults are the paper's."""

    retired: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "mae_weight": (0.0, "what patches hold is the method mae's to guess"),
        "mae_depth": (2, "what patches hold is the method mae's to guess"),
        "epochs": (800, "the run's own number is taken"),
        "sigma_schedule": ("step", PUBLISHED),
        "distance": ("euclidean", PUBLISHED),
        "target_grid": (None, PUBLISHED),
        "target_norm": ("rows", PUBLISHED),
        "floor_counts": (False, PUBLISHED),
        "weights_over": ("sample", PUBLISHED),
    }

    mask_ratio: Annotated[float, Within("[0, 1)")] = 0.75
    """γ: share of patches the encoder does not see."""

    position_mask_ratio: Annotated[float, Within("(0, 1]")] = 0.75
    """γ_pos: share of the visible patches whose place is dropped. 1 leaves no anchor."""

    decoder_width: Count = 512
    """Token width of the decoder."""

    decoder_depth: Natural = 2
    """Blocks of the decoder."""

    decoder_heads: Count = 16
    """Attention heads of the decoder."""

    sigma_start: NotNegative = 1.0
    """σ_0: width of the smoothed target at the start. 0 is the one-hot target."""

    sigma_end: NotNegative = 0.0
    """σ_T: its width at the end; between them σ falls linearly."""

    affinity: Literal["full", "visible"] | None = "full"
    """Features behind the attentive weights: of a second forward of all patches with all places and no gradient
    (paper; about as dear as the rest), of the same forward (free), or None for no weights (τ = ∞)."""

    tau: Positive = 0.1
    """τ: temperature of the attentive weights."""

    def check(self) -> None:
        check_decoder(self.decoder_width, self.decoder_heads)


class DropPos(Method):
    """`draw` orders the visible patches, anchors first; `forward` reads like Figure 2."""

    Config: ClassVar[type[DropPosConfig]] = DropPosConfig
    needs: ClassVar[tuple[str, ...]] = ("tokens",)
    puzzle_ratios: ClassVar[tuple[str, ...]] = ("mask_ratio", "position_mask_ratio")
    floor: ClassVar[bool] = False
    """How shares of the patches are rounded, see `kept_of`."""
    each_alike: ClassVar[bool] = True
    """Whether every sample has the same weight in the loss: Eq. 8 is of one sample."""
    reads_text: ClassVar[bool] = True

    def __init__(self, backbone: Backbone | nn.Module, config: DropPosConfig | None = None) -> None:
        super().__init__(backbone, config)
        self.grid = self.backbone.out_grid
        self.check()
        config = self.config
        width, depth, heads = config.decoder_width, config.decoder_depth, config.decoder_heads
        self.decoder = Decoder(self.backbone.out_dim, width, depth, heads, self.count)
        self.mask_token = nn.Parameter(torch.empty(self.backbone.token_dim).normal_(std=0.02))

    def check(self) -> None:
        backbone, config = self.backbone, self.config
        backbone.ready_to_select(self.visible)
        if not backbone.positions().kinds:
            raise SitusError(f"{backbone.name} has no positions to drop: choose sincos", field="backbone.positions")
        if self.visible == self.anchors:
            raise SitusError(
                f"position_mask_ratio={config.position_mask_ratio}: must drop a place; of "
                f"{counted(self.count, 'patches')} {self.visible} {verb(self.visible, 'are')} visible",
                field=("position_mask_ratio", "mask_ratio"),
            )

    @property
    def count(self) -> int:
        """N: how many patches, and places, there are."""
        return math.prod(self.grid)

    @property
    def visible(self) -> int:
        """V: how many patches the encoder sees, 49 of 196."""
        return kept_of(self.config.mask_ratio, self.count, floor=self.floor)

    @property
    def anchors(self) -> int:
        """How many of the visible patches are told their place, 13 of 49."""
        return kept_of(self.config.position_mask_ratio, self.visible, floor=self.floor)

    def draw(self, batch: Batch, when: When) -> Draws:
        """visible: [B, V], anchors' places first: they stand in random order, so one sort serves both. sigma: σ."""
        tokens, config = self.tokens(batch), self.config
        noise = uniform(when.seed, when.epoch, batch.ids, "droppos.mask", (tokens.count,))
        visible = tokens.select(self.backbone.shuffle(noise, tokens), config.mask_ratio, floor=self.floor).order
        return {"visible": visible, "sigma": torch.full((), self.sigma(when), device=batch.ids.device)}

    def sigma(self, when: When) -> float:
        """σ of a step: linear from sigma_start to sigma_end."""
        return self.config.sigma_start + when.progress * (self.config.sigma_end - self.config.sigma_start)

    def forward(self, batch: Batch, draws: Draws) -> Output:
        config, floor = self.config, self.floor
        visible = self.tokens(batch).select(draws["visible"], config.mask_ratio, floor=floor)
        anchors = visible.kept(config.position_mask_ratio, floor=floor)
        dropped = visible.slots >= anchors
        features = self.backbone.encode_at(batch.inputs, visible, forgotten=dropped, unknown=self.mask_token)
        # Anchors stand in front, so of equally long samples "dropped" is one slice, in the decoder and the loss too.
        start, asked = visible.behind(anchors)
        logits = self.decoder(join(features), self.backbone.num_prefix + start, visible.real)
        places, weights = visible.order[:, start:], self.weigh(batch, features, visible)
        weights = asked_weights(weights, start, asked, each=self.each_alike)
        loss = dropped_loss(logits, places, self.targets(draws["sigma"]), weights)
        metrics = {"position_accuracy": position_accuracy(logits, places, asked)}
        return Output(loss, metrics, {"logits": logits.detach(), "places": places})

    @torch.no_grad()
    def weigh(self, batch: Batch, features: Features, visible: Selection) -> Tensor | None:
        """A of the visible patches, [B, V], whose features are given; None: all count alike."""
        config, whole, places = self.config, features, None
        if config.affinity is None:
            return None
        if config.affinity == "full":  # in the model's own mode: where it has drop path, these features have it too
            tokens, places = self.backbone.embed(batch.inputs), visible.order
            whole = self.backbone.encode(tokens, self.backbone.positions(), mask=self.tokens(batch).real)
        return attentive_weights(whole, config.tau, places, visible.real, self.backbone.special)

    def targets(self, sigma: Tensor) -> Tensor:
        """The smoothed target of each place, [N, N]."""
        return smoothed_targets(self.grid, sigma)

    def at(self, *ratios: float) -> DropPos:
        """Only positions are asked for, and no loss, whose weights cost a forward."""
        return super().at(*ratios).under(affinity=None)

    def unknown_position(self) -> UnknownPosition:
        return UnknownPosition(self.mask_token.detach(), "the [MASK] vector that this DropPos run learned")

    def solve(self, batch: Batch, *, seed: int) -> Puzzle:
        """The anchors stand first, and are told; the other patches that are seen are asked for."""
        draws = self.draw(self.puzzling(batch), When(seed=seed, epoch=0, progress=1.0))
        extras = self(batch, draws).extras
        together = torch.cat([draws["visible"][:, : self.anchors], extras["logits"].argmax(dim=-1)], dim=1)
        ranks = place_ranks(extras["logits"], extras["places"])
        return Puzzle(draws["visible"], together, self.anchors, self.anchors, self.grid, ranks=ranks)

    def no_decay(self) -> set[str]:
        return {"mask_token"}


@torch.no_grad()
def attentive_weights(
    features: Features, tau: float, visible: Tensor | None = None, real: Tensor | None = None, special: int = 0
) -> Tensor:
    """A, [B, V] float32: softmax of cos(f_cls, f_i) / τ over the visible patches, without gradient.

    visible: [B, V] places among features.patches; None where those are the visible patches themselves. The softmax
    over all patches, gathered and renormalised, is the softmax over the visible. Without CLS the mean patch serves.
    real: [B, V] bool, False where a sample is filled up, of weight 0. special: whether the first patch is CLS.
    """
    patches = features.patches.float()
    if special:
        prefix = patches[:, :1]
    else:
        prefix = features.prefix[:, :1].float() if features.prefix.shape[1] else patches.mean(dim=1, keepdim=True)
    likeness = F.cosine_similarity(prefix, patches, dim=-1)
    if visible is not None:
        likeness = likeness.gather(1, visible)
    if real is not None:
        likeness = likeness.masked_fill(~real, -torch.inf)
    return (likeness / tau).softmax(dim=-1)


def asked_weights(weights: Tensor | None, start: int, asked: Tensor | None, *, each: bool) -> Tensor | None:
    """Weights of the tokens from `start` on, 0 where `asked` [B, K] says no; None: all count alike.

    weights: [B, V], or None. each: every sample's are brought to 1, so that it counts as much as any other.
    """
    if weights is not None:
        weights = weights[:, start:]
    if asked is not None:
        weights = asked.float() if weights is None else weights * asked
    if weights is None:
        return None
    return weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-12) if each else weights


def dropped_loss(logits: Tensor, places: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Cross entropy with smoothed targets, Σ(loss · A) / ΣA over the dropped patches.

    logits: [B, K, N], classes on the LAST axis. places: [B, K]. targets: [N, N], a row for each true place.
    weights: A [B, K], or None for the plain mean.
    """
    losses = -(targets[places] * logits.float().log_softmax(dim=-1)).sum(dim=-1)
    return losses.mean() if weights is None else (losses * weights).sum() / weights.sum().clamp(min=1e-12)
