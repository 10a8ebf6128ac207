"""Starting from weights that exist: a run, an export, a published file or a timm name, positions resampled."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from situs.backbones.base import Backbone
from situs.backbones.timm_create import load_weights, pretrained_state
from situs.backbones.weights import read_state_dict
from situs.errors import SitusError
from situs.train.checkpoint import RunFolder

METHOD_PARTS = re.compile(r"^(decoder|mask_token|projector|predictor|position_head|sigma|dino_head|ibot)")
"""Names that published checkpoints keep beside the encoder; they belong to a method, not to the model."""

POSITION_PARTS = re.compile(r"(^|\.)(pos_embed|relative_position_bias_table|rel_pos)(\.|$)")
"""Parameters that tell a place: left as the model was made where fresh positions are asked for."""

MAY_BE_NEW = re.compile(r"^(head|head_dist|fc|fc_norm|norm)\.")
"""What a model may have that a file has not: a classifier, and the norm of another way of pooling."""

BACKBONE = "backbone.model."


def initialise(backbone: Backbone, source: str, *, positions: bool = True) -> list[str]:
    """Puts the weights at `source` into the backbone. Returns what a user should know, a line each.

    positions: False leaves them as the model was made, whatever the file holds (fine-tuning with `--positions`).
    """
    state = {name: value for name, value in _read(source).items() if not METHOD_PARTS.match(name)}
    own = backbone.model.state_dict()
    places = {name for name in {*state, *own} if POSITION_PARTS.search(name)}
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


def _read(source: str) -> Mapping[str, Tensor]:
    path = Path(source).expanduser()
    if (path / "checkpoints").is_dir():
        checkpoint = RunFolder.open(path, writer=False).latest()
        if checkpoint is None:
            raise SitusError(f"init={source}: the run has no checkpoint yet (--init)")
        tensors = {**checkpoint.tensors("model"), **checkpoint.tensors("ema")}
        return {n.removeprefix(BACKBONE): v for n, v in tensors.items() if n.startswith(BACKBONE)}
    if path.exists():
        return read_state_dict(path)
    return pretrained_state(source)
