"""A running mean of the weights, updated in two kernels and no host sync."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_torch: Any = torch  # its stubs do not export the foreach kernels


class Ema:
    """The mean of a model's trainable parameters, by name; buffers and frozen parameters have none."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        held = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.decay = decay
        self.weights = list(held.values())
        self.mean: dict[str, Tensor] = {name: parameter.detach().clone() for name, parameter in held.items()}
        self._means = list(self.mean.values())

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Moves the mean towards the weights after update number `step` (t, the first is 0)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        _torch._foreach_lerp_(self._means, self.weights, 1.0 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model with the mean as its weights, for an evaluation; its own weights come back afterwards."""
        own = [weight.detach().clone() for weight in self.weights]
        self._put(self._means)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()  # here and not on `applied`: torch throws into a decorated generator in a way Python gives up
    def _put(self, values: list[Tensor]) -> None:
        # One by one: sharded weights have no copy for all at once.
        for weight, value in zip(self.weights, values, strict=True):
            weight.copy_(value)
