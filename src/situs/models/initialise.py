"""Starting from weights that exist: of any model that can be opened, or a published file; positions resampled."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from situs.backbones.base import Backbone
from situs.backbones.lora import merged_state
from situs.backbones.weights import HEADS, load_into, load_weights, read_state_dict
from situs.core.position import resample_table
from situs.errors import SitusError
from situs.files import names_code
from situs.models.handed import handed
from situs.models.module import make_module
from situs.models.open import PUBLISHED, Unlock, is_locked, open_whole
from situs.train.assemble import RunConfig, Start
from situs.train.checkpoint import RunFolder, run_and_step
from situs.train.export import POSITIONS
from situs.train.run import is_run

METHOD_PARTS = re.compile(r"^(decoder|mask_token|projector|predictor|position_head|sigma|dino_head|ibot)")
"""Names that published checkpoints keep beside the encoder; they belong to a method, not to the model."""

POSITION_PARTS = re.compile(r"(^|\.)(pos_embed|position_embeddings|rel_pos|shared_rel_pos)(\.|$)")
"""Parameters that tell a place: left as the model was made where fresh positions are asked for. The bias within
Swin's windows belongs to its blocks and comes along."""

MAY_BE_NEW = (*HEADS, "norm.")
"""What a model may have that a file has not: a classifier, and the norm of another way of pooling."""

BACKBONE, MODEL = "backbone.", "model."


def starting(unlock: Unlock | None = None) -> Start:
    """For `train_run`: what puts the weights that `RunConfig.init` names into a new backbone.

    unlock: what opens them, where that is a locked folder.
    """

    def start(config: RunConfig, backbone: Backbone) -> list[str]:
        assert config.init is not None
        return initialise(backbone, config.init, positions=config.init_positions, unlock=unlock)

    return start


def initialise(backbone: Backbone, source: str, *, positions: bool = True, unlock: Unlock | None = None) -> list[str]:
    """Puts the weights at `source` into the backbone. Returns what a user should know, a line each.

    positions: False leaves them as the model was made, whatever the file holds (fine-tuning with `--positions`).
    Prefix tokens stay what they were in the file: `cls_token` takes in the difference of its rows in the tables.
    """
    return taken_from(backbone, source, positions=positions, unlock=unlock)[0]


def taken_from(
    backbone: Backbone, source: str, *, positions: bool = True, unlock: Unlock | None = None
) -> tuple[list[str], frozenset[str]]:
    """`initialise`; gives its lines, and the names of the tensors that are as the model was made."""
    read, beside = _read(source, unlock)
    state = backbone.renamed({name: value for name, value in read.items() if not METHOD_PARTS.match(name)})
    own = backbone.model.state_dict()
    places = {name for name in {*state, *own} if POSITION_PARTS.search(name)}
    if not positions or backbone.table_name not in own:
        state |= _keep_prefix(state, own, backbone)
    state = {name: value for name, value in state.items() if name not in places or (positions and name in own)}
    left = {name for name in own if name not in state and (name in places or name.startswith(MAY_BE_NEW))}
    unused = {name for name in state if name not in own and name.startswith(MAY_BE_NEW)}
    whole = {**{name: own[name] for name in left}, **{k: v for k, v in state.items() if k not in unused}}
    kept = load_weights(backbone, whole, f"init={source}")
    taken, missed = _load_beside(backbone, beside if positions else {}, source)
    lines = [f"started from {source}: {len(whole) - len({*left, *kept}) + taken} tensors"]
    given = {own[name].data_ptr() for name in state if name in own}
    tied = {name for name in left if own[name].data_ptr() in given}  # the weight of another name, which was read
    fresh = sorted({*left, *kept, *missed} - tied)
    if fresh:
        lines.append(f"left as initialised: {', '.join(fresh[:6])}{' …' if len(fresh) > 6 else ''}")
    return lines, frozenset(fresh)


def _load_beside(backbone: Backbone, given: Mapping[str, Tensor], source: str) -> tuple[int, list[str]]:
    """The positions that stand beside the wrapped model (Swin's table): how many were taken, which were not there."""
    own = {name: value for name, value in backbone.state_dict().items() if not name.startswith(MODEL)}
    found = {name: value for name, value in given.items() if name in own}
    for name, value in found.items():
        side = math.isqrt(value.shape[0])
        if value.shape[0] != own[name].shape[0] and side * side == value.shape[0]:
            found[name] = resample_table(value, (side, side), backbone.grid)
    load_into(backbone, found, f"init={source}", optional=(MODEL, *(name for name in own if name not in found)))
    return len(found), [name for name in own if name not in found]


def _keep_prefix(state: Mapping[str, Tensor], own: Mapping[str, Tensor], backbone: Backbone) -> dict[str, Tensor]:
    """Prefix tokens (CLS, registers) that stay what they were although the table beneath them is another or gone.

    A model adds the table's first rows to them, so those rows are a part of the tokens and tell no place.
    """
    names = [name for name in backbone.prefix_names if name in state and name in own]
    given, new = state.get(backbone.table_name), own.get(backbone.table_name)
    count = backbone.table_prefix
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
    rows, patches = table.shape[1], table.shape[1] - backbone.table_prefix
    if rows == backbone.num_tokens or patches < 1:
        return False
    return patches == backbone.num_tokens or math.isqrt(patches) ** 2 == patches


def _read(source: str, unlock: Unlock | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model's tensors at `source`, and those of positions that stand beside the model."""
    if (model := handed(source)) is not None:
        return _apart(merged_state(model.backbone.state_dict()))
    path = Path(source).expanduser()
    if is_run(path):
        run, step = run_and_step(path)
        checkpoint = RunFolder.open(run, writer=False).chosen(step)
        tensors = {**checkpoint.tensors("model"), **checkpoint.tensors("ema")}
        own = {n.removeprefix(BACKBONE): v for n, v in tensors.items() if n.startswith(BACKBONE)}
        return _apart(merged_state(own))
    if is_locked(path):
        return _apart(open_whole(path, unlock).backbone.state_dict())
    if path.exists():
        table = path / POSITIONS
        return _weights(path), _weights(table) if table.is_file() else {}
    if names_code(source):
        return make_module(source).state_dict(), {}
    name, _, file = source.partition("=")
    if file and file != PUBLISHED:
        return _weights(file), {}
    from situs.backbones.timm.create import pretrained_state  # timm takes seconds, which `pretrain --help` would pay

    return pretrained_state(name), {}


def _weights(path: str | Path) -> dict[str, Tensor]:
    """`read_state_dict`; what is wrong with the file is said of the fields that name it here."""
    try:
        return read_state_dict(path)
    except SitusError as error:
        raise SitusError(str(error).removeprefix("weights="), field=("source", "init")) from error


def _apart(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A backbone's tensors: those of the wrapped model, under its own names, and those beside it."""
    model = {n.removeprefix(MODEL): v for n, v in state.items() if n.startswith(MODEL)}
    return model, {n: v for n, v in state.items() if not n.startswith(MODEL)}
