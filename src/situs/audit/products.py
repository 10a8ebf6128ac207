"""What a model multiplies with its weights, recorded while it runs: every audit that looks inside a model looks here.

The model's own code is run and its calls are intercepted, so nothing here knows a library's layout, nor what a model
does to an image before the first weight: scaling, channels, padding, resizing, patches that overlap, layers.
`Recorder` records the products of one forward pass and can exchange their inputs and outputs; `module_inputs` records
what one module is called with; `Feed` gives the input of one product as a differentiable function of the image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Kind = Literal["unfolded", "matrix", "turned"]
"""How a weight holds its rows [D, K]: as a convolution in the order of `F.unfold`, as they are, or as [K, D]."""


class Product(NamedTuple):
    """A product with the parameter `name`. inputs: as the layer was called; rows: the same as [B, N, K]."""

    name: str
    kind: Kind
    inputs: Tensor
    rows: Tensor


class EnoughError(Exception):
    """The last product that is needed was recorded: the rest of the model need not run."""


class Recorder(TorchFunctionMode):
    """Records the products of one forward pass with named weights, in their order, whoever makes them.

    names: of the weights by their id. until: the number of the last product that is needed: `run` ends the pass there.
    inputs, outputs: by number, what a product is given, or gives, instead. embedded: id of the patch embedding's weight
    and what its first product gives instead, [B, N, D] without the bias. fused: record linear layers alone, slices of
    fused weights and torch's own multi-head attention among them, and end once every weight was met.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        until: int | None = None,
        *,
        inputs: Mapping[int, Tensor] | None = None,
        outputs: Mapping[int, Tensor] | None = None,
        embedded: tuple[int, Tensor] | None = None,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.names, self.until, self.fused, self.embedded = names, until, fused, embedded
        self.inputs, self.outputs = inputs or {}, outputs or {}
        self.products: list[Product] = []

    def run(self, forward: Callable[[], Any]) -> Any:
        """What the forward pass returns; None where it ended early."""
        try:
            with self:
                return forward()
        except EnoughError:
            return None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self.fused and func is F.multi_head_attention_forward and _is_plain(*args, **kwargs):
            with self:  # torch makes these products where no mode sees them
                return _attend(*args, **kwargs)
        if func in _ARGUMENTS:
            args = (*args, *(kwargs.pop(name) for name in _ARGUMENTS[func][len(args) :] if name in kwargs))
        if self.embedded is not None and len(args) > 1 and id(args[1]) == self.embedded[0]:
            return self._embed(func, args, kwargs)
        number = len(self.products)
        if number in self.inputs and self._name(func, args) is not None:
            args = (self.inputs[number], *args[1:])
        product = self._product(func, args, kwargs)
        if product is None:
            return func(*args, **kwargs)
        self.products.append(product)
        if number == self.until or (
            self.fused and {*self.names.values()} <= {product.name for product in self.products}
        ):
            raise EnoughError
        return self.outputs[number] if number in self.outputs else func(*args, **kwargs)

    def _name(self, func: Any, args: Any) -> str | None:
        """The name of the weight that a call multiplies with."""
        if self.fused:  # a slice of a fused weight knows what it was cut from
            return self.names.get(id(args[1])) or self.names.get(id(args[1]._base)) if func is F.linear else None
        return self.names.get(id(args[1])) if (func in _MATMULS or func in _ARGUMENTS) and len(args) > 1 else None

    def _product(self, func: Any, args: Any, kwargs: Any) -> Product | None:
        name = self._name(func, args)
        if name is None:
            return None
        inputs = args[0]
        if func is F.linear:
            return Product(name, "matrix", inputs, _rows(inputs))
        if func in _MATMULS:
            return None if inputs.dim() < 2 else Product(name, "turned", inputs, _rows(inputs))
        options = dict(zip(_OPTIONS, args[3:], strict=False)) | kwargs
        if options.pop("groups", 1) != 1 or inputs.dim() != 4:
            return None
        return Product(name, "unfolded", inputs, unfold(inputs, args[1].shape[2:], **options))

    def _embed(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        assert self.embedded is not None
        tokens, usual = self.embedded[1], func(*args, **kwargs)
        self.embedded = None
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        tokens = tokens if bias is None else tokens + bias
        tokens = tokens.mT if func is torch.conv2d else tokens
        return tokens.reshape(len(tokens), *usual.shape[1:])


_MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
_OPTIONS = ("stride", "padding", "dilation", "groups")
_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    F.linear: ("input", "weight", "bias"),
    torch.conv2d: ("input", "weight", "bias"),
}


