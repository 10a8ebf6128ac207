"""Checkpoints of the papers' own codes (DropPos, MAE, MJP, Swin): their tensors under timm's names.

A checkpoint has the model among the parts of its method: decoders, mask tokens, heads that predict places. These are
left out, and `left_out` says which. MJP keeps its table in an `nn.Embedding`, whose last row is the unknown place.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

METHOD_PARTS = re.compile(
    r"^(aux_decoder|decoder|mask_token|mask_pos_token|projector|predictor|position_head|sigma|dino_head|ibot|dlocr)"
)
"""Names in published checkpoints that belong to a method, not to the model."""

UNKNOWN_PLACE = "unknown position"
"""How `left_out` calls the last row of MJP's table."""

TABLES = ("pos_embed", "absolute_pos_embed")
"""Position tables of a ViT and of a Swin."""

MADE_AGAIN = ("relative_position_index", "attn_mask")
"""Buffers of a Swin that timm makes itself."""


class Published(NamedTuple):
    """The model's tensors under timm's names, and the names of those that were left out."""

    state: dict[str, Tensor]
    left_out: tuple[str, ...]


def read_published(state: Mapping[str, Tensor], known: Container[str] = ()) -> Published:
    """The model in a checkpoint; a state dict of timm or of transformers is unchanged. known: names of the model."""
    left_out = [name for name in state if METHOD_PARTS.match(name) and name not in known]
    model = {name: value for name, value in state.items() if name not in left_out}
    for table in TABLES:
        if (rows := model.pop(f"{table}.weight", None)) is not None and rows.dim() == 2:
            model[table] = rows[None, :-1]
            left_out.append(UNKNOWN_PLACE)
        if table in model and "index_embed" in model:  # MJP's second table, which is always added
            model[table] = model[table] + model.pop("index_embed")
    return Published(_from_swin(model), tuple(left_out))


def _from_swin(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the published Swin code, which merges patches at the end of a stage and timm before the next."""
    if not any(name.startswith("layers.0.downsample.") for name in state):
        return state
    renamed = {}
    for name, value in state.items():
        if name.endswith(MADE_AGAIN):
            continue
        later = re.sub(r"^layers\.(\d+)\.downsample", lambda match: f"layers.{int(match[1]) + 1}.downsample", name)
        renamed[re.sub(r"^head\.(?=weight|bias)", "head.fc.", later)] = value
    return renamed


def describe_left_out(names: Iterable[str]) -> str:
    """The left-out tensors by their parts, for one line: decoder_blocks (24), mask_token."""
    parts = Counter(name.partition(".")[0] for name in names)
    return ", ".join(part if count == 1 else f"{part} ({count})" for part, count in parts.items())
