"""What `import situs` offers to train, open and export models: the verbs of the command line as functions.

A training is a config (`situs.train.run.RunConfig`), laid together from a preset, a TOML file and the arguments, each
over the one before. The command line parses its flags to the same config and goes the same way from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from situs.config import choices_of, from_dict, merge, tables_of, unknown_key
from situs.errors import SitusError
from situs.files import read_toml
from situs.limits import check_value
from situs.presets import laid, load_preset, one_length
from situs.progress import notes_to, silent

if TYPE_CHECKING:
    from typing import Unpack

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
    from situs.train.rehearse import Rehearsal

Config = TypeVar("Config", bound="RunConfig")
Table = Mapping[str, Any]

SHORT = {
    "epochs": ("train.epochs",),
    "steps": ("train.max_steps",),
    "batch": ("data.batch",),
    "seed": ("train.seed", "data.seed"),
    "parallel": ("train.parallel",),
}
"""Everyday names, each for fields of a run's config."""

NAMED = {
    "method": "method.name",
    "backbone": "backbone.name",
    "data": "data.path",
    "train": "tuning.parts",
    "dp": "dp.epsilon",
}
"""Names of tables for which one word may stand, each for a field of a run's config."""

GROUND, FLAGGED = "the model to start from", "flags"
"""Layers of a config that are no file: the lowest and the uppermost."""

VALIDATED = 5
"""Epochs between two looks at the validation split, where nothing is said."""


class Options(TypedDict, total=False):
    """What a training takes besides: where it starts and goes on (`PLACE`), a TOML file, fields of the run's config."""

    resume: str | Path | None
    device: str | None
    key: AnyKey | None
    withheld: str | Path | None
    quiet: bool
    config: str | Path | None
    steps: int
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
    """What an adaptation takes besides. backbone: patch_size and model_args of a name that stands for another shape."""

    backbone: Table
    device: str | None
    key: AnyKey | None
    withheld: str | Path | None
    quiet: bool


PLACE = ("out", "resume", "device", "key", "withheld", "quiet")
"""Options that are no part of the config."""


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
    """Trains a method on images; gives the folder of the run.

    data: an image folder, a folder of parquet or tar files, CIFAR's batches, or "samples" for the embedded pictures; or
    what is in memory: a list of images, of (image, label) pairs or of dicts, arrays, tensors, a dataset of torch or of
    Hugging Face, or a dict of them by split. A run on it goes on with resume and the same data again.
    out: a new folder for the run; resume instead: a run to go on with, after a crash or a Ctrl-C. method: mp3, droppos,
    mjp, mae or supervised, or a class of your own, itself or as "file.py:Class". backbone: a model of timm, as
    "vit_small_patch16_224", or a module or open model, whose weights the run starts from (it trains a copy). preset: a
    recipe by name, over which a TOML file (config) and then the other arguments are laid.

    Every field of a run's config can be given, as a TOML file holds it: `optim={"lr": 1e-3}`,
    `method={"name": "mp3", "mask_ratio": 0.5}`, `data={"path": "photos/", "img_size": 160}`. Further options: steps,
    parallel, augment, train, init (a model or weights to start from, whose architecture is taken where no backbone is
    named; key and withheld open a locked folder), init_positions, probe_every, device, quiet.
    `situs pretrain --help all` explains each.

    >>> run = situs.pretrain("photos/", method="mp3", backbone="vit_small_patch16_224", out="runs/mp3")
    """
    from situs.train.assemble import RunConfig

    given = {"out": out, "data": data, "method": method, "backbone": backbone, "preset": preset}
    config, place = _asked(RunConfig, {**given, "epochs": epochs, "batch": batch, "seed": seed}, options)
    return _folder_of(train_pretraining(config, **place), place)


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
    """Trains a classifier on a pretrained model; gives the folder of the run.

    source: a run, an export or another model's folder, a locked folder with its key, a timm name with its weights
    (NAME=FILE, NAME=pretrained), or a module or open model, of which a copy is trained. data: images in a folder a
    class, or in memory; by default the run's own. out: a new folder for the run, or resume: one to go on with.
    positions: learned, sincos, learned_sincos, relative or none; by default the model's own, and learned after MP3.
    validate_every: epochs between two looks at the validation split, by default 5; of data without one a fifth is held
    out (data={"path": ..., "held_out": 0.1} says another share), and 0 looks at none and trains on all of it. train:
    "head" or "lora" trains the classifier alone, or with LoRA's products (tuning={"rank": 8, "targets": ["qkv"]}); dp:
    an ε, trains with differential privacy (the extra dp).

    preset, epochs, batch, seed and further options are those of `pretrain`.

    >>> tuned = situs.finetune("runs/mp3", data="photos/", out="runs/ft")
    """
    from situs.measure.finetune import FinetuneConfig, data_as_seen
    from situs.models.start import addressed_model

    source = addressed_model(source)
    given = {"out": out, "data": data, "preset": preset, "epochs": epochs, "batch": batch, "seed": seed}
    ground = {} if source is None else data_as_seen(source)
    config, place = _asked(FinetuneConfig, given, options, ground)
    found = train_finetuning(config, source=source, positions=positions, validate_every=validate_every, **place)
    return _folder_of(found, place)


