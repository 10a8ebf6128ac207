"""The first block of a model, as one needs it who solves for its tokens one by one: no attention is computed.

    m = z + A o + b          the stream between attention and MLP: z the token, o what enters the attention's last layer
    h = norm(m)              what enters the MLP's first layer
    a = late(m)              what enters its last layer

A, b and late are the model's own code: inputs of its calls are noted and exchanged (`_Calls`), and nothing here knows
a library's layout. Blocks of another form (norms after, or inside of the MLP) are told apart by trying.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from situs.audit.attacks.spans import Span
from situs.audit.defences import Gradients
from situs.audit.stem import Stem, flat_weight, table_rows
from situs.audit.stem.products import EnoughError
from situs.backbones.base import Backbone
from situs.core.position import Positions


def first_linears(backbone: Backbone) -> tuple[str, ...]:
    """Names of the matrices in the first block."""
    roles = backbone.roles()
    first = {name for name, role in roles.items() if role.depth == 1 and role.part in ("qkv", "block")}
    return tuple(name for name, p in backbone.named_parameters() if p.dim() == 2 and name in first)


class _Call(NamedTuple):
    """A norm or a product with one of the block's matrices: what went in, and its own tensors."""

    name: str | None
    inputs: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float


class _Calls(TorchFunctionMode):
    """Notes the calls of one forward pass, whichever module makes them; call number `at` is given `instead`."""

    def __init__(
        self, names: dict[int, str], until: int | None = None, at: int = -1, instead: Tensor | None = None
    ) -> None:
        super().__init__()
        self.names, self.until, self.at, self.instead = names, until, at, instead
        self.seen: list[_Call] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = self._name(args[1]) if func is F.linear else None
        if name is None and func is not F.layer_norm:
            return func(*args, **kwargs)
        if len(self.seen) == self.at:
            args = (self.instead, *args[1:])
        given = dict(zip(("input", "normalized_shape", "weight", "bias", "eps"), args, strict=False)) | kwargs
        norm = func is F.layer_norm
        own = (given.get("weight"), given.get("bias"), given.get("eps", 1e-5)) if norm else (None, None, 0.0)
        self.seen.append(_Call(name, args[0], *own))
        unseen = set(self.names.values()) - {call.name for call in self.seen}
        if len(self.seen) == self.until or not unseen:
            raise EnoughError
        return func(*args, **kwargs)

    def _name(self, weight: Tensor) -> str | None:
        # A fused weight may be used slice by slice: a slice knows what it was cut from.
        return self.names.get(id(weight)) or self.names.get(id(weight._base))


class FirstBlock:
    """backbone: in float64. hidden: [N] bool. unknown: E_unk, [D], which hidden tokens have instead of a place.

    reason: None, or why the block's tokens cannot be solved for; the rest is then not there.
    """

    proj: Span
    fc1: Span
    fc2: Span
    into: Tensor
    shift: Tensor
    norm: _Call

    def __init__(self, backbone: Backbone, stem: Stem, upload: Gradients, hidden: Tensor, unknown: Tensor) -> None:
        own = {name: p.detach() for name, p in backbone.named_parameters()}
        self.backbone = backbone
        self.weight = flat_weight(own[stem.weight], stem)
        self.bias = own[stem.bias] if stem.bias is not None else self.weight.new_zeros(backbone.dim)
        table = table_rows(own[stem.table], stem)
        self.table = torch.where(hidden.unsqueeze(-1), unknown.to(table.dtype), table)
        self.tokens = backbone.num_tokens + backbone.num_prefix
        names = set(first_linears(backbone))
        self._names = {id(p): name for name, p in backbone.named_parameters() if name in names}
        self.reason = self._read(upload)

    def embed(self, patches: Tensor) -> Tensor:
        """z of the image's patch tokens [N, D] for patches [N, K], hidden ones with E_unk."""
        return patches @ self.weight.T + self.bias + self.table

    def late(self, m: Tensor) -> Tensor:
        """What enters the MLP's last layer for streams m [..., D]: [..., H]."""
        calls = self._run(self._nothing(1), at=self._at, instead=m.reshape(1, -1, m.shape[-1]))
        return calls[-1].inputs.reshape(*m.shape[:-1], calls[-1].inputs.shape[-1])

    def middle(self, patches: Tensor) -> Tensor:
        """m of the image's patch tokens [N, D], with the attention that they pay to each other."""
        calls = self._run(self.embed(patches), until=self._at + 1)
        return calls[-1].inputs[0, self.backbone.num_prefix :]

    def _read(self, upload: Gradients) -> str | None:
        """Finds the layers and their spans; the reason where that fails."""
        calls = self._run(self._nothing(1))
        norms = [number for number, call in enumerate(calls) if call.name is None]
        if not norms or not 0 < norms[-1] < len(calls) - 2:
            return "its first block is not attention, a layer norm and an MLP of two layers or more"
        self._at = norms[-1]
        self.norm = calls[self._at]
        proj, fc1, fc2 = (calls[number].name for number in (self._at - 1, self._at + 1, -1))
        if proj is None or fc1 is None or fc2 is None:
            return "a norm stands where a layer of its first block was expected"
        for role, name in (("proj", proj), ("fc1", fc1), ("fc2", fc2)):
            if name not in upload or not Span.exists(upload[name], self.tokens):
                return f"the gradient of {name} has no directions beside those of {self.tokens} tokens, or is not sent"
            setattr(self, role, Span(upload[name], self.tokens))
        width = calls[self._at - 1].inputs.shape[-1]
        zero = self.weight.new_zeros(1, width)
        mapped = self._mixed(self._nothing(width + 1), torch.cat([zero, torch.eye(width).to(zero)]))
        self.shift, self.into = mapped[0], mapped[1:] - mapped[0]
        chance = torch.Generator().manual_seed(0)
        z, o = (torch.randn(4, n, generator=chance, dtype=torch.float64).to(zero) for n in (len(self.shift), width))
        if not torch.allclose(self._mixed(z, o), z + o @ self.into + self.shift, rtol=1e-6, atol=1e-6):
            return "what its attention gives is not simply added to the tokens before the MLP's norm"
        return None

    def _mixed(self, z: Tensor, o: Tensor) -> Tensor:
        """m for tokens z [Q, D] whose attention's last layer is given o [Q, ·]."""
        first = self.backbone.num_prefix
        given = torch.cat([o.new_zeros(first, o.shape[1]), o]).unsqueeze(0)
        return self._run(z, until=self._at + 1, at=self._at - 1, instead=given)[-1].inputs[0, first:]

    def _nothing(self, count: int) -> Tensor:
        return self.weight.new_zeros(count, self.backbone.dim)

    def _run(self, z: Tensor, **how: Any) -> Sequence[_Call]:
        """The calls of a forward pass over tokens z [Q, D] without places."""
        calls = _Calls(self._names, **how)
        try:
            with calls:
                self.backbone.blocks(self.backbone.assemble(z.unsqueeze(0), Positions()))
        except EnoughError:
            pass
        return calls.seen
