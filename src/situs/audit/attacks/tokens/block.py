"""The first block of a model, read off its weights: what is linear in a token there, and what is not.

    z = E x + base           the token at its place; behind a norm, where one stands before the first block
    h1 = norm1(z)            input of the layers of queries, keys and values
    m = z + A o + b          the stream between attention and MLP; o: input of the attention's last layer
    h2 = norm2(m)            input of the MLP's first layer or layers
    a = late(m)              input of its last layer

The model's own code is run from its patch embedding on, with tokens of the attacker's choice; its products are recorded
and exchanged (`products.Recorder`), and nothing here knows a library's layout. A block of another form is recognised by
trying, with the reason.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from situs.audit.adapter import grid_of
from situs.audit.attacks.solver import BlockTail, Norm
from situs.audit.products import Feed, Product, Recorder, module_inputs, record_products
from situs.audit.stem import Stem, StemBackbone, View, find_embedding, flat_weight
from situs.backbones.base import Backbone


class NoBlockError(Exception):
    """The first block is none whose tokens can be solved for; its text is the reason."""


def first_matrices(backbone: Backbone) -> tuple[str, ...]:
    """Names of the matrices in the first block; of a user's own module all of its matrices."""
    if isinstance(backbone, StemBackbone):
        return tuple(name for name, p in backbone.named_parameters() if p.dim() == 2)
    roles = backbone.roles()
    first = {name for name, role in roles.items() if role.depth == 1 and role.part in ("qkv", "block")}
    return tuple(name for name, p in backbone.named_parameters() if p.dim() == 2 and name in first)


class Runner(ABC):
    """Runs one model, in float64 and eval mode, from the output of its patch embedding on.

    stem: its patch embedding; weight: E, [D, K]; places: N; grid: of the places.
    """

    stem: Stem
    weight: Tensor
    places: int
    grid: tuple[int, ...]

    def __init__(self, backbone: Backbone) -> None:
        self.backbone, recorded = backbone, {*first_matrices(backbone)}
        self.names = {id(p): name for name, p in backbone.named_parameters() if name in recorded}

    def __call__(self, tokens: Tensor | None, **exchanged: Any) -> list[Product]:
        """The products of a forward pass over E x of whole images, [B, N, D]; None: over the least input that runs.

        exchanged: as in `Recorder`.
        """
        recorder = Recorder(self.names, fused=True, embedded=self._embedded(tokens), **exchanged)
        recorder.run(lambda: self._forward(tokens))
        return recorder.products

    def sees_only(self, tokens: Tensor, until: int) -> bool:  # noqa: ARG002
        """Whether the products up to number `until` depend on nothing else of an image than these tokens, E x."""
        return True

    def _embedded(self, tokens: Tensor | None) -> tuple[int, Tensor] | None:  # noqa: ARG002
        """The product of the patch embedding that is exchanged, where the model is run as a whole."""
        return None

    @abstractmethod
    def _forward(self, tokens: Tensor | None) -> None: ...


class BackboneRunner(Runner):
    """A backbone, run by its parts."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone)
        stem = find_embedding(backbone)
        if isinstance(stem, str):
            raise NoBlockError(stem)
        parameters = {name: p.detach() for name, p in backbone.named_parameters()}
        self.stem, self.weight = stem, flat_weight(parameters[stem.weight], stem)
        self.bias = self.weight.new_zeros(backbone.dim) if stem.bias is None else parameters[stem.bias]
        self.places, self.grid = backbone.num_tokens, backbone.grid

    def _forward(self, tokens: Tensor | None) -> None:
        positions = None if tokens is None else self.backbone.positions()
        tokens = self.bias.view(1, 1, -1) if tokens is None else tokens + self.bias
        self.backbone.blocks(self.backbone.assemble(tokens, positions))


class ModuleRunner(Runner):
    """A user's own module, run as a whole on a blank image: the product of its patch embedding is exchanged."""

    def __init__(self, backbone: StemBackbone) -> None:
        super().__init__(backbone)
        self.stem = backbone.stem if isinstance(backbone.stem, Stem) else _find_embedding(backbone)
        self.weight = flat_weight(dict(backbone.named_parameters())[self.stem.weight].detach(), self.stem)
        self.places, shape = self.stem.count, backbone.input.shape
        assert shape is not None
        self.image = self.weight.new_zeros(1, backbone.input.channels, *shape)
        self.grid = grid_of(self.places, (shape[0], shape[1]))

    def _embedded(self, tokens: Tensor | None) -> tuple[int, Tensor]:
        if tokens is None:
            tokens = self.weight.new_zeros(1, self.places, len(self.weight))
        return id(dict(self.backbone.named_parameters())[self.stem.weight]), tokens

    def sees_only(self, tokens: Tensor, until: int) -> bool:
        blank, products = self.image, self(tokens, until=until)
        generator = torch.Generator().manual_seed(2)
        try:
            self.image = torch.randn(blank.shape, generator=generator, dtype=blank.dtype).to(blank)
            others = self(tokens, until=until)
        finally:
            self.image = blank
        pairs = zip(products, others, strict=True)
        return all(torch.allclose(one.inputs, other.inputs, rtol=1e-6, atol=1e-9) for one, other in pairs)

    def _forward(self, tokens: Tensor | None) -> None:
        self.backbone(self.image.expand(1 if tokens is None else len(tokens), -1, -1, -1))


