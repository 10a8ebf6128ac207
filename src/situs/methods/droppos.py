"""DropPos: reconstructing dropped positions (Wang et al., 2023, arXiv 2309.03576).

Show the encoder a quarter of the patches, tell only a quarter of those where they stand (the anchors), give the
others one learned vector instead of a place, and ask a small decoder for each of their places among all N.

Deviations, each a field of the config: `DropPosConfig.paper()` is the text with its errors mended (the softmax runs
over all N places, not over the visible ones), `DropPosConfig.official()` what the published code runs. Two of its
slips are kept in neither: the mask token is never repeated for the batch's count, and accuracy is plain top-1.

Of sentences, filled up to a common length, each has its visible tokens and its anchors among its real ones; [CLS] is
always an anchor.

On Swin (Table S2) a patch is the image's share behind an output token, and of each 2x2 cell of them one is visible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.backbones.base import Backbone, Features, join
from situs.backbones.cells import enable_cells, encode_cells
from situs.backbones.shapes import shapes_alone
from situs.config import Checked
from situs.core.jigsaw import patch_size_of
from situs.core.masking import kept_each, kept_of, one_of_cells
from situs.core.permutation import random_permutation
from situs.core.position import cut_targets, sincos, smoothed_targets
from situs.core.random import uniform
from situs.core.tokens import fill, mask_of, patchify, take
from situs.errors import SitusError, counted, verb
from situs.limits import Count, Natural, NotNegative, Positive, Within
from situs.methods.base import Batch, Draws, Method, Output, Puzzle, UnknownPosition, epoch_share
from situs.methods.heads import Decoder, check_decoder, place_ranks, position_accuracy
from situs.methods.mae import decode_hidden, reconstruction_loss


@dataclass(frozen=True)
class DropPosConfig(Checked):
    """DropPos's own settings; the defaults are the paper's."""

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

    sigma_schedule: Literal["step", "epoch"] = "step"
    """Whether σ falls at every step (paper) or stands still within an epoch (published code)."""

    epochs: Count = 800
    """The run's epochs, for sigma_schedule="epoch": a step knows its epoch and its share of the run, not this."""

    distance: Literal["euclidean", "squared"] = "euclidean"
    """Distance in the smoothed target: Euclidean (paper), or its square (published code)."""

    target_grid: tuple[int, int] | None = None
    """Grid on which distances are taken; None is the patches' own. The published code takes 16x16 for 14x14."""

    target_norm: Literal["rows", "columns"] = "rows"
    """Whether a place's target sums to 1 (rows, paper) or the map's columns do (published code)."""

    floor_counts: bool = False
    """Keep int((1-γ)N) instead of N - int(γN), as the published code rounds: 12 anchors of 49 visible, not 13."""

    affinity: Literal["full", "visible"] | None = "full"
    """Features behind the attentive weights: of a second forward of all patches with all places and no gradient
    (paper; about as dear as the rest), of the same forward (free), or None for no weights (τ = ∞)."""

    tau: Positive = 0.1
    """τ: temperature of the attentive weights."""

    weights_over: Literal["sample", "batch"] = "sample"
    """Over what the attentive weights are brought to 1: each sample's dropped patches (Eq. 8 is of one sample; a batch
    then is the mean of its samples, in parts, over ranks or whole), or the batch's (published code)."""

    mae_weight: NotNegative = 0.0
    """Weight of MAE's pixel loss on the hidden patches beside the position loss; 0 leaves it out."""

    mae_depth: Natural = 2
    """Blocks of the pixel decoder; its width and heads are the position decoder's."""

    def check(self) -> None:
        check_decoder(self.decoder_width, self.decoder_heads)
        if self.mae_weight > 0 and self.mask_ratio == 0:
            fields = ("mask_ratio", "mae_weight")
            raise SitusError(field=fields, value=self.mask_ratio, allowed="above 0 where mae_weight is")

    @staticmethod
    def paper() -> DropPosConfig:
        """What the text says."""
        return DropPosConfig()

    @staticmethod
    def official() -> DropPosConfig:
        """What the published code runs on 14x14 patches; set `epochs` to the run's."""
        return DropPosConfig(
            sigma_schedule="epoch",
            distance="squared",
            target_grid=(16, 16),
            target_norm="columns",
            floor_counts=True,
            weights_over="batch",
        )


