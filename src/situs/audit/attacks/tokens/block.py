"""The first block of a model as its weights tell it: what is linear in a token there, and what is not.

    h1 = norm1(z)            what enters the layers of queries, keys and values; z the token, E x + base at its place
    m = z + A o + b          the stream between attention and MLP; o what enters the attention's last layer
    h2 = norm2(m)            what enters the MLP's first layer or layers
    a = late(m)              what enters its last layer

All of it is the model's own code: its calls are noted and their inputs exchanged (`_Calls`), and nothing here knows a
library's layout. A block of another form is told apart by trying, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from situs.audit.attacks.spans import Norm
from situs.audit.stem import Stem, find_embedding, flat_weight
from situs.audit.stem.products import EnoughError
from situs.backbones.base import Backbone

EQUAL = 1e-7
"""Relative: what is the same in float64 differs by less."""


def first_linears(backbone: Backbone) -> tuple[str, ...]:
    """Names of the matrices in the first block."""
    roles = backbone.roles()
    first = {name for name, role in roles.items() if role.depth == 1 and role.part in ("qkv", "block")}
    return tuple(name for name, p in backbone.named_parameters() if p.dim() == 2 and name in first)


class _Call(NamedTuple):
    """A product with one of the block's matrices."""

    name: str
    inputs: Tensor


class _Calls(TorchFunctionMode):
    """Notes the products of one forward pass; those whose number is in `instead` are given other inputs, and those in
    `outcome` give other outputs.

    until: the number of the last product that is needed.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        until: int | None,
        instead: Mapping[int, Tensor],
        outcome: Mapping[int, Tensor],
    ) -> None:
        super().__init__()
        self.names, self.until, self.instead, self.outcome = names, until, instead, outcome
        self.seen: list[_Call] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = self._name(args[1]) if func is F.linear and len(args) > 1 else None
        if name is None:
            return func(*args, **kwargs)
        number = len(self.seen)
        args = (self.instead.get(number, args[0]), *args[1:])
        self.seen.append(_Call(name, args[0]))
        unseen = set(self.names.values()) - {call.name for call in self.seen}
        if number == self.until or not unseen:
            raise EnoughError
        return self.outcome[number] if number in self.outcome else func(*args, **kwargs)

    def _name(self, weight: Tensor) -> str | None:
        # A fused weight may be used slice by slice: a slice knows what it was cut from.
        return self.names.get(id(weight)) or self.names.get(id(weight._base))


class Layers(NamedTuple):
    """Names of the first block's matrices by what enters them: h1, o, h2 and a."""

    qkv: tuple[str, ...]
    proj: str
    fc1: tuple[str, ...]
    fc2: str