def adapt(
    source: AnyModel,
    *,
    data: AnyData | Table,
    out: str | Path,
    unlabelled: AnyData = None,
    method: Literal["droppos", "mp3", "mae", "none"] = "none",
    minutes: float = 30.0,
    batch: int | None = None,
    seed: int | None = None,
    **options: Unpack[AdaptOptions],
) -> Adapted:
    """Makes the best classifier of a model, own images and few labels; gives what was tried.

    Class means, a linear probe, the head alone, LoRA and all layers are compared by cross-validation on the training
    labels; the best is fitted to all of them, and lies in the new folder `out` as a run, with its export and the page
    of the comparison. The test split, or a fifth that is set aside first, is looked at once, at the end.

    source: whatever `finetune` takes. data: images in a folder a class, or in memory, or fields of the data's config:
    `{"path": "photos/", "img_size": 98}`. method: pretrain on the own images too, those of the training split and
    `unlabelled`, and try every way from there as well. minutes: a budget; what fits into it is said beforehand. Further
    options: device, quiet; key and withheld, which open a locked folder; backbone, a table with the patch_size and
    model_args of a name. Ctrl-C chooses among what was measured.

    >>> best = situs.adapt("vit_small_patch16_224=pretrained", data="photos/", minutes=10, out="runs/adapted")
    """
    from situs.data.open import addressed
    from situs.measure.adapt import adapt_model
    from situs.measure.finetune import FinetuneConfig, data_as_seen
    from situs.models.start import addressed_model, starting
    from situs.pages import publish

    source = addressed_model(source) or ""
    if unknown := [name for name in options if name not in AdaptOptions.__annotations__]:
        raise unknown_key(unknown[0], AdaptOptions.__annotations__)
    given = {"data": data, "preset": "few-labels", "batch": batch, "seed": seed, "backbone": options.get("backbone")}
    config, _ = _asked(FinetuneConfig, given, {}, data_as_seen(source))
    more = None if unlabelled is None else str(addressed(unlabelled))
    start = starting(unlock_of(source, options.get("key"), options.get("withheld")))
    say = (lambda _: None) if options.get("quiet") else print
    asked: dict[str, Any] = {"unlabelled": more, "method": method, "minutes": minutes, "device": options.get("device")}
    result = adapt_model(config, source, out=out, start=start, say=say, **asked)
    publish(result, out)
    return result


def export(
    run: str | Path,
    out: str | Path,
    *,
    form: Literal["timm", "hf", "onnx"] | None = None,
    features: Literal["logits", "pooled", "patches"] | None = None,
    ema: bool | None = None,
    force: bool = False,
) -> Path:
    """Writes a run's model to a folder that timm or transformers loads; gives the folder.

    What was written is read again by its library and compared. form: "hf" writes a plain ViT of timm for transformers,
    "onnx" any model of images as a graph that gives `features`: logits, pooled or patches. ema: the mean of the
    weights; None takes it where the run has one. force: replace an export that is already there.

    >>> situs.export("runs/ft", "exported")
    """
    from situs.models.export import export_model

    return export_model(run, out, form=form, features=features, ema=ema, force=force).path


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
    """Opens any model: a run, an export, a locked folder, a name, a folder, your own module.

    The model is in eval mode, but a module stays in the mode it is in; its `backbone` is a torch module with the steps
    `embed`, `positions`, `encode` and `head`. key, withheld: what opens a locked folder; without them it is opened as
    it lies there, scrambled. weights: for a timm name, a file, "pretrained" or "random"; pretrained=True says the
    second. img_size (an own module needs it, or `example`, images that it takes) and patch_size, in_chans, num_classes,
    model_args shape a new model. ema: for a run, the mean of its weights. seed: of random weights.

    >>> model = situs.open_model("vit_small_patch16_224", weights="random")
    """
    from situs import models

    if pretrained and weights not in (None, models.PUBLISHED):
        raise SitusError(f"pretrained=True: and weights={weights} are both asked for", field="weights")
    weights = models.PUBLISHED if pretrained else weights
    unlock = None if key is None and withheld is None else unlock_of(str(source), key, withheld)
    shape = {"weights": weights, "img_size": img_size, **fields}
    return models.open_model(source, unlock=unlock, ema=ema, seed=seed, device=device, **shape)


