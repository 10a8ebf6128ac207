"""The attention weights of a model, layer by layer, as its blocks really compute them.

Every family here runs its attention through torch's `scaled_dot_product_attention`, which does not return the weights.
While the blocks run, a watcher intercepts that call's arguments (queries and keys after norms, rotation and grouping,
relative bias or mask) and computes softmax(QKᵀ · scale + bias) from them. So no family's attention is written twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from situs.backbones.base import Backbone, Stream
from situs.core.attention import attention_weights
from situs.errors import SitusError

See = Callable[[int, Tensor], None]
"""(layer, counted from 0; weights [B, H, S, S], float32 at least, prefix tokens first) -> nothing."""


def watch_attention(backbone: Backbone, stream: Stream, see: See) -> Stream:
    """Runs the blocks on `stream` and calls `see` with each layer's attention weights.

    weights[b, h, i, j]: weight of key j for query i; rows sum to 1. One layer's weights exist at a time. The backbone
    must be in eval mode: with dropout the weights would not be those that were used.
    """
    check_attention_maps(backbone)
    if backbone.training:
        raise SitusError(f"{backbone.name}: attention maps need eval mode; call eval() first")
    watcher = _AttentionWatcher(see)
    with watcher:
        out = backbone.blocks(stream)
    assert watcher.layers == backbone.depth, f"{watcher.layers} attentions seen in {backbone.depth} layers"
    return out


def check_attention_maps(backbone: Backbone) -> None:
    """Refuses a model in which not every token attends to every other."""
    if "context" in backbone.refusals:
        raise SitusError(
            f"{backbone.name}: has no attention maps, because not every token attends to every other token: "
            f"{backbone.refusals['context']}"
        )


def has_cls(backbone: Backbone) -> bool:
    """Whether the first prefix token is a CLS token (some models have registers alone, some no prefix at all)."""
    if not backbone.num_prefix:
        return False
    return backbone.source.get("library") == "transformers" or backbone.model.cls_token is not None


class _AttentionWatcher(TorchFunctionMode):
    """Passes every call of torch on, and reports the weights of each attention."""

    def __init__(self, see: See) -> None:
        super().__init__()
        self.see, self.layers = see, 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._show(*args, **kwargs)
        return func(*args, **kwargs)

    def _show(
        self,
        q: Tensor,
        k: Tensor,
        _: Tensor,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
        **others: Any,
    ) -> None:
        assert not any(others.values()), "no family here uses these"
        self.see(self.layers, attention_weights(q, k, attn_mask, scale))  # in here the watcher itself is off
        self.layers += 1
