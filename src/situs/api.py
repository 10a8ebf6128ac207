"""Functions of `import situs` that train, open and export models: the verbs of the command line for Python.

A training is a config (`situs.train.run.RunConfig`): the arguments override a TOML file, which overrides a preset. The
command line parses its flags to the same config and calls the same functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack

from situs.config import checks_arguments, choices_of, from_dict, merge, tables_of, unknown_key
from situs.errors import SitusError
from situs.files import read_toml
from situs.limits import check_value
from situs.presets import load_preset, merge_layers, one_length
from situs.progress import notes_to, silent

if TYPE_CHECKING:
    from torch import nn

    from situs.backbones.config import PositionKind
    from situs.core.tokens import Size
    from situs.locks.key import AnyKey
    from situs.measure.adapt import Adapted
    from situs.methods import Method
    from situs.models import Model
    from situs.models.data import AnyData, AnyModel
    from situs.models.open import Unlock
    from situs.train.assemble import Hooks, RunConfig
    from situs.train.contract import TrainResult
    from situs.train.run import Rehearsal

Config = TypeVar("Config", bound="RunConfig")
Table = Mapping[str, Any]

SHORT = {
    "epochs": ("train.epochs",),
    "steps": ("train.max_steps",),
    "batch": ("data.batch",),
    "img_size": ("data.img_size",),
    "seed": ("train.seed", "data.seed"),
    "parallel": ("train.parallel",),
}
"""Short names -> the fields of a run's config that each sets."""

NAMED = {
    "method": "method.name",
    "backbone": "backbone.name",
    "data": "data.path",
    "train": "tuning.parts",
    "dp": "dp.epsilon",
}
"""Tables that also take one word -> the field of a run's config that the word sets."""

GROUND, FLAGGED = "the model to start from", "flags"
"""Layers of a config that are no files: the lowest and the highest."""

VALIDATED = 5
"""Default number of epochs between two evaluations on the validation split."""


class Options(TypedDict, total=False):
    """Further arguments of a training: those in `PLACE`, a TOML file, and fields of the run's config."""

    resume: str | Path | None
    device: str | None
    key: AnyKey | None
    withheld: str | Path | None
    quiet: bool
    config: str | Path | None
    steps: int
    img_size: Size
    parallel: str
    augment: Table
    optim: Table
    train: Table | Literal["all", "head", "lora"]
    tuning: Table
    dp: Table | float
    added: Sequence[str]
    init: AnyModel
    init_positions: bool
    probe_every: int


class FinetuneOptions(Options, total=False):
    """The same for a fine-tuning."""

    method: str | type[Method] | Table
    backbone: Table


class AdaptOptions(TypedDict, total=False):
    """Further arguments of an adaptation. backbone: patch_size and model_args of a timm name."""

    backbone: Table
    device: str | None
    key: AnyKey | None
    withheld: str | Path | None
    quiet: bool


PLACE = ("out", "resume", "device", "key", "withheld", "quiet")
"""Arguments that are not part of the config."""


def _types() -> dict[str, Any]:
    """The types in annotations of this module, which are imported for its first call."""
    from torch import nn

    from situs.backbones.config import PositionKind
    from situs.core.tokens import Size
    from situs.locks.key import AnyKey
    from situs.methods import Method
    from situs.models import Model
    from situs.models.data import AnyData, AnyModel

    types = {"nn": nn, "PositionKind": PositionKind, "Size": Size, "AnyKey": AnyKey, "Method": Method}
    return {**types, "Model": Model, "AnyData": AnyData, "AnyModel": AnyModel}


