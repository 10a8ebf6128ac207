"""Roles and depths of a model's tensors, and which of their axes a permutation moves together.

`LayoutBuilder` collects the groups: what a linear layer, a norm, an attention and an MLP contribute in any library.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import nn

from situs.errors import SitusError

if TYPE_CHECKING:
    from situs.backbones.block import Attention, Block, Mlp

Kind = Literal["residual", "hidden", "heads", "value", "query"]
Part = Literal["embedding", "table", "position", "prefix", "qkv", "block", "head", "unknown"]


class Role(NamedTuple):
    """What a tensor is. table: absolute positions; position: relative bias, rotation. qkv: queries, keys and values.

    depth: 0 before the blocks, i for the i-th block (from 1), one more behind them.
    """

    part: Part
    depth: int


class Names(NamedTuple):
    """A family's names of tensors: components of their names (for `embedding`, prefixes), for each part that does not
    follow from its block."""

    embedding: tuple[str, ...] = ()
    table: tuple[str, ...] = ()
    position: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    qkv: tuple[str, ...] = ()
    head: tuple[str, ...] = ()


def roles_of(
    backbone: nn.Module, blocks: Sequence[Iterable[nn.Module]], names: Names, inner: str = "model."
) -> dict[str, Role]:
    """The role of every tensor in a backbone's state dict. blocks: the modules of each of its blocks. inner: prefix of
    names in the model without its head."""
    paths = {id(module): path for path, module in backbone.named_modules()}
    depths = {
        f"{paths[id(module)]}.{tensor}": depth
        for depth, block in enumerate(blocks, start=1)
        for module in block
        for tensor in module.state_dict()
    }
    roles = {}
    for name in backbone.state_dict():
        parts = set(name.split("."))
        known: list[Part] = [
            part for part in ("table", "position", "prefix", "qkv") if not parts.isdisjoint(getattr(names, part))
        ]
        if name in depths:
            roles[name] = Role(known[0] if known else "block", depths[name])
        elif known and known[0] != "qkv":
            roles[name] = Role(known[0], 0)
        elif not name.startswith(inner) or name.removeprefix(inner).split(".")[0] in names.head:
            roles[name] = Role("head", len(blocks) + 1)
        elif any(name.removeprefix(inner).startswith(f"{prefix}.") for prefix in names.embedding):
            roles[name] = Role("embedding", 0)
        else:
            roles[name] = Role("unknown", len(blocks) + 1)
    return roles


@dataclass(frozen=True)
class Member:
    """One axis of one tensor as (outer, size, inner); the middle one is permuted.

    start, length: only that part of the axis (the values' third of a fused qkv); None: to its end. at: (axis, index) of
    another axis; only that slice is permuted (one layer's part of a table that all layers share).
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
"""Norms whose statistics do not depend on the order: a permutation of their input permutes their output."""


@dataclass(frozen=True)
class Projection:
    """A linear layer, or the part [start, start + length) of its outputs."""

    weight: str
    bias: str | None
    into: int
    """Axis of the inputs."""

    out: int
    """Axis of the outputs."""

    start: int = 0
    length: int | None = None
    own_bias: bool = False
    """Whether the bias is a separate tensor although the weight is part of a larger one."""


@dataclass
class _Draft:
    kind: Kind
    size: int
    members: dict[Member, None] = field(default_factory=dict)


class LayoutBuilder:
    """Collects members by group; tensors have their names in the state dict."""

    def __init__(self, model: nn.Module) -> None:
        self.state = model.state_dict(keep_vars=True)
        self._tensors = {id(tensor): name for name, tensor in self.state.items()}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._drafts: dict[str, _Draft] = {}

    def groups(self) -> tuple[Group, ...]:
        """All groups, the residual ones first."""
        groups = [Group(name, d.kind, d.size, tuple(d.members)) for name, d in self._drafts.items()]
        return tuple(sorted(groups, key=lambda group: group.kind != "residual"))

    def open(self, name: str, kind: Kind, size: int) -> None:
        """Makes a group, if there is none of this name yet."""
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
            raise SitusError(
                f"{self._names[id(layer)]} is a {kind}, but Situs supports only these classes here: {', '.join(kinds)}"
            )
        into, out = kinds[kind]
        bias = self.path(layer, "bias")
        return Projection(self.path(layer, "weight"), bias if bias in self.state else None, into, out, start, length)

    def inputs(self, p: Projection) -> int:
        """The number of input channels of a projection."""
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
                f"{self._names[id(layer)]} is a {type(layer).__name__}. Situs does not know whether this class "
                f"depends on the order of the channels; known classes: {', '.join(NORMS)}"
            )
        self.vectors(group, [self.path(layer, "weight"), self.path(layer, "bias")], outer, inner)

    def vectors(self, group: str, names: Iterable[str], outer: int = 1, inner: int = 1) -> None:
        """Vectors over this group's channels, where the model has them."""
        self.add(group, [Member(name, 0, outer, inner) for name in names if name in self.state])

    def block(self, name: str, residual: str, block: Block) -> None:
        """A transformer block: its norms and scales are permuted with the stream."""
        norms, first = (block.norm1, block.norm2), block.form != "post"
        if first:
            for layer in norms:
                self.norm(residual, layer)
            for gamma in block.gammas:
                if isinstance(gamma, nn.Module):
                    self.norm(residual, gamma)
                elif gamma is not None:
                    self.vectors(residual, [self._tensors[id(gamma)]])
        (self._by_head if block.attention.by_head else self._attention)(name, residual, block.attention)
        if not first:
            self.norm(residual, norms[0])
        self._mlp(name, residual, block.mlp)
        if not first:
            self.norm(residual, norms[1])

    def _mlp(self, block: str, residual: str, mlp: Mlp) -> None:
        """Up-projections (one, or gate and value), the norm between, and the down-projection."""
        if not mlp.up:
            raise SitusError(f"{block}: locks do not support an MLP of the class {type(mlp.run).__name__}")
        name, down = f"{block}.mlp", self.projection(mlp.down)
        self.open(name, "hidden", self.inputs(down))
        for p in map(self.projection, mlp.up):
            self.reads(residual, p)
            self.writes(name, p, outer=mlp.packed)
        self.reads(name, down)
        self.writes(residual, down)
        if mlp.norm is not None:
            self.norm(name, mlp.norm)

    def _attention(self, block: str, residual: str, a: Attention) -> None:
        """The residual side of an attention layer, and its groups of heads, values and (unrotated) queries."""
        gates = () if a.gate is None else (self.projection(a.gate),)
        o, kv_heads = self.projection(a.out), a.heads // a.shared
        width = self.inputs(o) // a.heads
        q, k, v = self._qkv(a)
        for p in (q, k, v, *gates):
            self.reads(residual, p)
        self.writes(residual, o)
        per_query, group_width = (q, *gates), a.shared * width
        if kv_heads > 1:  # the order of the kv heads, each with its queries
            name = "heads" if a.one_order else f"{block}.heads"
            written = [*((p, 1, group_width) for p in per_query), (k, 1, width), (v, 1, width)]
            self._group(name, "heads", kv_heads, written)
            self._read_heads(name, a, o, 1, group_width)
            self.add(name, [Member(self._tensors[id(table.tensor)], table.axis, at=table.at) for table in a.tables])
        if a.shared > 1:  # the order of the queries within
            self._group(f"{block}.queries", "heads", a.shared, [(p, kv_heads, width) for p in per_query])
            self._read_heads(f"{block}.queries", a, o, kv_heads, width)
        self._group(f"{block}.value", "value", width, [(v, kv_heads, 1), *((p, a.heads, 1) for p in gates)])
        self._read_heads(f"{block}.value", a, o, a.heads, 1)
        if not a.rotary:
            self._group(f"{block}.query", "query", width, [(q, a.heads, 1), (k, kv_heads, 1)])
            for layer in a.head_norms:
                self.norm(f"{block}.query", layer)

    def _by_head(self, block: str, residual: str, a: Attention) -> None:
        """Attention with each head's queries, keys and values concatenated in one matrix, and rotated."""
        joined, o, name = self.projection(a.qkv[0]), self.projection(a.out), f"{block}.heads"
        width = self.inputs(o) // a.heads
        self.reads(residual, joined)
        self.writes(residual, o)
        if a.heads > 1:
            self._group(name, "heads", a.heads, [(joined, 1, 3 * width)])
            self.reads(name, o, inner=width)
        values = [self.projection(a.qkv[0], (3 * head + 2) * width, width) for head in range(a.heads)]
        self._group(f"{block}.value", "value", width, [(p, 1, 1) for p in values])
        self.reads(f"{block}.value", o, outer=a.heads)

    def _qkv(self, a: Attention) -> list[Projection]:
        if len(a.qkv) != 1:
            return [self.projection(layer) for layer in a.qkv]
        whole = self.projection(a.qkv[0])
        width = self.state[whole.weight].shape[whole.out] // 3
        thirds = [replace(whole, start=third * width, length=width) for third in range(3)]
        if a.biases is None:
            return thirds
        # A buffer of zeros, as the keys' may be, is in no state dict.
        names = [self._tensors.get(id(bias)) for bias in a.biases]
        return [replace(p, bias=name, own_bias=True) for p, name in zip(thirds, names, strict=True)]

    def _group(self, name: str, kind: Kind, size: int, written: Iterable[tuple[Projection, int, int]]) -> None:
        """A group of outputs of projections, each with its (outer, inner)."""
        self.open(name, kind, size)
        for p, outer, inner in written:
            self.writes(name, p, outer, inner)

    def _read_heads(self, group: str, a: Attention, o: Projection, outer: int, inner: int) -> None:
        """The inputs of the last projection, and the norm before it, are of this group."""
        self.reads(group, o, outer, inner)
        if a.norm is not None:
            self.norm(group, a.norm, outer, inner)
