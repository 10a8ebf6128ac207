"""What a training starts from: a run, a model's folder, a locked folder, a name with its weights, a file of weights, or
a model in memory, which has an address that is used like a path.

`finetune_source` tells how to make its model again, `initialise` loads its weights into a new backbone. A run's config
has the address of a model in memory; the weights are read when the run begins, and are then in its checkpoints.
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
from situs.backbones.weights import HEADS, describe_left_out, load_into, load_weights, read_published, read_state_dict
from situs.config import from_dict, to_dict
from situs.core.position import resample_table
from situs.data.modalities import MODALITIES
from situs.data.sources.memory import PREFIX, is_memory
from situs.errors import SitusError
from situs.files import names_code
from situs.hub import hub_address, local_folder
from situs.methods import METHODS
from situs.methods.base import Method
from situs.models.model import Model
from situs.models.module import OwnModule, make_module
from situs.models.open import (
    CONFIG,
    PUBLISHED,
    RANDOM,
    Unlock,
    is_locked,
    is_missing,
    model_folder,
    open_model,
    open_whole,
)
from situs.train.assemble import RunConfig, Start
from situs.train.checkpoint import RunFolder, read_config, run_and_step
from situs.train.export import POSITIONS, TRAINING_ONLY
from situs.train.run import is_run

TABLES = tuple(modality.table for modality in MODALITIES if modality.table and not modality.labelled_unit)
"""Settings of the modalities with one class per sample."""

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
"""Fields of `DataConfig` that fine-tuning takes from the pretraining unless the user sets them."""

PREPARED = ("kind", *TABLES, "img_size", "channels", "mean", "std", "crop_share")
"""Those of them that say how a model's samples are prepared."""


FOLLOWS = ("num_classes", "in_chans", "img_size", *TRAINING_ONLY)
"""Arguments of a model that follow from the data and the recipe."""


@dataclass(frozen=True)
class FinetuneSource:
    """What a fine-tuning starts from.

    backbone: how to make its model again. init: where its weights are, for `RunConfig.init`. data: how its samples are
    prepared, and for a run where they are. sees: whether its training used positions. named: whether it is a name
    alone, whose patch size and channels are those of the user's weights. learned: the data of which it has learned all
    labels, or "".
    """

    backbone: BackboneConfig
    init: str
    data: dict[str, Any]
    sees: bool
    named: bool = False
    learned: str = ""


def finetune_source(source: str | Path) -> FinetuneSource:
    """A run, a model's folder, a locked folder or a timm name with its weights as the start of a fine-tuning.

    Refuses what a run could not make again by itself. A locked folder needs neither its key nor withheld parts here.
    """
    source = str(source)
    if (model := model_in_memory(source)) is not None:
        data = to_dict(model.samples)
        names = SAME_DATA if model.facts["kind"] == "run" else PREPARED
        learned = _learned(data) if model.method is not None and model.method.needs_targets else ""
        return FinetuneSource(_config_of(model), source, _fields(data, names), model.positions, learned=learned)
    if is_run(source):
        config = from_dict(RunConfig, read_config(run_and_step(source)[0]), where=f"{source}/config.json")
        data = to_dict(config.data)
        sees = METHODS[config.method_name].uses_positions(config.method)
        learned = _learned(data) if METHODS[config.method_name].needs_targets else ""
        backbone = replace(config.backbone, weights=None)
        return FinetuneSource(backbone, source, _fields(data, SAME_DATA), sees, learned=learned)
    if names_code(source):
        raise SitusError(
            f"{source}: is your own module; a run cannot start from your module, because Situs cannot "
            "build the module again from the folder of the run",
            field="source",
        )
    folder, on_hub = model_folder(source), hub_address(source) is not None
    if folder is None and is_locked(source):
        raise SitusError(
            f"{source}: is sealed (encrypted), so a run could not rebuild its model; unlock it first (situs unlock), "
            "and start from the unlocked folder",
            field="source",
        )
    name, _, weights = source.partition("=")
    if folder is None and is_missing(source) and not weights:
        raise SitusError(f"{source}: no such run, model folder or file", field="source")
    if folder is None and (not weights or weights == RANDOM):
        reason = "has random weights, so there is nothing to start from" if weights else "is neither a run nor a model"
        advice = "a timm name needs its weights, as NAME=FILE or NAME=pretrained"
        raise SitusError(f"{source}: {reason}; {advice}", field="source")
    # The shapes are enough; the weights are read when the training starts.
    try:
        model = open_model(source if on_hub else folder or name, any_weights=True, device="meta")
    except SitusError as error:
        fields = ["source" if field == "backbone.name" else field for field in error.fields]
        raise SitusError(str(error), field=fields) from error
    prepared = _fields(to_dict(model.samples), PREPARED)
    if folder is None:
        init = name if weights == PUBLISHED else weights
        return FinetuneSource(BackboneConfig(name), init, prepared, True, named=True)
    place = source if on_hub else str(folder)
    return FinetuneSource(_config_of_folder(model, folder, place), place, prepared, model.positions)


