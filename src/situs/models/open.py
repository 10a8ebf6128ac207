"""`open_model`: opens any source of a model as one `Model`.

a run                      its method, its newest checkpoint, its data
an export, a model folder  of timm or of transformers (Hugging Face), with its own description
a locked folder            with `unlock`, the model that the key opens (`situs.locks.owner`); else as it is stored
an address on the hub      hf:OWNER/NAME@COMMIT, fetched once (`situs.hub`)
a timm name                with weights: a file, `PUBLISHED` or `RANDOM`; "NAME=FILE" gives both
a user's module            an instance, or "package.module:name", or "file.py:name"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields as fields_of
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from situs.backbones import create_backbone
from situs.backbones.base import Backbone
from situs.backbones.config import BackboneConfig
from situs.backbones.create import create_shapes
from situs.backbones.weights import describe_left_out, load_into, load_weights, read_state_dict
from situs.config import checks_arguments, from_dict
from situs.core.tokens import Size, pair
from situs.core.when import START, When
from situs.data.config import DataConfig
from situs.data.preparation import Preparation, timm_words
from situs.data.tokeniser import keep_unsealed_tokeniser
from situs.errors import SitusError, counted, first_line
from situs.files import names_code, read_json
from situs.hub import Address, hub_address, local_folder
from situs.methods import create_method, method_class
from situs.methods.base import Method
from situs.models.model import Model, feature_defence_of, folder_name, identity_of
from situs.models.module import OwnModule, deduce_input, in_float32, make_module, wrap_module
from situs.train.assemble import takes
from situs.train.checkpoint import run_and_step
from situs.train.distributed import find_device
from situs.train.export import MULTI_LABEL, PARTS, PREPARED, last_name
from situs.train.private import Spent, epsilon_of
from situs.train.run import Loaded, is_run, load_run

PUBLISHED, RANDOM = "pretrained", "random"
"""Values of `weights` that are no file: the weights that timm publishes, and random ones."""

CONFIG, MANIFEST = "config.json", "manifest.json"
LOCKED = " (locked)"
WEIGHT_FILES = (".safetensors", ".pt", ".pth", ".bin", ".npz")

Unlock = Callable[[Path], AbstractContextManager[tuple[Path, Callable[[Backbone], Backbone]]]]
"""A locked folder -> a folder that can be read, and a function that unlocks the backbone made from it."""


@checks_arguments()
def open_model(
    source: str | Path | nn.Module | Model,
    *,
    weights: str | Path | None = None,
    img_size: Size | None = None,
    ema: bool | None = None,
    unlock: Unlock | None = None,
    any_weights: bool = False,
    as_trained: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
    **fields: Any,
) -> Model:
    """The model that `source` names, on its device and in eval mode; a module stays in the mode it is in.

    weights: for a name: a file, "pretrained" or "random"; any_weights: a name without them gets random ones. seed: of
    random weights. ema: for a run: the mean of its weights; None takes it if there is one. as_trained: a run as in its
    own steps, with LoRA's products apart and frozen weights frozen; else an ordinary model. img_size and `fields`
    (patch_size, in_chans, num_classes, model_args) shape a new model; for a user's module, example [B, C, H, W] gives
    the size and the channels as well. device: "meta" makes a name or a folder without its values.
    """
    device = device if str(device) == "meta" else find_device(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        of_run = {"ema": ema, "as_trained": as_trained}
        return _open(source, weights, of_run, unlock, any_weights, device, {"img_size": img_size, **fields})


def _open(
    source: str | Path | nn.Module | Model,
    weights: str | Path | None,
    of_run: dict[str, Any],
    unlock: Unlock | None,
    any_weights: bool,
    device: torch.device | str,
    fields: dict[str, Any],
) -> Model:
    fields = {name: value for name, value in fields.items() if value is not None}
    known = {field.name for field in fields_of(BackboneConfig)} - {"name", "weights"} | {"example"}
    if unknown := sorted(fields.keys() - known - {"pretrained"}):
        shaping = ", ".join(sorted(known))
        raise SitusError(f"unknown option {unknown[0]!r}; the options of a model are {shaping}", field=unknown[0])
    weights = None if weights is None else str(weights)
    if isinstance(source, Model):
        _refuse("an open model", weights=weights, **fields)
        return source
    if isinstance(source, nn.Module):
        _refuse("a module", weights=weights)
        name = source.name if isinstance(source, Backbone) else type(source).__name__
        return _open_module(source, name, fields, device)
    source = str(source)
    if not Path(source).exists() and not names_code(source) and "=" in source:
        source, _, after = source.partition("=")
        _refuse(f"{source}={after}", weights=weights)
        weights = after
    address = hub_address(source)
    origin = Path(source).resolve().as_posix() if Path(source).exists() else f"{source}={weights}"
    if is_locked(source) or unlock is not None:
        _refuse("a locked folder", weights=weights)
        origin += " with its key" if unlock is not None else ""  # without it, another model
        model = _open_locked(Path(source), unlock, fields, device)
    elif is_run(source):
        _refuse("a run", weights=weights, **fields)
        origin += " without its mean" if of_run["ema"] is False else ""  # other weights
        model = _open_run(source, device, **of_run)
    elif (folder := model_folder(source)) is not None:
        _refuse("a model's folder", weights=weights)
        model = _open_folder(folder, fields, device) if address is None else _open_hub(address, folder, fields, device)
    elif names_code(source):
        _refuse(source, weights=weights)
        module = make_module(source, fields.pop("model_args", None))
        model = _open_module(module.eval(), last_name(source), fields, device)  # results name no folders
    else:
        model = _open_name(source, weights or (RANDOM if any_weights else None), fields, device)
    home = Path(origin).parent.name if Path(source).exists() else last_name(weights or "")
    return replace(model, identity=identity_of(origin), home=home)


def open_whole(source: str | Path, unlock: Unlock | None) -> Model:
    """A locked folder opened with its key; an error without one."""
    if unlock is None:
        raise SitusError(
            f"{source}: is locked, and its blocks stay scrambled without its key; give the key", field="key"
        )
    return open_model(source, unlock=unlock)


def is_locked(source: str | Path) -> bool:
    """Whether a folder has a lock's manifest."""
    try:
        return read_json(Path(source) / MANIFEST).get("format") == "situs-lock"
    except SitusError:
        return False


