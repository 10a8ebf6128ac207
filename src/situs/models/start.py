"""What a training starts from: a run, a model's folder, a locked one, a name with its weights, a file of weights alone,
or a model in memory, under an address that stands wherever a model's path stands.

`beginning` tells how its model is made again, `initialise` puts its weights into a new backbone. A run's config holds
an address in memory as it is; the weights are read when the run begins, and from then on lie in its checkpoints.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from situs.backbones.base import Backbone
from situs.backbones.config import BackboneConfig
from situs.backbones.lora import merged_state
from situs.backbones.weights import HEADS, load_into, load_weights, read_state_dict
from situs.config import from_dict, to_dict
from situs.core.position import resample_table
from situs.data.modalities import MODALITIES
from situs.data.sources.memory import PREFIX, is_memory
from situs.errors import SitusError
from situs.files import names_code
from situs.methods import METHODS
from situs.methods.base import Method
from situs.models.model import Model
from situs.models.module import OwnModule, make_module
from situs.models.open import CONFIG, PUBLISHED, RANDOM, Unlock, is_locked, model_folder, open_model, open_whole
from situs.train.assemble import RunConfig, Start
from situs.train.checkpoint import RunFolder, read_config, run_and_step
from situs.train.export import POSITIONS, TRAINING_ONLY
from situs.train.run import is_run

TABLES = tuple(each.table for each in MODALITIES if each.table and not each.labelled_unit)
"""Settings of the modalities whose samples have a class each."""

SAME_DATA = (
    "path",
    "kind",
    *TABLES,
    "multi_label",
    "held_out",
    "img_size",
    "channels",
    "mean",
    "std",
    "crop_share",
    "workers",
    "resident",
    "resident_gib",
)
"""Fields of `DataConfig` in which fine-tuning follows the pretraining unless told otherwise."""

PREPARED = ("kind", *TABLES, "img_size", "channels", "mean", "std", "crop_share")
"""Those that say how a model's samples are prepared, wherever they are."""


FOLLOWS = ("num_classes", "in_chans", "img_size", *TRAINING_ONLY)
"""Arguments of a model that follow from the data and the recipe."""


@dataclass(frozen=True)
class Beginning:
    """What a fine-tuning starts from.

    backbone: how its model is made again. init: where its weights are, for `RunConfig.init`. data: how its samples are
    prepared, and of a run where they are. sees: whether its positions took part in its training. named: whether it is
    a name alone, whose patch size and channels are those of the weights, which the user knows. learned: the data whose
    labels it has learned, all of them, or "".
    """

    backbone: BackboneConfig
    init: str
    data: dict[str, Any]
    sees: bool
    named: bool = False
    learned: str = ""


def beginning(source: str | Path) -> Beginning:
    """A run, a model's folder, a locked folder or a timm name with its weights, as what a fine-tuning starts from.

    Refused is what a run could not make again by itself. A locked folder needs no key here, nor what was withheld.
    """
    source = str(source)
    if (model := handed(source)) is not None:
        data = to_dict(model.samples)
        seen = SAME_DATA if model.facts["kind"] == "run" else PREPARED
        learned = model.method is not None and bool(model.method.needs_targets)
        return Beginning(
            _made_of(model), source, _seen(data, seen), model.positions, learned=_learned(data) if learned else ""
        )
    if is_run(source):
        config = from_dict(RunConfig, read_config(run_and_step(source)[0]), where=f"{source}/config.json")
        data = to_dict(config.data)
        sees = METHODS[config.method_name].uses_positions(config.method)
        learned = _learned(data) if METHODS[config.method_name].needs_targets else ""
        return Beginning(replace(config.backbone, weights=None), source, _seen(data, SAME_DATA), sees, learned=learned)
    if names_code(source):
        raise SitusError(f"{source}: is your own module, which a run cannot make again by itself", field="source")
    folder = model_folder(source)
    if folder is None and is_locked(source):
        raise SitusError(
            f"{source}: is sealed, so that a run could not make its model again by itself; open it with its key first "
            "(situs unlock) and start from the folder that this writes",
            field="source",
        )
    name, _, weights = source.partition("=")
    if folder is None and (not weights or weights == RANDOM):
        said = "has random weights, which are nothing to start from" if weights else "holds no run and no model"
        told = f"{source}: {said}; a timm name needs its weights, as NAME=FILE or NAME=pretrained"
        raise SitusError(told, field="source")
    # The shapes tell all; the weights are read when the training starts.
    try:
        model = open_model(folder or name, any_weights=True, device="meta")
    except SitusError as error:
        fields = ["source" if each == "backbone.name" else each for each in error.fields]
        raise SitusError(str(error), field=fields) from error
    data = to_dict(model.samples)
    seen = {name: data[name] for name in PREPARED}
    if folder is None:
        return Beginning(BackboneConfig(name), name if weights == PUBLISHED else weights, seen, True, named=True)
    return Beginning(_described(model, folder), str(folder), seen, model.positions)