def _fields(data: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """These fields of a data config; held_out only where a share was held out."""
    return {name: data[name] for name in names if name != "held_out" or data[name]}


def _learned(data: dict[str, Any]) -> str:
    return "" if data["held_out"] else data["path"]


def adopted(init: str) -> dict[str, Any]:
    """Architecture and preparation of the model that `init` names, as tables of a run's config.

    Empty for weights alone: a file, a module's name.
    """
    is_model = model_in_memory(init) is not None or is_run(init) or model_folder(init) is not None
    if not is_model and (Path(init).exists() or names_code(init)):
        return {}
    try:
        source = finetune_source(init if is_model or "=" in init else f"{init}={PUBLISHED}")
    except SitusError:  # the error comes when the weights are read
        return {}
    config = to_dict(source.backbone)
    backbone = {name: config[name] for name in ("name", "patch_size", "positions", "model_args")}
    return {"backbone": backbone, "data": {name: source.data[name] for name in PREPARED}}


def _config_of(model: Model) -> BackboneConfig:
    """The config that makes an open model's backbone again."""
    backbone = model.backbone
    if backbone.source.get("library", "timm") != "timm" or isinstance(backbone, OwnModule):
        kind = "your own module" if isinstance(backbone, OwnModule) else "a module of the library transformers"
        advice = "" if isinstance(backbone, OwnModule) else "; save the module (save_pretrained) and give the folder"
        raise SitusError(
            f"{model.name}: is {kind}; a run cannot start from this module, because Situs could not build "
            f"the module again from the folder of the run{advice}",
            field="source",
        )
    from situs.backbones.timm.create import remade  # timm takes seconds

    source = remade(backbone)
    has_own_table = any(not name.startswith("model.") for name in backbone.state_dict())
    table = getattr(backbone.model, "pos_embed", None)
    fixed = isinstance(table, nn.Parameter) and not table.requires_grad
    arguments = {name: value for name, value in source["model_args"].items() if name not in FOLLOWS}
    positions = "learned" if has_own_table else "sincos" if fixed else None
    return BackboneConfig(source["architecture"], positions=positions, model_args=arguments)


def _config_of_folder(model: Model, folder: Path, place: str) -> BackboneConfig:
    """The config that makes a folder's model again: from timm alone where timm has it, else from the folder, whose path
    or address is `place`."""
    source = model.backbone.source
    if source["library"] != "timm":
        return BackboneConfig(str(folder / CONFIG) if is_locked(folder) else place)  # a lock may lack weights
    arguments = {name: value for name, value in source["model_args"].items() if name not in FOLLOWS}
    has_own_table = (folder / POSITIONS).is_file()
    positions = "learned" if has_own_table else None
    return BackboneConfig(source["architecture"], positions=positions, model_args=arguments)


# --- weights into a new backbone -------------------------------------------------------------------------------------

POSITION_PARTS = re.compile(r"(^|\.)(pos_embed|position_embeddings|rel_pos|shared_rel_pos)(\.|$)")
"""Position parameters: not loaded where new positions are asked for. The bias within Swin's windows belongs to its
blocks and is loaded."""

MAY_BE_NEW = (*HEADS, "norm.")
"""What a model may have and a file may lack: a classifier, and the norm of another pooling."""

BACKBONE, MODEL = "backbone.", "model."
SWIN_TABLE = "absolute_pos_embed"
"""The published Swin's name of the table that `SwinBackbone` has beside timm's model."""


def starting(unlock: Unlock | None = None) -> Start:
    """The `Start` for `train_run`: loads the weights that `RunConfig.init` names into a new backbone.

    unlock: opens a locked folder.
    """

    def start(config: RunConfig, backbone: Backbone) -> list[str]:
        assert config.init is not None
        return initialise(backbone, config.init, positions=config.init_positions, unlock=unlock)

    return start


def initialise(backbone: Backbone, source: str, *, positions: bool = True, unlock: Unlock | None = None) -> list[str]:
    """Loads the weights at `source` into the backbone. Returns lines for the user.

    positions: False keeps the model's new positions, whatever the file has (fine-tuning with `--positions`). Prefix
    tokens keep their values: `cls_token` absorbs the difference of its rows in the two tables.
    """
    read, beside = _read(source, unlock)
    published, left_out = read_published(read)
    if (table := published.pop(SWIN_TABLE, None)) is not None:
        beside = {"table": table[0], **beside}
    state = backbone.renamed(published)
    target = backbone.model.state_dict()
    places = {name for name in {*state, *target} if POSITION_PARTS.search(name)}
    if not positions or backbone.table_name not in target:
        state |= _keep_prefix(state, target, backbone)
    state = {name: value for name, value in state.items() if name not in places or (positions and name in target)}
    missing = {name for name in target if name not in state and (name in places or name.startswith(MAY_BE_NEW))}
    unused = {name for name in state if name not in target and name.startswith(MAY_BE_NEW)}
    whole = {**{name: target[name] for name in missing}, **{k: v for k, v in state.items() if k not in unused}}
    unchanged = load_weights(backbone, whole, f"init={source}")
    tables, missing_tables = _load_own_tables(backbone, beside if positions else {}, source)
    lines = [f"started from {source}: {len(whole) - len({*missing, *unchanged}) + tables} tensors"]
    loaded = {target[name].data_ptr() for name in state if name in target}
    tied = {name for name in missing if target[name].data_ptr() in loaded}  # loaded under another name
    fresh = sorted({*missing, *unchanged, *missing_tables} - tied)
    if fresh:
        lines.append(f"left as initialised: {', '.join(fresh[:6])}{' …' if len(fresh) > 6 else ''}")
    if left_out:
        lines.append(f"left out (parts of the method, not of the model): {describe_left_out(left_out)}")
    return lines


def _load_own_tables(backbone: Backbone, tables: Mapping[str, Tensor], source: str) -> tuple[int, list[str]]:
    """Loads position tables that the backbone has beside the wrapped model (Swin): how many, and which are missing."""
    target = {name: value for name, value in backbone.state_dict().items() if not name.startswith(MODEL)}
    fitting = {name: value for name, value in tables.items() if name in target}
    for name, value in fitting.items():
        side = math.isqrt(value.shape[0])
        if value.shape[0] != target[name].shape[0] and side * side == value.shape[0]:
            fitting[name] = resample_table(value, (side, side), backbone.grid)
    missing = [name for name in target if name not in fitting]
    load_into(backbone, fitting, f"init={source}", optional=(MODEL, *missing))
    return len(fitting), missing


def _keep_prefix(state: Mapping[str, Tensor], target: Mapping[str, Tensor], backbone: Backbone) -> dict[str, Tensor]:
    """Prefix tokens (CLS, registers) that keep their values although the table added to them changes or is gone.

    A model adds the table's first rows to them, so those rows are a part of the tokens and no positions.
    """
    names = [name for name in backbone.prefix_names if name in state and name in target]
    old, new = state.get(backbone.table_name), target.get(backbone.table_name)
    count = backbone.table_prefix
    if old is None or not names or not _has_prefix_rows(old if new is None else new, backbone):
        return {}
    fits = new is None or new.shape[-1] == old.shape[-1]
    if not fits or sum(state[name].shape[1] for name in names) != count:
        return {}  # `load_weights` then raises
    rows = old[:, :count] if new is None else old[:, :count] - new[:, :count].to(old)
    parts = rows.split([state[name].shape[1] for name in names], dim=1)
    return {name: state[name] + part for name, part in zip(names, parts, strict=True)}


def _has_prefix_rows(table: Tensor, backbone: Backbone) -> bool:
    """Whether a table [1, rows, D] of this model's grid or of a square one begins with rows for prefix tokens."""
    rows, patches = table.shape[1], table.shape[1] - backbone.table_prefix
    if rows == backbone.num_tokens or patches < 1:
        return False
    return patches == backbone.num_tokens or math.isqrt(patches) ** 2 == patches


def _read(source: str, unlock: Unlock | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model's tensors at `source`, and the position tables that are stored beside the model."""
    if (model := model_in_memory(source)) is not None:
        return _apart(merged_state(model.backbone.state_dict()))
    path = local_folder(source)
    if is_run(path):
        run, step = run_and_step(path)
        checkpoint = RunFolder.open(run, writer=False).chosen(step)
        last, mean = dict(checkpoint.tensors("model")), dict(checkpoint.tensors("ema"))
        tensors = {**last, **mean, **_tied(last, mean)}
        state = {n.removeprefix(BACKBONE): v for n, v in tensors.items() if n.startswith(BACKBONE)}
        return _apart(merged_state(state))
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


def _tied(last: Mapping[str, Tensor], mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The mean of matrices that the model has twice, under their second names, which the mean does not have."""
    second = {name: value for name, value in last.items() if name not in mean and value.dim() > 1}
    pairs = ((name, first) for name in second for first in mean if first in last)
    return {name: mean[first] for name, first in pairs if torch.equal(last[first], second[name])}


def _weights(path: str | Path) -> dict[str, Tensor]:
    """`read_state_dict` with errors that name the fields of a training."""
    try:
        return read_state_dict(path)
    except SitusError as error:
        raise SitusError(str(error).removeprefix("weights="), field=("source", "init")) from error


def _apart(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A backbone's tensors: those of the wrapped model, under its own names, and the others."""
    model = {n.removeprefix(MODEL): v for n, v in state.items() if n.startswith(MODEL)}
    return model, {n: v for n, v in state.items() if not n.startswith(MODEL)}


# --- models in memory ------------------------------------------------------------------------------------------------

_KEPT = 2
_known: OrderedDict[str, Model] = OrderedDict()


def addressed_model(source: Any) -> str | None:
    """The address of a module or an open model; a path (as text), a name or None unchanged."""
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


def model_in_memory(address: str | Path) -> Model | None:
    """The model at an address in memory; None for any other text."""
    address = str(address)
    if not is_memory(address):
        return None
    if address not in _known:
        name = address.removeprefix(PREFIX).rpartition("-")[0]
        raise SitusError(f"{name}: the model in memory no longer exists; pass the model again", field="init")
    return _known[address]
