"""The steps of every transformer, as an interface over a model of another library.

    embed(x)                    -> tokens [B, N, D]            no position, no prefix tokens
    positions(grid)             -> Positions                   the positions of the tokens
    assemble(tokens, positions, mask) -> Stream                positions and prefix tokens added
    blocks(stream, context)     -> Stream                      the transformer proper
    finish(stream)              -> Features                    final norm; prefix and patch tokens separated
    head(features)              -> logits

Indices count patch tokens only; prefix tokens (CLS, registers, distillation) appear in none of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from situs.backbones.block import Block, Stream, Taps, run_blocks
from situs.backbones.layout import Group, LayoutBuilder, Names, Role, roles_of
from situs.core.position import Positions
from situs.core.selection import Context, Selection, Tokens
from situs.core.tokens import Grid, fill, mask_of, take
from situs.errors import SitusError

CAPABILITIES = {
    "images": "reading images or spectrograms",
    "tokens": "running on a sequence of tokens: patches, frames or words",
    "context": "attending to a chosen subset of the tokens (MP3)",
    "take": "running on a subset of the tokens (DropPos, MAE)",
    "rows": "permuting the tokens (row equivariance, split learning)",
    "columns": "permuting the residual channels (locks)",
    "depths": "measuring each layer (one grid and one width at every depth)",
}
"""Capabilities of backbones; `Backbone.refusals` says which a backbone lacks and why."""


class Features(NamedTuple):
    """The output of an encoder: prefix [B, p, D] and patches [B, N, D], the latter in the order of the input tokens.

    real: [B, N] bool, False for padding; None: no padding.
    """

    prefix: Tensor
    patches: Tensor
    real: Tensor | None = None

    def filled(self) -> Features:
        """With padding replaced by the mean of the sample's real patches."""
        return self if self.real is None else self._replace(patches=fill(self.patches, self.real))


class Past(Protocol):
    """The keys and values of the tokens that a causal model has seen in one sequence."""

    @property
    def length(self) -> int:
        """The number of tokens."""
        ...

    @property
    def nbytes(self) -> int:
        """The size of keys and values."""
        ...


NOT_CAUSAL = "its tokens also attend to later tokens"


class InputSpec(NamedTuple):
    """The input of a model.

    shape: its sides without the channels, (height, width) of an image; None if the model takes several sizes.
    channels: of each pixel; 0 for word ids.
    patch: the sides of the patch of one token; None if the model has no tokens, or one per word.
    words: size of the vocabulary, if the input is word ids.
    """

    shape: tuple[int, ...] | None = None
    channels: int = 0
    patch: tuple[int, ...] | None = None
    words: int = 0


class Level(NamedTuple):
    """A depth at which a feature map is taken. block: after which block, from 1. halved: how often the grid is
    halved by then, sides rounded up. dim: width of its tokens."""

    block: int
    halved: int
    dim: int