@checks_arguments("data", extra=_types)
def pretrain(
    data: AnyData | Table = None,
    *,
    out: str | Path | None = None,
    method: str | type[Method] | Table | None = None,
    backbone: AnyModel | Table | None = None,
    preset: str | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    seed: int | None = None,
    **options: Unpack[Options],
) -> Path:
    """Trains a method on images and returns the folder of the run.

    data: an image folder, a folder of parquet or tar files, CIFAR's batches, or "samples" for the sample images; or
    data in memory: a list of images, of (image, label) pairs or of dicts, arrays, tensors, a torch or Hugging Face
    dataset, or a dict of them by split (to resume such a run, pass the same data again). out: a new folder for the run.
    resume: a run to resume after a crash or Ctrl-C, instead of `out`. method: mp3, droppos, mjp, mae, supervised …, or
    your own class, itself or as "file.py:Class". backbone: a timm name such as "vit_small_patch16_224", or a module or
    open model, from whose weights the run starts (it trains a copy). preset: a ready-made config; a TOML file (config)
    overrides it, and the other arguments override both.

    Every field of a run's config is an argument, in the form of a TOML file: `optim={"lr": 1e-3}`,
    `method={"name": "mp3", "mask_ratio": 0.5}`, `data={"path": "photos/", "img_size": 160}`. Further arguments: steps,
    parallel, augment, train, init (a model or weights to start from; without a backbone its architecture is used; key
    and withheld open a locked folder), init_positions, probe_every, device, quiet. `situs pretrain --help all` explains
    them.

    >>> run = situs.pretrain("samples", preset="samples-mp3", steps=5, out="runs/new", quiet=True)
    >>> situs.open_model(run).facts["step"]
    5
    """
    from situs.train.assemble import RunConfig

    named = {"out": out, "data": data, "method": method, "backbone": backbone, "preset": preset}
    config, place = _resolve(RunConfig, {**named, "epochs": epochs, "batch": batch, "seed": seed}, options)
    return _folder_of(train_pretraining(config, **place), place)


@checks_arguments("data", "source", extra=_types)
def finetune(
    source: AnyModel | None = None,
    *,
    data: AnyData | Table = None,
    out: str | Path | None = None,
    positions: PositionKind | None = None,
    validate_every: int | None = None,
    preset: str | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    seed: int | None = None,
    **options: Unpack[FinetuneOptions],
) -> Path:
    """Trains a classifier, starting from a pretrained model, and returns the folder of the run.

    source: a run, an export, a model folder, a locked folder with its key, a timm name with its weights (NAME=FILE or
    NAME=pretrained), or a module or open model (a copy is trained). data: images with one folder per class, or data in
    memory. Default: the data of the run. out: a new folder for the run. resume: a run to resume, instead of `out`.
    positions: learned, sincos, learned_sincos, relative or none. Default: the model's; after MP3, learned.
    validate_every: epochs between evaluations on the validation split (default: 5). Without such a split a fifth of the
    data is held out (data={"path": ..., "held_out": 0.1} holds out another ratio); 0 never evaluates and trains on all
    data. train: "head" trains only the classifier, "lora" also LoRA's products (tuning={"rank": 8, "targets":
    ["qkv"]}). dp: an ε; trains with differential privacy (needs the extra dp).

    preset, epochs, batch, seed and further arguments are those of `pretrain`.

    >>> tuned = situs.finetune("runs/mp3", steps=5, out="runs/tuned", quiet=True)
    >>> len(situs.open_model(tuned).classes)
    10
    """
    from situs.measure.finetune import FinetuneConfig, data_as_seen
    from situs.models.start import addressed_model

    source = addressed_model(source)
    named = {"out": out, "data": data, "preset": preset, "epochs": epochs, "batch": batch, "seed": seed}
    ground = {} if source is None else data_as_seen(source)
    config, place = _resolve(FinetuneConfig, named, options, ground)
    result = train_finetuning(config, source=source, positions=positions, validate_every=validate_every, **place)
    return _folder_of(result, place)


