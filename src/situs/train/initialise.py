"""Starting from weights that exist: a run, an export, a published file or a timm name, positions resampled."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from situs.backbones.base import Backbone
from situs.backbones.weights import read_state_dict
from situs.train.checkpoint import RunFolder

METHOD_PARTS = re.compile(r"^(decoder|mask_token|projector|predictor|position_head|sigma|dino_head|ibot)")
"""Names that published checkpoints keep beside the encoder; they belong to a method, not to the model."""

POSITION_PARTS = re.compile(r"(^|\.)(pos_embed|relative_position_bias_table|rel_pos)(\.|$)")
"""Parameters that tell a place: left as the model was made where fresh positions are asked for."""

MAY_BE_NEW = re.compile(r"^(head|head_dist|fc|fc_norm|norm)\.")
"""What a model may have that a file has not: a classifier, and the norm of another way of pooling."""

PREFIX_TOKENS = ("cls_token", "dist_token", "reg_token")
"""timm's names of them, in the order in which they stand before the patches."""

BACKBONE = "backbone.model."


def initialise(backbone: Backbone, source: str, *, positions: bool = True) -> list[str]:
    """Puts the weights at `source` into the backbone. Returns what a user should know, a line each.

    positions: False leaves them as the model was made, whatever the file holds (fine-tuning with `--positions`).
    Prefix tokens stay what they were in the file: `cls_token` takes in the difference of its rows in the tables.
    """
    from situs.backbones.timm_create import load_weights  # timm takes seconds, which `pretrain --help` would pay

    state = {name: value for name, value in _read(source).items() if not METHOD_PARTS.match(name)}
    own = backbone.model.state_dict()
    places = {name for name in {*state, *own} if POSITION_PARTS.search(name)}
    if not positions or "pos_embed" not in own:
        state |= _keep_prefix(state, own, backbone)
    state = {name: value for name, value in state.items() if name not in places or (positions and name in own)}
    left = {name for name in own if name not in state and (name in places or MAY_BE_NEW.match(name))}
    unused = {name for name in state if name not in own and MAY_BE_NEW.match(name)}
    whole = {**{name: own[name] for name in left}, **{k: v for k, v in state.items() if k not in unused}}
    kept = load_weights(backbone, whole, f"init={source}")
    lines = [f"started from {source}: {len(whole) - len({*left, *kept})} tensors"]
    fresh = sorted({*left, *kept})
    if fresh:
        lines.append(f"left as initialised: {', '.join(fresh[:6])}{' …' if len(fresh) > 6 else ''}")
    return lines


def _keep_prefix(state: Mapping[str, Tensor], own: Mapping[str, Tensor], backbone: Backbone) -> dict[str, Tensor]:
    """Prefix tokens (CLS, registers) that stay what they were although the table beneath them is another or gone.

    A model adds the table's first rows to them, so those rows are a part of the tokens and tell no place.
    """
    names = [name for name in PREFIX_TOKENS if name in state and name in own]
    given, new, count = state.get("pos_embed"), own.get("pos_embed"), backbone.num_prefix
    if given is None or not names or not _has_prefix_rows(given if new is None else new, backbone):
        return {}
    fits = new is None or new.shape[-1] == given.shape[-1]
    if not fits or sum(state[name].shape[1] for name in names) != count:
        return {}  # which `load_weights` then says
    rows = given[:, :count] if new is None else given[:, :count] - new[:, :count].to(given)
    parts = rows.split([state[name].shape[1] for name in names], dim=1)
    return {name: state[name] + part for name, part in zip(names, parts, strict=True)}


def _has_prefix_rows(table: Tensor, backbone: Backbone) -> bool:
    """Whether a table [1, rows, D] for this model, of its own grid or another that is square, opens with such rows."""
    rows, patches = table.shape[1], table.shape[1] - backbone.num_prefix
    if rows == backbone.num_tokens or patches < 1:
        return False
    return patches == backbone.num_tokens or math.isqrt(patches) ** 2 == patches


def _read(source: str) -> Mapping[str, Tensor]:
    path = Path(source).expanduser()
    if (path / "checkpoints").is_dir():
        checkpoint = RunFolder.open(path, writer=False).newest()
        tensors = {**checkpoint.tensors("model"), **checkpoint.tensors("ema")}
        return {n.removeprefix(BACKBONE): v for n, v in tensors.items() if n.startswith(BACKBONE)}
    if path.exists():
        return read_state_dict(path)
    from situs.backbones.timm_create import pretrained_state

    return pretrained_state(source)
