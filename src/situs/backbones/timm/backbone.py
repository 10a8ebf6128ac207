"""timm's models as backbones. Every class is exact: a subclass we have not read is refused by name."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, ClassVar

import torch
from timm.layers.patch_embed import PatchEmbed
from timm.layers.pos_embed_sincos import RotaryEmbeddingCat
from timm.models import (
    beit,
    deit,
    eva,
    resnet,
    swin_transformer,
    swin_transformer_v2,
    vision_transformer,
    vision_transformer_relpos,
)
from torch import Tensor, nn
from torch.nn import functional as F

from situs.backbones.base import Backbone, Features, InputSpec, Level, WholeBackbone, join, refuses_tokens
from situs.backbones.block import Block, HeadTable, Stream, Taps
from situs.backbones.layout import LayoutBuilder, Role, roles_of
from situs.backbones.timm.blocks import NAMES, bias_tables, check_blocks, read_block
from situs.core.masking import one_of_cells
from situs.core.permutation import random_permutation
from situs.core.position import PairBias, Positions, resample_table
from situs.core.selection import Context, Selection, Tokens
from situs.core.tokens import Grid, grid_of, mask_of, patchify, take
from situs.errors import SitusError


class TimmBackbone(Backbone):
    """What timm's transformers share: a final norm, and a head that reads their own form of the sequence."""

    @property
    def num_classes(self) -> int:
        return self.model.num_classes

    def sequence(self, features: Features) -> Tensor:
        """What timm's own head is given."""
        return join(features)

    def final_norm(self, z: Tensor) -> Tensor:
        return self.model.norm(z)

    def head(self, features: Features) -> Tensor:
        return self.model.forward_head(self.sequence(features))

    def pooled(self, features: Features) -> Tensor:
        return self.model.forward_head(self.sequence(features), pre_logits=True)

    @property
    def head_input(self) -> str:
        if getattr(self.model, "dist_token", None) is not None:
            return "mean of the CLS and distillation tokens"
        words = {"token": "CLS token", "avg": "mean of the patches", "max": "maximum over the patches"}
        return words.get(self.model.global_pool, f"patches pooled by {self.model.global_pool!r}")

    def read(self, layer: nn.Module) -> Block:
        return read_block(layer)

    def roles(self) -> dict[str, Role]:
        return roles_of(self, self.block_modules(), NAMES)


class FlatBackbone(TimmBackbone):
    """What timm's flat transformers share: one sequence, prefix tokens in front, blocks we run ourselves."""

    def __init__(self, model: nn.Module, name: str) -> None:
        inner: Any = model
        check_stem(name, inner.patch_embed)
        check_blocks(name, inner.blocks)
        height, width = inner.patch_embed.grid_size
        super().__init__(model, name, (height, width), inner.embed_dim, inner.num_prefix_tokens, len(inner.blocks))
        self.input = _images_of(inner.patch_embed)

    def embed(self, x: Tensor) -> Tensor:
        return self._embed(x, None)

    def embed_at(self, x: Tensor, index: Tensor) -> Tensor:
        return self._embed(x, index)

    def embed_sized(self, x: Tensor) -> tuple[Tensor, Positions, Grid]:
        grid = grid_of((x.shape[-2], x.shape[-1]), self.model.patch_embed.patch_size)
        return self._embed(x, None, any_size=True), self.positions(None if grid == self.grid else grid), grid

    def _embed(self, x: Tensor, index: Tensor | None, *, any_size: bool = False) -> Tensor:
        stem = self.model.patch_embed
        x = self.checked_images(x, stem.proj.weight.dtype, any_size=any_size)
        # A kernel as large as its stride sees each patch once: one matrix product, without the layouts that a
        # convolution asks for on its way there and back, and over the patches that are asked for alone.
        patches = patchify(x, stem.patch_size)
        patches = patches if index is None else take(patches, index)
        weight = stem.proj.weight.permute(0, 2, 3, 1).flatten(1)
        return stem.norm(F.linear(patches, weight, stem.proj.bias))

    def before_blocks(self, z: Tensor) -> Tensor:
        return self.model.norm_pre(self.model.pos_drop(z))

    def layers(self) -> Sequence[nn.Module]:
        return self.model.blocks

    def one_block_args(self) -> dict[str, Any]:
        return {"depth": 1}