def _find_embedding(backbone: StemBackbone) -> Stem:
    """The first layer whose input are several places of the image and all of it; with any positions."""
    parameters, shape = dict(backbone.named_parameters()), backbone.input.shape
    assert shape is not None
    size = (backbone.input.channels, shape[0], shape[1])
    image = torch.randn(1, *size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    image = image.to(next(iter(parameters.values())).device)
    with torch.enable_grad():
        products = record_products(backbone, image.requires_grad_())[1]
    for number, product in enumerate(products):
        if product.rows.requires_grad and product.rows.shape[1] > 1:
            if not View(Feed(backbone, number), size, image.device).affine:
                break
            bias = f"{product.name.removesuffix('weight')}bias"
            bias = bias if bias in parameters and product.kind != "turned" else None
            return Stem(product.name, bias, "", 0, layout=product.kind, product=number, count=product.rows.shape[1])
    raise NoBlockError("no layer multiplies patches of the image by a weight")


EQUAL = 1e-7
"""Relative difference below which two results in float64 are the same."""

LOOSE = 1e-5
"""The same where large numbers were subtracted from each other, or where a result was used again."""


class Layers(NamedTuple):
    """Names of the first block's matrices by their inputs: h1, o, h2 and a."""

    qkv: tuple[str, ...]
    proj: str
    fc1: tuple[str, ...]
    fc2: str


class Block(BlockTail):
    """The first block of a backbone in float64 and eval mode. weight: E, [D, K]; base [N, D]: what is added to E x at
    each place; prefix [p, D]: the prefix tokens at the first block; norm0: a norm between both and the first block."""

    layers: Layers
    norm0: Norm | None
    norm1: Norm
    base: Tensor
    prefix: Tensor

    def __init__(self, backbone: Backbone) -> None:
        """Raises `NoBlockError` with the reason where the block is of another form."""
        self.backbone = backbone
        self.run = ModuleRunner(backbone) if isinstance(backbone, StemBackbone) else BackboneRunner(backbone)
        self.stem, self.weight, self.grid = self.run.stem, self.run.weight, self.run.grid
        tokens = self._random(1, self.places)
        products = self.run(tokens)
        self._read_layers(products)
        if not self.run.sees_only(tokens, self._fc2):
            raise NoBlockError("the image also reaches the first block by another path than the patch embedding")
        norms = [self._module_giving(tokens, number, products[number].inputs) for number in (0, self._fc1)]
        if norms[0] is None or norms[1] is None:
            raise NoBlockError("the model's first block lacks a norm before its attention or before its MLP")
        self._norms = norms[0], norms[1]
        self.norm1, self.norm2 = (read_norm(module, len(self.weight)) for module in self._norms)
        self._read_base(tokens)
        self._read_mixing(products[self._fc1 - 1].inputs.shape[-1])
        half = slice(None, None, 2)  # an attention in the MLP's place would miss the others
        m = self._streams(tokens)[1][:, half]
        if not _same(self.late(m), products[self._fc2].inputs[:, half], LOOSE):
            raise NoBlockError("the MLP of the first block mixes tokens")

    def enter(self, u: Tensor) -> Tensor:
        """The linear part of tokens u [..., D] as the first block gets them."""
        return u if self.norm0 is None else self.norm0.form(u)

    @property
    def places(self) -> int:
        """N."""
        return self.run.places

    @property
    def names(self) -> tuple[str, ...]:
        """Of all gradients that depend on its tokens."""
        return (self.stem.weight, *self.layers.qkv, self.layers.proj, *self.layers.fc1, self.layers.fc2)

    def entry(self) -> tuple[Tensor, Tensor]:
        return self.joined(self.layers.fc1)

    def joined(self, names: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Weights and biases of linear layers, one below the other; a layer without a bias has zeros."""
        parameters = dict(self.backbone.named_parameters())
        weights: list[Tensor] = [parameters[name] for name in names]
        biases = [parameters.get(f"{name.removesuffix('weight')}bias") for name in names]
        pairs = zip(weights, biases, strict=True)
        return torch.cat(weights), torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs])

    def tail(self, entered: Tensor) -> Tensor:
        parameters = dict(self.backbone.named_parameters())
        sizes = [len(parameters[name]) for name in self.layers.fc1]
        parts = entered.reshape(1, -1, entered.shape[-1]).split(sizes, dim=-1)
        outputs = dict(zip(range(self._fc1, self._fc2), parts, strict=True))
        last = self.run(None, until=self._fc2, outputs=outputs)[-1].inputs
        return last.reshape(*entered.shape[:-1], last.shape[-1])

    def middle(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """m and o of all tokens of images with patches [B, N, K], by the model's own attention: [B, p + N, ·] each."""
        return self.through(patches @ self.weight.T)

    def through(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The same for outputs of the patch embedding's product, [B, N, D]."""
        _, m, products = self._streams(tokens)
        return m, products[self._fc1 - 1].inputs

    def attended(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of queries, keys and values, and outputs of their attention: [B, p + N, ·] each."""
        products = self._streams(patches @ self.weight.T)[2]
        return products[0].inputs, products[self._fc1 - 1].inputs

    def _streams(self, tokens: Tensor, **exchanged: Mapping[int, Tensor]) -> tuple[Tensor, Tensor, list[Product]]:
        """Inputs of the norms before attention and MLP, [B, p + N, D] each, and the products."""
        with module_inputs(self._norms[0]) as first, module_inputs(self._norms[1]) as second:
            products = self.run(tokens, until=self._fc1, **exchanged)
        return first[0], second[-1], products

    def _read_layers(self, products: Sequence[Product]) -> None:
        """Groups the products by their inputs: queries, keys and values; projection; the MLP's first; its last."""
        groups: list[list[int]] = []
        for number, product in enumerate(products):
            if groups and _same(products[groups[-1][0]].inputs, product.inputs):
                groups[-1].append(number)
            else:
                groups.append([number])
        shape = "the model's first block is not attention followed by an MLP of two layers"
        if len(groups) < 4 or len(groups[1]) > 1:
            raise NoBlockError(shape)
        qkv, proj, fc1, last = groups[:4]
        self._fc1, self._fc2 = fc1[0], last[0]
        inputs = [product.inputs for product in products[: last[0]]]
        if any(rows.dim() != 3 or rows.shape[1] < self.places for rows in inputs):
            raise NoBlockError(shape)
        names = [product.name for product in products]
        self.layers = Layers(
            tuple(names[i] for i in qkv), names[proj[0]], tuple(names[i] for i in fc1), names[self._fc2]
        )

    def _module_giving(self, tokens: Tensor, number: int, output: Tensor) -> nn.Module | None:
        """The last module before product `number` with this output."""
        outputs: list[tuple[nn.Module, Any]] = []
        hooks = [
            module.register_forward_hook(lambda module, _, out: outputs.append((module, out)))
            for module in self.backbone.modules()
            if not list(module.children()) and not isinstance(module, nn.Linear | nn.Identity | nn.Dropout)
        ]
        try:
            self.run(tokens, until=number)
        finally:
            for hook in hooks:
                hook.remove()
        pairs = reversed(outputs)
        return next((module for module, out in pairs if isinstance(out, Tensor) and _same(out, output)), None)

    def _read_base(self, tokens: Tensor) -> None:
        """What is added to E x, and whether a norm stands between that and the first block."""
        first, self.norm0 = self.run(tokens, until=0)[0].inputs.shape[1] - self.places, None
        both = torch.cat([tokens, torch.zeros_like(tokens)])
        z = self._streams(both)[0]
        self.prefix = z[0, :first]
        if not _same(z[0, first:] - z[1, first:], tokens[0], LOOSE):
            module = self._module_giving(tokens, 0, self._streams(tokens)[0])
            between = "a layer other than a norm lies between the patch embedding and the first block"
            if module is None:
                raise NoBlockError(between)
            with module_inputs(module) as inputs:
                self.run(both, until=0)
            z = inputs[0]
            if z.shape[1] != first + self.places or not _same(z[0, first:] - z[1, first:], tokens[0], LOOSE):
                raise NoBlockError(between)
            self.norm0 = read_norm(module, len(self.weight))
        self.base = z[1, first:]

    def _read_mixing(self, width: int) -> None:
        """A and b, from the model's outputs for 0 and for each unit vector."""
        m, z = self._mixed(torch.cat([self.weight.new_zeros(1, width), torch.eye(width).to(self.weight)]))
        self.shift, self.into = (m - z)[0], (m - z)[1:] - (m - z)[0]
        generator = torch.Generator().manual_seed(1)
        o = torch.randn(4, width, generator=generator, dtype=torch.float64).to(self.weight)
        m, z = self._mixed(o, 1.0)
        if not _same(m, z + o @ self.into + self.shift):
            raise NoBlockError("the first attention's output is not simply added to the tokens before the MLP's norm")

    def _mixed(self, o: Tensor, size: float = 0.0) -> tuple[Tensor, Tensor]:
        """m and z of random tokens of a size where the attention's last layer gets o [Q, ·]."""
        images = -(-len(o) // self.places)
        padded = torch.cat([o, o.new_zeros(images * self.places - len(o), o.shape[1])]).view(images, self.places, -1)
        first = len(self.prefix)
        inputs = torch.cat([padded.new_zeros(images, first, o.shape[1]), padded], dim=1)
        z, m, _ = self._streams(size * self._random(images, self.places), inputs={self._fc1 - 1: inputs})
        return m[:, first:].flatten(0, 1)[: len(o)], z[:, first:].flatten(0, 1)[: len(o)]

    def _random(self, images: int, count: int) -> Tensor:
        """Tokens to try the block with, [images, count, D]."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(images, count, len(self.weight), generator=generator, dtype=torch.float64).to(self.weight)


@torch.no_grad()
def read_block(backbone: Backbone) -> Block | str:
    """The first block, or the reason why its tokens cannot be solved for. backbone: in float64, in eval mode."""
    try:
        return Block(backbone)
    except NoBlockError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  (the model's own code, run in parts and on other tokens than its own)
        lines = str(error).splitlines() or [""]
        return f"the model's first block cannot be run separately ({type(error).__name__}: {lines[0]})"


@torch.no_grad()
def read_norm(norm: Callable[[Tensor], Tensor], dim: int) -> Norm:
    """A norm's weight, bias and eps from its outputs, whoever wrote it."""
    like = next(iter(norm.parameters()), None) if isinstance(norm, nn.Module) else None
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(8, dim, generator=generator, dtype=torch.float64).to("cpu" if like is None else like.device)
    bias = norm(torch.zeros_like(z[:1]))[0]
    centred = _same(norm(z + 3.0), norm(z))
    away = z - z.mean(dim=-1, keepdim=True) if centred else z
    unit = away / away.square().mean(dim=-1, keepdim=True).sqrt()
    large = norm(1e6 * z) - bias  # so large that eps does not matter
    weight = (large * unit).sum(dim=0) / unit.square().sum(dim=0)
    small = norm(1e-3 * z) - bias
    share = (small * large).sum() / large.square().sum()
    var = 1e-6 * away.square().mean(dim=-1, keepdim=True)
    eps = float((var * (1 / share**2 - 1)).mean().clamp(min=0))
    # One eps for all tokens, by bisection since their variances differ.
    low, high = 0.0, max(4 * eps, 1e-3)
    for _ in range(200):
        eps = (low + high) / 2
        if eps in (low, high):  # no number lies between them
            break
        normed = (away * 1e-3 / (var + eps).sqrt()) * weight
        low, high = (eps, high) if float((normed * small).sum()) > float(small.square().sum()) else (low, eps)
    result = Norm(weight, bias, eps, centred)
    for size in (1.0, 1e-2, 10.0):
        if not _same(result.apply(size * z), norm(size * z), 1e-6):
            raise NoBlockError("a norm in or before the first block is neither a layer norm nor an RMS norm")
    return result


def _same(one: Tensor, other: Tensor, tolerance: float = EQUAL) -> bool:
    return one.shape == other.shape and bool((one - other).norm() <= tolerance * other.norm() + 1e-300)