def model_folder(source: str | Path) -> Path | None:
    """The folder of a timm or transformers model (also an export) that `source` names."""
    folder = local_folder(source)
    return folder if (folder / CONFIG).is_file() else None


def _refuse(what: str, **settings: Any) -> None:
    for name, value in settings.items():
        if value is not None:
            raise SitusError(f"{name}={value}: {what} has its own {name}; do not set {name}", field=name)


def _open_run(source: str, device: torch.device | str, **options: Any) -> Model:
    loaded = load_run(source, "cpu" if str(device) == "meta" else device, **options)
    facts = {
        "kind": "run",
        "model": loaded.config.backbone.name,
        "method": loaded.config.method_name,
        "step": loaded.checkpoint.step,
        "ema": loaded.ema,
    }
    if (defence := feature_defence_of(run_and_step(source)[0])) is not None:
        facts |= {"defence": defence.defence, "defence_scale": defence.scale}
    state, method = loaded.checkpoint.state, loaded.method
    if loaded.config.train.keep_best and (best := state.get("best", {})).get("step") == loaded.checkpoint.step:
        facts["best_by"] = best["by"]
    return Model(
        folder_name(run_and_step(source)[0]),
        method.backbone,
        method,
        loaded.config.data,
        loaded.classes,
        facts,
        classifier="label" in method.needs_targets,
        positions=method.sees_positions,
        when=_last_step(state),
        tuning=loaded.config.tuning,
        spent=spent_of(loaded),
    )


