"""What a model multiplies with its weights: every product of something made of the image with one parameter.

The model is run and watched (`_Watcher`), so nothing here knows its layout, nor what it does to an image before the
first weight: scaling, channels, padding, resizing, patches that overlap, layers. `Feed` gives the input of one product
as a function of the image, in float64 and differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Kind = Literal["unfolded", "matrix", "turned"]
"""How a weight holds its rows [D, K]: as a convolution in the order of `F.unfold`, as they are, or as [K, D]."""


class Product(NamedTuple):
    """A product with the parameter `name`: inputs [B, N, K], and how the weight holds its rows [D, K]."""

    name: str
    kind: Kind
    inputs: Tensor


class EnoughError(Exception):
    """What was asked for was seen: the rest of the model need not run."""


class _Watcher(TorchFunctionMode):
    """Notes the products of one forward pass, whoever makes them; after number `until` it ends."""

    def __init__(self, names: dict[int, str], until: int | None = None) -> None:
        super().__init__()
        self.names, self.until = names, until
        self.seen: list[Product] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = self._product(func, args, kwargs)
        if found is not None:
            self.seen.append(found)
            if self.until is not None and len(self.seen) > self.until:
                raise EnoughError
        return func(*args, **kwargs)

    def _product(self, func: Any, args: Any, kwargs: Any) -> Product | None:
        if func in _MATMULS:
            name = self.names.get(id(args[1]))
            inputs = args[0]
            return None if name is None or inputs.dim() < 2 else Product(name, "turned", _rows(inputs))
        if func not in (F.linear, torch.conv2d):
            return None
        given = dict(zip(_ARGUMENTS[func], args, strict=False)) | kwargs
        inputs, name = given["input"], self.names.get(id(given["weight"]))
        if name is None or given.get("groups", 1) != 1:
            return None
        if func is F.linear:
            return Product(name, "matrix", _rows(inputs))
        return Product(name, "unfolded", unfold(inputs, given)) if inputs.dim() == 4 else None


_MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    F.linear: ("input", "weight", "bias"),
    torch.conv2d: ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
}


def _rows(inputs: Tensor) -> Tensor:
    """[B, ..., K] -> [B, N, K]; one row of a batch is one place."""
    return inputs.reshape(len(inputs), -1, inputs.shape[-1])


def unfold(inputs: Tensor, given: dict[str, Any]) -> Tensor:
    """What a convolution multiplies: [B, C, H, W] -> [B, N, C · P_h · P_w]."""
    kernel, dilation = tuple(given["weight"].shape[2:]), given.get("dilation", 1)
    padding = given.get("padding", 0)
    if isinstance(padding, str):
        wide = [d * (k - 1) for k, d in zip(kernel, _both(dilation), strict=True)] if padding == "same" else [0, 0]
        before = [total // 2 for total in wide]
        inputs = F.pad(inputs, (before[1], wide[1] - before[1], before[0], wide[0] - before[0]))
        padding = 0
    return F.unfold(inputs, kernel, dilation, padding, given.get("stride", 1)).mT


def _both(number: Any) -> tuple[int, int]:
    return (number, number) if isinstance(number, int) else (number[0], number[-1])


def watch_products(model: nn.Module, images: Tensor, until: int | None = None) -> tuple[Any, list[Product]]:
    """What the model says to images, and its products in their order; None where it was stopped behind number `until`.

    Where a model draws in its forward pass, it draws the same each time.
    """
    watcher = _Watcher({id(p): name for name, p in model.named_parameters()}, until)
    said = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            with watcher:
                said = model(images)
        except EnoughError:
            pass
    return said, watcher.seen


class Feed:
    """The input [B, N, K] of product `number` as a function of images [B, C, H, W]. copied: whether the model is a
    `precise` one already, which is then taken as it is."""

    def __init__(self, model: nn.Module, number: int, copied: bool = False) -> None:
        self.model, self.number = model if copied else precise(model).requires_grad_(False), number

    def __call__(self, images: Tensor) -> Tensor:
        return watch_products(self.model, images, self.number)[1][self.number].inputs

    def derivative(self, image: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """The input for one image [1, C, H, W], v -> J v and u -> J^T u at it."""
        with torch.enable_grad():
            image = image.detach().requires_grad_()
            value = self(image)
            weights = torch.zeros_like(value, requires_grad=True)
            [back] = torch.autograd.grad(value, image, weights, create_graph=True)

        def along(direction: Tensor) -> Tensor:
            if not back.requires_grad:  # it does not see the image at all
                return torch.zeros_like(value)
            return torch.autograd.grad(back, weights, direction, retain_graph=True)[0]

        def against(direction: Tensor) -> Tensor:
            return torch.autograd.grad(value, image, direction, retain_graph=True)[0]

        return value.detach(), along, against


def precise(model: nn.Module) -> nn.Module:
    """A copy in float64, in eval mode."""
    return deepcopy(model).double().eval()
