"""The steps every transformer has, over a model that someone else wrote.

    embed(x)                    -> tokens [B, N, D]            no position, no prefix tokens
    positions(grid)             -> Positions                   what tells a token its place
    assemble(tokens, positions, mask) -> Stream                positions and prefix tokens added
    blocks(stream, context)     -> Stream                      the transformer proper
    finish(stream)              -> Features                    final norm; prefix and patch tokens apart
    head(features)              -> logits

Indices count patch tokens only; prefix tokens (CLS, registers, distillation) appear in none of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from situs.backbones.block import Block, Stream, Taps, run_blocks
from situs.backbones.layout import Group, LayoutBuilder, Names, Role, roles_of
from situs.core.position import Positions
from situs.core.selection import Context, Selection, Tokens
from situs.core.tokens import Grid, fill, mask_of, take
from situs.errors import SitusError

CAPABILITIES = {
    "images": "images or spectrograms as input",
    "tokens": "a sequence of tokens: patches, frames or words",
    "context": "attention to a context of chosen tokens (MP3)",
    "take": "running on a subset of the tokens (DropPos, MAE)",
    "rows": "permuting the tokens (row equivariance, split learning)",
    "columns": "permuting the residual channels (locks)",
    "depths": "one grid and one width at every depth (looking at each layer)",
}
"""What a backbone may be asked for; `Backbone.refusals` says which it refuses and why."""


class Features(NamedTuple):
    """What an encoder gives: prefix [B, p, D] and patches [B, N, D], the latter in the order the tokens came in.

    real: [B, N] bool, False for padding; None: there is none.
    """

    prefix: Tensor
    patches: Tensor
    real: Tensor | None = None

    def filled(self) -> Features:
        """With the mean of a sample's real patches in the place of its padding."""
        return self if self.real is None else self._replace(patches=fill(self.patches, self.real))


class InputSpec(NamedTuple):
    """What one input of a model is.

    shape: its sides without the channels, (height, width) of an image; None where it takes several.
    channels: numbers at each place of it; 0 for the ids of words.
    patch: the sides of what becomes one token; None where the model has no tokens, or one a word.
    words: how many words it knows, where it takes their ids.
    """

    shape: tuple[int, ...] | None = None
    channels: int = 0
    patch: tuple[int, ...] | None = None
    words: int = 0


class Level(NamedTuple):
    """A depth at which a feature map is read. block: after which, from 1. halved: how often the grid is halved by then,
    sides rounded up. dim: width of its tokens."""

    block: int
    halved: int
    dim: int


