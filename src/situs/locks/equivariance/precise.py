"""Running a model wholly in float64, against its own casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class KeepDouble(TorchFunctionMode):
    """Casts of float64 to float32 do nothing while this is on.

    RMSNorm, rotary embeddings and some softmaxes compute in float32 whatever the model's type. A law that holds to
    1e-14 would then be seen to hold to 1e-7 only; the casts are no part of it.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        double = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64
        if double and func is torch.Tensor.float:
            return args[0]
        if double and kwargs.get("dtype") == torch.float32:
            kwargs["dtype"] = torch.float64
        if double and func is torch.Tensor.to:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return func(*args, **kwargs)
