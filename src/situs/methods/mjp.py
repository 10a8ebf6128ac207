"""MJP: masked jigsaw puzzle positions (Ren et al., CVPR 2023, arXiv 2205.12551), over supervised training.

Shuffle the patches of a block mask among themselves, give them one learned vector E_unk instead of their positions, and
let a small regressor predict (row, column) from the position vectors of the others (DAL), beside the cross entropy.

DAL is E ‖(i, j) - g(E_pos^{i,j})‖₁ over the places that keep their vector. g is the same for every sample and its input
is the table, so it runs once over the N rows for any batch: a sample only chooses which errors count.

In samples that differ in length, spans of tokens are shuffled instead of blocks, and DAL predicts one number. Causal
models are refused, since their mask reveals the order. The published code is in `methods.official`; its Swin targets
are off by one, ours are not. `VARIANTS` are the rows A to J of the paper's Table 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from situs.backbones.base import Backbone, Features
from situs.config import Checked
from situs.core.components import principal_guesses
from situs.core.jigsaw import move_patches, move_pixels
from situs.core.masking import jigsaw
from situs.core.permutation import random_permutation
from situs.core.position import coordinates
from situs.core.random import uniform
from situs.core.selection import Tokens, draw_region
from situs.core.tokens import take
from situs.core.when import When
from situs.errors import SitusError
from situs.limits import NotNegative, Share, Within
from situs.methods.base import Batch, Draws, Output, UnknownPosition
from situs.methods.measured import HidesPlaces
from situs.methods.retired import RETIRED
from situs.methods.supervised import label_loss

DalKind = Literal["none", "pca", "linear", "nonlinear"]

COMPONENTS = 2
"""Number of principal components for the regression by them."""


class Regressor(NamedTuple):
    """Settings of the regression. depth: linear layers of a nonlinear g, ReLU between them. fit: whether principal
    components are mapped to the grid by least squares. mean_axes: the mean over row and column, not their sum."""

    depth: int = 3
    fit: bool = True
    mean_axes: bool = False


def dal_loss(guesses: Tensor, targets: Tensor, mask: Tensor | None, *, mean_axes: bool = False) -> Tensor:
    """The L1 error of the unmasked places: a mean over each sample's, then over the batch.

    guesses: [N, 2], or [B, N, 2] where each sample has its own; targets: [N, 2]. mask: bool [B, N], True where a place
    lost its vector; None if none did.
    mean_axes: the mean over both axes instead of their sum ‖·‖₁. A sample with every place masked adds 0.
    """
    errors = (guesses - targets.to(guesses.dtype)).abs()
    errors = errors.mean(dim=-1) if mean_axes else errors.sum(dim=-1)
    if mask is None:
        return errors.mean()
    known = (~mask).to(errors.dtype)
    return ((known * errors).sum(dim=-1) / known.sum(dim=-1).clamp(min=1.0)).mean()


class Dal(nn.Module):
    """g over the backbone's table. kind: pca (no weights), linear or nonlinear."""

    def __init__(self, backbone: Backbone, kind: DalKind, regressor: Regressor) -> None:
        super().__init__()
        require_table(backbone)
        self.kind, self.fit = kind, regressor.fit
        widths = [backbone.token_dim] * (1 if kind == "linear" else regressor.depth) + [len(backbone.grid)]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths) if kind != "pca" else ():
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)

    def forward(self, table: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """table [N, D], targets [N, 2] -> guesses [N, 2], or [B, N, 2] where they depend on the mask [B, N].

        Never in half precision, which cannot distinguish 12 from 12.03.
        """
        with torch.autocast(table.device.type, enabled=False):
            if self.kind == "pca":
                table = table if table.dtype == torch.float64 else table.float()
                return principal_guesses(table, targets, COMPONENTS, fit=self.fit, mask=mask)
            first = next(self.layers.parameters())
            return self.layers(table.to(first.dtype))


def require_table(backbone: Backbone) -> None:
    """Refuses a backbone without a learned table of positions, with the reason."""
    with torch.enable_grad():
        places = backbone.positions()
    if places.table is None:
        reason = {
            "rotary": "its positions are rotations of queries and keys, so no position vector can be trained",
            "bias": "its positions are biases between pairs of tokens, so no position has a vector",
        }.get("".join(places.kinds), "it has no position table")
    elif not places.table.requires_grad:
        reason = "its position table is fixed, so a loss on it trains nothing"
    else:
        return
    raise SitusError(f"{backbone.name} does not support the loss DAL: {reason}; choose dal='none'", field="dal")


@dataclass(frozen=True)
class MJPConfig(Checked):
    """Settings of MJP. The defaults are row J of the paper's Table 4."""

    retired: ClassVar = RETIRED["mjp"]

    mask_ratio: Share = 0.03
    """γ: fraction of shuffled patches. The paper uses .03 for accuracy, and up to .27 for consistency."""

    shuffle: Literal["none", "jigsaw", "spp"] = "jigsaw"
    """What is shuffled. jigsaw: the masked patches, among themselves (JP). spp: all patches, and the pixels within
    patches (SPP). none: nothing."""

    positions: bool = True
    """Whether the model has position embeddings. False is row B of the paper's Table 4."""

    unknown: bool = True
    """Whether a learned vector E_unk replaces the position embedding of masked patches (UNK)."""

    index: Literal["none", "place", "origin"] = "none"
    """Index into a second learned position table (IDX). place: a patch's position after the shuffle, as in the
    published code. origin: its position before the shuffle; the paper's "global index" may mean this. none: no second
    table."""

    dal: DalKind = "nonlinear"
    """Regressor of the loss DAL. It predicts a patch's row and column from its position embedding. pca (without
    weights), linear (LN) or nonlinear (NLN). none: no DAL."""

    dal_weight: NotNegative = 0.01
    """λ: weight of the DAL loss."""

    pixel_grid: tuple[int, int] = (14, 14)
    """Grid of the shuffled patches, for a backbone without tokens (ResNet)."""

    label_smoothing: Annotated[float, Within("[0, 1)")] = 0.1
    """Label smoothing: probability mass that is spread over all classes. With several labels per sample, the
    mass is spread over yes and no of each class. Labels that augmentation has made soft are not smoothed again."""

    def check(self) -> None:
        if self.unknown and (not self.positions or self.shuffle == "spp"):
            allowed = "off if positions are off or all patches are shuffled"
            raise SitusError(field=("unknown", "positions", "shuffle"), value=self.unknown, allowed=allowed)
        if self.dal != "none" and not self.positions:
            raise SitusError(field=("dal", "positions"), value=self.dal, allowed="'none' without positions")


class MJP(HidesPlaces):
    """`draw` chooses mask and shuffle; `forward` reads like Figure 2(d). Without tokens, pixels are moved."""

    Config: ClassVar[type[MJPConfig]] = MJPConfig
    needs: ClassVar[tuple[str, ...]] = ()
    needs_targets: ClassVar[tuple[str, ...]] = ("label",)
    reads_text: ClassVar[bool] = True
    regressor: ClassVar[Regressor] = Regressor()
    unknown_std: ClassVar[float] = 0.02  # deviation of E_unk at the start

    def __init__(self, backbone: Backbone | nn.Module, config: MJPConfig | None = None) -> None:
        config = config or self.Config()
        super().__init__(backbone, config)
        backbone = self.backbone
        backbone.ready_to_shuffle()
        if backbone.num_tokens == 0 and (config.unknown or config.dal != "none" or config.index != "none"):
            raise SitusError(
                f"{backbone.name} has no positions to hide or to predict: choose unknown=False, dal='none' and"
                " index='none'; then MJP only shuffles blocks of pixels",
                field=("unknown", "dal", "index"),
            )
        self.grid = backbone.grid if backbone.num_tokens else config.pixel_grid
        if config.shuffle == "spp":
            self._pixels()
        if config.unknown:
            self.unknown = nn.Parameter(torch.empty(backbone.token_dim).normal_(std=self.unknown_std))
        if config.index != "none":
            self.index_table = nn.Parameter(torch.zeros(backbone.num_tokens, backbone.token_dim))
        self.dal = None if config.dal == "none" else Dal(backbone, config.dal, self.regressor)

    @classmethod
    def uses_positions(cls, config: MJPConfig) -> bool:
        return config.positions

    def draw(self, batch: Batch, when: When) -> Draws:
        """mask: [B, N] bool. index: [B, N], pixels: [B, P * P], orders as in `core.jigsaw`. dal_weight: λ, a scalar."""
        config, draws = self.config, Draws()
        if config.shuffle == "spp":
            for name, count in (("index", math.prod(self.grid)), ("pixels", self._pixels())):
                noise = uniform(when.seed, when.epoch, batch.ids, f"mjp.{name}", (count,))
                draws[name] = random_permutation(noise)
        elif config.shuffle == "jigsaw" or config.unknown:
            draws["mask"] = mask = self.draw_mask(batch, when)
            if config.shuffle == "jigsaw":
                draws["index"] = jigsaw(mask, self.draw_order(batch.ids, mask.shape[1], when))
        if self.dal is not None:
            draws["dal_weight"] = torch.full((), self.dal_weight(when), device=batch.ids.device)
        return draws

    def draw_mask(self, batch: Batch, when: When) -> Tensor:
        """The patches that are shuffled, [B, N] bool."""
        tokens, share = self.tokens(batch), self.config.mask_ratio
        return draw_region(when.seed, when.epoch, batch.ids, "mjp.mask", tokens, self.grid, share)

    def draw_order(self, ids: Tensor, count: int, when: When) -> Tensor:
        """Noise [B, N] whose order shuffles the patches."""
        return uniform(when.seed, when.epoch, ids, "mjp.order", (count,))

    def dal_weight(self, when: When) -> float:
        """λ of a step."""
        return self.config.dal_weight

    def _pixels(self) -> int:
        """Pixels of a patch, for SPP."""
        if self.backbone.input.patch is None:
            raise SitusError(f"shuffle='spp': {self.backbone.name} has no patches of a fixed size", field="shuffle")
        return math.prod(self.backbone.input.patch)

    def forward(self, batch: Batch, draws: Draws) -> Output:
        inputs, mask, tokens = batch.inputs, draws.get("mask"), self.tokens(batch)
        if "pixels" in draws:
            inputs = move_pixels(inputs, self.grid, draws["pixels"])
        if self.backbone.num_tokens:
            hidden = mask if self.config.unknown else None
            features = self.encode(inputs, hidden, draws.get("index"), tokens)
            logits = self.backbone.classify(features)
        else:
            logits = self.backbone(move_patches(inputs, self.grid, draws["index"]) if "index" in draws else inputs)
        loss, metrics = label_loss(logits, batch, self.config.label_smoothing)
        if self.dal is not None:
            regression = self.localise(None if mask is None else tokens.or_missing(mask))
            loss = loss + draws["dal_weight"] * regression
            metrics["dal"] = regression.detach()
        return Output(loss, metrics, {"logits": logits.detach()})

    def encode(
        self, inputs: Tensor, hidden: Tensor | None = None, index: Tensor | None = None, tokens: Tokens | None = None
    ) -> Features:
        """Features of inputs [B, C, H, W] whose positions at `hidden` [B, N] are replaced by E_unk.

        index: [B, N], the shuffle of the patches; None if the inputs are already shuffled, or not at all. tokens: of
        the batch.
        """
        tokens = tokens or self.backbone.tokens(inputs)
        z = self.backbone.embed(inputs)
        # Patches are embedded one by one, so moving tokens is moving patches, and copies far fewer numbers.
        if self.config.index == "origin":
            z = z + self.index_table[: z.shape[1]].to(z.dtype)
        if index is not None:
            z = take(z, index)
        if self.config.index == "place":
            z = z + self.index_table[: z.shape[1]].to(z.dtype)
        places = self.backbone.positions_of(tokens) if self.config.positions else None
        if places is not None and hidden is not None:
            places = places.forget(hidden, self.unknown if self.config.unknown else None)
        return self.encode_tokens(z, tokens, places)

    def localise(self, mask: Tensor | None) -> Tensor:
        """L_DAL over the positions that keep their vector. mask: [B, N], or None for all positions.

        Without E_unk every position keeps its vector, masked or not, and the loss runs over all.
        """
        assert self.dal is not None
        mask = mask if self.config.unknown else None
        table = self.backbone.positions().table
        assert table is not None  # `Dal` has refused a backbone without one
        targets = coordinates(self.grid, table.device).float()
        if mask is not None:  # rows behind the longest sentence of the batch do not count
            mask = nn.functional.pad(mask, (0, len(table) - mask.shape[1]), value=True)
        return dal_loss(self.dal(table, targets, mask), targets, mask, mean_axes=self.regressor.mean_axes)

    def unknown_position(self) -> UnknownPosition | None:
        words = "the vector E_unk that this MJP run learned"
        return UnknownPosition(self.unknown.detach(), words) if self.config.unknown else None

    @property
    def hidden_share(self) -> float:
        return self.config.mask_ratio

    def table_loss(self, hidden: Tensor, when: When) -> Tensor | None:
        """λ DAL."""
        if self.dal is None:
            return None
        weight = torch.full((), self.dal_weight(when), device=hidden.device)  # rounded as `draw` does
        return weight * self.localise(hidden)

    def no_decay(self) -> set[str]:
        parameters = {"unknown": self.config.unknown, "index_table": self.config.index != "none"}
        return {name for name, exists in parameters.items() if exists}


_PLAIN = MJPConfig(shuffle="none", unknown=False, dal="none")
VARIANTS: dict[str, MJPConfig] = {
    "A": _PLAIN,
    "B": replace(_PLAIN, positions=False),
    "C": replace(_PLAIN, shuffle="spp"),
    "D": replace(_PLAIN, dal="nonlinear"),
    "E": replace(_PLAIN, shuffle="jigsaw"),
    "F": replace(_PLAIN, shuffle="jigsaw", index="place"),
    "G": replace(_PLAIN, shuffle="jigsaw", unknown=True),
    "H": replace(_PLAIN, shuffle="jigsaw", unknown=True, dal="pca"),
    "I": replace(_PLAIN, shuffle="jigsaw", unknown=True, dal="linear"),
    "J": MJPConfig(),
}
"""Table 4: A plain, B without positions, C SPP, D DAL, E JP, F + IDX, G + UNK, H to J + DAL (PCA, LN, NLN)."""
