"""The first block of a model as its weights tell it: what is linear in a token there, and what is not.

    z = E x + base           the token at its place; behind a norm, where one stands before the first block
    h1 = norm1(z)            what enters the layers of queries, keys and values
    m = z + A o + b          the stream between attention and MLP; o what enters the attention's last layer
    h2 = norm2(m)            what enters the MLP's first layer or layers
    a = late(m)              what enters its last layer

All of it is the model's own code: its calls are noted and their inputs exchanged (`runs`), and nothing here knows a
library's layout. A block of another form is told apart by trying, with the reason.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from situs.audit.adapter import grid_of
from situs.audit.attacks.solver import Behind
from situs.audit.attacks.spans import Norm
from situs.audit.stem import EnoughError, Feed, Stem, StemBackbone, View, find_embedding, flat_weight, watch_products
from situs.backbones.base import Backbone

# ---------------------------------------------------------------------------------------------------------------------
# A model run from its patch embedding on, with tokens of one's own: what its layers are given is noted and exchanged.
#
# All of it is the model's own code: nothing here knows a library's layout. Backbones are run by their parts; a user's
# own module as a whole, with the product of its patch embedding exchanged.


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


# --- the first block -------------------------------------------------------------------------------------------------


EQUAL = 1e-7
"""Relative: what is the same in float64 differs by less."""

LOOSE = 1e-5
"""Where large numbers are subtracted from each other, or what was read is used again."""


class Layers(NamedTuple):
    """Names of the first block's matrices by what enters them: h1, o, h2 and a."""

    qkv: tuple[str, ...]
    proj: str
    fc1: tuple[str, ...]
    fc2: str