class Backbone(nn.Module, ABC):
    """A wrapped model. Subclasses know one library's layout; everything above knows only this class.

    model: the wrapped module itself, its parameter names untouched. grid: how many patch tokens along each side, (h, w)
    of an image. dim: D. input: what it takes. out_grid, out_dim: of `Features.patches` (coarser in a hierarchical one).
    """

    refusals: ClassVar[dict[str, str]] = {}
    """capability -> why this backbone refuses it; see `CAPABILITIES`."""
    entry: ClassVar[Literal["run_layers", "run_grid"]] = "run_layers"
    """The method through which every stream goes into the blocks; `run_grid(z, grid, taps)` where they know a grid."""

    special: ClassVar[int] = 0
    """Patch tokens at the front that are the model's own ([CLS] of BERT): they keep their place and are not asked."""

    def __init__(self, model: nn.Module, name: str, grid: Grid, dim: int, prefix: int, depth: int) -> None:
        super().__init__()
        self.model: Any = model
        self.name = name
        self.grid = grid
        self.dim = dim
        self.token_dim = dim
        """The width of tokens and positions before the blocks: D, but where a model widens them only then."""
        self.num_prefix = prefix
        self.depth = depth
        self.input = InputSpec()
        self.source: dict[str, Any] = {}
        """How the wrapped library makes this model again: library, architecture, model_args."""
        self.wide = False
        """Whether the stream through the blocks is float32 where autocast has embedded the tokens in half precision."""

    @abstractmethod
    def embed(self, x: Tensor) -> Tensor:
        """Images [B, C, H, W] (or token ids [B, N]) -> patch tokens [B, N, D]: no position, no prefix tokens."""

    def embed_at(self, x: Tensor, index: Tensor) -> Tensor:
        """The tokens at places index [B, K] alone, [B, K, D]: `take(embed(x), index)`, without embedding the others."""
        return take(self.embed(x), index)

    @abstractmethod
    def positions(self, grid: Grid | None = None) -> Positions:
        """The model's own positions for its whole grid, or for another as its library brings them there.

        Refused in one sentence where they are made for one grid alone.
        """

    def assemble(self, tokens: Tensor, positions: Positions | None, mask: Tensor | None = None) -> Stream:
        """Adds positions and prefix tokens. positions=None removes every kind; a prefix token's own vector stays.

        mask: [B, N] bool, False for padding, which no other token sees.
        """
        places = self.fitted(positions, tokens.shape[1])
        if self.wide and tokens.element_size() == 2:
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
        """The positions of `count` tokens, refused where they do not fit."""
        return Positions() if positions is None else positions

    def prefix_tokens(self) -> Tensor | None:
        """The prefix tokens with their own position rows added, [1, p, D]."""
        return None

    def before_blocks(self, z: Tensor) -> Tensor:
        """What the wrapped model does between adding positions and its first block."""
        return z

    def final_norm(self, z: Tensor) -> Tensor:
        """What it does behind its last block."""
        return z

    def layers(self) -> Sequence[nn.Module]:
        """The blocks as the library keeps them, in the order of the stream; one may stand there several times."""
        return ()

    def read(self, layer: nn.Module) -> Block:
        """One of them by its parts."""
        raise SitusError(f"{self.name}: no parts are known for the class {type(layer).__qualname__}")

    def parts(self) -> list[Block]:
        """Each block once by its parts, with what the model around it tells of it."""
        return [self.read(layer) for layer in dict.fromkeys(self.layers())]

    def run_layers(self, stream: Stream, keys: int | None, taps: Taps = ()) -> Tensor:
        """All blocks over stream.z; with `keys`, only the first `keys` tokens of the sequence are keys and values.

        taps: called with (number, z) after every block, numbered from 1: the one way to several depths.
        """
        return run_blocks(self.layers(), self.read, stream, keys, taps)

    def finish(self, stream: Stream) -> Features:
        """The final norm, and the prefix tokens apart from the patches."""
        z = self.final_norm(stream.z)
        return Features(z[:, : stream.prefix], z[:, stream.prefix :])

    @abstractmethod
    def head(self, features: Features) -> Tensor:
        """The model's own head on finished features -> logits (or pooled features where it has no classes)."""

    @property
    def reads(self) -> str:
        """What `pooled` gives, in words."""
        return "CLS token" if self.num_prefix else "mean of the patches"

    def pooled(self, features: Features) -> Tensor:
        """The vector the head's last layer reads, [B, D]: F_CLS where it reads CLS."""
        return features.prefix[:, 0] if self.num_prefix else features.patches.mean(dim=1)

    def read_pixels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Images -> what the head's last layer reads [B, D], and the logits."""
        features = self.encode(self.embed(x), self.positions())
        return self.pooled(features), self.head(features)

    @torch.no_grad()
    def erase_positions(self) -> tuple[str, ...]:
        """Zeroes the learned positions of the patches in the wrapped model, for a method that never used them.

        The model's own forward is then `encode(tokens, positions=None)`. Returns the kinds that stay because no
        weight holds them (rotation), so that it is not.
        """
        table = self.positions().table
        if table is not None:
            table.zero_()
        places = self.positions()
        assert places.table is None or not places.table.any(), "the table is no view of the model's own"
        return tuple(kind for kind in places.kinds if kind != "table")

    def block_modules(self) -> list[tuple[nn.Module, ...]]:
        """The modules of each block in the order of the stream; none where the model has no blocks that are known."""
        return [(layer,) for layer in dict.fromkeys(self.layers())]

    def roles(self) -> dict[str, Role]:
        """Every tensor of this backbone's state dict: what it is, and how deep it stands."""
        return roles_of(self, self.block_modules(), Names())

    def one_block_args(self) -> dict[str, Any]:
        """`model_args` that make this model with one block and few words; nothing where its blocks differ."""
        return {}

    def groups(self) -> tuple[Group, ...]:
        """The axes that one permutation moves together, the residual ones first; names are the wrapped model's own."""
        for capability in ("tokens", "columns"):
            self.require(capability)
        layout = LayoutBuilder(self.model)
        self.write_layout(layout)
        return layout.groups()

    def write_layout(self, layout: LayoutBuilder) -> None:
        """Writes the groups of this family's blocks down: one residual key for all."""
        layout.open("residual", "residual", self.dim)
        for number, block in enumerate(self.parts()):
            layout.block(f"blocks.{number}", "residual", block)

    @property
    def table_name(self) -> str:
        """The name of the absolute position table [1, rows, D] in the wrapped model's state dict, where it has one."""
        return "pos_embed"

    @property
    def prefix_names(self) -> tuple[str, ...]:
        """The names of the prefix tokens to which rows of that table may be added, in their order."""
        return "cls_token", "dist_token", "reg_token"

    @property
    def table_prefix(self) -> int:
        """How many prefix tokens have a row in a table that has rows for them."""
        return self.num_prefix

    @property
    def table_grid(self) -> Grid:
        """The grid whose places the rows of the model's own table are."""
        return self.grid

    def own_names(self, names: Iterable[str]) -> dict[str, str]:
        """Names in a file -> names in the wrapped model's state dict; what has none of its own may be left out."""
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
        """How many classes of images its own head tells apart; 0 where it has no such head."""
        return 0

    @property
    def next_words(self) -> bool:
        """Whether its own head gives the word to come behind each word."""
        return False

    @property
    def patch_values(self) -> int:
        """How many numbers a patch of the input holds: P_h * P_w * C of an image."""
        if self.input.patch is None:
            raise SitusError(f"{self.name} takes no images of a fixed size, so it has no patches of pixels")
        return self.input.channels * math.prod(self.input.patch)

    @property
    def out_grid(self) -> Grid:
        return self.grid

    @property
    def out_dim(self) -> int:
        return self.dim

    def levels(self) -> tuple[Level, ...]:
        """Depths for dense tasks: four at equal distances, or of a hierarchical model the end of each stage."""
        self.require("tokens")
        return tuple(Level(-(-self.depth * quarter // 4), 0, self.dim) for quarter in range(1, 5))

    def embed_sized(self, x: Tensor) -> tuple[Tensor, Positions, Grid]:
        """Inputs of any size that whole patches fill: their tokens, the positions for their grid, and the grid.

        Refused where the model takes one size alone.
        """
        if self.input.shape is None or tuple(x.shape[2:]) != self.input.shape:
            size = " × ".join(map(str, self.input.shape or ()))
            raise SitusError(f"{self.name}: takes inputs of {size} alone, and {list(x.shape)} are given")
        return self.embed(x), self.positions(), self.grid

    def checked_images(self, x: Tensor, dtype: torch.dtype, *, any_size: bool = False) -> Tensor:
        """Images in the model's own precision; refused as whole numbers, or in another shape than it was made for."""
        channels, size = self.input.channels, None if any_size else self.input.shape
        wanted = f"[B, {channels}, {size[0]}, {size[1]}]" if size else f"[B, {channels}, H, W]"
        if x.dim() != 4 or x.shape[1] != channels or (size is not None and tuple(x.shape[2:]) != size):
            said = f"{self.name}: images of shape {list(x.shape)} given, {wanted} needed (img_size=, in_chans=)"
            raise SitusError(said, field="img_size")
        if not x.is_floating_point():
            raise SitusError(f"{self.name}: images of {x.dtype} given; they must be normalised floats")
        return x.to(dtype)

    def own_grid(self, grid: Grid | None, why: str) -> None:
        """Refuses positions for another grid than the model's own."""
        if grid not in (None, self.grid):
            raise SitusError(f"{self.name} has no positions for a grid of {'x'.join(map(str, grid))}: {why}")

    def blocks(self, stream: Stream, context: Tensor | int | None = None) -> Stream:
        """The transformer proper.

        context: places of the patch tokens that serve as keys and values in every layer ([K] or [B, K]), taken from
        that layer's own tokens; queries are all tokens, and prefix tokens are always in the context. An int k is
        the first k patch tokens. Keys and values are computed for the context alone, so it costs less, not more.
        """
        if context is None:
            return replace(stream, z=self.run_layers(stream, None))
        self.require("context")
        if isinstance(context, int):
            return replace(stream, z=self.run_layers(stream, stream.prefix + context))
        # The context in front: slicing then serves every layer, with no gather.
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
        """The tokens of a batch that may be selected one by one: the places of `out_grid`. mask: see `forward`."""
        return Tokens(math.prod(self.out_grid) if mask is None else mask.shape[1], mask, self.special)

    def positions_of(self, tokens: Tokens) -> Positions:  # noqa: ARG002  (of words)
        """The positions of a batch's tokens."""
        return self.positions()

    def ready_to_select(self, kept: int) -> None:  # noqa: ARG002  (Swin does)
        """Refuses `encode_at` with `kept` tokens of each sample where this model cannot run on them."""
        self.require("take")

    def ready_to_shuffle(self) -> None:
        """Refuses to train on inputs whose patches are moved where this model cannot."""
        self.require("images")

    def shuffle(self, noise: Tensor, tokens: Tokens) -> Tensor:
        """A random order of the tokens, [B, N], of which any beginning may be selected."""
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

        context: those that serve as keys and values; by default all. positions: whether they know their places;
        forgotten: [K] or [B, K] bool, those that do not, and get `unknown` [D] instead.
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
        """`head` of samples that may have padding."""
        return self.head(features if features.real is None else self.before_head(features))

    def before_head(self, features: Features) -> Features:
        """What the head reads of samples with padding: a mean over all is that of what is real."""
        return features.filled()

    def require(self, capability: str) -> None:
        """Raises with the reason where this backbone refuses a capability."""
        if capability in self.refusals:
            raise SitusError(f"{self.name} refuses {CAPABILITIES[capability]}: {self.refusals[capability]}")


class WholeBackbone(Backbone):
    """A model whose tokens nobody knows, if it has any: what needs them is refused with `refusals`' reason."""

    def _refuse(self, *_: object, **__: object) -> Any:
        self.require("tokens")

    embed = positions = assemble = run_layers = finish = head = pooled = _refuse


def refuses_tokens(reason: str) -> dict[str, str]:
    """The refusals of such a model."""
    return dict.fromkeys([name for name in CAPABILITIES if name != "images"], reason)


def join(features: Features) -> Tensor:
    """The sequence a wrapped model's own head expects: prefix and patches together, [B, p + N, D]."""
    return torch.cat([features.prefix, features.patches], dim=1)