class DropPos(Method):
    """`draw` orders the visible patches, anchors first; `forward` reads like Figure 2."""

    places: Tensor
    Config: ClassVar[type[DropPosConfig]] = DropPosConfig
    needs: ClassVar[tuple[str, ...]] = ("tokens",)
    puzzle_ratios: ClassVar[tuple[str, ...]] = ("mask_ratio", "position_mask_ratio")
    reads_text: ClassVar[bool] = True

    def __init__(self, backbone: Backbone | nn.Module, config: DropPosConfig | None = None) -> None:
        config = config or DropPosConfig()
        super().__init__(backbone, config)
        backbone = self.backbone
        if backbone.input.words:  # its visible tokens stand in random order, which a causal mask would take for theirs
            backbone.require("rows")
        self.grid = backbone.out_grid
        self.by_cells = "take" in backbone.refusals
        if self.by_cells:
            enable_cells(backbone)
        if not backbone.positions().kinds:
            raise SitusError(f"{backbone.name} has no positions to drop: choose sincos", field="backbone.positions")
        if self.visible == self.anchors:
            raise SitusError(
                f"position_mask_ratio={config.position_mask_ratio}: must drop a place; of "
                f"{counted(self.count, 'patches')} {self.visible} {verb(self.visible, 'are')} visible",
                field=("position_mask_ratio", "mask_ratio"),
            )
        width, heads = config.decoder_width, config.decoder_heads
        self.decoder = Decoder(backbone.out_dim, width, config.decoder_depth, heads, self.count)
        self.mask_token = nn.Parameter(torch.empty(backbone.token_dim).normal_(std=0.02))
        if config.target_grid is not None:
            cut_targets(self.count, config.target_grid, 0.0)  # refuses a grid that is too small
        if config.mae_weight:
            values = backbone.patch_values * backbone.num_tokens // self.count
            self.pixel_decoder = Decoder(backbone.out_dim, width, config.mae_depth, heads, values)
            self.pixel_token = nn.Parameter(torch.empty(width).normal_(std=0.02))
            self.register_buffer("places", sincos(self.grid, width), persistent=False)

    @property
    def count(self) -> int:
        """N: how many patches, and places, there are."""
        return math.prod(self.grid)

    @property
    def visible(self) -> int:
        """V: how many patches the encoder sees, 49 of 196."""
        seen = self._keep(self.count, self.config.mask_ratio)
        if self.by_cells and 4 * seen != self.count:
            raise SitusError(
                f"mask_ratio={self.config.mask_ratio}: must be 0.75 on {self.backbone.name}, which sees one patch of"
                " each 2x2 cell",
                field="mask_ratio",
            )
        return seen

    @property
    def anchors(self) -> int:
        """How many of the visible patches are told their place, 13 of 49."""
        return self._keep(self.visible, self.config.position_mask_ratio)

    def _keep(self, count: int, ratio: float) -> int:
        return kept_of(ratio, count, floor=self.config.floor_counts)

    def at(self, *ratios: float) -> DropPos:
        """The same weights at another γ and γ_pos, for evaluations; only positions are asked for, and no loss."""
        others = dict(zip(self.puzzle_ratios, ratios, strict=True))
        config = replace(self.config, **others, mae_weight=0.0, affinity=None)  # its weights cost a forward
        with shapes_alone():  # what is made here gives way to this one's, and must draw no random numbers
            other = DropPos(self.backbone, config)
        other.decoder, other.mask_token, other.training = self.decoder, self.mask_token, self.training
        return other

    def unknown_position(self) -> UnknownPosition:
        return UnknownPosition(self.mask_token.detach(), "the [MASK] vector that this DropPos run learned")

    def solve(self, batch: Batch, *, seed: int) -> Puzzle:
        """The anchors stand first, and are told; the other patches that are seen are asked for."""
        self.refuse_padding(self.with_mask(batch))
        draws = self.draw(batch, seed=seed, epoch=0, progress=1.0)
        extras = self(batch, draws).extras
        together = torch.cat([draws["visible"][:, : self.anchors], extras["logits"].argmax(dim=-1)], dim=1)
        ranks = place_ranks(extras["logits"], extras["places"])
        return Puzzle(draws["visible"], together, self.anchors, self.anchors, self.grid, ranks=ranks)

    def draw(self, batch: Batch, *, seed: int, epoch: int, progress: float = 0.0) -> Draws:
        """visible: [B, V], anchors' places first. hidden: [B, N - V], where pixels are asked for. sigma: a scalar.

        Of padded samples also seen and told, [B, 1]: how many of the visible are real, and how many are anchors.
        """
        batch = self.with_mask(batch)
        if batch.mask is not None:
            return self._draw_padded(batch.ids, batch.mask, seed, epoch, progress)
        noise = uniform(seed, epoch, batch.ids, "droppos.mask", (self.count,))
        if self.by_cells:
            chosen = mask_of(one_of_cells(noise, self.grid), self.count)
            noise = torch.where(chosen, noise, noise + 1.0)
        # The visible stand in random order, so their first ones are a fair choice of anchors: one sort for both.
        order = random_permutation(noise)
        sigma = sigma_at(self.config, epoch, progress)
        draws = {"visible": order[:, : self.visible], "sigma": torch.full((), sigma, device=batch.ids.device)}
        if self.config.mae_weight:
            draws["hidden"] = order[:, self.visible :]
        return draws

    def _draw_padded(self, ids: Tensor, mask: Tensor, seed: int, epoch: int, progress: float) -> Draws:
        noise = uniform(seed, epoch, ids, "droppos.mask", (mask.shape[1],)).masked_fill(~mask, 1.0)
        lead, length = self.backbone.lead, mask.sum(dim=1, keepdim=True)
        noise[:, :lead] = -1.0
        seen = kept_each(self.config.mask_ratio, length, floor=self.config.floor_counts).clamp(min=lead)
        told = kept_each(self.config.position_mask_ratio, seen, floor=self.config.floor_counts).clamp(min=lead)
        visible = random_permutation(noise)[:, : max(lead, self._keep(mask.shape[1], self.config.mask_ratio))]
        sigma = torch.full((), sigma_at(self.config, epoch, progress), device=ids.device)
        return {"visible": visible, "seen": seen, "told": told, "sigma": sigma}

    def _forward_padded(self, batch: Batch, draws: Draws) -> Output:
        """`forward` where the samples differ in how many tokens are seen and told."""
        visible, slot = draws["visible"], torch.arange(draws["visible"].shape[1], device=batch.ids.device)
        real, unknown = slot < draws["seen"], slot >= draws["told"]
        positions, asked = self.backbone.positions(), real & unknown
        known = positions.take(visible).forget(unknown, self.mask_token)
        features = self.backbone.encode(self.backbone.embed_at(batch.inputs, visible), known, mask=real)
        logits = self.decoder(features.patches, mask=real)
        weights = asked.float()
        if self.config.affinity is not None:
            whole, there, places = features, real, None
            if self.config.affinity == "full":
                assert batch.mask is not None
                there, places = batch.mask, visible
                with torch.no_grad():
                    whole = self.backbone.encode(self.backbone.embed(batch.inputs), positions, mask=there)
            if not self.backbone.lead:
                whole = whole._replace(patches=fill(whole.patches, there))
            weights = attentive_weights(whole, self.config.tau, places, real, self.backbone.lead) * asked
        if self.config.weights_over == "sample":
            weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-12)
        loss = dropped_loss(logits, visible, self.targets(draws["sigma"]), weights)
        metrics = {"position_accuracy": position_accuracy(logits, visible, asked)}
        return Output(loss, metrics, {"logits": logits.detach(), "places": visible})

    def forward(self, batch: Batch, draws: Draws) -> Output:
        batch = self.with_mask(batch)
        if batch.mask is not None:
            return self._forward_padded(batch, draws)
        visible, anchors = draws["visible"], self.anchors
        places = visible[:, anchors:]
        positions = self.backbone.positions()
        # Anchors stand in front, so "dropped" is the same slice for every sample, in the decoder and the loss too.
        dropped = torch.arange(self.visible, device=visible.device) >= anchors
        if self.by_cells:
            tokens = self.backbone.embed(batch.inputs)
            features = encode_cells(self.backbone, tokens, visible, dropped, self.mask_token)
        else:
            known = positions.take(visible).forget(dropped, self.mask_token)
            features = self.backbone.encode(self.backbone.embed_at(batch.inputs, visible), known)
        logits = self.decoder(join(features), start=self.backbone.num_prefix + anchors)
        weights = None
        if self.config.affinity == "full":
            # In the model's own mode: where the backbone has drop path, these features have it too.
            with torch.no_grad():
                whole = self.backbone.encode(self.backbone.embed(batch.inputs), positions)
                weights = attentive_weights(whole, self.config.tau, visible)
        elif self.config.affinity == "visible":
            weights = attentive_weights(features, self.config.tau)
        if weights is not None:
            weights = weights[:, anchors:]
            weights = weights / weights.sum(dim=1 if self.config.weights_over == "sample" else None, keepdim=True)
        loss = dropped_loss(logits, places, self.targets(draws["sigma"]), weights)
        metrics = {"position_accuracy": position_accuracy(logits, places)}
        if self.config.mae_weight:
            pixels = self._pixel_loss(batch.inputs, features, visible, draws["hidden"])
            loss = loss + self.config.mae_weight * pixels
            metrics["pixel_loss"] = pixels.detach()
        return Output(loss, metrics, {"logits": logits.detach(), "places": places})

    def targets(self, sigma: Tensor) -> Tensor:
        """The smoothed target of each place, [N, N]."""
        config = self.config
        squared, columns = config.distance == "squared", config.target_norm == "columns"
        if config.target_grid is None and not columns:
            return smoothed_targets(self.grid, sigma, squared=squared)
        grid = config.target_grid or self.grid
        return cut_targets(self.count, grid, sigma, squared=squared, columns=columns)

    def _pixel_loss(self, inputs: Tensor, features: Features, visible: Tensor, hidden: Tensor) -> Tensor:
        guesses = decode_hidden(self.pixel_decoder, features, self.pixel_token, self.places, visible, hidden)
        target = take(patchify(inputs, patch_size_of(inputs, self.grid)), hidden)
        return reconstruction_loss(guesses, target, normalise=True)

    def no_decay(self) -> set[str]:
        return {"mask_token", "pixel_token"} if self.config.mae_weight else {"mask_token"}


