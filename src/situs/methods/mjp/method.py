"""MJP: masked jigsaw puzzle positions (Ren et al., CVPR 2023, arXiv 2205.12551), over supervised training.

Shuffle the patches of a block mask among themselves, give them one learned vector E_unk instead of their places, and
let a small regressor read (row, column) off the position vectors of the others (DAL), beside the cross entropy.

Of sentences spans of words are shuffled instead of blocks of patches, among the real tokens and without [CLS], and DAL
reads off one number, the place in the sentence. Causal models are refused, for their mask gives the order away.

Deviations, each a field of the config: `MJPConfig.paper()` is the text, `MJPConfig.official()` what the published code
runs (its Swin targets are off by one: ours are not). `VARIANTS` are the rows A to J of the paper's Table 4.
"""

from __future__ import annotations

import math
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from situs.backbones.base import Backbone, Features
from situs.core.jigsaw import move_patches, move_pixels
from situs.core.masking import jigsaw
from situs.core.permutation import random_permutation
from situs.core.random import uniform
from situs.core.selection import Tokens, draw_region
from situs.core.tokens import take
from situs.errors import SitusError
from situs.methods.base import Batch, Draws, Method, Output, UnknownPosition
from situs.methods.mjp.config import MJPConfig, dal_weight_at
from situs.methods.mjp.dal import Dal, dal_loss, dal_targets
from situs.methods.supervised import label_loss


