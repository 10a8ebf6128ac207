"""transformers' encoders of images as backbones: ViT, DINOv2 with and without registers, and AST, whose tokens are
patches of a spectrogram; other audio models are refused."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

from situs.backbones.base import Features, InputSpec, join
from situs.backbones.config import PositionKind
from situs.backbones.hf.layers import EncoderBackbone, Head, fit, own_state
from situs.backbones.weights import fill_table
from situs.core.position import Positions, resample_table
from situs.core.tokens import Grid, grid_of, pair
from situs.errors import SitusError


class ImageBackbone(EncoderBackbone):
    """What ViT and DINOv2 share: a patch convolution, a table whose row 0 belongs to CLS, pre-norm layers."""

    def __init__(self, model: Any, head: Head, size: tuple[int, int] | None = None) -> None:
        inner = model.base_model
        patches = inner.embeddings.patch_embeddings
        old, new = pair(patches.image_size), size or pair(patches.image_size)
        registers = getattr(inner.config, "num_register_tokens", 0)
        super().__init__(model, head, grid_of(new, patches.patch_size), 1 + registers)
        self.input = InputSpec(new, patches.num_channels, pair(patches.patch_size))
        self._placeless = False
        self._resize(old, new)

    def _table(self) -> Tensor:
        """The rows of CLS and of all patches, [1 + N, D]: a view of the parameter where it can be one."""
        return self.inner.embeddings.position_embeddings[0]

    def _table_of(self, grid: Grid) -> Tensor:
        """The rows of CLS and of another grid's patches, as transformers' own `interpolate_pos_encoding` makes them."""
        if self.table_grid[0] != self.table_grid[1]:
            self.own_grid(grid, "transformers expects a square position table, but this table is not square")
        assert self.input.patch is not None
        height, width = (count * side for count, side in zip(grid, self.input.patch, strict=True))
        shape = torch.empty(1, 1 + grid[0] * grid[1], self.dim, device="meta")
        return self.inner.embeddings.interpolate_pos_encoding(shape, height, width)[0]

    @abstractmethod
    def _resize(self, old: tuple[int, int], new: tuple[int, int]) -> None:
        """Resamples the table for another image size."""

    def _replace_table(self, patches: Tensor, size: tuple[int, int]) -> None:
        """A new table in the wrapped model, and its image size wherever transformers keeps it."""
        embeddings = self.inner.embeddings
        old = embeddings.position_embeddings
        table = torch.cat([old.detach()[:, :1], patches.detach().unsqueeze(0)], dim=1)
        embeddings.position_embeddings = nn.Parameter(table, requires_grad=old.requires_grad)
        embeddings.patch_embeddings.image_size = size
        embeddings.patch_embeddings.num_patches = patches.shape[0]
        for config in (self.model.config, self.inner.config):
            config.image_size = size[0] if size[0] == size[1] else list(size)

    @torch.no_grad()
    def erase_positions(self) -> tuple[str, ...]:
        self.inner.embeddings.position_embeddings[:, self.table_prefix :].zero_()
        return ()

    @property
    def num_classes(self) -> int:
        heads = ("ForImageClassification", "ForAudioClassification")
        return self.model.config.num_labels if self.name.endswith(heads) else 0

    @property
    def table_name(self) -> str:
        inside = "" if self.model is self.inner else f"{self.model.base_model_prefix}."
        return f"{inside}embeddings.position_embeddings"

    @property
    def prefix_names(self) -> tuple[str, ...]:
        return (self.table_name.replace("position_embeddings", "cls_token"),)

    @property
    def table_prefix(self) -> int:
        return 1  # registers have no rows

    def renamed(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return own_state(self.model, state)

    def embed(self, x: Tensor) -> Tensor:
        convolution = self.inner.embeddings.patch_embeddings.projection
        return convolution(self.checked_images(x, convolution.weight.dtype)).flatten(2).transpose(1, 2)

    def positions(self, grid: Grid | None = None) -> Positions:
        if self._placeless:
            return Positions()
        return Positions(
            table=(self._table() if grid in (None, self.grid) else self._table_of(grid))[self.table_prefix :]
        )

    def set_positions(self, kind: PositionKind) -> None:
        """Initialises the model's own table. none: with fixed zeros, which its own forward adds without effect.

        The row of CLS is no place: it is 0 where the others are fixed, and CLS itself is learned.
        """
        table = self.inner.embeddings.position_embeddings
        if kind == "relative":
            raise SitusError(
                f"positions='relative': {self.name} has no relative bias; choose learned, sincos or none",
                field="positions",
            )
        if kind in ("sincos", "learned_sincos") and self.table_grid != self.grid:
            raise SitusError(
                f"positions={kind!r}: needs a square image. For {self.grid[0]}x{self.grid[1]} patches, transformers "
                f"would resample the square position table of {self.name}, and thus change its sine and cosine values; "
                "choose a square image, or positions='learned' or 'none'",
                field="img_size",
            )
        fill_table(table, kind, self.grid)
        self._placeless = kind == "none"

    def fitted(self, positions: Positions | None, count: int) -> Positions:
        return fit(positions, count, None, ("table",), self.name)

    def prefix_tokens(self) -> Tensor:
        embeddings = self.inner.embeddings
        return embeddings.cls_token + embeddings.position_embeddings[:, :1]

    def before_blocks(self, z: Tensor) -> Tensor:
        return self.inner.embeddings.dropout(z)

    def final_norm(self, z: Tensor) -> Tensor:
        return self.inner.layernorm(z)


class ViTBackbone(ImageBackbone):
    """ViTModel, ViTForImageClassification. Another image size gives the model a resampled table."""

    def layers(self) -> Any:
        return self.inner.layers

    def _resize(self, old: tuple[int, int], new: tuple[int, int]) -> None:
        if old == new:
            return
        embeddings = self.inner.embeddings
        patch_size = embeddings.patch_embeddings.patch_size
        rows = resample_table(embeddings.position_embeddings.detach()[0, 1:], grid_of(old, patch_size), self.grid)
        self._replace_table(rows, new)
        embeddings.image_size = new


class Dinov2Backbone(ImageBackbone):
    """Dinov2Model, Dinov2ForImageClassification.

    transformers resamples DINOv2's table in every forward and reads it as a square, so we do the same through
    its own function: a square image size replaces the table once, a rectangular one leaves the square table
    in the model and `positions()` resamples it, with gradients. Either way the bare model agrees with us.
    """

    def layers(self) -> Any:
        return self.inner.encoder.layer

    @property
    def table_grid(self) -> Grid:
        side = isqrt(self.inner.embeddings.position_embeddings.shape[1] - 1)
        return side, side

    def _table(self) -> Tensor:
        return self._table_of(self.grid)

    def _resize(self, old: tuple[int, int], new: tuple[int, int]) -> None:
        count = self.inner.embeddings.patch_embeddings.num_patches
        if old[0] != old[1] or (old != new and isqrt(count) ** 2 != count):
            raise SitusError(
                f"image_size={old[0]}x{old[1]}: must be square in the config, because transformers reads "
                f"the position table of {self.name} as a square; to use images that are not square, keep a square "
                "image_size in the config and set img_size",
                field="img_size",
            )
        if old != new and new[0] == new[1]:
            self._replace_table(self._table()[1:], new)


class Dinov2RegistersBackbone(Dinov2Backbone):
    """Dinov2WithRegistersModel and its classifier: registers come after CLS, without rows in the table."""

    def prefix_tokens(self) -> Tensor:
        return torch.cat([super().prefix_tokens(), self.inner.embeddings.register_tokens], dim=1)


def vit_pooled(model: Any, features: Features) -> Tensor:
    """The pooler's output, or CLS where the model has none."""
    return features.prefix[:, 0] if model.pooler is None else model.pooler(join(features))