def sigma_at(config: DropPosConfig, epoch: int, progress: float) -> float:
    """σ of a step: linear from sigma_start to sigma_end over the run's share done, or over its epochs."""
    share = epoch_share(config.epochs, epoch, progress) if config.sigma_schedule == "epoch" else progress
    return config.sigma_start + share * (config.sigma_end - config.sigma_start)


@torch.no_grad()
def attentive_weights(
    features: Features, tau: float, visible: Tensor | None = None, real: Tensor | None = None, lead: int = 0
) -> Tensor:
    """A, [B, V] float32: softmax of cos(f_cls, f_i) / τ over the visible patches, without gradient.

    visible: [B, V] places among features.patches; None where those are the visible patches themselves. The softmax
    over all patches, gathered and renormalised, is the softmax over the visible. Without CLS the mean patch serves.
    real: [B, V] bool, False for padding, of weight 0. lead: whether the first patch is CLS.
    """
    patches = features.patches.float()
    if lead:
        prefix = patches[:, :1]
    else:
        prefix = features.prefix[:, :1].float() if features.prefix.shape[1] else patches.mean(dim=1, keepdim=True)
    likeness = F.cosine_similarity(prefix, patches, dim=-1)
    if visible is not None:
        likeness = likeness.gather(1, visible)
    if real is not None:
        likeness = likeness.masked_fill(~real, -torch.inf)
    return (likeness / tau).softmax(dim=-1)


def dropped_loss(logits: Tensor, places: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Cross entropy with smoothed targets, Σ(loss · A) / ΣA over the dropped patches.

    logits: [B, K, N], classes on the LAST axis. places: [B, K]. targets: [N, N], a row for each true place.
    weights: A [B, K], or None for the plain mean.
    """
    losses = -(targets[places] * logits.float().log_softmax(dim=-1)).sum(dim=-1)
    return losses.mean() if weights is None else (losses * weights).sum() / weights.sum().clamp(min=1e-12)
