"""What a model's tensors are for: their roles and depths, and which of their axes move together under a permutation.

`LayoutBuilder` writes groups down: what a linear layer, a norm, an attention and an MLP contribute in any library.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import nn

from situs.errors import SitusError

if TYPE_CHECKING:
    from situs.backbones.base import Backbone

Kind = Literal["residual", "hidden", "heads", "value", "query"]
Part = Literal["embedding", "table", "position", "prefix", "qkv", "block", "head", "unknown"]


class Role(NamedTuple):
    """What a tensor is. table: absolute positions; position: relative bias, rotation. qkv: queries, keys and values.

    depth: 0 before the blocks, i for the i-th block (from 1), one more behind them.
    """

    part: Part
    depth: int


class Names(NamedTuple):
    """How a family calls its tensors: components of their names (of `embedding`, how they begin), for each part that is
    not told by its block."""

    embedding: tuple[str, ...] = ()
    table: tuple[str, ...] = ()
    position: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    qkv: tuple[str, ...] = ()
    head: tuple[str, ...] = ()


def roles_of(backbone: Backbone, names: Names, inner: str = "model.") -> dict[str, Role]:
    """The role of every tensor in a backbone's state dict. inner: how names in the model without its head begin."""
    paths = {id(module): path for path, module in backbone.named_modules()}
    blocks = backbone.block_modules()
    depths = {
        f"{paths[id(module)]}.{own}": depth
        for depth, block in enumerate(blocks, start=1)
        for module in block
        for own in module.state_dict()
    }
    found = {}
    for name in backbone.state_dict():
        parts = set(name.split("."))
        known: list[Part] = [
            part for part in ("table", "position", "prefix", "qkv") if not parts.isdisjoint(getattr(names, part))
        ]
        if name in depths:
            found[name] = Role(known[0] if known else "block", depths[name])
        elif known and known[0] != "qkv":
            found[name] = Role(known[0], 0)
        elif not name.startswith(inner) or name.removeprefix(inner).split(".")[0] in names.head:
            found[name] = Role("head", len(blocks) + 1)
        elif any(name.removeprefix(inner).startswith(f"{each}.") for each in names.embedding):
            found[name] = Role("embedding", 0)
        else:
            found[name] = Role("unknown", len(blocks) + 1)
    return found


@dataclass(frozen=True)
class Member:
    """One axis of one tensor, laid out (outer, size, inner); the middle one is permuted.

    start, length: only that stretch of the axis has the layout (the values' third of a fused qkv); None: to its end.
    at: (axis, index) of another axis; only that slice moves (one layer's part of a table that all layers share).
    """

    tensor: str
    axis: int
    outer: int = 1
    inner: int = 1
    start: int = 0
    length: int | None = None
    at: tuple[int, int] | None = None


@dataclass(frozen=True)
class Group:
    """Axes that one permutation [size] moves together."""

    name: str
    kind: Kind
    size: int
    members: tuple[Member, ...]


NORMS = (
    *("LayerNorm", "LayerNormFp32", "RmsNorm", "RmsNormFp32", "SimpleNorm", "SimpleNormFp32"),
    *("RMSNorm", "LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"),
)
"""Norms whose statistics do not see an order: a permutation of their input permutes their output."""


@dataclass(frozen=True)
class Projection:
    """A linear layer, or a stretch [start, start + length) of its outputs."""

    weight: str
    bias: str | None
    into: int
    """Axis of the inputs."""

    out: int
    """Axis of the outputs."""

    start: int = 0
    length: int | None = None
    own_bias: bool = False
    """The bias is a tensor of its own while the weight is a stretch of a larger one."""


@dataclass
class AttentionLayer:
    """What the groups need to know of one attention layer. heads = kv_heads * (queries that share one)."""

    q: Projection
    k: Projection
    v: Projection
    o: Projection
    heads: int
    kv_heads: int
    rotary: bool = False
    """Rotated in pairs: its query and key channels cannot move."""

    head_norms: Sequence[nn.Module] = ()
    """q- and k-norms over the channels of a head, shared by all heads."""

    inner_norm: nn.Module | None = None
    """A norm over all heads' outputs, before the last projection: no part of the residual stream."""

    gates: Sequence[Projection] = ()
    """Projections of the residual stream that multiply the heads' outputs."""

    head_tables: Sequence[Member] = ()
    """Tensors with one entry for each head beside the projections: bias tables, rotary frequencies."""

    shared_heads: bool = False
    """Such a table serves all layers, so that all layers share the order of their heads."""


@dataclass
class _Draft:
    kind: Kind
    size: int
    members: dict[Member, None] = field(default_factory=dict)


