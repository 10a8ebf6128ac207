"""Inputs of a linear layer lie in the row space of its weight's gradient: ∂W = Σ_t δ_t h_t^T.

With fewer tokens than channels that is a test any guess of the image must pass, token by token, with the first
block's forward pass alone: the wrong part of h is what sticks out of the row space. What the gradient's own rounding
lets stick out is known (`Span.variance`), so a guess is judged by how likely its residuals are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from situs.audit.stem import Stem, flat_weight, table_rows
from situs.audit.threat import Gradients
from situs.backbones.base import Backbone
from situs.core.position import Positions

FORWARD = 3e-6
"""Relative error of the victim's own forward pass in float32: its h is not exactly ours."""

_FIRST_BLOCK = re.compile(r"\.(blocks|layers?)\.0\..*weight$")


def first_linears(backbone: Backbone) -> tuple[str, ...]:
    """Names of the matrices in the first block."""
    return tuple(name for name, p in backbone.named_parameters() if p.dim() == 2 and _FIRST_BLOCK.search(name))


class Span:
    """The row space of one weight's gradient [out, in] of rank `tokens`, and what is outside of it.

    Rows are divided by their size (which leaves the row space as it is) and columns by theirs: rounding errs in
    proportion to each number, so that only then the noise is even and the weakest tokens stand out of it.
    """

    def __init__(self, gradient: Tensor, tokens: int) -> None:
        g = gradient.double()
        size = g.square().mean(dim=1, keepdim=True).sqrt()
        g = (g / size)[size[:, 0] > 0]
        column = g.square().mean(dim=0).sqrt()
        # A unit that is nearly dead says nothing, and dividing by its size would let it speak loudest.
        self.column = 1 / column.clamp(min=1e-2 * float(column.square().mean().sqrt()))
        # Once an image, and on the host: one matrix at a time is no work for a device.
        _, values, vectors = torch.linalg.svd((g * self.column).cpu(), full_matrices=False)
        inside = vectors[:tokens]
        outside = torch.linalg.qr(inside.T, mode="complete")[0][:, tokens:].T
        free = (g.shape[0] - tokens) * (g.shape[1] - tokens)
        noise = (values[tokens:].square().sum() / max(free, 1)).sqrt()
        parts = (values[:tokens], inside, outside.contiguous(), noise)
        self.values, self.inside, self.outside, self.noise = (part.to(g.device) for part in parts)

    @staticmethod
    def exists(gradient: Tensor, tokens: int) -> bool:
        """Whether the gradient leaves room outside of its row space."""
        return min(gradient.shape) > tokens and bool(gradient.isfinite().all()) and bool(gradient.any())

    def residual(self, inputs: Tensor) -> Tensor:
        """What of inputs [T, in] is outside, [T, out dims]."""
        return (inputs * self.column) @ self.outside.T

    def variance(self, inputs: Tensor, level: Tensor | float) -> Tensor:
        """The variance of each number of a token's residual, [T]: what noise alone explains, and level² · size².

        h = Σ_k c_k v_k with ∂W known up to noise η errs outside by η ‖c / σ‖: tokens with weak gradients err most.
        """
        scaled = inputs * self.column
        own = (scaled @ self.inside.T / self.values).square().sum(dim=-1)
        return self.noise**2 * own + (level**2 + FORWARD**2) * scaled.square().mean(dim=-1)

    def excess(self, inputs: Tensor) -> Tensor:
        """Squared relative residual beyond what noise explains, [T]."""
        scaled = (inputs * self.column).square().mean(dim=-1)
        beyond = self.residual(inputs).square().mean(dim=-1) - self.variance(inputs, 0.0)
        return beyond.clamp(min=0.0) / scaled


class _EnoughError(Exception):
    """All inputs were seen: the rest of the model need not run."""


