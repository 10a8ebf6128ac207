"""Under which names transformers' files keep the tensors of a model.

transformers writes some models under the names of its older releases (ViT, DINOv2), reads others with or without the
prefix of the bare model, and knows old spellings (LayerNorm.gamma). Its own table of renamings says which is which.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from situs.errors import SitusError


def own_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Names in a file -> names in `model.state_dict()`, for those that from_pretrained would load as they are.

    A tensor that transformers would leave out, or make of several, has no entry.
    """
    own = model.state_dict()
    renamings, converters, rename = _table(model)
    prefix = model.base_model_prefix or None
    found: dict[str, str] = {}
    for name in names:
        new, converted = rename(name, renamings, converters, prefix, own)
        if new not in own and name in own:
            new, converted = rename(name, [], [], prefix, own)
        if new in own and converted is None:
            found[name] = new
    return found


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