# --- what the command line calls too ------------------------------------------------------------------------


def train_pretraining(config: RunConfig, **place: Any) -> TrainResult | Rehearsal:
    """Trains what `config` says. place: by the names in `PLACE`; `dry_run`: all is checked and nothing trained."""
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
    """Fine-tunes the model at `source` as `config` says, and looks at the validation split on the way."""
    from situs.measure.hooks import validation_hooks
    from situs.train.inputs import own_splits

    if validate_every is not None:
        check_value("validate_every", validate_every, ">= 0")
    every = config.probe_every if validate_every is None else validate_every
    if place.get("resume") is None:
        config = _begun(config, source, positions)
        every = every or VALIDATED if validate_every is None else every
        if validate_every == 0 and config.data.held_out is None:  # on all of data without a split to be judged on
            config = replace(config, data=replace(config.data, held_out=0.0))
        if validate_every is None and config.data.held_out == 0 and config.data.path and not own_splits(config.data):
            every = 0
    else:  # as it began, without validation too
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
    from situs.train.rehearse import rehearse
    from situs.train.run import train_run

    start = starting(None if config.init is None else unlock_of(config.init, key, withheld))
    setup = Setup(start=start, hooks=hooks)
    if dry_run:
        return rehearse(config, setup, **place)
    with notes_to(silent) if quiet else nullcontext():
        return train_run(config, setup, quiet=quiet, **place)


def _begun(config: RunConfig, source: str | Path | None, positions: PositionKind | None) -> RunConfig:
    """The config of a new fine-tuning: of a model (`source`), or of weights alone (`config.init`)."""
    from situs.measure.finetune import check_labelled, finetune_config

    if source is not None:
        if config.init is not None:
            said = f"give the model to start from ({source}) or other weights ({config.init}), and not both"
            raise SitusError(said, field=("source", "init"))
        return finetune_config(config, source, positions)
    if config.init is None:
        raise SitusError(
            "give the pretrained model to start from, other weights with the name of their model, or a run to go on "
            "with",
            field=("source", "init", "backbone.name", "resume"),
        )
    check_labelled(config)
    if positions is None:
        return config
    return replace(config, backbone=replace(config.backbone, positions=positions), init_positions=False)


def _check_resumed(config: RunConfig, run: str | Path, given: Mapping[str, Any]) -> None:
    """Refuses a run that was never fine-tuned, and what is for a new fine-tuning."""
    from situs.methods import METHODS

    labelled = bool(METHODS[config.method_name].needs_targets)
    if not labelled or config.init is None:  # a fine-tuning always starts from weights
        raise SitusError(
            f"{run}: is a run of pretrain (method {config.method_name}), not of finetune; go on with it in pretrain, "
            "or start a new fine-tuning from it",
            field=("resume", "source", "out"),
        )
    for field, value in given.items():
        if value is not None:
            raise SitusError(f"{field}={value}: is for a new fine-tuning; {run} goes on as it began", field=field)


def unlock_of(source: str, key: AnyKey | None, withheld: str | Path | None) -> Unlock | None:
    """What opens a locked folder: its key, or the file with it, and the owner's second file where parts are there."""
    from situs.models.open import is_locked

    if withheld is not None and not is_locked(source):
        raise SitusError(f"{source}: is not locked, so that nothing was withheld", field="withheld")
    if key is None:
        return None
    from situs.locks import unlocking

    return unlocking(key, withheld)


def _folder_of(result: Any, place: Mapping[str, Any]) -> Path:
    if result.interrupted:  # a checkpoint was written; who runs this in a loop must not go on
        raise KeyboardInterrupt
    folder = place.get("out") or place.get("resume")
    assert folder is not None
    return Path(folder)


# --- arguments -> config ------------------------------------------------------------------------------------


