"""What every method is: draws (not compiled) and a pure forward (compiled), over one backbone.

A method holds no loop, no optimiser and no data set. `draw` turns a batch's ids into masks and permutations by the
counter-based hash, so a sample's draws are the same whatever batch it stands in; `forward` is a pure function of
(batch, draws) and may be compiled as one graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor, nn

from situs.backbones import create_backbone
from situs.backbones.base import Backbone, Features
from situs.core.jigsaw import move_patches
from situs.core.position import Positions
from situs.core.selection import Tokens
from situs.core.when import When
from situs.data.batch import Batch

Draws = dict[str, Tensor]
"""Everything random (or scheduled) about one step, by name; saved beside a batch it can be replayed exactly."""


class Output(NamedTuple):
    """loss: a scalar. metrics: detached scalars to log. extras: tensors for figures and evaluations."""

    loss: Tensor
    metrics: dict[str, Tensor] = {}  # noqa: RUF012  (a tuple's default, into which nobody writes)
    extras: dict[str, Tensor] = {}  # noqa: RUF012


class UnknownPosition(NamedTuple):
    """How places are taken away. vector: [D] that a token without a place gets, None for zeros; words: what it is.

    sighted: whether there is a place to take away at all.
    """

    vector: Tensor | None
    words: str
    sighted: bool = True


@dataclass(frozen=True)
class NoConfig:
    """Of a method without settings."""


class Method(nn.Module, ABC):
    """A training idea over a backbone. What a method adds lives beside `backbone` and is dropped on export."""

    Config: ClassVar[type[Any]] = NoConfig
    needs: ClassVar[tuple[str, ...]] = ("tokens",)
    """Capabilities the backbone must not refuse; see `situs.backbones.base.CAPABILITIES`."""

    needs_targets: ClassVar[tuple[str, ...]] = ()
    """Names in `Batch.targets` that it cannot do without; "label" gives the backbone a classifier, "words" keeps its
    own head. A method with others classifies by itself: it is made with the number of classes as its third argument,
    and an export keeps its parts."""

    compiled_part: ClassVar[str] = "forward"
    """The method of its own that the compiler is given: one whose kernels are the same at every step. Where that is not
    `forward`, the rest decides on the host, and a step is not recorded as a CUDA graph."""

    reads_text: ClassVar[bool] = False
    """Whether it learns from sentences, padding and all."""

    def __init__(self, backbone: Backbone | nn.Module, config: Any = None) -> None:
        """backbone: or a module of timm or transformers, which is wrapped and trained as it is. config: its own
        defaults where None."""
        super().__init__()
        self.backbone: Backbone = self.wrapped(backbone)
        for capability in self.needs:
            self.backbone.require(capability)
        self.grid: tuple[int, ...] = self.backbone.grid
        self.config: Any = type(self).Config() if config is None else config

    @staticmethod
    def wrapped(backbone: Backbone | nn.Module) -> Backbone:
        """A module of timm or transformers as a backbone."""
        return backbone if isinstance(backbone, Backbone) else create_backbone(backbone)

    @abstractmethod
    def draw(self, batch: Batch, when: When) -> Draws:
        """A batch's draws, on its device."""

    def tokens(self, batch: Batch) -> Tokens:
        """The tokens of a batch that may be selected one by one."""
        return self.backbone.tokens(batch.inputs, batch.mask)

    def encode_tokens(self, z: Tensor, tokens: Tokens, places: Positions | None) -> Features:
        """Features of all tokens of a batch, of which z [B, N, D] are the embedded ones."""
        return self.backbone.encode(z, places, mask=tokens.real)

    @abstractmethod
    def forward(self, batch: Batch, draws: Draws) -> Output:
        """Reads like the paper's figure; pure."""

    @classmethod
    def uses_positions(cls, config: Any) -> bool:
        """Whether, under this config, the backbone's own positions take part in training."""
        return True

    @property
    def sees_positions(self) -> bool:
        """Whether the backbone's own positions take part; where not, they mean nothing after training."""
        return self.uses_positions(self.config)

    def under(self, **changes: Any) -> Self:
        """The same weights with other values in the config, to be looked at."""
        # A sharded method is of a class that FSDP makes, whose instances are made by wrapping alone; and what a run
        # hung on this one (a compiled forward, hooks) is of this config.
        sharded = {each for each in type(self).__mro__ if "FSDPModule" in [one.__name__ for one in each.__mro__]}
        kind = next(each for each in type(self).__mro__ if each not in sharded)
        other = object.__new__(kind)
        other.__dict__ |= {name: value for name, value in self.__dict__.items() if name != "forward"}
        other._forward_hooks, other._forward_pre_hooks = OrderedDict(), OrderedDict()
        other.config = replace(self.config, **changes)
        other.check()
        return other

    def check(self) -> None:
        """Refuses a config that does not fit the backbone."""

    def encode(self, inputs: Tensor, hidden: Tensor | None = None, index: Tensor | None = None) -> Features:
        """Features of inputs [B, …] whose patches are moved by `index` [B, N], those at `hidden` [B, N] without
        their places, which get the vector of `unknown_position`."""
        learned = self.unknown_position()
        vector = None if learned is None else learned.vector
        return encode_moved(self.backbone, inputs, hidden, index, positions=self.sees_positions, vector=vector)

    def unknown_position(self) -> UnknownPosition | None:
        """The vector that it learned for tokens whose place is hidden, where it learned one."""
        return None

    @property
    def chance(self) -> dict[str, float]:
        """What a blind guess comes to, by the name of the metric."""
        return {}

    def no_decay(self) -> set[str]:
        """Names of the method's own parameters that weight decay must leave alone (tokens, tables)."""
        return set()

    def decayed(self) -> set[str]:
        """Names of parameters, the backbone's too, that weight decay acts on although it spares their kind."""
        return set()


def encode_moved(
    backbone: Backbone,
    inputs: Tensor,
    hidden: Tensor | None = None,
    index: Tensor | None = None,
    *,
    positions: bool = True,
    vector: Tensor | None = None,
) -> Features:
    """`Method.encode` of a backbone. positions: whether its own take part. vector: [D] in place of a hidden place."""
    tokens = backbone.embed(inputs if index is None else move_patches(inputs, backbone.grid, index))
    places = backbone.positions() if positions else None
    if places is not None and hidden is not None:
        places = places.forget(hidden, vector)
    return backbone.encode(tokens, places)
