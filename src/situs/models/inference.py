"""How every measurement runs a model: in eval mode, without gradients, gathered where FSDP has sharded it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from situs.errors import SitusError
from situs.train import distributed
from situs.train.step import Ema


@contextmanager
def evaluating(*modules: Any, ema: Ema | None = None) -> Iterator[None]:
    """No gradients and eval mode inside; every module's mode is restored. Arguments that are not modules are ignored.

    ema: a mean of the weights to evaluate instead of the weights.
    """
    parts = [part for module in modules if isinstance(module, nn.Module) for part in module.modules()]
    modes, sharded = [part.training for part in parts], _sharded(parts)
    with torch.no_grad(), nullcontext() if ema is None else ema.applied():
        for part in parts:
            part.training = False
        for part in sharded:
            part.unshard()
        try:
            yield
        finally:
            for part in sharded:
                part.reshard()
            for part, mode in zip(parts, modes, strict=True):
                part.training = mode


def _sharded(parts: list[nn.Module]) -> list[Any]:
    """Modules whose weights FSDP gathers only in their own forward, which an evaluation may not call."""
    if distributed.world() == 1:
        return []
    from torch.distributed.fsdp import FSDPModule

    return [part for part in parts if isinstance(part, FSDPModule)]


class Total:
    """A sum of tensors of one shape, part by part on their device."""

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def add(self, value: Tensor) -> None:
        """Adds a part; does not wait for the device."""
        self.value = value if self.value is None else self.value + value

    def of_this_rank(self) -> Tensor:
        """The sum; an error where there were no parts."""
        if self.value is None:
            raise SitusError("there are no samples to evaluate on", field="data")
        return self.value

    def over_ranks(self) -> Tensor:
        """The sum over the parts of all ranks."""
        value = self.of_this_rank().clone()
        if distributed.world() > 1:
            dist.all_reduce(value)
        return value


def rows_of_ranks(value: Tensor) -> Tensor:
    """The rows [n, …] of all ranks; n may differ between ranks."""
    return torch.cat(distributed.gather(value))