def _asked(
    cls: type[Config], given: Mapping[str, Any], options: Mapping[str, Any], ground: Table | None = None
) -> tuple[Config, dict[str, Any]]:
    """The config that the arguments come to, and those that are no part of it; None in `given` is not given."""
    asked = {**{name: value for name, value in given.items() if value is not None}, **options}
    known = {*SHORT, *PLACE, "preset", "config", *(each.name for each in fields(cls))}
    for name in asked:
        if name not in known:
            raise unknown_key(name, known)
    place = {name: asked.pop(name) for name in PLACE if name in asked}
    if "data" in asked:
        asked["data"] = _data_of(asked["data"])
    _take_modules(asked)
    _take_class(asked)
    init = None if _names_backbone(asked) else asked.get("init")
    below = layered(asked.pop("preset", None), asked.pop("config", None), place.get("resume"), ground, init)
    layers = laid(cls, below.values())
    from_dict(cls, layers, where=named(below))  # a mistake in a file is told with its name
    each: list[tuple[str, str, Any]] = []
    for name, value in asked.items():
        word = name in NAMED and isinstance(value, (str, Path, int, float))
        each += (
            [(name, NAMED[name], str(value) if isinstance(value, Path) else value)]
            if word
            else [(name, path, value) for path in SHORT.get(name, (name,))]
        )
    return from_dict(cls, merge(layers, one_length(tables_of(each)), choices_of(cls))), place


def _take_modules(asked: dict[str, Any]) -> None:
    """Puts addresses in the place of models in memory: of `init`, and of a backbone, whose weights are started from."""
    if not isinstance(asked.get("init"), str | None) or not isinstance(asked.get("backbone"), str | Mapping | None):
        from situs.models.start import addressed_model

        if not isinstance(asked.get("backbone"), str | Mapping | None):
            if asked.get("init") is not None:
                said = "backbone: is a model in memory, whose weights are started from; leave init out"
                raise SitusError(said, field=("backbone", "init"))
            asked["init"] = asked.pop("backbone")
        asked["init"] = addressed_model(asked["init"])


def _take_class(asked: dict[str, Any]) -> None:
    """Puts its name in the place of a class of the user's own as method."""
    method = asked.get("method")
    given = method.get("name") if isinstance(method, Mapping) else method
    if isinstance(given, type):
        from situs.methods import METHODS

        name = METHODS.name_of(given)
        asked["method"] = {**method, "name": name} if isinstance(method, Mapping) else name


def _names_backbone(table: Table) -> bool:
    named = table.get("backbone")
    return isinstance(named, str) or (isinstance(named, Mapping) and "name" in named)


def _data_of(data: Any) -> Any:
    """A path, an address of what is in memory, or fields of the data's config with such a path."""
    from situs.data.config import DataConfig
    from situs.data.open import addressed

    if isinstance(data, Mapping) and {*data} <= {each.name for each in fields(DataConfig)}:
        return {**data, "path": str(addressed(data["path"]))} if data.get("path") is not None else data
    if isinstance(data, Mapping) and "path" in data:
        return data  # the unknown key is said
    return addressed(data)


def layered(
    preset: str | None,
    file: str | Path | None,
    run: str | Path | None = None,
    ground: Table | None = None,
    init: str | None = None,
) -> dict[str, Table]:
    """What lies below the arguments of a training, by where it comes from, the lowest first: preset < TOML file, or a
    run's own config.

    ground: tables that lie below both. init: weights to start from, whose architecture lies there too where neither
    names one.
    """
    if run is not None:
        if preset or file:
            said = f"resume={run}: brings the run's own config, over which no preset and no file are laid"
            raise SitusError(said, field=("resume", "preset", "config"))
        from situs.train.checkpoint import read_config

        return {str(Path(run) / "config.json"): read_config(Path(run))}
    found: dict[str, Table] = {} if ground is None else {GROUND: ground}
    if preset is not None:
        found[f"preset {preset}"] = one_length(load_preset(preset))
    if file is not None:
        found[str(file)] = one_length(read_toml(file))
    if init is not None and not any(map(_names_backbone, found.values())):
        from situs.models.start import adopted

        found = {GROUND: merge(adopted(init), ground or {}), **{name: t for name, t in found.items() if name != GROUND}}
    return found


def named(layers: Iterable[str]) -> str:
    """The files that layers come from, to open a sentence with."""
    return " + ".join(each for each in layers if each not in (GROUND, FLAGGED))