def _last_step(state: Mapping[str, Any]) -> When:
    """The last step that a checkpoint includes."""
    step, total, per_epoch = (state.get(name, 0) for name in ("step", "total_steps", "steps_per_epoch"))
    if not (step and total and per_epoch):
        return START
    return When(0, (step - 1) // per_epoch, (step - 1) / total, step - 1, -(-total // per_epoch))


def spent_of(loaded: Loaded) -> Spent | None:
    """What a run with DP-SGD has spent at the step of its weights: from its log, or computed where the log ends before.

    The best checkpoint is chosen by measurements of all steps, so all of them count.
    """
    dp, step = loaded.config.dp, loaded.checkpoint.step
    if loaded.config.train.keep_best:
        step = max(step, loaded.run.facts().get("step", step))
    logged = [record for record in loaded.run.records() if "epsilon" in record and record["step"] <= step]
    if not logged:  # it is logged from the first step on
        return None
    last = logged[-1]
    noise, rate, epsilon = last["noise_multiplier"], last["sampling_rate"], last["epsilon"]
    if last["step"] < step:
        try:
            epsilon = epsilon_of(noise, rate, step, dp.delta)
        except SitusError:  # unknown without the extra `dp`
            epsilon = None
    return Spent(epsilon, dp.delta, noise, dp.clip, step)


def _open_locked(folder: Path, unlock: Unlock | None, fields: dict[str, Any], device: torch.device | str) -> Model:
    """The model, with its key; without one the locked weights, where they make a whole model."""
    if not is_locked(folder):
        raise SitusError(f"{folder}: is not locked, so it needs no key", field="key")
    if unlock is not None:
        with unlock(folder) as (readable, opened):
            model = _open_folder(readable, fields, "cpu")
            if model.input is not None and model.input.modality.ids:  # the readable folder is deleted afterwards
                if readable != folder:
                    keep_unsealed_tokeniser(folder, readable)
                text = replace(model.input.text, tokeniser=str(folder))
                model = replace(model, input=replace(model.input, text=text))
            model = replace(model, name=folder_name(folder), backbone=opened(model.backbone).to(device).eval())
        return replace(model, facts={**model.facts, "locked": "opened with its key"})
    manifest = read_json(folder / MANIFEST)
    withheld = manifest.get("withheld")
    shapes = str(device) == "meta"  # shapes need no weights, so nothing withheld is missing
    if manifest.get("sealed") or (withheld is not None and not shapes):
        parts = ", ".join(map(str, withheld.get("parts", ()))) if isinstance(withheld, dict) else "?"
        lacks = (
            "is sealed (encrypted)"
            if manifest.get("sealed")
            else f"lacks the parts that were withheld by the lock ({parts})"
        )
        raise SitusError(f"{folder}: {lacks}, so the model is incomplete without its key", field=("key", "withheld"))
    model = _open_folder(folder, fields, device)
    facts = {**model.facts, "locked": "yes, opened without its key"}
    return replace(model, name=f"{model.name}{LOCKED}", facts=facts, locked=True)


def _open_folder(folder: Path, fields: dict[str, Any], device: torch.device | str) -> Model:
    ours, crop = read_json(folder / CONFIG).get("situs", {}), read_prepared(folder).get("crop_size", {})
    # transformers keeps a square image_size for DINOv2; the images of our export need not be square.
    size = {"img_size": (crop["height"], crop["width"])} if ours and crop else {}
    backbone = _create(folder, {**size, **fields}, device)
    description = described(folder, backbone)
    method = None if str(device) == "meta" else _exported_method(folder, backbone, ours)
    names = description.get("label_names")
    prepared = samples_for(backbone, description, folder=folder)
    if prepared is not None and ours.get("held_out"):
        prepared = replace(prepared, held_out=ours["held_out"])
    return Model(
        folder_name(folder),
        backbone,
        method,
        prepared,
        (tuple(names) if isinstance(names, list) else None) if method is None else _dense_classes(ours),
        {"kind": "export", "model": backbone.source["architecture"], "method": ours.get("method")},
        classifier=description.get("num_classes") != 0,
        positions=ours.get("positions", True),
    )


def _open_hub(address: Address, folder: Path, fields: dict[str, Any], device: torch.device | str) -> Model:
    """The model of an address; sentences and results name the address, not its place in the cache."""
    try:
        model = _open_folder(folder, fields, device)
    except SitusError as error:
        sentence = str(error).replace(str(folder), str(address)).removeprefix("weights=")
        raise SitusError(sentence, field=error.fields, value=error.value, allowed=error.allowed) from error
    except Exception as error:  # a stranger's files may have anything in them
        reason = f"{type(error).__name__}: {first_line(error)}".replace(str(folder), str(address))
        raise SitusError(f"{address}: its files do not describe a model ({reason})", field="model") from error
    return replace(model, name=address.name.rpartition("/")[2], facts={**model.facts, "hub": str(address)})


def _dense_classes(ours: Mapping[str, Any]) -> tuple[str, ...]:
    """The classes of pixels or objects that an export predicts."""
    return tuple((ours.get("masks") or ours["objects"])["classes"])


def _exported_method(folder: Path, backbone: Backbone, ours: Mapping[str, Any]) -> Method | None:
    """The method whose own parts (a decoder) an export has beside the model; None where there are none."""
    if not (folder / PARTS).is_file():
        return None
    settings = from_dict(method_class(ours["method"]).Config, ours["settings"], where=f"{folder}/{CONFIG}")
    method = create_method(ours["method"], backbone, settings, len(_dense_classes(ours)))
    load_into(method, read_state_dict(folder / PARTS), f"{folder / PARTS}", optional=("backbone.",))
    return method.to(next(backbone.parameters()).device).eval()


def is_missing(name: str) -> bool:
    """Whether a name can only be a path, and nothing is there."""
    return "/" in name and not Path(name).exists()


def _open_name(name: str, weights: str | None, fields: dict[str, Any], device: torch.device | str) -> Model:
    if Path(name).suffix in WEIGHT_FILES and Path(name).is_file():
        raise SitusError(
            f"{name}: contains only weights; give MODEL as timm name and file, for example vit_small_patch16_224={name}"
        )
    if weights is None:
        if is_missing(name):
            raise SitusError(f"{name}: no such run, export or file", field="model")
        raise SitusError(
            f"{name}: is neither a run nor an export; if you mean the timm model of this name, set weights to a file, "
            f"to {PUBLISHED!r} (the weights that timm publishes) or to {RANDOM!r} (an untrained model)",
            field="weights",
        )
    file = None if weights in (PUBLISHED, RANDOM) else weights
    backbone = _create(name, {**fields, "weights": file}, "cpu" if weights != RANDOM else device)
    if weights == PUBLISHED:
        from situs.backbones.timm.create import pretrained_state

        load_weights(backbone, pretrained_state(name, "weights"), f"weights={weights}")
    description = backbone.model.pretrained_cfg if backbone.source["library"] == "timm" else {}
    return Model(
        name,
        backbone.to(device),
        None,
        samples_for(backbone, {"pretrained_cfg": description}),
        None,
        {"kind": "name", "model": name, "weights": last_name(weights)},
        notes={"left out": describe_left_out(backbone.left_out)} if backbone.left_out else {},
        classifier=weights != RANDOM and description.get("num_classes") != 0,
    )


def _shape_of(example: Any) -> dict[str, Any]:
    if not isinstance(example, torch.Tensor) or example.dim() < 3:
        kind = (
            f"a tensor of shape {list(example.shape)}" if isinstance(example, torch.Tensor) else type(example).__name__
        )
        raise SitusError(f"example: must be a tensor [B, C, H, W], but is {kind}", field="example")
    return {"img_size": tuple(example.shape[-2:]), "in_chans": example.shape[1]}


def _open_module(module: nn.Module, name: str, fields: dict[str, Any], device: torch.device | str) -> Model:
    """A backbone as it is; a known module of timm or transformers as its backbone; any other module as a whole."""
    example = fields.pop("example", None)
    if example is not None:
        fields = {**_shape_of(example), **fields}
    size = fields.pop("img_size", None)
    module, original_dtype = in_float32(module)
    backbone = module if isinstance(module, Backbone) else _library_backbone(module)
    deduced = None
    if backbone is None:
        if size is None:
            if (deduced := deduce_input(module, fields.get("in_chans"))) is None:
                raise SitusError(f"{name}: its image size cannot be deduced; set img_size", field="img_size")
            size, fields["in_chans"] = deduced
        backbone = wrap_module(module, size, name=name, **fields)
    elif example is None:
        _refuse(name, **fields)
    if backbone.input.channels and backbone.input.shape is None:
        raise SitusError(f"{name}: its image size is not fixed, but Situs needs a fixed image size here")
    of_user = {*module.modules()}
    for part in backbone.modules():  # what wraps the module takes its mode
        part.training = part.training if part in of_user else module.training
    if size is not None and backbone.input.shape != pair(size):
        raise SitusError(f"img_size={size}: {name} takes {backbone.input.shape}", field="img_size")
    backbone.name = name
    description: Any = getattr(backbone.model, "pretrained_cfg", None) or {}
    if isinstance(backbone, OwnModule):
        original_dtype = original_dtype or backbone.original_dtype
        if backbone.normalisation is not None:
            description = dict(zip(("mean", "std"), backbone.normalisation, strict=True))
    notes = {} if original_dtype is None else {"precision": f"weights in {original_dtype}; computed in float32 here"}
    if deduced is not None:
        (height, width), channels = deduced
        notes["image size"] = f"{height} × {width}, {counted(channels, 'channels')}: deduced from the module"
    device = "cpu" if str(device) == "meta" else device
    facts = {"kind": "module", "model": name, "weights": "its own"}
    prepared = samples_for(backbone, {"pretrained_cfg": description})
    return Model(name, backbone.to(device), None, prepared, None, facts, notes=notes)


def _library_backbone(module: nn.Module) -> Backbone | None:
    """The backbone of a module of timm or transformers, where its class is known."""
    try:
        return create_backbone(module)
    except SitusError:
        return None


def _create(source: str | Path, fields: dict[str, Any], device: torch.device | str) -> Backbone:
    """The backbone in eval mode; on the meta device with shapes and no values, so that no model is too large."""
    if str(device) != "meta":
        return create_backbone(source, **fields).to(device).eval()
    return create_shapes(source / CONFIG if isinstance(source, Path) else source, **fields).eval()


def read_prepared(folder: Path) -> dict[str, Any]:
    """transformers' preprocessor_config.json, where the folder has one."""
    return read_json(folder / PREPARED) if (folder / PREPARED).is_file() else {}


def described(folder: Path, backbone: Backbone) -> dict[str, Any]:
    """The description of a model's folder in timm's format, whichever library wrote it."""
    if backbone.source["library"] != "transformers":
        return read_json(folder / "config.json")
    config = backbone.model.config
    words = {"num_classes": backbone.num_classes, "problem_type": config.problem_type}
    words |= {"pretrained_cfg": timm_words(read_prepared(folder)), "situs": getattr(config, "situs", {})}
    names = [config.id2label[number] for number in sorted(config.id2label)]
    if names == [f"LABEL_{number}" for number in range(len(names))]:
        return words
    return words | {"label_names": names if backbone.num_classes else None}


def samples_for(
    backbone: Backbone, described: Mapping[str, Any], path: str = "", *, folder: Path | None = None
) -> DataConfig | None:
    """How the model's samples are prepared; None where unknown. described: a folder's description."""
    settings = {"multi_label": MULTI_LABEL.items() <= described.items(), "path": path}
    model = takes(backbone, str(folder or ""))
    return Preparation.read(model, described.get("pretrained_cfg", {}), described.get("situs", {}), **settings).data