def _seen(data: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Those fields of a run's data; a share only where one was held out."""
    return {name: data[name] for name in names if name != "held_out" or data[name]}


def _learned(data: dict[str, Any]) -> str:
    return "" if data["held_out"] else data["path"]


def adopted(init: str) -> dict[str, Any]:
    """The tables of a training from weights that say which model they are of: its architecture, how it sees images.

    None where they are weights alone: a file, a module's name.
    """
    known = handed(init) is not None or is_run(init) or model_folder(init) is not None
    if not known and (Path(init).exists() or names_code(init)):
        return {}
    try:
        begun = beginning(init if known or "=" in init else f"{init}={PUBLISHED}")
    except SitusError:  # whoever reads the weights says what is wrong with them
        return {}
    own = to_dict(begun.backbone)
    shaped = {name: own[name] for name in ("name", "patch_size", "positions", "model_args")}
    return {"backbone": shaped, "data": {name: begun.data[name] for name in PREPARED}}


def _made_of(model: Model) -> BackboneConfig:
    """How the model of an open one is made again."""
    backbone = model.backbone
    if backbone.source.get("library", "timm") != "timm" or isinstance(backbone, OwnModule):
        said = "is your own module" if isinstance(backbone, OwnModule) else "is a module of transformers"
        more = "" if isinstance(backbone, OwnModule) else "; save it (save_pretrained) and give the folder"
        raise SitusError(f"{model.name}: {said}, which a run cannot make again by itself{more}", field="source")
    from situs.backbones.timm.create import remade  # timm takes seconds

    own = remade(backbone)
    beside = any(not name.startswith("model.") for name in backbone.state_dict())
    table = getattr(backbone.model, "pos_embed", None)
    fixed = isinstance(table, nn.Parameter) and not table.requires_grad
    shaped = {name: value for name, value in own["model_args"].items() if name not in FOLLOWS}
    positions = "learned" if beside else "sincos" if fixed else None
    return BackboneConfig(own["architecture"], positions=positions, model_args=shaped)


def _described(model: Model, folder: Path) -> BackboneConfig:
    """How the model of a folder is made again: from itself alone where timm makes it, else by its folder."""
    own = model.backbone.source
    if own["library"] != "timm":
        return BackboneConfig(str(folder / CONFIG if is_locked(folder) else folder))  # a lock may lack weights
    shaped = {name: value for name, value in own["model_args"].items() if name not in FOLLOWS}
    beside = (folder / POSITIONS).is_file()
    return BackboneConfig(own["architecture"], positions="learned" if beside else None, model_args=shaped)


# --- weights into a new backbone -------------------------------------------------------------------------------------

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


# --- models in memory ------------------------------------------------------------------------------------------------

_KEPT = 2
_known: OrderedDict[str, Model] = OrderedDict()


def addressed_model(source: Any) -> str | None:
    """The address of a module or an open model; a path, a name and None as they are (a path as text)."""
    if source is None or isinstance(source, str | Path):
        return None if source is None else str(source)
    if not isinstance(source, nn.Module | Model):
        allowed = "a run, a model's folder, a name, a weight file, an nn.Module or an open model"
        raise SitusError(field="source", value=type(source).__name__, allowed=allowed)
    model = open_model(source.backbone if isinstance(source, Method) else source)
    mark = hashlib.blake2b(digest_size=6)
    for name, value in model.backbone.state_dict().items():
        mark.update(name.encode())
        mark.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    name = "".join(letter if letter.isalnum() or letter in "_." else "_" for letter in model.name)
    address = f"{PREFIX}{name}-{mark.hexdigest()}"
    _known[address] = model
    _known.move_to_end(address)
    while len(_known) > _KEPT:
        _known.popitem(last=False)
    return address


def handed(address: str | Path) -> Model | None:
    """The model at an address; None where it is none."""
    address = str(address)
    if not is_memory(address):
        return None
    if address not in _known:
        name = address.removeprefix(PREFIX).rpartition("-")[0]
        raise SitusError(f"{name}: was a model in memory, which is there no more; give it again", field="init")
    return _known[address]
