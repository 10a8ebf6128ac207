"""What transformers' models share as backbones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from situs.backbones.base import Backbone, Features
from situs.backbones.block import Block
from situs.backbones.hf.blocks import NAMES, reader_of
from situs.backbones.hf.names import own_names
from situs.backbones.layout import Role, roles_of
from situs.core.position import Positions
from situs.core.tokens import Grid
from situs.errors import SitusError

Head = Callable[[Any, Features], Tensor]
"""(wrapped model, finished features) -> logits."""


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

    def read(self, layer: nn.Module) -> Block:
        return reader_of(self.name, [layer])(layer)

    def own_names(self, names: Iterable[str]) -> dict[str, str]:
        return own_names(self.model, names)

    def one_block_args(self) -> dict[str, Any]:
        return one_block(self.model.config)

    def roles(self) -> dict[str, Role]:
        return roles_of(self, self.block_modules(), NAMES, inner_prefix(self.model))

    def head(self, features: Features) -> Tensor:
        return self._head(self.model, features)


class EncoderBackbone(HFBackbone):
    """An encoder, whose layers run here, with a context; one with replaced attention is refused."""

    def __init__(self, model: Any, head: Head, grid: Grid, prefix: int) -> None:
        super().__init__(model, head, grid, prefix)
        self._read = reader_of(self.name, self.layers())

    def read(self, layer: nn.Module) -> Block:
        return self._read(layer)


def inner_prefix(model: Any) -> str:
    """Prefix of the names of the model without its head, in a backbone's state dict."""
    return "model." if model.base_model is model else f"model.{model.base_model_prefix}."


def one_block(config: Any) -> dict[str, Any]:
    """Config entries that make the model with one layer and few words."""
    known, few = config.to_dict(), 64
    lost = [name for name in ("pad_token_id", "bos_token_id", "eos_token_id") if not _among(known.get(name), few)]
    layers = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    entries = {layers: 1, "vocab_size": few, **dict.fromkeys(lost)}
    if known.get("layer_types"):
        entries["layer_types"] = known["layer_types"][:1]
    return {name: value for name, value in entries.items() if name in known}


def _among(word: Any, few: int) -> bool:
    """Whether an id is one of the first; RoBERTa numbers its positions after that of the padding."""
    return isinstance(word, int) and word < few


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