class Backbone(nn.Module, ABC):
    """A wrapped model. Subclasses know one library's layout; all other packages know only this class.

    model: the wrapped module itself, its parameter names unchanged. grid: patch tokens along each side, (h, w) of an
    image. dim: D. input: see `InputSpec`. out_grid, out_dim: of `Features.patches` (coarser in a hierarchical
    model).
    """

    refusals: ClassVar[dict[str, str]] = {}
    """capability -> why this backbone refuses it; see `CAPABILITIES`."""
    entry: ClassVar[Literal["run_layers", "run_grid"]] = "run_layers"
    """The method that runs a stream through the blocks; `run_grid(z, grid, taps)` where they need a grid."""

    causal: ClassVar[bool] = False
    """Whether tokens attend only to those before them, so that `extend` can continue a sequence."""

    special: ClassVar[int] = 0
    """Leading patch tokens that belong to the model ([CLS] of BERT): they keep their position and are never
    predicted."""

    def __init__(self, model: nn.Module, name: str, grid: Grid, dim: int, prefix: int, depth: int) -> None:
        super().__init__()
        self.model: Any = model
        self.name = name
        self.grid = grid
        self.dim = dim
        self.token_dim = dim
        """The width of tokens and positions before the blocks: D, unless the model projects them to D later."""
        self.num_prefix = prefix
        self.depth = depth
        self.input = InputSpec()
        self.source: dict[str, Any] = {}
        """The library, architecture and model_args that make this model again."""
        self.left_out: tuple[str, ...] = ()
        """Tensors of its weight file that belong to a method, and were not loaded."""
        self.float32_residual = False
        """Whether the residual stream is float32 where autocast embeds the tokens in half precision."""

    @abstractmethod
    def embed(self, x: Tensor) -> Tensor:
        """Images [B, C, H, W] (or token ids [B, N]) -> patch tokens [B, N, D]: no position, no prefix tokens."""

    def embed_at(self, x: Tensor, index: Tensor) -> Tensor:
        """The tokens at index [B, K] alone, [B, K, D]: `take(embed(x), index)`, without embedding the others."""
        return take(self.embed(x), index)

    @abstractmethod
    def positions(self, grid: Grid | None = None) -> Positions:
        """The model's own positions for its whole grid, or for another grid as its library resamples them.

        Refused if the model has positions for one grid only.
        """

    def assemble(self, tokens: Tensor, positions: Positions | None, mask: Tensor | None = None) -> Stream:
        """Adds positions and prefix tokens. positions=None removes every kind; a prefix token's own vector stays.

        mask: [B, N] bool, False for padding, which no other token attends to.
        """
        places = self.fitted(positions, tokens.shape[1])
        if self.float32_residual and tokens.element_size() == 2:
            tokens = tokens.float()
        if places.table is not None:
            tokens = tokens + places.table.to(tokens.dtype)
        prefix = self.prefix_tokens() if self.num_prefix else None
        if prefix is not None:
            tokens = torch.cat([prefix.to(tokens.dtype).expand(tokens.shape[0], -1, -1), tokens], dim=1)
        if mask is not None:
            mask = torch.cat([mask.new_ones(mask.shape[0], self.num_prefix), mask], dim=1).bool()
        return Stream(self.before_blocks(tokens), self.num_prefix, places.rotary, places.bias, mask)

    def fitted(self, positions: Positions | None, count: int) -> Positions:  # noqa: ARG002  (a family that checks it)
        """The positions of `count` tokens; refused if they do not fit."""
        return Positions() if positions is None else positions

    def prefix_tokens(self) -> Tensor | None:
        """The prefix tokens with their own position rows added, [1, p, D]."""
        return None

    def before_blocks(self, z: Tensor) -> Tensor:
        """What the wrapped model does between adding positions and its first block."""
        return z

    def final_norm(self, z: Tensor) -> Tensor:
        """What the wrapped model does after its last block."""
        return z

    def layers(self) -> Sequence[nn.Module]:
        """The library's blocks, in the order of the stream; a block may occur several times."""
        return ()

    def read(self, layer: nn.Module) -> Block:
        """The parts of one of the `layers`."""
        raise SitusError(f"{self.name}: Situs does not support blocks of the class {type(layer).__qualname__}")

    def parts(self) -> list[Block]:
        """The parts of each block, every block once, including what the model adds to the blocks."""
        return [self.read(layer) for layer in dict.fromkeys(self.layers())]

    def run_layers(self, stream: Stream, keys: int | None, taps: Taps = ()) -> Tensor:
        """All blocks over stream.z; with `keys`, only the first `keys` tokens of the sequence are keys and values.

        taps: called with (number, z) after every block, numbered from 1.
        """
        return run_blocks(self.layers(), self.read, stream, keys, taps)

    def new_past(self) -> Past:
        """The `Past` of a new sequence, for `extend`."""
        raise SitusError(f"{self.name} cannot continue a sequence: {NOT_CAUSAL}")

    def extend(self, stream: Stream, past: Past) -> Tensor:  # noqa: ARG002  (a causal model)
        """All blocks over stream.z [B, n, D], the tokens that follow those of `past`; theirs are added to it."""
        raise SitusError(f"{self.name} cannot continue a sequence: {NOT_CAUSAL}")

    def finish(self, stream: Stream) -> Features:
        """Applies the final norm and separates prefix tokens and patches."""
        z = self.final_norm(stream.z)
        return Features(z[:, : stream.prefix], z[:, stream.prefix :])

    @abstractmethod
    def head(self, features: Features) -> Tensor:
        """The model's own head on finished features -> logits (or pooled features where it has no classes)."""

    @property
    def head_input(self) -> str:
        """A description of what `pooled` returns."""
        return "CLS token" if self.num_prefix else "mean of the patches"

    def pooled(self, features: Features) -> Tensor:
        """The input of the head's last layer, [B, D]: F_CLS if the head reads CLS."""
        return features.prefix[:, 0] if self.num_prefix else features.patches.mean(dim=1)

    def read_pixels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Images -> the input of the head's last layer [B, D], and the logits."""
        features = self.encode(self.embed(x), self.positions())
        return self.pooled(features), self.head(features)

    @torch.no_grad()
    def erase_positions(self) -> tuple[str, ...]:
        """Zeroes the learned positions of the patches in the wrapped model, for a method that never uses them.

        The model's own forward is then `encode(tokens, positions=None)`, except for the kinds that it returns: they are
        no weights (rotation) and stay.
        """
        table = self.positions().table
        if table is not None:
            table.zero_()
        places = self.positions()
        assert places.table is None or not places.table.any(), "the table is not a view of the model's parameter"
        return tuple(kind for kind in places.kinds if kind != "table")

    def block_modules(self) -> list[tuple[nn.Module, ...]]:
        """The modules of each block in the order of the stream; empty if the model's blocks are not known."""
        return [(layer,) for layer in dict.fromkeys(self.layers())]

    def roles(self) -> dict[str, Role]:
        """The role and depth of every tensor of this backbone's state dict."""
        return roles_of(self, self.block_modules(), Names())

    def one_block_args(self) -> dict[str, Any]:
        """`model_args` that make this model with one block and few words; empty if its blocks differ."""
        return {}

    def groups(self) -> tuple[Group, ...]:
        """The axes that one permutation moves together, the residual ones first, by the wrapped model's names."""
        for capability in ("tokens", "columns"):
            self.require(capability)
        layout = LayoutBuilder(self.model)
        self.write_layout(layout)
        return layout.groups()

    def write_layout(self, layout: LayoutBuilder) -> None:
        """Adds the groups of this family's blocks: one residual group for all."""
        layout.open("residual", "residual", self.dim)
        for number, block in enumerate(self.parts()):
            layout.block(f"blocks.{number}", "residual", block)

    @property
    def table_name(self) -> str:
        """The name of the absolute position table [1, rows, D] in the wrapped model's state dict, if it has one."""
        return "pos_embed"

    @property
    def prefix_names(self) -> tuple[str, ...]:
        """The names of the prefix tokens to which rows of that table may be added, in their order."""
        return "cls_token", "dist_token", "reg_token"

    @property
    def table_prefix(self) -> int:
        """How many prefix tokens have a row in the table."""
        return self.num_prefix

    @property
    def table_grid(self) -> Grid:
        """The grid of the model's own table."""
        return self.grid

    def own_names(self, names: Iterable[str]) -> dict[str, str]:
        """Names in a file -> names in the wrapped model's state dict; tensors without one may be left out."""
        return {name: name for name in names}

    def renamed(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A file's tensors under the names of the wrapped model; those it does not know keep theirs."""
        return dict(state)

    @property
    def num_tokens(self) -> int:
        """N, the number of patch tokens."""
        return math.prod(self.grid)

    @property
    def num_classes(self) -> int:
        """The number of classes of its own head; 0 if it has no head."""
        return 0

    @property
    def next_words(self) -> bool:
        """Whether its own head predicts the next word."""
        return False

    @property
    def patch_values(self) -> int:
        """The number of values in a patch of the input: P_h * P_w * C of an image."""
        if self.input.patch is None:
            raise SitusError(
                f"{self.name} has no patches of pixels: it takes text, or Situs does not know how it divides an image "
                "into patches"
            )
        return self.input.channels * math.prod(self.input.patch)

    @property
    def out_grid(self) -> Grid:
        return self.grid

    @property
    def out_dim(self) -> int:
        return self.dim

    def levels(self) -> tuple[Level, ...]:
        """Depths for dense tasks: four at equal distances, or the end of each stage of a hierarchical model."""
        self.require("tokens")
        return tuple(Level(-(-self.depth * quarter // 4), 0, self.dim) for quarter in range(1, 5))

    def embed_sized(self, x: Tensor) -> tuple[Tensor, Positions, Grid]:
        """Inputs of any size that is a multiple of the patch: their tokens, the positions for their grid, and the grid.

        Refused if the model takes only one size.
        """
        if self.input.shape is None or tuple(x.shape[2:]) != self.input.shape:
            size, shape = (" × ".join(map(str, sides)) for sides in (self.input.shape or (), x.shape[2:]))
            raise SitusError(f"{self.name}: takes only inputs of the size {size}, not {shape}")
        return self.embed(x), self.positions(), self.grid

    def checked_images(self, x: Tensor, dtype: torch.dtype, *, any_size: bool = False) -> Tensor:
        """Images in the model's precision; integers and other shapes are refused."""
        channels, size = self.input.channels, None if any_size else self.input.shape
        wanted = f"[B, {channels}, {size[0]}, {size[1]}]" if size else f"[B, {channels}, H, W]"
        if x.dim() != 4 or x.shape[1] != channels or (size is not None and tuple(x.shape[2:]) != size):
            shapes = f"images must have the shape {wanted}, not {list(x.shape)}"
            raise SitusError(
                f"{self.name}: {shapes}; to accept other shapes, set img_size and in_chans of the model",
                field="img_size",
            )
        if not x.is_floating_point():
            raise SitusError(f"{self.name}: images must be normalised floats, not {x.dtype}")
        return x.to(dtype)

    def own_grid(self, grid: Grid | None, why: str) -> None:
        """Refuses positions for another grid than the model's own."""
        if grid not in (None, self.grid):
            raise SitusError(f"{self.name} has no positions for a grid of {'x'.join(map(str, grid))}: {why}")

    def blocks(self, stream: Stream, context: Tensor | int | None = None) -> Stream:
        """Runs the transformer blocks.

        context: indices of the patch tokens that are keys and values in every layer ([K] or [B, K]), of that layer's
        tokens; queries are all tokens, and prefix tokens are always in the context. An int k is the first k patch
        tokens. Keys and values are computed only for the context, so a context reduces the cost.
        """
        if context is None:
            return replace(stream, z=self.run_layers(stream, None))
        self.require("context")
        if isinstance(context, int):
            return replace(stream, z=self.run_layers(stream, stream.prefix + context))
        # The context in front: every layer then slices instead of gathering.
        inside = mask_of(context, stream.z.shape[1] - stream.prefix)
        order = torch.argsort((~inside).to(torch.uint8), dim=-1, stable=True)
        moved = stream.take(order)
        z = self.run_layers(moved, stream.prefix + context.shape[-1])
        return replace(stream, z=replace(moved, z=z, rotary=None, bias=None).take(torch.argsort(order)).z)

    def encode(
        self,
        tokens: Tensor,
        positions: Positions | None = None,
        context: Tensor | int | None = None,
        mask: Tensor | None = None,
    ) -> Features:
        """finish(blocks(assemble(tokens, positions), context)): tokens [B, N, D] -> Features. mask: see `forward`."""
        features = self.finish(self.blocks(self.assemble(tokens, positions, mask), context))
        return features if mask is None else features._replace(real=mask)

    def tokens(self, inputs: Tensor, mask: Tensor | None = None) -> Tokens:  # noqa: ARG002  (of words)
        """The tokens of a batch that may be selected one by one: those of `out_grid`. mask: see `forward`."""
        return Tokens(math.prod(self.out_grid) if mask is None else mask.shape[1], mask, self.special)

    def positions_of(self, tokens: Tokens) -> Positions:  # noqa: ARG002  (of words)
        """The positions of a batch's tokens."""
        return self.positions()

    def ready_to_select(self, kept: int) -> None:  # noqa: ARG002  (Swin does)
        """Refuses if this model cannot run `encode_at` with `kept` tokens of each sample."""
        self.require("take")

    def ready_to_shuffle(self) -> None:
        """Refuses if this model cannot train on inputs with shuffled patches."""
        self.require("images")

    def shuffle(self, noise: Tensor, tokens: Tokens) -> Tensor:
        """A random order of the tokens, [B, N], of which the first ones may be selected."""
        return tokens.shuffled(noise)

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
        """Features of the selected tokens alone, in their order.

        context: those that are keys and values; by default all. positions: whether they have positions; forgotten: [K]
        or [B, K] bool, tokens with a hidden position, which get `unknown` [D] instead.
        """
        places = self.positions().take(selected.order) if positions else None
        if places is not None and forgotten is not None:
            places = places.forget(forgotten, unknown)
        tokens = self.embed_at(inputs, selected.order)
        if context is None:
            return self.encode(tokens, places, mask=selected.real)
        return self.encode(tokens, places, context.size, context.keys)._replace(real=selected.real)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The wrapped model's own forward: inputs -> logits. mask: [B, N] bool, False for padding."""
        return self.classify(self.encode(self.embed(x), self.positions(), mask=mask))

    def classify(self, features: Features) -> Tensor:
        """`head` for samples that may have padding."""
        return self.head(features if features.real is None else self.before_head(features))

    def before_head(self, features: Features) -> Features:
        """The head's input for samples with padding: the mean over all tokens then equals the mean over the real
        tokens."""
        return features.filled()

    def require(self, capability: str) -> None:
        """Raises an error with the reason if this backbone refuses a capability."""
        if capability in self.refusals:
            raise SitusError(f"{self.name} does not support {CAPABILITIES[capability]}: {self.refusals[capability]}")


class WholeBackbone(Backbone):
    """A model without known tokens: what needs them is refused with `refusals`' reason."""

    def _refuse(self, *_: object, **__: object) -> Any:
        self.require("tokens")

    embed = positions = assemble = run_layers = finish = head = pooled = _refuse


def refuses_tokens(reason: str) -> dict[str, str]:
    """The refusals of a `WholeBackbone`."""
    return dict.fromkeys([name for name in CAPABILITIES if name != "images"], reason)


def join(features: Features) -> Tensor:
    """The sequence a wrapped model's own head expects: prefix and patches together, [B, p + N, D]."""
    return torch.cat([features.prefix, features.patches], dim=1)