class Block(Behind):
    """What the weights alone tell. weight: E, [D, K]; base [N, D]: what is added to E x at each place; prefix [p, D]:
    the prefix tokens as they enter the first block; norm0: a norm between the two and the first block.

    backbone: in float64, in eval mode.
    """

    layers: Layers
    norm0: Norm | None
    norm1: Norm
    base: Tensor
    prefix: Tensor

    def __init__(self, backbone: Backbone) -> None:
        """Raises `NoBlockError` with the reason where the block is of another form."""
        self.backbone, self.run = backbone, runs_of(backbone)
        self.stem, self.weight, self.grid = self.run.stem, self.run.weight, self.run.grid
        tokens = self._any(1, self.places)
        calls = self.run(tokens)
        self._read_layers(calls)
        if not self.run.alone(tokens, self._fc2):
            raise NoBlockError("its first block sees more of an image than its patch embedding")
        self._modules = [self._norm_before(tokens, number, calls[number].inputs) for number in (0, self._fc1)]
        self.norm1, self.norm2 = (read_norm(module, len(self.weight)) for module in self._modules)
        self._read_base(tokens)
        self._read_mixing(calls[self._fc1 - 1].inputs.shape[-1])
        some = slice(None, None, 2)  # an attention in the MLP's place would miss the others
        m = self._given(tokens)[1][:, some]
        if not _same(self.late(m), calls[self._fc2].inputs[:, some], LOOSE):
            raise NoBlockError("its first MLP mixes tokens")

    def enter(self, u: Tensor) -> Tensor:
        """What is linear of what tokens u [..., D] are when they enter the first block."""
        return u if self.norm0 is None else self.norm0.form(u)

    @property
    def places(self) -> int:
        """N."""
        return self.run.places

    @property
    def names(self) -> tuple[str, ...]:
        """Of all gradients that tell of its tokens."""
        return (self.stem.weight, *self.layers.qkv, self.layers.proj, *self.layers.fc1, self.layers.fc2)

    def entry(self) -> tuple[Tensor, Tensor]:
        own = dict(self.backbone.named_parameters())
        weights: list[Tensor] = [own[name] for name in self.layers.fc1]
        biases = [own.get(f"{name.removesuffix('weight')}bias") for name in self.layers.fc1]
        pairs = zip(weights, biases, strict=True)
        return torch.cat(weights), torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs])

    def tail(self, entered: Tensor) -> Tensor:
        own = dict(self.backbone.named_parameters())
        parts = entered.reshape(1, -1, entered.shape[-1]).split([len(own[name]) for name in self.layers.fc1], dim=-1)
        given = dict(zip(range(self._fc1, self._fc2), parts, strict=True))
        calls = self.run(None, until=self._fc2, outcome=given)
        return calls[-1].inputs.reshape(*entered.shape[:-1], calls[-1].inputs.shape[-1])

    def middle(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """m and o of all tokens of images [B, p + N, ·], with the attention that they pay to each other; patches:
        [B, N, K]."""
        return self.through(patches @ self.weight.T)

    def through(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The same of what the patch embedding's product gave, [B, N, D]."""
        _, m, calls = self._given(tokens)
        return m, calls[self._fc1 - 1].inputs

    def attended(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """What enters queries, keys and values, and what their attention gave: [B, p + N, ·] each."""
        calls = self._given(patches @ self.weight.T)[2]
        return calls[0].inputs, calls[self._fc1 - 1].inputs

    def _given(self, tokens: Tensor, instead: Mapping[int, Tensor] | None = None) -> tuple[Tensor, Tensor, list[Call]]:
        """What the norms before attention and MLP are given, [B, p + N, D] each, and the products."""
        first, second = list[Tensor](), list[Tensor]()
        with _Watched(self._modules[0], first), _Watched(self._modules[1], second):
            calls = self.run(tokens, until=self._fc1, instead=instead or {})
        return first[0], second[-1], calls

    def _read_layers(self, calls: Sequence[Call]) -> None:
        groups: list[list[int]] = []
        for number, call in enumerate(calls):
            if groups and _same(calls[groups[-1][0]].inputs, call.inputs):
                groups[-1].append(number)
            else:
                groups.append([number])
        shape = "its first block is not attention and an MLP of two layers, one behind the other"
        if len(groups) < 4 or len(groups[1]) > 1:
            raise NoBlockError(shape)
        qkv, proj, fc1, last = groups[:4]
        self._fc1, self._fc2 = fc1[0], last[0]
        if any(
            calls[number].inputs.dim() != 3 or calls[number].inputs.shape[1] < self.places for number in range(last[0])
        ):
            raise NoBlockError(shape)
        named = [call.name for call in calls]
        self.layers = Layers(
            tuple(named[i] for i in qkv), named[proj[0]], tuple(named[i] for i in fc1), named[self._fc2]
        )

    def _norm_before(self, tokens: Tensor, number: int, wanted: Tensor) -> nn.Module:
        """The module whose output is what product `number` is given."""
        module = self._giving(tokens, number, wanted)
        if module is None:
            raise NoBlockError("its first block has no norm before its attention and before its MLP")
        return module

    def _giving(self, tokens: Tensor, number: int, wanted: Tensor) -> nn.Module | None:
        """The last module before product `number` whose output is this."""
        given: list[tuple[nn.Module, Any]] = []
        hooks = [
            module.register_forward_hook(lambda module, _, out: given.append((module, out)))
            for module in self.backbone.modules()
            if not list(module.children()) and not isinstance(module, nn.Linear | nn.Identity | nn.Dropout)
        ]
        try:
            self.run(tokens, until=number)
        finally:
            for hook in hooks:
                hook.remove()
        pairs = reversed(given)
        return next((module for module, out in pairs if isinstance(out, Tensor) and _same(out, wanted)), None)

    def _read_base(self, tokens: Tensor) -> None:
        """What is added to E x, and whether a norm stands between that and the first block."""
        first, self.norm0 = self.run(tokens, until=0)[0].inputs.shape[1] - self.places, None
        many = torch.cat([tokens, 0 * tokens])
        z = self._given(many)[0]
        self.prefix = z[0, :first]
        if not _same(z[0, first:] - z[1, first:], tokens[0], LOOSE):
            module, seen = self._giving(tokens, 0, self._given(tokens)[0]), list[Tensor]()
            between = "something stands between its patch embedding and its first block that is no norm"
            if module is None:
                raise NoBlockError(between)
            with _Watched(module, seen):
                self.run(many, until=0)
            z = seen[0]
            if z.shape[1] != first + self.places or not _same(z[0, first:] - z[1, first:], tokens[0], LOOSE):
                raise NoBlockError(between)
            self.norm0 = read_norm(module, len(self.weight))
        self.base = z[1, first:]

    def _read_mixing(self, width: int) -> None:
        eye = torch.cat([self.weight.new_zeros(1, width), torch.eye(width).to(self.weight)])
        mapped, z = self._mixed(eye)
        away = mapped - z
        self.shift, self.into = away[0], away[1:] - away[0]
        chance = torch.Generator().manual_seed(1)
        o = torch.randn(4, width, generator=chance, dtype=torch.float64).to(self.weight)
        mapped, z = self._mixed(o, 1.0)
        if not _same(mapped, z + o @ self.into + self.shift):
            raise NoBlockError("the output of its attention is not simply added to the tokens before the MLP's norm")

    def _mixed(self, o: Tensor, size: float = 0.0) -> tuple[Tensor, Tensor]:
        """m and z of tokens whose attention's last layer is given o [Q, ·]."""
        images = -(-len(o) // self.places)
        wide = torch.cat([o, o.new_zeros(images * self.places - len(o), o.shape[1])]).view(images, self.places, -1)
        first = len(self.prefix)
        given = torch.cat([wide.new_zeros(images, first, o.shape[1]), wide], dim=1)
        z, m, _ = self._given(size * self._any(images, self.places), {self._fc1 - 1: given})
        return m[:, first:].flatten(0, 1)[: len(o)], z[:, first:].flatten(0, 1)[: len(o)]

    def _any(self, images: int, count: int) -> Tensor:
        """Tokens to try it with, [images, count, D]."""
        chance = torch.Generator().manual_seed(0)
        drawn = torch.randn(images, count, len(self.weight), generator=chance, dtype=torch.float64)
        return drawn.to(self.weight)


@torch.no_grad()
def read_block(backbone: Backbone) -> Block | str:
    """The first block, or the reason why its tokens cannot be solved for. backbone: in float64, in eval mode."""
    try:
        return Block(backbone)
    except NoBlockError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  (the model's own code, run in parts and with tokens of its audit's)
        said = str(error).splitlines() or [""]
        return f"its first block does not run by itself ({type(error).__name__}: {said[0]})"


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
        if eps in (low, high):  # nothing lies between them
            break
        made = (away * 1e-3 / (var + eps).sqrt()) * weight
        low, high = (eps, high) if float((made * small).sum()) > float(small.square().sum()) else (low, eps)
    found = Norm(weight, bias, eps, centred)
    for size in (1.0, 1e-2, 10.0):
        if not _same(found.apply(size * z), norm(size * z), 1e-6):
            raise NoBlockError("the norm before its first block's layers is neither a layer norm nor an RMS norm")
    return found


def _same(one: Tensor, other: Tensor, tolerance: float = EQUAL) -> bool:
    return one.shape == other.shape and bool((one - other).norm() <= tolerance * other.norm() + 1e-300)