class VitBackbone(FlatBackbone):
    """VisionTransformer and its distilled DeiT: a learned table, with or without rows for the prefix tokens."""

    undropped: ClassVar[type] = nn.Identity
    """The module that timm uses if there is no patch dropout."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__(model, name)
        if type(self.model.patch_drop) is not self.undropped:
            reason = f"{name}: patch_drop_rate must be 0, because the training method chooses the tokens"
            raise SitusError(reason, field="backbone.model_args")

    def _prefix_rows(self) -> int:
        """How many rows of the table belong to prefix tokens."""
        return 0 if self.model.no_embed_class else self.num_prefix

    def prefix_tokens(self) -> Tensor:
        tokens = [token for name in self.prefix_names if (token := getattr(self.model, name, None)) is not None]
        prefix = torch.cat(tokens, dim=1)
        if self.model.pos_embed is not None and self._prefix_rows():
            prefix = prefix + self.model.pos_embed[:, : self.num_prefix]
        return prefix

    def positions(self, grid: Grid | None = None) -> Positions:
        table = self.model.pos_embed
        if table is None:
            return Positions()
        return Positions(table=resample_table(table[0, self._prefix_rows() :], self.grid, grid or self.grid))


class EvaBackbone(VitBackbone):
    """Eva: EVA-02 (table and rotation), axial and mixed RoPE ViTs, DINOv3."""

    undropped = type(None)

    def positions(self, grid: Grid | None = None) -> Positions:
        if self.model.rope is None:
            return super().positions(grid)
        turn = self._rotation(grid)
        # Axial: [N, 2d], one for all; mixed: [L, H, N, 2d], learned for each layer and head.
        rotary = turn.unsqueeze(1) if self.model.rope_mixed else turn.view(1, 1, 1, *turn.shape)
        return Positions(table=super().positions(grid).table, rotary=rotary)

    def parts(self) -> list[Block]:
        if (rope := self.model.rope) is None:
            return super().parts()
        # Mixed rotations have learned frequencies [2, L, H, d / 2], one for each layer and head.
        tables = [(HeadTable(rope.freqs, 2, (1, n)),) if self.model.rope_mixed else () for n in range(self.depth)]
        return [b.attending(rotary=True, tables=table) for b, table in zip(super().parts(), tables, strict=True)]

    def _rotation(self, grid: Grid | None) -> Tensor:
        rope = self.model.rope
        if self.model.rope_mixed and rope.t_x is not None:  # timm turns them in float32, whatever the model is in
            rope.t_x, rope.t_y = rope.t_x.float(), rope.t_y.float()
        if grid in (None, self.grid):
            return rope.get_embed(shape=list(self.grid)) if self.model.dynamic_img_size else rope.get_embed()
        if isinstance(rope, RotaryEmbeddingCat) and rope.bands is None:
            # It holds the rotations of its own grid alone, and makes them anew only in place.
            rope = copy.deepcopy(rope)
            rope.update_feat_shape(list(grid))
            return rope.get_embed()
        return rope.get_embed(shape=list(grid))


class RelPosBackbone(FlatBackbone):
    """VisionTransformerRelPos: a relative bias per layer, or one shared by all; no table."""

    refusals: ClassVar[dict[str, str]] = {
        "rows": "its relative bias would have to be permuted too, and a permuted bias reveals the order"
    }

    def prefix_tokens(self) -> Tensor:
        return self.model.cls_token

    def before_blocks(self, z: Tensor) -> Tensor:
        return z

    def positions(self, grid: Grid | None = None) -> Positions:
        self.own_grid(grid, "its relative bias covers only the offsets of its own grid")
        return Positions(bias=PairBias(self.bias_values(), self.num_prefix))

    def bias_values(self) -> Tensor:
        """[L or 1, H, S, S]"""
        shared = self.shared_bias()
        modules = [block.attn.rel_pos for block in self.model.blocks] if shared is None else [shared]
        return torch.cat([module.get_bias() for module in modules])

    def shared_bias(self) -> Any:
        """What makes the bias of all layers, where they share one."""
        return self.model.shared_rel_pos

    def parts(self) -> list[Block]:
        parts, shared = super().parts(), bias_tables(self.shared_bias())
        return [b.attending(tables=b.attention.tables + shared, one_order=True) for b in parts] if shared else parts

    @torch.no_grad()
    def erase_positions(self) -> tuple[str, ...]:
        for name, parameter in self.model.named_parameters():
            # A table of biases, or the last layer of the small network that computes them.
            if name.endswith("relative_position_bias_table") or "rel_pos.mlp.fc2." in name:
                parameter.zero_()
        bias = self.positions().bias
        return ("bias",) if bias is not None and bias.values.any() else ()


class BeitBackbone(RelPosBackbone):
    """Beit: a relative bias of each layer, with entries of their own for CLS; all may add one that they share."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__(model, name)
        if self.model.pos_embed is not None or self.model.blocks[0].attn.window_size is None:
            reason = (
                f"{name}: use_rel_pos_bias must be True and use_abs_pos_emb must be False, as in every BEiT of timm"
            )
            raise SitusError(reason, field="backbone.model_args")

    def bias_values(self) -> Tensor:
        bias, shared = (torch.cat([block.attn._get_rel_pos_bias() for block in self.model.blocks]), self.shared_bias())
        return bias if shared is None else bias + shared()

    def shared_bias(self) -> Any:
        return self.model.rel_pos_bias

    def before_blocks(self, z: Tensor) -> Tensor:
        return self.model.pos_drop(z)