class _Tap(TorchFunctionMode):
    """Notes what goes into the products with certain weights, whichever module or function makes them."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names, self.seen = names, dict[str, Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            # A fused weight may be used slice by slice: a slice knows what it was cut from.
            name = self.names.get(id(args[1])) or self.names.get(id(args[1]._base))
            if name is not None and name not in self.seen:
                self.seen[name] = args[0]
                if len(self.seen) == len(self.names):
                    raise _EnoughError
        return func(*args, **(kwargs or {}))


class FirstBlock:
    """The first block of a model as the attacker runs it: patches in, residuals out, in float64.

    backbone: in float64. hidden: [N] bool. unknown: E_unk, [D]. Queries may stand beside the image: tokens that look at
    it and are not looked at, each a guess on its own.
    """

    def __init__(self, backbone: Backbone, stem: Stem, upload: Gradients, hidden: Tensor, unknown: Tensor) -> None:
        own = {name: p.detach() for name, p in backbone.named_parameters()}
        self.backbone, self.count, self.prefix = backbone, backbone.num_tokens, backbone.num_prefix
        tokens = self.count + self.prefix
        names = [n for n in first_linears(backbone) if n in upload and Span.exists(upload[n], tokens)]
        self.spans = {name: Span(upload[name], tokens) for name in names}
        self._names = {id(p): name for name, p in backbone.named_parameters() if name in self.spans}
        self.weight = flat_weight(own[stem.weight])
        self.bias = own[stem.bias] if stem.bias is not None else 0.0
        table = table_rows(own[stem.table], stem)
        self.table = torch.where(hidden.unsqueeze(-1), unknown.to(table.dtype), table)

    def inputs(self, patches: Tensor, queries: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
        """What each layer is given for the image's tokens [N, in], or for queries (patches [Q, K], rows [Q, D])."""
        z = patches @ self.weight.T + self.bias + self.table
        first = self.prefix
        if queries is not None:
            z = torch.cat([z, queries[0] @ self.weight.T + self.bias + queries[1]])
            first += self.count
        tap = _Tap(self._names)
        try:
            # Flash kernels know no forward derivative.
            with tap, sdpa_kernel(SDPBackend.MATH):
                stream = self.backbone.assemble(z.unsqueeze(0), Positions())
                self.backbone.blocks(stream, context=self.count)
        except _EnoughError:
            pass
        return {name: tap.seen[name][0, first:] for name in self.spans}

    def residuals(self, inputs: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Tensor:
        """All residuals of each token, weighted, [T, R]."""
        return torch.cat([span.residual(inputs[n]) * weights[n].unsqueeze(-1) for n, span in self.spans.items()], 1)

    def levels(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The relative error that the median token still has in each layer."""
        return {name: span.excess(inputs[name]).median().sqrt() for name, span in self.spans.items()}

    def surprise(self, inputs: Mapping[str, Tensor], levels: Mapping[str, Tensor | float]) -> Tensor:
        """How unlikely each token's residuals are, [T]: -2 log likelihood a number, up to a constant."""
        total = 0.0
        for name, span in self.spans.items():
            variance = span.variance(inputs[name], levels[name])
            total = total + span.residual(inputs[name]).square().sum(-1) / variance
            total = total + span.outside.shape[0] * variance.log()
        assert isinstance(total, Tensor)
        return total / self.size

    def fit(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """χ² per number of each token, [T]: near 1 where noise explains all."""
        parts = [s.residual(inputs[n]).square().sum(-1) / s.variance(inputs[n], 0.0) for n, s in self.spans.items()]
        return torch.stack(parts).sum(dim=0) / self.size

    def error(self, inputs: Mapping[str, Tensor]) -> float:
        """The mean over tokens and layers of the log of the relative residual: one number to compare two images by.

        A sum of logs, so that a token that is wholly wrong counts as one token and not for all.
        """
        logs = []
        for name, span in self.spans.items():
            size = (inputs[name] * span.column).square().mean(dim=-1)
            logs.append((span.residual(inputs[name]).square().mean(dim=-1) / size + FORWARD**2).log())
        return float(torch.stack(logs).mean())

    @property
    def size(self) -> int:
        """R: residuals of one token."""
        return sum(span.outside.shape[0] for span in self.spans.values())
