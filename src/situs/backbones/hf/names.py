"""Names of a model's tensors in transformers' files.

transformers writes some models with the names of its older releases (ViT, DINOv2), reads others with or without the
prefix of the bare model, and knows old spellings (LayerNorm.gamma). Its own table of renamings is used here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

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
            f"this version of transformers lacks {error.name}, which gives the tensor names of its files: upgrade it"
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
