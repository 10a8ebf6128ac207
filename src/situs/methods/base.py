"""The base class of methods: draws (not compiled) and a pure forward (compiled), over one backbone.

A method has no loop, no optimiser and no data set. `draw` turns a batch's ids into masks and permutations by the
counter-based hash, so a sample's draws are the same in any batch; `forward` is a pure function of (batch, draws) and
may be compiled as one graph.
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
"""Everything random (or scheduled) about one step, by name."""


class Output(NamedTuple):
    """loss: a scalar. metrics: detached scalars to log. extras: tensors for figures and evaluations."""

    loss: Tensor
    metrics: dict[str, Tensor] = {}  # noqa: RUF012  (a tuple's default, never changed)
    extras: dict[str, Tensor] = {}  # noqa: RUF012


class UnknownPosition(NamedTuple):
    """How positions are hidden. vector: [D], added to a token without a position (None: zeros); words: its name.

    sighted: whether the model uses positions at all.
    """

    vector: Tensor | None
    words: str
    sighted: bool = True


@dataclass(frozen=True)
class NoConfig:
    """The config of a method without settings."""


class Method(nn.Module, ABC):
    """A training method over a backbone. The modules that a method adds stand beside `backbone`, and an export drops
    them."""

    Config: ClassVar[type[Any]] = NoConfig
    needs: ClassVar[tuple[str, ...]] = ("tokens",)
    """Capabilities the backbone must not refuse; see `situs.backbones.base.CAPABILITIES`."""

    needs_targets: ClassVar[tuple[str, ...]] = ()
    """Names in `Batch.targets` that the method needs. With "label" the backbone gets a classifier, and with "words" the
    backbone keeps its head. A method with other targets brings its classifier. It gets the number of classes as its
    third argument, and an export keeps the classifier."""

    compiled_part: ClassVar[str] = "forward"
    """The name of the method that is compiled: its kernels are the same at every step. If it is not `forward`,
    other parts run on the host, and a step is not recorded as a CUDA graph."""

    reads_text: ClassVar[bool] = False
    """Whether the method learns from sentences, with padding."""

    def __init__(self, backbone: Backbone | nn.Module, config: Any = None) -> None:
        """backbone: or a module of timm or transformers, which is wrapped and trained as it is. config: None for the
        defaults."""
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
        """Features of all tokens of a batch, from the embedded tokens z [B, N, D]."""
        return self.backbone.encode(z, places, mask=tokens.real)

    @abstractmethod
    def forward(self, batch: Batch, draws: Draws) -> Output:
        """The forward pass, written like the paper's figure; a pure function."""

    @classmethod
    def uses_positions(cls, config: Any) -> bool:
        """Whether training with this config uses the backbone's own positions."""
        return True

    @property
    def sees_positions(self) -> bool:
        """Whether training uses the backbone's own positions; if not, they stay untrained."""
        return self.uses_positions(self.config)

    def under(self, **changes: Any) -> Self:
        """The same weights with other values in the config, for measurements."""
        # FSDP makes a class of its own for a sharded method, whose instances are made only by wrapping; and a compiled
        # forward and hooks of a run belong to this config.
        sharded = {cls for cls in type(self).__mro__ if "FSDPModule" in [base.__name__ for base in cls.__mro__]}
        kind = next(cls for cls in type(self).__mro__ if cls not in sharded)
        other = object.__new__(kind)
        other.__dict__ |= {name: value for name, value in self.__dict__.items() if name != "forward"}
        other._forward_hooks, other._forward_pre_hooks = OrderedDict(), OrderedDict()
        other.config = replace(self.config, **changes)
        other.check()
        return other

    def check(self) -> None:
        """Refuses a config that does not fit the backbone."""

    def encode(self, inputs: Tensor, hidden: Tensor | None = None, index: Tensor | None = None) -> Features:
        """Features of inputs [B, …] whose patches are moved by `index` [B, N]; those at `hidden` [B, N] have the vector
        of `unknown_position` instead of their positions."""
        learned = self.unknown_position()
        vector = None if learned is None else learned.vector
        return encode_moved(self.backbone, inputs, hidden, index, positions=self.sees_positions, vector=vector)

    def unknown_position(self) -> UnknownPosition | None:
        """The learned vector for tokens with a hidden position; None if there is no such vector."""
        return None

    @property
    def chance(self) -> dict[str, float]:
        """The chance level of metrics, by name."""
        return {}

    def no_decay(self) -> set[str]:
        """Names of the method's own parameters without weight decay (tokens, tables)."""
        return set()

    def decayed(self) -> set[str]:
        """Names of parameters, also the backbone's, that have weight decay although their kind has none."""
        return set()


def encode_moved(
    backbone: Backbone,
    inputs: Tensor,
    hidden: Tensor | None = None,
    index: Tensor | None = None,
    *,
    positions: bool,
    vector: Tensor | None = None,
) -> Features:
    """`Method.encode` of a backbone. positions: whether its own are used. vector: [D] for hidden positions."""
    tokens = backbone.embed(inputs if index is None else move_patches(inputs, backbone.grid, index))
    places = backbone.positions() if positions else None
    if places is not None and hidden is not None:
        places = places.forget(hidden, vector)
    return backbone.encode(tokens, places)
