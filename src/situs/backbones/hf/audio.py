"""transformers' audio encoders as backbones: AST, whose tokens are patches of a spectrogram; others are refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from situs.backbones.base import Features, InputSpec
from situs.backbones.hf.image import ImageBackbone
from situs.backbones.hf.layers import EncoderBackbone, Head
from situs.core.tokens import Grid, grid_of
from situs.errors import SitusError

AST = "audio-spectrogram-transformer"

_CONVOLVED = (
    "its places come from a convolution over neighbouring tokens, so that the place of a single token cannot be "
    "taken, moved or forgotten"
)
UNPLACED: dict[str, str] = {
    "whisper": "its convolutions compute a token from frames that neighbouring tokens share, and from the "
    "padding at both ends, so that tokens reveal their places even without positions",
    **dict.fromkeys(("wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat", "data2vec-audio"), _CONVOLVED),
}
"""Config type -> why its tokens have no positions that Situs can use."""


class ASTBackbone(ImageBackbone):
    """ASTModel, ASTForAudioClassification. It takes [B, 1, mels, frames], transformers' input the other way round.

    Patches that overlap are refused, as timm's are: a neighbour's numbers would tell a token its place.
    """

    def __init__(self, model: Any, head: Head, size: tuple[int, int] | None = None) -> None:
        config = model.base_model.config
        shape, patch = (config.num_mel_bins, config.max_length), config.patch_size
        strides = config.frequency_stride, config.time_stride
        name = type(model).__name__
        if strides != (patch, patch):
            raise SitusError(
                f"{name}: its patches of {patch}x{patch} stand {strides[0]} mels and {strides[1]} frames apart; "
                "overlapping patches would reveal their places, and gaps would leave frames out; "
                "frequency_stride and time_stride must equal patch_size",
                field="backbone.model_args",
            )
        if size not in (None, shape):
            self._resize(shape, size)
        EncoderBackbone.__init__(self, model, head, grid_of(shape, patch), 2)
        self.input = InputSpec(shape, 1, (patch, patch))
        self._placeless = False

    def layers(self) -> Any:
        return self.inner.layers

    def _resize(self, old: tuple[int, int], new: tuple[int, int]) -> None:
        raise SitusError(
            f"img_size={new[0]}x{new[1]}: the table of this AST is made for {old[0]} mels and {old[1]} frames, "
            "and transformers does not resample it",
            field="img_size",
        )

    def _table_of(self, grid: Grid) -> Tensor:
        self.own_grid(grid, "transformers does not resample its table")
        return self._table()

    def prefix_tokens(self) -> Tensor:
        embeddings = self.inner.embeddings
        tokens = torch.cat([embeddings.cls_token, embeddings.distillation_token], dim=1)
        return tokens + embeddings.position_embeddings[:, :2]

    @property
    def table_prefix(self) -> int:
        return 2

    @property
    def prefix_names(self) -> tuple[str, ...]:
        return tuple(
            self.table_name.replace("position_embeddings", name) for name in ("cls_token", "distillation_token")
        )

    @property
    def head_input(self) -> str:
        return "mean of the CLS and distillation tokens"

    def pooled(self, features: Features) -> Tensor:
        pooled = ast_pooled(self.model, features)
        return self.model.classifier.layernorm(pooled) if self.num_classes else pooled


def ast_pooled(_: Any, features: Features) -> Tensor:
    """The mean of the CLS and distillation tokens."""
    return features.prefix.mean(dim=1)


def ast_classes(model: Any, features: Features) -> Tensor:
    """A norm and a linear layer on that mean."""
    return model.classifier(ast_pooled(model, features))