class LayoutBuilder:
    """Collects members by group; every tensor is named after the module that holds it."""

    def __init__(self, model: nn.Module) -> None:
        self.state = model.state_dict()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._drafts: dict[str, _Draft] = {}

    def groups(self) -> tuple[Group, ...]:
        """All groups, the residual ones first."""
        made = [Group(name, d.kind, d.size, tuple(d.members)) for name, d in self._drafts.items()]
        return tuple(sorted(made, key=lambda group: group.kind != "residual"))

    def open(self, name: str, kind: Kind, size: int) -> None:
        """A group, where it is not there yet."""
        draft = self._drafts.setdefault(name, _Draft(kind, size))
        assert (draft.kind, draft.size) == (kind, size), f"{name} is already {draft.kind} of {draft.size}"

    def add(self, group: str, members: Iterable[Member]) -> None:
        """Members into an open group."""
        self._drafts[group].members.update(dict.fromkeys(members))

    def path(self, module: nn.Module, tensor: str) -> str:
        """The state dict's name of a module's tensor."""
        return f"{self._names[id(module)]}.{tensor}"

    def projection(self, layer: Any, start: int = 0, length: int | None = None) -> Projection:
        """A torch `Linear` ([out, in]) or transformers' `Conv1D` ([in, out])."""
        kinds = {"Linear": (1, 0), "Conv1D": (0, 1)}
        kind = type(layer).__name__
        if kind not in kinds:
            raise SitusError(f"{self._names[id(layer)]} is a {kind}, not one of: {', '.join(kinds)}")
        into, out = kinds[kind]
        bias = self.path(layer, "bias")
        return Projection(self.path(layer, "weight"), bias if bias in self.state else None, into, out, start, length)

    def inputs(self, p: Projection) -> int:
        """How many channels a projection reads."""
        return self.state[p.weight].shape[p.into]

    def reads(self, group: str, p: Projection, outer: int = 1, inner: int = 1) -> None:
        """The projection's inputs are of this group."""
        self.add(group, [Member(p.weight, p.into, outer, inner)])

    def writes(self, group: str, p: Projection, outer: int = 1, inner: int = 1) -> None:
        """The projection's outputs (and its bias) are of this group."""
        self.add(group, [Member(p.weight, p.out, outer, inner, p.start, p.length)])
        if p.bias is not None:
            start, length = (0, None) if p.own_bias else (p.start, p.length)
            self.add(group, [Member(p.bias, 0, outer, inner, start, length)])

    def norm(self, group: str, layer: nn.Module, outer: int = 1, inner: int = 1) -> None:
        """The weight and bias of a norm over this group's channels."""
        if isinstance(layer, nn.Identity):
            return
        if type(layer).__name__ not in NORMS:
            raise SitusError(
                f"{self._names[id(layer)]} is a {type(layer).__name__}, which is not known to leave an order alone; "
                f"known: {', '.join(NORMS)}"
            )
        self.vectors(group, [self.path(layer, "weight"), self.path(layer, "bias")], outer, inner)

    def vectors(self, group: str, names: Iterable[str], outer: int = 1, inner: int = 1) -> None:
        """Vectors over this group's channels, where the model has them."""
        self.add(group, [Member(name, 0, outer, inner) for name in names if name in self.state])

    def mlp(self, block: str, residual: str, up: Sequence[Projection], down: Projection, packed: int = 1) -> str:
        """Up-projections (one, or gate and value), whatever stands between, and the one down; gives the group's name.

        packed: how many of them lie in one tensor, one after the other.
        """
        name = f"{block}.mlp"
        self.open(name, "hidden", self.inputs(down))
        for p in up:
            self.reads(residual, p)
            self.writes(name, p, outer=packed)
        self.reads(name, down)
        self.writes(residual, down)
        return name

    def attention(self, block: str, residual: str, a: AttentionLayer) -> None:
        """The residual side of an attention layer, and its groups of heads, values and (unrotated) queries."""
        for p in (a.q, a.k, a.v, *a.gates):
            self.reads(residual, p)
        self.writes(residual, a.o)
        share, width, per_query = a.heads // a.kv_heads, self.inputs(a.o) // a.heads, (a.q, *a.gates)
        if a.kv_heads > 1:  # the order of the kv heads, each with the queries it serves
            name, wide = "heads" if a.shared_heads else f"{block}.heads", share * width
            written = [*((p, 1, wide) for p in per_query), (a.k, 1, width), (a.v, 1, width)]
            self._group(name, "heads", a.kv_heads, written, a, (1, wide))
            self.add(name, a.head_tables)
        if share > 1:  # the order of the queries within
            written = [(p, a.kv_heads, width) for p in per_query]
            self._group(f"{block}.queries", "heads", share, written, a, (a.kv_heads, width))
        written = [(a.v, a.kv_heads, 1), *((p, a.heads, 1) for p in a.gates)]
        self._group(f"{block}.value", "value", width, written, a, (a.heads, 1))
        if not a.rotary:
            self._group(f"{block}.query", "query", width, [(a.q, a.heads, 1), (a.k, a.kv_heads, 1)], a)
            for layer in a.head_norms:
                self.norm(f"{block}.query", layer)

    def _group(
        self,
        name: str,
        kind: Kind,
        size: int,
        written: Iterable[tuple[Projection, int, int]],
        a: AttentionLayer,
        read: tuple[int, int] | None = None,
    ) -> None:
        """Outputs of projections, each with its (outer, inner); read: those of the last projection's inputs."""
        self.open(name, kind, size)
        for p, outer, inner in written:
            self.writes(name, p, outer, inner)
        if read is not None:
            self.reads(name, a.o, *read)
            if a.inner_norm is not None:
                self.norm(name, a.inner_norm, *read)
