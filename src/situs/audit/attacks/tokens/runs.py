"""A model run from its patch embedding on, with tokens of one's own: what its layers are given is noted and exchanged.

All of it is the model's own code: nothing here knows a library's layout. Backbones are run by their parts; a user's own
module as a whole, with the product of its patch embedding exchanged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from situs.audit.adapter import grid_of
from situs.audit.stem import Stem, StemBackbone, find_embedding, flat_weight
from situs.audit.stem.inverse import View
from situs.audit.stem.products import EnoughError, Feed, watch_products
from situs.backbones.base import Backbone


class NoBlockError(Exception):
    """The first block is none whose tokens can be solved for; its text is the reason."""


def first_linears(backbone: Backbone) -> tuple[str, ...]:
    """Names of the matrices in the first block; of a user's own module all that it has."""
    if isinstance(backbone, StemBackbone):
        return tuple(name for name, p in backbone.named_parameters() if p.dim() == 2)
    roles = backbone.roles()
    first = {name for name, role in roles.items() if role.depth == 1 and role.part in ("qkv", "block")}
    return tuple(name for name, p in backbone.named_parameters() if p.dim() == 2 and name in first)


class Call(NamedTuple):
    """A product with one of the block's matrices."""

    name: str
    inputs: Tensor


class Calls(TorchFunctionMode):
    """Notes the products of one forward pass; those whose number is in `instead` are given other inputs, and those in
    `outcome` give other outputs.

    names: of the matrices by their id. until: the number of the last product that is needed. embedded: id of the patch
    embedding's weight, and what its first product with anything is [B, N, D], where the model is run as a whole.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        until: int | None = None,
        instead: Mapping[int, Tensor] | None = None,
        outcome: Mapping[int, Tensor] | None = None,
        embedded: tuple[int, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.names, self.until, self.instead, self.outcome = names, until, instead or {}, outcome or {}
        self.embedded = embedded
        self.seen: list[Call] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.multi_head_attention_forward and _plain(*args, **kwargs):
            with self:  # torch would do its products where nobody sees them
                return _attend(*args, **kwargs)
        if func in (F.linear, torch.conv2d):  # however its weight is given
            args = (*args, *(kwargs.pop(name) for name in _NAMES[len(args) :] if name in kwargs))
        if self.embedded is not None and len(args) > 1 and id(args[1]) == self.embedded[0]:
            return self._embed(func, args, kwargs)
        name = self._name(args[1]) if func is F.linear else None
        if name is None:
            return func(*args, **kwargs)
        number = len(self.seen)
        args = (self.instead.get(number, args[0]), *args[1:])
        self.seen.append(Call(name, args[0]))
        unseen = set(self.names.values()) - {call.name for call in self.seen}
        if number == self.until or not unseen:
            raise EnoughError
        return self.outcome[number] if number in self.outcome else func(*args, **kwargs)

    def _embed(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        assert self.embedded is not None
        tokens, real = self.embedded[1], func(*args, **kwargs)
        self.embedded = None
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        tokens = tokens if bias is None else tokens + bias
        tokens = tokens.mT if func is torch.conv2d else tokens
        return tokens.reshape(len(tokens), *real.shape[1:])

    def _name(self, weight: Tensor) -> str | None:
        # A fused weight may be used slice by slice: a slice knows what it was cut from.
        return self.names.get(id(weight)) or self.names.get(id(weight._base))


_NAMES = ("input", "weight", "bias")


def _plain(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> bool:
    """Whether torch's multi-head attention is simply one of tokens to each other, with one matrix for all three."""
    weight, _, bias_k, bias_v, add_zero = args[2:7]
    odd = bias_k is not None or bias_v is not None or add_zero or options.get("attn_mask") is not None
    return weight is not None and not odd and options.get("key_padding_mask") is None and query is key is value