class Block:
    """What the weights alone tell. weight: E, [D, K]; base [N, D]: e and the table's row of each place; prefix [p, D]:
    the prefix tokens; into [·, D] and shift [D]: A and b.

    backbone: in float64, in eval mode.
    """

    stem: Stem
    layers: Layers
    norm0: Norm | None
    norm1: Norm
    norm2: Norm
    into: Tensor
    shift: Tensor

    def __init__(self, backbone: Backbone) -> None:
        """Raises `NoBlockError` with the reason where the block is of another form."""
        self.backbone, self.norm0 = backbone, None
        names = set(first_linears(backbone))
        self._names = {id(p): name for name, p in backbone.named_parameters() if name in names}
        self._read_stem()
        self._read_layers()

    def enter(self, u: Tensor) -> Tensor:
        """What is linear of what tokens u [..., D] are when they enter the first block."""
        return u if self.norm0 is None else self.norm0.form(u)

    @property
    def places(self) -> int:
        """N."""
        return len(self.base)

    def late(self, m: Tensor) -> Tensor:
        """What enters the MLP's last layer for streams m [..., D]: [..., H]."""
        weight, bias = self.entry()
        return self.tail(self.norm2.apply(m) @ weight.T + bias)

    def entry(self) -> tuple[Tensor, Tensor]:
        """Weight [H', D] and bias [H'] of the MLP's first layers, one below the other."""
        own = dict(self.backbone.named_parameters())
        weights: list[Tensor] = [own[name] for name in self.layers.fc1]
        biases = [own.get(f"{name.removesuffix('weight')}bias") for name in self.layers.fc1]
        pairs = zip(weights, biases, strict=True)
        return torch.cat(weights), torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs])

    def tail(self, entered: Tensor) -> Tensor:
        """What enters the MLP's last layer for what its first layers gave [..., H']: [..., H]."""
        sizes = [len(weight) for name, weight in self.backbone.named_parameters() if name in self.layers.fc1]
        parts = entered.reshape(1, -1, entered.shape[-1]).split(sizes, dim=-1)
        given = dict(zip(range(self._fc1, self._fc2), parts, strict=True))
        nothing = self.weight.new_zeros(1, 1, self.backbone.dim)
        calls = self._run(nothing, {}, self._fc2, outcome=given)
        return calls[-1].inputs.reshape(*entered.shape[:-1], calls[-1].inputs.shape[-1])

    def middle(self, z: Tensor, positions: Any) -> tuple[Tensor, Tensor]:
        """m and o of all tokens of images [B, p + N, ·], with the attention that they pay to each other; z: their
        patch tokens before positions are added, [B, N, D]."""
        seen: list[Tensor] = []
        with _Watched(self._second, seen):
            calls = self._run(z, {}, self._fc1, positions)
        return seen[-1], calls[self._fc1 - 1].inputs

    def _read_stem(self) -> None:
        backbone = self.backbone
        stem = find_embedding(backbone)
        if isinstance(stem, str):
            raise NoBlockError(stem)
        own = {name: p.detach() for name, p in backbone.named_parameters()}
        self.stem, self.weight = stem, flat_weight(own[stem.weight], stem)
        bias = self.weight.new_zeros(backbone.dim) if stem.bias is None else own[stem.bias]
        tokens = self._any(backbone.num_tokens)
        stream = backbone.assemble(tokens, backbone.positions()).z[0]
        first = backbone.num_prefix
        self.prefix, self.base = stream[:first], stream[first:] - tokens[0] + bias
        table = backbone.positions().table
        wanted = tokens[0] if table is None else tokens[0] + table
        if not _same(stream[first:], wanted):
            raise NoBlockError("something stands between its patch embedding and its first block (a norm before it)")

    def _read_layers(self) -> None:
        z = self._any(3)
        calls = self._run(z, {}, None)
        groups: list[list[int]] = []
        for number, call in enumerate(calls):
            if groups and _same(calls[groups[-1][0]].inputs, call.inputs):
                groups[-1].append(number)
            else:
                groups.append([number])
        if len(groups) < 4:
            raise NoBlockError("its first block is not attention and an MLP of two layers, one behind the other")
        qkv, proj, fc1 = groups[0], groups[1], groups[2]
        self._fc1, self._fc2 = fc1[0], fc1[-1] + 1
        if len(proj) > 1 or self._fc2 != len(calls) - 1:
            raise NoBlockError("its first block is not attention and an MLP of two layers, one behind the other")
        named = [calls[number].name for number in range(len(calls))]
        self.layers = Layers(
            tuple(named[i] for i in qkv), named[proj[0]], tuple(named[i] for i in fc1), named[self._fc2]
        )
        first, self._second = (self._norm_before(z, number) for number in (0, self._fc1))
        self.norm1, self.norm2 = (read_norm(module, self.backbone.dim) for module in (first, self._second))
        self._read_mixing(calls[proj[0]].inputs.shape[-1])

    def _norm_before(self, z: Tensor, number: int) -> nn.Module:
        """The module whose output is what product `number` is given."""
        given: list[tuple[nn.Module, Any]] = []
        hooks = [
            module.register_forward_hook(lambda module, _, out: given.append((module, out)))
            for module in self.backbone.modules()
            if not list(module.children()) and not isinstance(module, nn.Linear | nn.Identity | nn.Dropout)
        ]
        try:
            calls = self._run(z, {}, number)
        finally:
            for hook in hooks:
                hook.remove()
        wanted = calls[number].inputs
        for module, out in reversed(given):
            if isinstance(out, Tensor) and _same(out, wanted):
                return module
        raise NoBlockError("no norm stands before its first block's attention and before its MLP")

    def _read_mixing(self, width: int) -> None:
        zero = self.weight.new_zeros(1, width)
        mapped = self._mixed(self._any(width + 1) * 0, torch.cat([zero, torch.eye(width).to(zero)]))
        self.shift, self.into = mapped[0], mapped[1:] - mapped[0]
        chance = torch.Generator().manual_seed(0)
        z, o = (torch.randn(4, n, generator=chance, dtype=torch.float64).to(zero) for n in (len(self.shift), width))
        if not _same(self._mixed(z[None], o), z + o @ self.into + self.shift):
            raise NoBlockError("what its attention gives is not simply added to the tokens before the MLP's norm")

    def _mixed(self, z: Tensor, o: Tensor) -> Tensor:
        """m for tokens z [1, Q, D] whose attention's last layer is given o [Q, ·]."""
        first, seen = self.backbone.num_prefix, list[Tensor]()
        given = torch.cat([o.new_zeros(first, o.shape[1]), o]).unsqueeze(0)
        with _Watched(self._second, seen):
            self._run(z, {self._fc1 - 1: given}, self._fc1)
        return seen[-1][0, first:]

    def _any(self, count: int) -> Tensor:
        """Tokens to try it with, [1, count, D]."""
        chance = torch.Generator().manual_seed(0)
        return torch.randn(1, count, self.backbone.dim, generator=chance, dtype=torch.float64).to(self._device)

    @property
    def _device(self) -> torch.device:
        return next(self.backbone.parameters()).device

    def _run(
        self,
        z: Tensor,
        instead: Mapping[int, Tensor],
        until: int | None,
        positions: Any = None,
        outcome: Mapping[int, Tensor] | None = None,
    ) -> list[_Call]:
        """The products of a forward pass over tokens z [B, Q, D], without places unless they are given."""
        calls = _Calls(self._names, until, instead, outcome or {})
        try:
            with calls:
                self.backbone.blocks(self.backbone.assemble(z, positions))
        except EnoughError:
            pass
        return calls.seen


