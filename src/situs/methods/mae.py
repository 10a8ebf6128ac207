"""MAE: masked autoencoder (He et al., 2021, arXiv 2111.06377), the baseline beside MP3 and DropPos.

Encode a random quarter of the patches with their positions, put a learned mask token at each hidden position, and let
a small decoder predict the hidden pixels, each patch normalised by its own mean and variance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from situs.backbones.base import Backbone, Features, join
from situs.config import Checked
from situs.core.jigsaw import patch_size_of
from situs.core.masking import kept_of
from situs.core.permutation import random_permutation
from situs.core.position import sincos
from situs.core.random import uniform
from situs.core.selection import Selection
from situs.core.tokens import patchify, take
from situs.core.when import When
from situs.errors import SitusError, counted
from situs.limits import Count, Natural, Within
from situs.methods.base import Batch, Draws, Method, Output
from situs.methods.heads import Decoder, check_decoder
from situs.methods.retired import RETIRED


@dataclass(frozen=True)
class MAEConfig(Checked):
    """Settings of MAE. The defaults are the paper's."""

    retired: ClassVar = RETIRED["mae"]

    mask_ratio: Annotated[float, Within("(0, 1)")] = 0.75
    """Fraction of patches that are hidden from the encoder."""

    decoder_width: Count = 512
    """Width of the decoder's tokens."""

    decoder_depth: Natural = 8
    """Number of blocks of the decoder."""

    decoder_heads: Count = 16
    """Number of attention heads of the decoder."""

    def check(self) -> None:
        check_decoder(self.decoder_width, self.decoder_heads)


class MAE(Method):
    """The encoder sees the kept patches; the decoder sees every position."""

    places: Tensor
    Config: ClassVar[type[MAEConfig]] = MAEConfig
    needs: ClassVar[tuple[str, ...]] = ("images", "tokens", "take")

    def __init__(self, backbone: Backbone | nn.Module, config: MAEConfig | None = None) -> None:
        config = config or MAEConfig()
        super().__init__(backbone, config)
        backbone = self.backbone
        count = backbone.num_tokens
        if not 0 < kept_of(config.mask_ratio, count) < count:
            raise SitusError(
                f"mask_ratio={config.mask_ratio}: out of {counted(count, 'patches')}, at least one patch must "
                "be hidden, and at least one patch must stay visible",
                field="mask_ratio",
            )
        width = config.decoder_width
        self.decoder = Decoder(
            backbone.out_dim, width, config.decoder_depth, config.decoder_heads, backbone.patch_values
        )
        self.mask_token = nn.Parameter(torch.empty(width).normal_(std=0.02))
        self.register_buffer("places", sincos(backbone.grid, width), persistent=False)

    def draw(self, batch: Batch, when: When) -> Draws:
        noise = uniform(when.seed, when.epoch, batch.ids, "mae.mask", (self.backbone.num_tokens,))
        order, kept = random_permutation(noise), kept_of(self.config.mask_ratio, self.backbone.num_tokens)
        return {"kept": order[:, :kept], "dropped": order[:, kept:]}

    def forward(self, batch: Batch, draws: Draws) -> Output:
        kept, dropped = draws["kept"], draws["dropped"]
        features = self.backbone.encode_at(batch.inputs, Selection(kept))
        guesses = decode_hidden(self.decoder, features, self.mask_token, self.places, kept, dropped)
        target = patchify(batch.inputs, patch_size_of(batch.inputs, self.backbone.grid))
        loss = reconstruction_loss(guesses, take(target, dropped))
        return Output(loss, {}, {"guesses": guesses.detach(), "places": dropped})

    def no_decay(self) -> set[str]:
        return {"mask_token"}


def decode_hidden(
    decoder: Decoder, features: Features, mask_token: Tensor, places: Tensor, kept: Tensor, dropped: Tensor
) -> Tensor:
    """The predicted content of the dropped patches, [B, K, P * P * C], in the order of `dropped`.

    features: of the kept patches, in the order of `kept` [B, V]. places: the decoder's position table, [N, width].
    """
    p = features.prefix.shape[1]
    visible = decoder.enter(join(features))
    hidden = mask_token.to(visible.dtype).expand(visible.shape[0], dropped.shape[1], -1)
    # Kept first, hidden after: the positions are put in this order instead of the tokens in the positions' order.
    tokens = torch.cat([visible[:, p:], hidden], dim=1)
    tokens = tokens + take(places.to(visible.dtype)[None], torch.cat([kept, dropped], dim=1))
    return decoder.decode(torch.cat([visible[:, :p], tokens], dim=1), start=p + kept.shape[1])


def reconstruction_loss(guesses: Tensor, target: Tensor) -> Tensor:
    """Mean squared error over the hidden patches, both [B, K, P * P * C]; each target patch is normalised by its own
    mean and variance."""
    target = target.float()
    variance, mean = torch.var_mean(target, dim=-1, keepdim=True)
    return (guesses.float() - (target - mean) / (variance + 1e-6).sqrt()).square().mean()
