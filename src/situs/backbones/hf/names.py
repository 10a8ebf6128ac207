"""Under which names transformers' files keep the tensors of a model.

transformers writes some models under the names of its older releases (ViT, DINOv2), reads others with or without the
prefix of the bare model, and knows old spellings (LayerNorm.gamma). Its own table of renamings says which is which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from situs.errors import SitusError


def own_state(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file under the names of `model.state_dict()`; what the model does not know keeps its name.

    A tensor that transformers makes of others (DINOv2's SwiGLU) is made by transformers.
    """
    own, found, parts = model.state_dict(), {}, False
    for name, new, converted in _renamed(model, state):
        parts = parts or converted
        if not converted:
            found[new if new in own else name] = state[name]
    if not parts:
        return found
    with quietly():
        made, info = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=dict(state),
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    absent = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"]), *found}
    return found | {name: tensor for name, tensor in made.state_dict().items() if name not in absent}


def own_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Names in a file -> names in `model.state_dict()`, for those that from_pretrained would load as they are.

    A tensor that transformers would leave out, or make of several, has no entry.
    """
    own = model.state_dict()
    return {name: new for name, new, converted in _renamed(model, names) if new in own and not converted}


def _renamed(model: Any, names: Iterable[str]) -> Iterator[tuple[str, str, bool]]:
    """Each name, what from_pretrained calls it, and whether it is then one of several that make a tensor."""
    own = model.state_dict()
    renamings, converters, rename = _table(model)
    prefix = model.base_model_prefix or None
    for name in names:
        new, converted = rename(name, renamings, converters, prefix, own)
        if new not in own and name in own:
            new, converted = rename(name, [], [], prefix, own)
        yield name, new, converted is not None


def _table(model: Any) -> tuple[list[Any], list[Any], Any]:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError as error:
        raise SitusError(
            f"this transformers does not tell the names in its files ({error.name}): upgrade it"
        ) from error
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    return renamings, converters, rename_source_key


@contextmanager
def quietly() -> Iterator[None]:
    """Without transformers' progress bar and load report: what matters of them becomes an error."""
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