@checks_arguments("data", "source", "unlabelled", extra=_types)
def adapt(
    source: AnyModel,
    *,
    data: AnyData | Table,
    out: str | Path,
    unlabelled: AnyData = None,
    method: Literal["droppos", "mp3", "part", "mae", "none"] = "none",
    minutes: float = 30.0,
    batch: int | None = None,
    seed: int | None = None,
    **options: Unpack[AdaptOptions],
) -> Adapted:
    """Finds the best classifier for your images and few labels, and returns the comparison.

    Compares class means, a linear probe, the head alone, LoRA and all layers by cross-validation on the training
    labels. The best one is trained on all of them; the new folder `out` holds its run, its export and the page of the
    comparison. The test split, or a fifth that is set aside first, is used once, at the end.

    source: as in `finetune`. data: images with one folder per class, data in memory, or fields of the data's config:
    `{"path": "photos/", "img_size": 98}`. method: also pretrain on your images (the training split and `unlabelled`),
    and compare the pretrained model too. minutes: time limit; the steps that fit into the limit are printed first.
    Further arguments: device, quiet; key and withheld, which open a locked folder; backbone, a table with patch_size
    and model_args of a timm name. Ctrl-C chooses among the results so far.

    >>> best = situs.adapt("runs/mp3", data="samples", minutes=1, out="runs/adapted", quiet=True)
    >>> situs.open_model(best.run).facts["kind"]
    'run'
    """
    from situs.data.sources.memory import addressed
    from situs.measure.adapt import adapt_model
    from situs.measure.finetune import FinetuneConfig, data_as_seen
    from situs.models.start import addressed_model, finetune_source, starting
    from situs.pages import publish

    source = addressed_model(source) or ""
    if unknown := [name for name in options if name not in AdaptOptions.__annotations__]:
        raise unknown_key(unknown[0], AdaptOptions.__annotations__)
    named = {"data": data, "preset": "few-labels", "batch": batch, "seed": seed, "backbone": options.get("backbone")}
    config, _ = _resolve(FinetuneConfig, named, {}, data_as_seen(source))
    more = None if unlabelled is None else str(addressed(unlabelled))
    start = starting(unlock_of(source, options.get("key"), options.get("withheld")))
    say = (lambda _: None) if options.get("quiet") else print
    chosen: dict[str, Any] = {"unlabelled": more, "method": method, "minutes": minutes, "device": options.get("device")}
    chosen["any_size"] = finetune_source(source).named and not (isinstance(data, Mapping) and data.get("img_size"))
    result = adapt_model(config, source, out=out, start=start, say=say, **chosen)
    publish(result, out)
    return result


@checks_arguments(extra=_types)
def export(
    run: str | Path,
    out: str | Path,
    *,
    form: Literal["timm", "hf", "onnx"] | None = None,
    features: Literal["logits", "pooled", "patches"] | None = None,
    ema: bool | None = None,
    force: bool = False,
) -> Path:
    """Writes a run's model to a folder that timm, transformers or ONNX loads, and returns the folder.

    The export is loaded again by its library and compared. form: "hf" writes a plain ViT of timm for transformers,
    "onnx" any image model as a graph that gives `features`: logits, pooled or patches. ema: use the running mean of the
    weights; None: if the run has one. force: replace an existing export.

    >>> folder = situs.export("runs/ft", "exported")
    >>> timm.create_model(f"local-dir:{folder}", pretrained=True).num_classes
    10
    """
    from situs.models.export import export_model

    return export_model(run, out, form=form, features=features, ema=ema, force=force).path


@checks_arguments(extra=_types)
def open_model(
    source: str | Path | nn.Module | Model,
    *,
    key: AnyKey | None = None,
    withheld: str | Path | None = None,
    weights: str | Path | None = None,
    pretrained: bool = False,
    img_size: Size | None = None,
    ema: bool | None = None,
    seed: int = 0,
    device: str = "cpu",
    **fields: Any,
) -> Model:
    """Opens any model: a run, an export, a locked folder, a timm name, a model folder, your own module.

    The model is in eval mode, except your own module, which keeps its mode. Its `backbone` is a torch module with the
    steps `embed`, `positions`, `encode` and `head`. key, withheld: open a locked folder; without them its weights stay
    scrambled. weights: for a timm name, a file, "pretrained" (the same as pretrained=True) or "random". img_size,
    patch_size, in_chans, num_classes and model_args shape a new model; your own module needs img_size, or `example`, a
    batch of its inputs, unless they can be deduced. ema: for a run, use the running mean of its weights. seed: of
    random weights.

    "hf:OWNER/NAME@COMMIT" is a model folder on the Hugging Face hub: its safetensors are fetched once, and its code is
    never run. A commit is needed, because a branch can change.

    >>> model = situs.open_model("vit_tiny_patch16_224", weights="random")
    >>> model.backbone.grid, model.backbone.dim
    ((14, 14), 192)
    """
    from situs import models

    if pretrained and weights not in (None, models.PUBLISHED):
        raise SitusError(f"pretrained=True and weights={weights}: give only one of them", field="weights")
    weights = models.PUBLISHED if pretrained else weights
    unlock = None if key is None and withheld is None else unlock_of(str(source), key, withheld)
    shape = {"weights": weights, "img_size": img_size, **fields}
    return models.open_model(source, unlock=unlock, ema=ema, seed=seed, device=device, **shape)


# --- also called by the command line ------------------------------------------------------------------------


def train_pretraining(config: RunConfig, **place: Any) -> TrainResult | Rehearsal:
    """Pretrains by a config. place: arguments of `PLACE`, and `dry_run`: check everything without training."""
    from situs.measure.hooks import probe_hooks

    return _train(config, probe_hooks, **place)


