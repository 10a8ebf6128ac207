"""What transformers' models share, and the layers of its encoders, run over their own weights with a context.

transformers computes keys and values for every token. Here each exact attention class that we know has its
layer written out, with keys and values for the first `keys` tokens alone; a class we do not know is refused
by name. Attention runs through torch's SDPA whatever the model's `attn_implementation`: the others differ in
rounding only. Gradient checkpointing, which transformers keeps in its own layer call, is not applied.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from situs.backbones.base import Backbone, Features, Stream, Taps, called
from situs.backbones.hf.layout import NAMES, inner_prefix, one_block
from situs.backbones.hf.names import own_names
from situs.backbones.hf.postnorm import POST_NORM, PostNorm
from situs.backbones.layout import Role, roles_of
from situs.core.position import Positions
from situs.core.tokens import Grid
from situs.errors import SitusError

Layer = Callable[[Any, Tensor, int | None, Tensor | None], Tensor]
"""(layer, z [B, S, D], keys, mask [B, 1, 1, K] or None) -> z."""

Head = Callable[[Any, Features], Tensor]
"""(wrapped model, finished features) -> logits."""


def _mix(
    project: tuple[Any, Any, Any],
    heads: int,
    scale: float,
    dropout: float,
    x: Tensor,
    keys: int | None,
    mask: Tensor | None,
) -> Tensor:
    """Attention before the output projection: x [B, S, D] -> [B, S, H * d]; queries are all tokens."""
    seen = x if keys is None else x[:, :keys]
    sources = zip(project, (x, seen, seen), strict=True)
    q, k, v = (_heads(linear(source), heads) for linear, source in sources)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    return mixed.transpose(1, 2).flatten(2)


def _heads(x: Tensor, count: int) -> Tensor:
    """[B, S, H * d] -> [B, H, S, d]."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _image_attention(attn: Any, x: Tensor, keys: int | None, mask: Tensor | None) -> Tensor:
    project, dropout = (attn.q_proj, attn.k_proj, attn.v_proj), attn.attention_dropout if attn.training else 0.0
    return attn.o_proj(_mix(project, attn.num_attention_heads, attn.scaling, dropout, x, keys, mask))


def _vit(layer: Any, z: Tensor, keys: int | None, mask: Tensor | None) -> Tensor:
    z = z + layer.dropout(_image_attention(layer.attention, layer.layernorm_before(z), keys, mask))
    return z + layer.dropout(layer.mlp(layer.layernorm_after(z)))


def _dinov2(layer: Any, z: Tensor, keys: int | None, mask: Tensor | None) -> Tensor:
    mixed = layer.layer_scale1(_image_attention(layer.attention, layer.norm1(z), keys, mask))
    z = z + layer.drop_path(mixed)
    return z + layer.drop_path(layer.layer_scale2(layer.mlp(layer.norm2(z))))


def _post_norm(
    parts: Callable[[Any], PostNorm], layer: Any, z: Tensor, keys: int | None, mask: Tensor | None
) -> Tensor:
    p = parts(layer)
    dropout = p.dropout.p if p.dropout.training else 0.0
    z = p.norm1(z + p.drop1(p.out(_mix(p[:3], p.heads, p.scale, dropout, z, keys, mask))))
    return p.norm2(z + p.drop2(p.fc2(p.act(p.fc1(z)))))


LAYERS: dict[str, Layer] = {
    "ASTAttention": _vit,
    "Dinov2Attention": _dinov2,
    "Dinov2WithRegistersAttention": _dinov2,
    "ViTAttention": _vit,
    **{name: partial(_post_norm, parts) for name, parts in POST_NORM.items()},
}
"""Exact attention class -> the layer around it."""


class HFBackbone(Backbone):
    """What transformers' models share. head: what gives logits for finished features."""

    def __init__(self, model: Any, head: Head, grid: Grid, prefix: int) -> None:
        config = model.base_model.config
        super().__init__(model, type(model).__name__, grid, config.hidden_size, prefix, config.num_hidden_layers)
        self._head = head
        self.train(model.training)

    @property
    def inner(self) -> Any:
        """The model without its head. A property: as an attribute its weights would be saved twice."""
        return self.model.base_model

    @abstractmethod
    def layers(self) -> Any:
        """The blocks, as transformers keeps them."""

    def block_modules(self) -> list[tuple[nn.Module, ...]]:
        return [(layer,) for layer in dict.fromkeys(self.layers())]  # each once, where it runs several times

    def own_names(self, names: Iterable[str]) -> dict[str, str]:
        return own_names(self.model, names)

    def one_block_args(self) -> dict[str, Any]:
        return one_block(self.model.config)

    def roles(self) -> dict[str, Role]:
        return roles_of(self, NAMES, inner_prefix(self.model))

    def head(self, features: Features) -> Tensor:
        return self._head(self.model, features)


class EncoderBackbone(HFBackbone):
    """An encoder, whose layers run here, with a context; one whose attention has been exchanged is refused."""

    def __init__(self, model: Any, head: Head, grid: Grid, prefix: int) -> None:
        super().__init__(model, head, grid, prefix)
        for attention in self.attentions():
            kind = type(attention).__name__
            if kind not in LAYERS:
                known = ", ".join(sorted(LAYERS))
                raise SitusError(f"{self.name}: its {kind} is not among the attention classes Situs runs: {known}")

    def attentions(self) -> list[nn.Module]:
        """The attention of each layer."""
        return [layer.attention for layer in self.layers()]

    def run_layers(self, stream: Stream, keys: int | None, taps: Taps = ()) -> Tensor:
        z, mask = stream.z, None if stream.mask is None else stream.mask[:, None, None, :keys]
        for number, (layer, attention) in enumerate(zip(self.layers(), self.attentions(), strict=True), start=1):
            run = LAYERS[type(attention).__name__]
            z = called(layer, lambda x, run=run, layer=layer: run(layer, x, keys, mask), z)
            for tap in taps:
                tap(number, z)
        return z


def fit(positions: Positions | None, count: int, whole: int | None, kinds: tuple[str, ...], name: str) -> Positions:
    """The positions of `count` tokens.

    whole: the length of a text model's own positions. Where they hold so many places and the tokens are
    fewer, the first `count` places are meant (sentences seldom fill the table). None: the counts must agree.
    A table is always allowed, whatever the model's own kinds: it is where a forgotten token's vector lives.
    """
    if positions is None:
        return Positions()
    for kind in positions.kinds:
        if kind not in (*kinds, "table"):
            raise SitusError(f"{name} has no {kind} positions; its own are: {', '.join(kinds)}")
    places = {x.shape[-2] for x in (positions.table, positions.rotary) if x is not None and x.dim() > 1}
    if places <= {count}:
        return positions
    if whole is None or places != {whole} or count > whole:
        raise SitusError(
            f"{name}: positions of {max(places)} places do not fit {count} tokens; take(index) chooses some"
        )
    table = None if positions.table is None else positions.table[..., :count, :]
    rotary = None if positions.rotary is None else positions.rotary[..., :count, :]
    return Positions(table, rotary)