class MJP(Method):
    """`draw` chooses mask and shuffle; `forward` reads like Figure 2(d). Without tokens, pixels are moved."""

    Config: ClassVar[type[MJPConfig]] = MJPConfig
    needs: ClassVar[tuple[str, ...]] = ()
    needs_targets: ClassVar[tuple[str, ...]] = ("label",)
    reads_text: ClassVar[bool] = True

    def __init__(self, backbone: Backbone | nn.Module, config: MJPConfig | None = None) -> None:
        config = config or MJPConfig()
        super().__init__(backbone, config)
        backbone = self.backbone
        backbone.require("rows" if backbone.input.words else "images")
        if backbone.input.words and (config.shuffle == "spp" or config.rule == "official" or config.draw_per != "sample"):
            given = f"shuffle={config.shuffle!r}, rule={config.rule!r}, draw_per={config.draw_per!r}"
            said = f"{given}: are for patches; words are shuffled in spans, with jigsaw, paper and sample"
            raise SitusError(said, field=("shuffle", "rule", "draw_per"))
        if backbone.num_tokens == 0 and (config.unknown or config.dal != "none" or config.index != "none"):
            raise SitusError(
                f"{backbone.name} has no positions to hide or to regress from: choose unknown=False, dal='none' and"
                " index='none', and only its pixels are shuffled",
                field=("unknown", "dal", "index"),
            )
        self.grid = backbone.grid if backbone.num_tokens else config.pixel_grid
        if config.rule == "official" and config.shuffle != "spp" and min(self.grid) == 1:
            raise SitusError(
                f"rule='official': a single line of {max(self.grid)} places holds no smaller block, so that nothing "
                "would ever be shuffled; rule='paper' masks single places there",
                field="rule",
            )
        if config.table_std is not None:
            _fill_table(backbone, config.table_std)
        if config.unknown:
            self.unknown = nn.Parameter(torch.empty(backbone.token_dim).normal_(std=config.unknown_std))
        if config.index != "none":
            self.index_table = nn.Parameter(torch.zeros(backbone.num_tokens, backbone.token_dim))
        self.dal = None
        if config.dal != "none":
            self.dal = Dal(backbone, config.dal, config.dal_depth, config.dal_components, config.dal_fit)

    @classmethod
    def uses_positions(cls, config: MJPConfig) -> bool:
        return config.positions

    def draw(self, batch: Batch, *, seed: int, epoch: int, progress: float = 0.0) -> Draws:
        """mask: [B, N] bool. index: [B, N], pixels: [B, P * P], orders as in `core.jigsaw`. dal_weight: λ, a scalar.

        Each stands there where the config uses it. Where chance or epoch says no, the mask is empty and the orders
        are the identity, so that one graph serves both.
        """
        ids, config, draws, tokens = batch.ids, self.config, Draws(), self.tokens(batch)
        names = ids if config.draw_per == "sample" else ids[:1]
        fires = uniform(seed, epoch, names, "mjp.chance", (1,)) < (config.chance if epoch >= config.start_epoch else 0)
        if config.shuffle == "spp":
            for name, count in (("index", math.prod(self.grid)), ("pixels", self._pixels())):
                draws[name] = random_permutation(uniform(seed, epoch, names, f"mjp.{name}", (count,)))
        elif config.shuffle == "jigsaw" or config.unknown:
            share, rule = config.mask_ratio, config.rule
            mask = draw_region(seed, epoch, names, "mjp.mask", tokens, self.grid, share, rule=rule)
            draws["mask"] = mask & fires
            if config.shuffle == "jigsaw":
                draws["index"] = jigsaw(mask, uniform(seed, epoch, names, "mjp.order", mask.shape[1:]))
        for name in {"index", "pixels"} & draws.keys():
            draws[name] = torch.where(fires, draws[name], torch.arange(draws[name].shape[1], device=ids.device))
        draws = {name: value.expand(ids.shape[0], -1).contiguous() for name, value in draws.items()}
        if self.dal is not None:
            draws["dal_weight"] = torch.full((), dal_weight_at(config, epoch, progress), device=ids.device)
        return draws

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
            logits = self.backbone.classify(features, tokens.real)
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
        """Features of inputs [B, C, H, W] whose places at `hidden` [B, N] are unknown: the mask is *told*.

        index: [B, N], where the patches are still to be shuffled; None where the inputs already are, or not at all.
        tokens: of the batch.
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
        return self.backbone.encode(z, places, mask=tokens.real)

    def localise(self, mask: Tensor | None) -> Tensor:
        """L_DAL over the places that keep their vector. mask: [B, N], or None for all places.

        Without E_unk every place keeps it, masked or not, and the loss runs over all.
        """
        assert self.dal is not None
        mask = mask if self.config.unknown else None
        table = self.backbone.positions().table
        assert table is not None  # `Dal` has refused a backbone without one
        targets = dal_targets(self.grid, self.config.dal_normalise, table.device)
        if mask is not None and mask.shape[1] < len(table):  # those behind the longest sentence here have no say
            mask = nn.functional.pad(mask, (0, len(table) - mask.shape[1]), value=True)
        return dal_loss(self.dal(table, targets, mask), targets, mask, mean_axes=self.config.dal_mean)

    def unknown_position(self) -> UnknownPosition | None:
        said = "the vector E_unk that this MJP run learned"
        return UnknownPosition(self.unknown.detach(), said) if self.config.unknown else None

    @property
    def hidden_share(self) -> float:
        return self.config.mask_ratio

    def at_hidden_share(self, share: float) -> Self:
        return self.under(mask_ratio=share)

    def table_loss(self, hidden: Tensor, *, seed: int, epoch: int) -> Tensor | None:
        """λ DAL."""
        if self.dal is None:
            return None
        weight = torch.full((), dal_weight_at(self.config, epoch, 0.0), device=hidden.device)  # rounded as `draw` does
        return weight * self.localise(hidden)

    def no_decay(self) -> set[str]:
        held = {"unknown": self.config.unknown, "index_table": self.config.index != "none"}
        return {name for name, there in held.items() if there}

    def decayed(self) -> set[str]:
        tables = {f"backbone.{name}" for name, role in self.backbone.roles().items() if role.part == "table"}
        return {*tables, "unknown"} if self.config.decay_positions else set()


@torch.no_grad()
def _fill_table(backbone: Backbone, std: float) -> None:
    """The rows of the places, and those of CLS and its like where they stand in the same table."""
    table = backbone.positions().table if backbone.num_tokens else None
    if table is None:
        return
    table.normal_(std=std)
    roles = backbone.roles()
    for name, parameter in backbone.named_parameters():
        if roles[name].part == "table" and parameter.shape[-2] == backbone.num_prefix + backbone.num_tokens:
            parameter[..., : backbone.num_prefix, :].normal_(std=std)
