"""What transformers' models share as backbones, and the names of their tensors in transformers' files.

transformers writes some models with the names of its older releases (ViT, DINOv2), reads others with or without the
prefix of the bare model, and knows old spellings (LayerNorm.gamma). Its own table of renamings is used here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from situs.backbones.base import Backbone, Features
from situs.backbones.block import Block
from situs.backbones.hf.blocks import NAMES, reader_of
from situs.backbones.layout import Role, roles_of
from situs.core.position import Positions
from situs.core.tokens import Grid
from situs.errors import SitusError


def own_state(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file with the names of `model.state_dict()`; unknown tensors keep their names.

    A tensor that transformers makes of others (DINOv2's SwiGLU) is made by transformers.
    """
    known, renamed, has_parts = model.state_dict(), {}, False
    for name, new, converted in _renamed(model, state):
        has_parts = has_parts or converted
        if not converted:
            renamed[new if new in known else name] = state[name]
    if not has_parts:
        return renamed
    with quietly():
        loaded, info = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=dict(state),
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    absent = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"]), *renamed}
    return renamed | {name: tensor for name, tensor in loaded.state_dict().items() if name not in absent}


def own_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Names in a file -> names in `model.state_dict()`, for those that from_pretrained would load as they are.

    A tensor that transformers would leave out, or make of several, has no entry.
    """
    known = model.state_dict()
    return {name: new for name, new, converted in _renamed(model, names) if new in known and not converted}


def _renamed(model: Any, names: Iterable[str]) -> Iterator[tuple[str, str, bool]]:
    """Each name, from_pretrained's name for it, and whether it is one of several that make a tensor."""
    known = model.state_dict()
    renamings, converters, rename = _table(model)
    prefix = model.base_model_prefix or None
    for name in names:
        new, converted = rename(name, renamings, converters, prefix, known)
        if new not in known and name in known:
            new, converted = rename(name, [], [], prefix, known)
        yield name, new, converted is not None


def _table(model: Any) -> tuple[list[Any], list[Any], Any]:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError as error:
        raise SitusError(
            f"upgrade transformers: this version lacks {error.name}, which Situs needs to read weight files"
        ) from error
    mapping = get_model_conversion_mapping(model)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    return renamings, converters, rename_source_key


@contextmanager
def quietly() -> Iterator[None]:
    """Turns off transformers' progress bar and load report; real problems become errors."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


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
        inner = "model." if self.inner is self.model else f"model.{self.model.base_model_prefix}."
        return roles_of(self, self.block_modules(), NAMES, inner)

    def head(self, features: Features) -> Tensor:
        return self._head(self.model, features)


class EncoderBackbone(HFBackbone):
    """An encoder, whose layers run here, with a context; one with replaced attention is refused."""

    def __init__(self, model: Any, head: Head, grid: Grid, prefix: int) -> None:
        super().__init__(model, head, grid, prefix)
        self._read = reader_of(self.name, self.layers())

    def read(self, layer: nn.Module) -> Block:
        return self._read(layer)


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
            raise SitusError(f"{name} has no {kind} positions; it has: {', '.join(kinds)}")
    places = {x.shape[-2] for x in (positions.table, positions.rotary) if x is not None}
    if places <= {count}:
        return positions
    if whole is None or places != {whole} or count > whole:
        raise SitusError(
            f"{name}: {max(places)} positions do not fit {count} tokens; select the positions of these tokens with "
            "take(index)"
        )
    table = None if positions.table is None else positions.table[..., :count, :]
    rotary = None if positions.rotary is None else positions.rotary[..., :count, :]
    return Positions(table, rotary)