def train_finetuning(
    config: RunConfig,
    *,
    source: str | Path | None,
    positions: PositionKind | None,
    validate_every: int | None,
    **place: Any,
) -> TrainResult | Rehearsal:
    """Fine-tunes the model at `source` by a config, and evaluates on the validation split."""
    from situs.measure.hooks import validation_hooks
    from situs.train.assemble import own_splits

    if validate_every is not None:
        check_value("validate_every", validate_every, ">= 0")
    every = config.probe_every if validate_every is None else validate_every
    if place.get("resume") is None:
        config = _begun(config, source, positions)
        every = every or VALIDATED if validate_every is None else every
        if validate_every == 0 and config.data.held_out is None:  # train on all data
            config = replace(config, data=replace(config.data, held_out=0.0))
        if validate_every is None and config.data.held_out == 0 and config.data.path and not own_splits(config.data):
            every = 0
    else:  # with the validation that it began with
        _check_resumed(config, place["resume"], {"source": source, "positions": positions})
    return _train(replace(config, probe_every=every), validation_hooks(every), **place)


def _train(
    config: RunConfig,
    hooks: Hooks,
    *,
    key: AnyKey | None = None,
    withheld: str | Path | None = None,
    quiet: bool = False,
    dry_run: bool = False,
    **place: Any,
) -> Any:
    from situs.models.start import starting
    from situs.train.assemble import Setup
    from situs.train.run import rehearse, train_run

    start = starting(None if config.init is None else unlock_of(config.init, key, withheld))
    setup = Setup(start=start, hooks=hooks)
    if dry_run:
        return rehearse(config, setup, **place)
    with notes_to(silent) if quiet else nullcontext():
        return train_run(config, setup, quiet=quiet, **place)


def _begun(config: RunConfig, source: str | Path | None, positions: PositionKind | None) -> RunConfig:
    """The config of a new fine-tuning: from a model (`source`), or from weights (`config.init`)."""
    from situs.measure.finetune import check_labelled, finetune_config

    if source is not None:
        if config.init is not None:
            reason = f"give the initial model ({source}) or other weights ({config.init}), not both"
            raise SitusError(reason, field=("source", "init"))
        return finetune_config(config, source, positions)
    if config.init is None:
        raise SitusError(
            "the initial weights are missing; give a pretrained model, or a weight file together with the name of "
            "its model, or a run to resume",
            field=("source", "init", "backbone.name", "resume"),
        )
    check_labelled(config)
    if positions is None:
        return config
    return replace(config, backbone=replace(config.backbone, positions=positions), init_positions=False)


def _check_resumed(config: RunConfig, run: str | Path, fixed: Mapping[str, Any]) -> None:
    """Refuses to resume a run of pretraining, and arguments of a new fine-tuning (`fixed`)."""
    from situs.methods import METHODS

    labelled = bool(METHODS[config.method_name].needs_targets)
    if not labelled or config.init is None:  # a fine-tuning always starts from weights
        raise SitusError(
            f"{run}: is a pretraining run (method {config.method_name}), not a fine-tuning run; use "
            "pretrain to resume this run, or start a new fine-tuning run from this run",
            field=("resume", "source", "out"),
        )
    for field, value in fixed.items():
        if value is not None:
            raise SitusError(
                (f"{field}={value}: applies only to a new fine-tuning run; a resumed run keeps its own value"),
                field=field,
            )


def unlock_of(source: str, key: AnyKey | None, withheld: str | Path | None) -> Unlock | None:
    """What opens a locked folder: its key (or key file), and the file of its withheld parts."""
    from situs.models.open import is_locked

    if withheld is not None and not is_locked(source):
        raise SitusError(
            f"{source}: is not a locked model (situs lock), so no part of it was withheld; do not set `withheld`",
            field="withheld",
        )
    if key is None:
        return None
    from situs.locks import unlocking

    return unlocking(key, withheld)


def _folder_of(result: Any, place: Mapping[str, Any]) -> Path:
    if result.interrupted:  # a checkpoint was written; a loop over runs must stop
        raise KeyboardInterrupt
    folder = place.get("out") or place.get("resume")
    assert folder is not None
    return Path(folder)


# --- arguments -> config ------------------------------------------------------------------------------------


