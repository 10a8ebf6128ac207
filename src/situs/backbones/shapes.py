"""Models without values: their shapes alone, made in no time and no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_FILLS = {
    *(Tensor.uniform_, Tensor.normal_, Tensor.fill_, Tensor.zero_, Tensor.copy_),
    *(Tensor.erfinv_, Tensor.mul_, Tensor.div_, Tensor.add_, Tensor.clamp_),  # of truncated normal values
}


class _Unfilled(TorchFunctionMode):
    """Leaves a tensor of no values as it is, where torch would look up what a fill does to its shape: nothing."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _FILLS and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def shapes_alone() -> Iterator[None]:
    """What is made within is on the meta device; to start its weights costs nothing."""
    with torch.device("meta"), _Unfilled():
        yield
