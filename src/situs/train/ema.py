"""An exponential moving average (EMA) of the weights, updated by two kernels without a host sync."""

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
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.decay = decay
        self.weights = list(trained.values())
        self.mean: dict[str, Tensor] = {name: parameter.detach().clone() for name, parameter in trained.items()}
        self._means = list(self.mean.values())

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Moves the mean towards the weights after update number `step` (t, the first is 0)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        _torch._foreach_lerp_(self._means, self.weights, 1.0 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Puts the mean into the model for an evaluation, and the trained weights back afterwards."""
        trained = [weight.detach().clone() for weight in self.weights]
        self._put(self._means)
        try:
            yield
        finally:
            self._put(trained)

    @torch.no_grad()  # not on `applied`: torch's decorator throws into a generator in a way that Python deprecates
    def _put(self, values: list[Tensor]) -> None:
        # One by one: sharded weights have no copy for all at once.
        for weight, value in zip(self.weights, values, strict=True):
            weight.copy_(value)