def _resolve(
    cls: type[Config], named: Mapping[str, Any], options: Mapping[str, Any], ground: Table | None = None
) -> tuple[Config, dict[str, Any]]:
    """The config of these arguments, and those that are not part of it; None in `named` means "not set"."""
    arguments = {**{name: value for name, value in named.items() if value is not None}, **options}
    names = {*SHORT, *PLACE, "preset", "config", *(field.name for field in fields(cls))}
    for name in arguments:
        if name not in names:
            raise unknown_key(name, names)
    place = {name: arguments.pop(name) for name in PLACE if name in arguments}
    if "data" in arguments:
        arguments["data"] = _data_of(arguments["data"])
    _replace_modules(arguments)
    _replace_class(arguments)
    init = None if _names_backbone(arguments) else arguments.get("init")
    below = layered(arguments.pop("preset", None), arguments.pop("config", None), place.get("resume"), ground, init)
    layers = merge_layers(cls, below.values())
    from_dict(cls, layers, where=files_of(below))  # a mistake in a file is reported with the file's name
    values: list[tuple[str, str, Any]] = []
    for name, value in arguments.items():
        if name in NAMED and isinstance(value, (str, Path, int, float)):
            values.append((name, NAMED[name], str(value) if isinstance(value, Path) else value))
        else:
            values += [(name, path, value) for path in SHORT.get(name, (name,))]
    return from_dict(cls, merge(layers, one_length(tables_of(values)), choices_of(cls))), place


def _replace_modules(arguments: dict[str, Any]) -> None:
    """Replaces models in memory by addresses: `init`, or a backbone, from whose weights the run starts."""
    backbone = arguments.get("backbone")
    if not isinstance(arguments.get("init"), str | None) or not isinstance(backbone, str | Mapping | None):
        from situs.models.start import addressed_model

        if not isinstance(backbone, str | Mapping | None):
            if arguments.get("init") is not None:
                reason = "backbone: is a model in memory, and the training starts from its weights; do not set init"
                raise SitusError(reason, field=("backbone", "init"))
            arguments["init"] = arguments.pop("backbone")
        arguments["init"] = addressed_model(arguments["init"])


def _replace_class(arguments: dict[str, Any]) -> None:
    """Replaces a method's class by its name."""
    method = arguments.get("method")
    kind = method.get("name") if isinstance(method, Mapping) else method
    if isinstance(kind, type):
        from situs.methods import METHODS

        name = METHODS.name_of(kind)
        arguments["method"] = {**method, "name": name} if isinstance(method, Mapping) else name


def _names_backbone(table: Table) -> bool:
    backbone = table.get("backbone")
    return isinstance(backbone, str) or (isinstance(backbone, Mapping) and "name" in backbone)


def _data_of(data: Any) -> Any:
    """A path, an address of data in memory, or fields of the data's config with such a path."""
    from situs.data.config import DataConfig
    from situs.data.sources.memory import addressed

    if isinstance(data, Mapping) and {*data} <= {field.name for field in fields(DataConfig)}:
        return {**data, "path": str(addressed(data["path"]))} if data.get("path") is not None else data
    if isinstance(data, Mapping) and "path" in data:
        return data  # its unknown key is reported later
    return addressed(data)


def layered(
    preset: str | None,
    file: str | Path | None,
    run: str | Path | None = None,
    ground: Table | None = None,
    init: str | None = None,
) -> dict[str, Table]:
    """The tables that the arguments of a training override, by their origin, the lowest first: the preset and the TOML
    file, or the config of a resumed run.

    ground: tables that both override. init: weights to start from; their architecture is used if no table names one.
    """
    if run is not None:
        if preset or file:
            reason = f"resume={run}: give no preset and no config file, because a resumed run keeps its config"
            raise SitusError(reason, field=("resume", "preset", "config"))
        from situs.train.checkpoint import read_config

        return {str(Path(run) / "config.json"): read_config(Path(run))}
    files: dict[str, Table] = {}
    if preset is not None:
        files[f"preset {preset}"] = one_length(load_preset(preset))
    if file is not None:
        files[str(file)] = one_length(read_toml(file))
    lowest = {} if ground is None else {GROUND: ground}
    if init is not None and not any(map(_names_backbone, (*lowest.values(), *files.values()))):
        from situs.models.start import adopted

        lowest = {GROUND: merge(adopted(init), ground or {})}
    return {**lowest, **files}


def files_of(layers: Iterable[str]) -> str:
    """The names of the layers that are files, as the start of a sentence."""
    return " + ".join(name for name in layers if name not in (GROUND, FLAGGED))