def vit_classes(model: Any, features: Features) -> Tensor:
    """A linear layer on CLS."""
    return model.classifier(features.prefix[:, 0])


def dinov2_pooled(_: Any, features: Features) -> Tensor:
    """CLS."""
    return features.prefix[:, 0]


def dinov2_classes(model: Any, features: Features) -> Tensor:
    """A linear layer on CLS and the mean patch."""
    return model.classifier(torch.cat([features.prefix[:, 0], features.patches.mean(dim=1)], dim=1))


AST = "audio-spectrogram-transformer"

_CONVOLVED = (
    "its positions come from a convolution over neighbouring tokens, so Situs cannot take, move or "
    "remove the position of a single token"
)
UNPLACED: dict[str, str] = {
    "whisper": "its convolutions also use the frames of neighbouring tokens, and the padding at both ends. "
    "Tokens therefore reveal their order even without position "
    "embeddings",
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
                f"{name}: frequency_stride and time_stride must equal patch_size ({patch}), not {strides[0]} and "
                f"{strides[1]}. Overlapping patches would reveal their positions, and gaps would leave frames out",
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
            f"img_size={new[0]}x{new[1]}: must be {old[0]}x{old[1]} (mels x frames), because transformers does not "
            "resample the position table of an AST",
            field="img_size",
        )

    def _table_of(self, grid: Grid) -> Tensor:
        self.own_grid(grid, "transformers does not resample the position table of this model")
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
