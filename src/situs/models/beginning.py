"""What a fine-tuning starts from: a run, a model's folder, a locked one, or a name with its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from situs.backbones.config import BackboneConfig
from situs.config import from_dict, to_dict
from situs.data.modalities import MODALITIES
from situs.errors import SitusError
from situs.files import names_code
from situs.methods import METHODS
from situs.models.handed import handed
from situs.models.model import Model
from situs.models.module import OwnModule
from situs.models.open import CONFIG, PUBLISHED, RANDOM, is_locked, model_folder, open_model
from situs.train.assemble import RunConfig
from situs.train.checkpoint import read_config, run_and_step
from situs.train.export import POSITIONS, TRAINING_ONLY
from situs.train.run import is_run

TABLES = tuple(each.table for each in MODALITIES if each.table and not each.each)
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