class SwinBackbone(TimmBackbone):
    """SwinTransformer and its second version, optionally with an absolute table.

    timm's Swin has no absolute table, so ours is a parameter of this wrapper: such a model exports its timm part to
    timm, and the table with it only to Situs. `positions=None` leaves the table out; the windows' own bias and
    shifts belong to the blocks and stay, so a Swin always knows something about positions.
    """

    entry = "run_grid"
    refusals: ClassVar[dict[str, str]] = {
        "context": "its window attention needs every token of the grid",
        "take": "its windows and merges need the whole grid",
        "rows": "its windows, shifts and merges depend on the position of a token",
        "depths": "its merges change grid and width, and its final norm fits only the last stage",
    }

    def __init__(self, model: nn.Module, name: str, table: Tensor | None = None, *, learned: bool = True) -> None:
        inner: Any = model
        check_blocks(name, [block for stage in inner.layers for block in stage.blocks])
        height, width = inner.patch_embed.grid_size
        depth = sum(len(stage.blocks) for stage in inner.layers)
        super().__init__(model, name, (height, width), inner.patch_embed.proj.out_channels, 0, depth)
        self.input = _images_of(inner.patch_embed)
        self.table = None if table is None else nn.Parameter(table, requires_grad=learned)

    @property
    def out_grid(self) -> Grid:
        height, width = self.grid
        for _ in self.model.layers[1:]:
            height, width = -(-height // 2), -(-width // 2)
        return height, width

    @property
    def out_dim(self) -> int:
        return self.model.num_features

    def levels(self) -> tuple[Level, ...]:
        ends = accumulate(len(stage.blocks) for stage in self.model.layers)
        return tuple(Level(end, stage, self.dim * 2**stage) for stage, end in enumerate(ends))

    def embed(self, x: Tensor) -> Tensor:
        stem = self.model.patch_embed
        x = self.checked_images(x, stem.proj.weight.dtype)
        return stem(x).flatten(1, 2)

    def positions(self, grid: Grid | None = None) -> Positions:
        self.own_grid(grid, "its windows and their masks are made for its own grid")
        return Positions(table=self.table, rigid=self.refusals["take"])

    def assemble(self, tokens: Tensor, positions: Positions | None, mask: Tensor | None = None) -> Stream:
        if mask is not None:
            raise SitusError(f"{self.name}: takes images, so a padding mask does not apply")
        return super().assemble(tokens, positions)

    def ready_to_select(self, kept: int) -> None:
        enable_cells(self)
        if 4 * kept != math.prod(self.out_grid):
            reason = f"mask_ratio: must be 0.75 on {self.name}, which sees one patch of each 2x2 cell"
            raise SitusError(reason, field="mask_ratio")

    def shuffle(self, noise: Tensor, tokens: Tokens) -> Tensor:
        """One of each 2x2 cell first."""
        chosen = mask_of(one_of_cells(noise, self.out_grid), tokens.total)
        return random_permutation(torch.where(chosen, noise, noise + 1.0))

    def encode_at(
        self,
        inputs: Tensor,
        selected: Selection,
        context: Context | None = None,
        *,
        positions: bool = True,
        forgotten: Tensor | None = None,
        unknown: Tensor | None = None,
    ) -> Features:
        """Of one place of `out_grid` in each 2x2 cell, see `encode_cells`."""
        if context is not None:
            self.require("context")
        table = self.positions().table if positions else None
        return encode_cells(self, self.embed(inputs), selected.order, table, forgotten, unknown)

    def run_layers(self, stream: Stream, keys: int | None, taps: Taps = ()) -> Tensor:
        assert keys is None  # `blocks` has refused a context
        return self.run_grid(stream.z, self.grid, taps)

    def run_grid(self, z: Tensor, grid: Grid, taps: Taps = ()) -> Tensor:
        """All stages over a grid of tokens, z [B, h * w, D]: the one way into them. A tap sees its stage's own grid."""
        z = z.unflatten(1, grid)
        if not taps:
            return self.model.layers(z).flatten(1, 2)
        number = 0
        for stage in self.model.layers:
            z = stage.downsample(z)
            for block in stage.blocks:
                z, number = block(z), number + 1
                for tap in taps:
                    tap(number, z.flatten(1, 2))
        return z.flatten(1, 2)

    def block_modules(self) -> list[tuple[nn.Module, ...]]:
        """A merge between stages goes with the block behind it, as timm runs it."""
        return [
            (block,) if number else (stage.downsample, block)
            for stage in self.model.layers
            for number, block in enumerate(stage.blocks)
        ]

    def layers(self) -> Sequence[nn.Module]:
        return [block for stage in self.model.layers for block in stage.blocks]

    def write_layout(self, layout: LayoutBuilder) -> None:
        """One residual key for each stage; a merge joins 4 tokens, so it sees its stage's key 4 times over."""
        depth = 0
        for stage, layer in enumerate(self.model.layers):
            residual = f"residual.{stage}"
            layout.open(residual, "residual", layer.blocks[0].dim)
            if not isinstance(layer.downsample, nn.Identity):
                before, merge = f"residual.{stage - 1}", layer.downsample
                reduction = layout.projection(merge.reduction)
                behind = merge.norm.weight.numel() == merge.reduction.out_features  # as in Swin V2
                layout.norm(residual if behind else before, merge.norm, outer=1 if behind else 4)
                layout.reads(before, reduction, outer=4)
                layout.writes(residual, reduction)
            for block in layer.blocks:
                layout.block(f"blocks.{depth}", residual, self.read(block))
                depth += 1

    def sequence(self, features: Features) -> Tensor:
        return features.patches.unflatten(1, self.out_grid)


# --- a quarter of an image through a Swin ----------------------------------------------------------------------------
# Swin cannot run on arbitrary tokens. But one *unit* (the image region of one output token) of each 2x2 cell can be
# kept, and the kept ones put side by side: a dense grid of half the height and width, on which every window and every
# merge is whole (Li et al., 2022, arXiv 2205.10063, "uniform sampling"). Each output token is then one unit.


def enable_cells(backbone: SwinBackbone) -> None:
    """Prepares a Swin for `encode_cells`; refuses sizes at which a window would not be whole."""
    unit, (rows, columns) = _unit(backbone), backbone.out_grid
    fits = (rows * unit, columns * unit) == backbone.grid and rows % 2 == 0 and columns % 2 == 0
    for depth, stage in enumerate(backbone.model.layers):
        sides = [side // 2 // 2**depth for side in backbone.grid]
        fits = fits and all(
            side % window == 0 for block in stage.blocks for side, window in zip(sides, block.window_size, strict=True)
        )
    if not fits:
        windows = sorted({window for stage in backbone.model.layers for b in stage.blocks for window in b.window_size})
        raise SitusError(
            f"{backbone.name} cannot keep only one patch of each 2x2 cell, because the grid that remains (half as "
            "high, half as wide) does not fit the window size. The grid of the first stage is "
            f"{backbone.grid[0]}x{backbone.grid[1]}. In every stage, half the height and half the width of the grid "
            f"must be multiples of the window size ({', '.join(map(str, windows))}). "
            "Double the image size, for example to 448 pixels for windows of 7",
            field="data.img_size",
        )
    for stage in backbone.model.layers:
        for block in stage.blocks:
            block.dynamic_mask = True  # the mask of shifted windows follows the input's grid


def encode_cells(
    backbone: SwinBackbone,
    tokens: Tensor,
    units: Tensor,
    table: Tensor | None,
    forgotten: Tensor | None,
    unknown: Tensor | None,
) -> Features:
    """Features of one unit of each 2x2 cell: patches [B, V, D], in the order of `units`.

    tokens: [B, N, D] of the whole image. units: [B, V] positions on `out_grid`, one of each cell, in any order. table:
    [N, D]. forgotten: [V] or [B, V] bool, units whose tokens get `unknown` [D] instead of their rows of the table.
    """
    columns, unit = backbone.out_grid[1], _unit(backbone)
    # The model needs the units laid out cell by cell; they are put back into the caller's order afterwards.
    layout = cell_of(units, columns).argsort(dim=1)
    cell, inner = _compact(backbone, tokens.device)
    source = units.gather(1, layout)[:, cell]  # the unit that each token of the dense grid belongs to
    index = (source // columns * unit + inner // unit) * backbone.grid[1] + source % columns * unit + inner % unit
    places = Positions(None if table is None else take(table[None], index))
    if forgotten is not None:
        places = places.forget(forgotten.expand_as(units).gather(1, layout)[:, cell], unknown)
    z = backbone.assemble(take(tokens, index), places).z
    half = (backbone.grid[0] // 2, backbone.grid[1] // 2)
    features = backbone.finish(Stream(backbone.run_grid(z, half), 0))
    return Features(features.prefix, take(features.patches, layout.argsort(dim=1)))


def cell_of(places: Tensor, columns: int) -> Tensor:
    """The number of a position's 2x2 cell, on a grid with `columns` columns, row by row."""
    return places // columns // 2 * (columns // 2) + places % columns // 2


def _unit(backbone: SwinBackbone) -> int:
    """Tokens along one side of a unit."""
    return 2 ** (len(backbone.model.layers) - 1)


def _compact(backbone: SwinBackbone, device: torch.device) -> tuple[Tensor, Tensor]:
    """The tokens of the dense half-size grid, row by row: their cells and their numbers within a unit, [N / 4] each."""
    unit, columns = _unit(backbone), backbone.grid[1] // 2
    token = torch.arange(backbone.num_tokens // 4, device=device)
    row, column = token // columns, token % columns
    return row // unit * (columns // unit) + column // unit, row % unit * unit + column % unit


class PixelBackbone(WholeBackbone):
    """ResNet: no tokens, so only methods that act on the pixels apply (MJP's jigsaw of images, supervised training)."""

    refusals: ClassVar[dict[str, str]] = refuses_tokens("it is a convolutional network and has no tokens")

    def __init__(self, model: nn.Module, name: str) -> None:
        inner: Any = model
        super().__init__(model, name, (0, 0), inner.num_features, 0, len(inner.feature_info) - 1)
        first = inner.conv1 if isinstance(inner.conv1, nn.Conv2d) else inner.conv1[0]
        self.input = InputSpec(channels=first.in_channels)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            self.require("tokens")
        return self.model(self._checked(x))

    @property
    def head_input(self) -> str:
        return "mean of the last feature map"

    def read_pixels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Images -> what the last layer reads [B, D], and the logits."""
        pooled = self.model.forward_head(self.model.forward_features(self._checked(x)), pre_logits=True)
        return pooled, self.model.get_classifier()(pooled)

    def _checked(self, x: Tensor) -> Tensor:
        return self.checked_images(x, next(self.model.parameters()).dtype)


def check_stem(name: str, stem: Any) -> None:
    """Refuses a patch embedding in which a token is not made of one patch alone."""
    if type(stem) is not PatchEmbed or stem.proj.kernel_size != stem.proj.stride:
        raise SitusError(
            f"{name}: Situs supports only models that compute each token from the pixels of one patch (PatchEmbed). "
            f"The {type(stem).__name__} of this model also uses pixels outside the patch, so a token reveals its "
            "position"
        )


def _images_of(stem: Any) -> InputSpec:
    """What timm's patch embedding takes; a border that fills no patch is left out of the image."""
    (h, w), (ph, pw) = stem.grid_size, stem.patch_size
    return InputSpec((h * ph, w * pw), stem.proj.in_channels, (ph, pw))


FAMILIES: dict[type[nn.Module], Callable[[Any, str], Backbone]] = {
    vision_transformer.VisionTransformer: VitBackbone,
    deit.VisionTransformerDistilled: VitBackbone,
    eva.Eva: EvaBackbone,
    vision_transformer_relpos.VisionTransformerRelPos: RelPosBackbone,
    beit.Beit: BeitBackbone,
    swin_transformer.SwinTransformer: SwinBackbone,
    swin_transformer_v2.SwinTransformerV2: SwinBackbone,
    resnet.ResNet: PixelBackbone,
}
"""timm class, exactly -> its backbone."""