class NoBlockError(Exception):
    """The first block is none whose tokens can be solved for; its text is the reason."""


class _Watched:
    """Notes what a module is given."""

    def __init__(self, module: nn.Module, seen: list[Tensor]) -> None:
        self.hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.hook.remove()


@torch.no_grad()
def read_norm(norm: Callable[[Tensor], Tensor], dim: int) -> Norm:
    """A norm's weight, bias and eps from what it does, whoever wrote it."""
    like = next(iter(norm.parameters()), None) if isinstance(norm, nn.Module) else None
    chance = torch.Generator().manual_seed(0)
    z = torch.randn(8, dim, generator=chance, dtype=torch.float64).to("cpu" if like is None else like.device)
    bias = norm(torch.zeros_like(z[:1]))[0]
    centred = _same(norm(z + 3.0), norm(z))
    away = z - z.mean(dim=-1, keepdim=True) if centred else z
    unit = away / away.square().mean(dim=-1, keepdim=True).sqrt()
    large = norm(1e6 * z) - bias  # so large that eps says nothing
    weight = (large * unit).sum(dim=0) / unit.square().sum(dim=0)
    small = norm(1e-3 * z) - bias
    share = (small * large).sum() / large.square().sum()
    var = 1e-6 * away.square().mean(dim=-1, keepdim=True)
    eps = float((var * (1 / share**2 - 1)).mean().clamp(min=0))
    # One eps for all tokens: found by bisection where their variances differ.
    low, high = 0.0, max(4 * eps, 1e-3)
    for _ in range(200):
        eps = (low + high) / 2
        made = (away * 1e-3 / (var + eps).sqrt()) * weight
        low, high = (eps, high) if float((made * small).sum()) > float(small.square().sum()) else (low, eps)
    found = Norm(weight, bias, eps, centred)
    for size in (1.0, 1e-2, 10.0):
        if not _same(found.apply(size * z), norm(size * z), 1e-6):
            raise NoBlockError("what stands before its first block's layers is neither a layer norm nor an RMS norm")
    return found


def _same(one: Tensor, other: Tensor, tolerance: float = EQUAL) -> bool:
    return one.shape == other.shape and bool((one - other).norm() <= tolerance * other.norm() + 1e-300)