def _rows(inputs: Tensor) -> Tensor:
    """[B, ..., K] -> [B, N, K]."""
    return inputs.reshape(len(inputs), -1, inputs.shape[-1])


def unfold(inputs: Tensor, kernel: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1) -> Tensor:
    """What a convolution with a kernel (height, width) multiplies: [B, C, H, W] -> [B, N, C · P_h · P_w]."""
    kernel = tuple(kernel)
    if isinstance(padding, str):
        steps = (dilation, dilation) if isinstance(dilation, int) else (dilation[0], dilation[-1])
        total = [d * (k - 1) if padding == "same" else 0 for k, d in zip(kernel, steps, strict=True)]
        before = [part // 2 for part in total]
        inputs = F.pad(inputs, (before[1], total[1] - before[1], before[0], total[0] - before[0]))
        padding = 0
    return F.unfold(inputs, kernel, dilation, padding, stride).mT


def _is_plain(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> bool:
    """Whether torch's multi-head attention is self-attention with one matrix for queries, keys and values, no mask."""
    weight, _, bias_k, bias_v, add_zero = args[2:7]
    odd = bias_k is not None or bias_v is not None or add_zero or options.get("attn_mask") is not None
    return weight is not None and not odd and options.get("key_padding_mask") is None and query is key is value


def _attend(query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, *args: Any, **_: Any) -> Any:  # noqa: ARG001
    """Torch's multi-head attention of tokens [S, B, D], by products that are recorded."""
    weight, bias, *_more, out_weight, out_bias = args[:8]
    z = query.transpose(0, 1)
    q, k, v = F.linear(z, weight, bias).view(*z.shape[:2], 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return F.linear(mixed, out_weight, out_bias).transpose(0, 1), None


def record_products(model: nn.Module, images: Tensor, until: int | None = None) -> tuple[Any, list[Product]]:
    """What the model returns for images (None where it ended at product `until`), and its products in their order.

    A model that draws random numbers in its forward pass draws the same ones each time.
    """
    recorder = Recorder({id(p): name for name, p in model.named_parameters()}, until)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return recorder.run(lambda: model(images)), recorder.products


@contextmanager
def module_inputs(module: nn.Module, last: int | None = None) -> Iterator[list[Tensor]]:
    """The first argument of each call of a module; the forward pass within ends at call number `last`."""
    inputs: list[Tensor] = []

    def record(_: nn.Module, args: tuple[Any, ...]) -> None:
        inputs.append(args[0])
        if len(inputs) - 1 == last:
            raise EnoughError

    handle = module.register_forward_pre_hook(record)
    try:
        yield inputs
    except EnoughError:
        pass
    finally:
        handle.remove()


class Feed:
    """The rows [B, N, K] of product `number` as a function of images [B, C, H, W], in float64 and differentiable.

    copied: whether the model is already a `precise` copy of its own.
    """

    def __init__(self, model: nn.Module, number: int, copied: bool = False) -> None:
        self.model, self.number = model if copied else precise(model).requires_grad_(False), number

    def __call__(self, images: Tensor) -> Tensor:
        return record_products(self.model, images, self.number)[1][self.number].rows

    def derivative(self, image: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """The rows for one image [1, C, H, W], and the products v -> J v and u -> J^T u with their derivative J."""
        with torch.enable_grad():
            image = image.detach().requires_grad_()
            value = self(image)
            weights = torch.zeros_like(value, requires_grad=True)
            [back] = torch.autograd.grad(value, image, weights, create_graph=True)

        def along(direction: Tensor) -> Tensor:
            if not back.requires_grad:  # the rows do not depend on the image
                return torch.zeros_like(value)
            return torch.autograd.grad(back, weights, direction, retain_graph=True)[0]

        def against(direction: Tensor) -> Tensor:
            return torch.autograd.grad(value, image, direction, retain_graph=True)[0]

        return value.detach(), along, against


def precise(model: nn.Module) -> nn.Module:
    """A copy in float64, in eval mode."""
    return deepcopy(model).double().eval()