def _attend(query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, *args: Any, **_: Any) -> Any:  # noqa: ARG001
    """Torch's multi-head attention of tokens [S, B, D], by products that can be seen."""
    weight, bias, *_more, out_weight, out_bias = args[:8]
    z = query.transpose(0, 1)
    q, k, v = F.linear(z, weight, bias).view(*z.shape[:2], 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return F.linear(mixed, out_weight, out_bias).transpose(0, 1), None


class Runs(ABC):
    """One model. stem: its patch embedding; weight: E, [D, K]; bias [D]; places: N; grid: of the places.

    backbone: in float64, in eval mode.
    """

    stem: Stem
    weight: Tensor
    places: int
    grid: tuple[int, ...]

    def __init__(self, backbone: Backbone, names: Collection[str] | None = None) -> None:
        """Raises `NoBlockError` with the reason where there is no patch embedding. names: of the matrices whose
        products are noted; None for those of the first block."""
        self.backbone = backbone
        names = set(first_linears(backbone) if names is None else names)
        self.names = {id(p): name for name, p in backbone.named_parameters() if name in names}

    def __call__(self, tokens: Tensor | None, **how: Any) -> list[Call]:
        """The products of a forward pass over E x of whole images, [B, N, D]; None: over as little as can be."""
        calls = self._calls(tokens, how)
        try:
            with calls:
                self._run(tokens)
        except EnoughError:
            pass
        return calls.seen

    def _calls(self, tokens: Tensor | None, how: dict[str, Any]) -> Calls:  # noqa: ARG002
        return Calls(self.names, **how)

    def alone(self, tokens: Tensor, until: int) -> bool:  # noqa: ARG002
        """Whether the products up to number `until` are given nothing else of an image than these tokens, E x."""
        return True

    @abstractmethod
    def _run(self, tokens: Tensor | None) -> None: ...


class BackboneRuns(Runs):
    """A backbone, by its parts."""

    def __init__(self, backbone: Backbone, names: Collection[str] | None = None) -> None:
        super().__init__(backbone, names)
        stem = find_embedding(backbone)
        if isinstance(stem, str):
            raise NoBlockError(stem)
        own = {name: p.detach() for name, p in backbone.named_parameters()}
        self.stem, self.weight = stem, flat_weight(own[stem.weight], stem)
        self.bias = self.weight.new_zeros(backbone.dim) if stem.bias is None else own[stem.bias]
        self.places, self.grid = backbone.num_tokens, backbone.grid

    def _run(self, tokens: Tensor | None) -> None:
        backbone = self.backbone
        places = None if tokens is None else backbone.positions()
        tokens = self.bias.view(1, 1, -1) if tokens is None else tokens + self.bias
        backbone.blocks(backbone.assemble(tokens, places))


class ModuleRuns(Runs):
    """A user's own module, as a whole: the image is nothing, and its patch embedding's product is exchanged."""

    def __init__(self, backbone: StemBackbone, names: Collection[str] | None = None) -> None:
        super().__init__(backbone, names)
        own = dict(backbone.named_parameters())
        self.stem = backbone.stem if isinstance(backbone.stem, Stem) else _embedding(backbone)
        self.weight = flat_weight(own[self.stem.weight].detach(), self.stem)
        self.names.pop(id(own[self.stem.weight]), None)
        self.places, shape = self.stem.count, backbone.input.shape
        assert shape is not None
        self.image = self.weight.new_zeros(1, backbone.input.channels, *shape)
        self.grid = grid_of(self.places, (shape[0], shape[1]))

    def _calls(self, tokens: Tensor | None, how: dict[str, Any]) -> Calls:
        if tokens is None:
            tokens = self.weight.new_zeros(1, self.places, len(self.weight))
        weight = dict(self.backbone.named_parameters())[self.stem.weight]
        return Calls(self.names, **how, embedded=(id(weight), tokens))

    def alone(self, tokens: Tensor, until: int) -> bool:
        plain, grey = self(tokens, until=until), self.image
        try:
            self.image = torch.randn(grey.shape, generator=torch.Generator().manual_seed(2), dtype=grey.dtype).to(grey)
            others = self(tokens, until=until)
        finally:
            self.image = grey
        pairs = zip(plain, others, strict=True)
        return all(torch.allclose(one.inputs, other.inputs, rtol=1e-6, atol=1e-9) for one, other in pairs)

    def _run(self, tokens: Tensor | None) -> None:
        self.backbone(self.image.expand(1 if tokens is None else len(tokens), -1, -1, -1))


def _embedding(backbone: StemBackbone) -> Stem:
    """The first layer that is fed the image at several places, and sees all of it; whatever the positions are."""
    own, shape = dict(backbone.named_parameters()), backbone.input.shape
    assert shape is not None
    size = (backbone.input.channels, shape[0], shape[1])
    image = torch.randn(1, *size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    image = image.to(next(iter(own.values())).device)
    with torch.enable_grad():
        products = watch_products(backbone, image.requires_grad_())[1]
    for number, product in enumerate(products):
        if product.inputs.requires_grad and product.inputs.shape[1] > 1:
            if not View(Feed(backbone, number), size, image.device).affine:
                break
            bias = f"{product.name.removesuffix('weight')}bias"
            bias = bias if bias in own and product.kind != "turned" else None
            return Stem(product.name, bias, "", 0, (1, 1), product.kind, number, count=product.inputs.shape[1])
    raise NoBlockError("no layer was found that multiplies patches of the image with one of its weights")


def runs_of(backbone: Backbone, names: Collection[str] | None = None) -> Runs:
    """How a model is run; names: as in `Runs`."""
    kind = ModuleRuns if isinstance(backbone, StemBackbone) else BackboneRuns
    return kind(backbone, names)  # pyright: ignore[reportArgumentType]
