"""A run put together from one config: data, backbone, method and hooks; trained by `run`, tried out by `rehearse`.

`resolve_config` adds to the user's config what must be recorded with the run: absolute paths, the size of the inputs
(the model's unless the user sets one), the share that is held out, and the mean and deviation of clips. What else
follows (the model's channels from the data's, the classes from the labels) is computed here and never written back.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from situs.backbones import BackboneConfig, create_backbone
from situs.backbones.base import Backbone
from situs.backbones.create import create_shapes
from situs.config import Checked, choice, choices_of
from situs.core.tokens import pair
from situs.data.augment.recipes import AugmentConfig
from situs.data.config import BATCH, NO_DATA, DataConfig
from situs.data.loader import Loader, make_loader
from situs.data.modalities.base import ModelInput
from situs.data.open import SAMPLES, resolve, splits_at
from situs.data.sources.base import SPLITS
from situs.data.sources.memory import display_path
from situs.data.sources.subset import HELD_OUT, PerClass, Rows, Subset
from situs.errors import SitusError, counted, verb
from situs.files import absolute, write_text
from situs.hub import hub_address, local_folder
from situs.limits import Natural
from situs.methods import METHODS, create_method
from situs.methods.added import add_losses, parse
from situs.methods.base import Method
from situs.progress import note
from situs.train import distributed
from situs.train.checkpoint import check_target
from situs.train.checkpoint.folder import CLASSES, MARK
from situs.train.config import TrainConfig
from situs.train.contract import Hook, StartHook
from situs.train.distributed import restarts
from situs.train.optim import OptimConfig, gentle
from situs.train.private import DpConfig, Private, private_of
from situs.train.tuning import TuningConfig, attach, check_start, freeze
from situs.train.tuning import describe as described


@dataclass(frozen=True)
class RunConfig(Checked):
    """All settings of a run. The run's folder stores them as config.json."""

    method: Any = choice(METHODS, "mp3")
    """The training method."""

    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    """The model. Its input size, channels and classes follow from the data."""

    data: DataConfig = field(default_factory=DataConfig)
    """The training data: images, clips or sentences."""

    augment: AugmentConfig = field(default_factory=AugmentConfig)
    """Augmentation of training images or clips."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimiser and schedule."""

    train: TrainConfig = field(default_factory=TrainConfig)
    """Length, precision, logging and checkpoints of the training."""

    tuning: TuningConfig = field(default_factory=TuningConfig)
    """Which weights of a pretrained model are trained."""

    dp: DpConfig = field(default_factory=DpConfig)
    """Differential privacy. It is on if epsilon or noise is set."""

    added: tuple[str, ...] = ()
    """Losses of other methods to add, such as mp3:weight=0.1 or mp3:weight=0.1:mask_ratio=0.5."""

    init: str | None = None
    """Initial weights: a run, an export, a weight file or a timm name."""

    init_positions: bool = True
    """Whether the position embeddings also come from the initial weights. This works only if both models have the same
    kind of positions."""

    probe_every: Natural = 0
    """Number of epochs between two measurements of kNN accuracy and of position accuracy. With 0, nothing is
    measured."""

    def check(self) -> None:
        if self.added and self.dp.on:
            raise SitusError("differential privacy does not support added losses", field="added")
        if self.added and self.tuning.parts != "all":
            raise SitusError(
                f"added losses need tuning.parts=all, but tuning.parts is {self.tuning.parts}", field="added"
            )
        for text in self.added:
            parse(text)

    @property
    def method_name(self) -> str:
        """The method's name in `METHODS`."""
        return choices_of(RunConfig)["method"].name_of(self.method)


def resolve_config(config: RunConfig) -> RunConfig:
    """The config with absolute paths, the size of its inputs and the share that is held out (see the file's head)."""
    backbone, data, init = config.backbone, config.data, config.init
    if not data.path:
        raise SitusError(NO_DATA, field="data")
    data = data.for_method(config.method_name, METHODS[config.method_name].needs_targets)
    if data.path != SAMPLES:
        data = replace(data, path=absolute(data.path))
    data = replace(data, held_out=share_held_out(data, learns=bool(METHODS[config.method_name].needs_targets)))
    data = resolve(data)
    if init is not None:
        init = absolute(init)
    name, prefix = backbone.name.removeprefix("hf:"), "hf:" if backbone.name.startswith("hf:") else ""
    config_file = Path(name) if name.endswith(".json") else Path(name) / "config.json"
    if config_file.is_file():  # else it is a timm name, even where a folder here has the same name
        backbone = replace(backbone, name=prefix + absolute(name))
    if backbone.weights is not None:
        backbone = replace(backbone, weights=absolute(backbone.weights))
    data = fitted(data, backbone, config.method_name)
    return replace(config, backbone=backbone, data=data, init=init)


Hooks = Callable[[RunConfig, Loader, torch.device], Sequence[Hook | StartHook]]
Start = Callable[[RunConfig, Backbone], Sequence[str]]


def cannot_start(config: RunConfig, backbone: Backbone) -> Sequence[str]:
    """The default `Start`: refuses, since only `situs.models` knows how to read first weights."""
    raise SitusError(
        f"init={config.init}: cannot be loaded into {backbone.name}, because the Setup of this training has no "
        "function `start`, which loads initial weights; pass Setup(start=situs.models.start.starting())",
        field="start",
    )


@dataclass(frozen=True)
class Setup:
    """What packages above give to a training.

    start: loads the weights that `RunConfig.init` names into a new backbone and returns lines for the user
    (`situs.models.start.starting`). adapt: wraps the method in another over the same tensors, which is trained instead.
    hooks: makes the hooks from the config, the training loader and the device.
    """

    start: Start = cannot_start
    adapt: Callable[[Method, Loader], Method] = lambda method, _: method
    hooks: Hooks = lambda *_: ()


@dataclass(frozen=True)
class Assembled:
    """A run before its first step. optim: the config's, with the rates resolved. total: number of updates."""

    config: RunConfig
    optim: OptimConfig
    ranks: distributed.Ranks
    loader: Loader
    method: Method
    hooks: Sequence[Hook | StartHook]
    total: int
    private: Private | None


@contextmanager
def assemble(
    requested: RunConfig, config: RunConfig, ranks: distributed.Ranks, setup: Setup, *, fresh: bool
) -> Iterator[Assembled]:
    """Opens the run that `config` describes and notes what a user should know of it; closes its loader at the end.

    requested: the config before `resolve_config`. fresh: it starts at step 0, and so from `init`.
    """
    private = private_of(config.dp, config.method_name, config.augment)
    loader = make_training_loader(config, ranks, private)
    try:
        for line in described_set(requested, config, loader):
            note(line)
        method = _start_method(config, loader, ranks, setup, fresh)
        hooks = setup.hooks(config, loader, ranks.device)
        note(describe(config, method, ranks))
        total, optim = config.train.total_steps(loader.steps_per_epoch), rates_of(config, method)
        if optim.layer_decay != config.optim.layer_decay:
            note(
                f"each layer's learning rate is {optim.layer_decay} times that of the layer above it "
                "(optim.layer_decay)"
            )
        yield Assembled(config, optim, ranks, loader, method, hooks, total, private)
    finally:
        loader.close()


def rates_of(config: RunConfig, method: Method) -> OptimConfig:
    """The config's rates; lower ones in a pretrained model that learns classes with all its layers."""
    classes = "label" in method.needs_targets and not config.data.modality.ids
    pretrained = config.init is not None and config.init_positions
    if classes and pretrained and config.tuning.parts == "all" and not config.dp.on:
        return gentle(config.optim, method)
    return config.optim


def _start_method(config: RunConfig, loader: Loader, ranks: distributed.Ranks, setup: Setup, fresh: bool) -> Method:
    """The method that is trained, on its device; a fresh run starts from the weights of `config.init`."""
    learns = loader.source.target == "label" and "label" in METHODS[config.method_name].needs_targets
    if learns and fresh and len(classes := loader.source.classes_present()) == 1:
        reason = f"{loader.source.name}: has only one class, {classes[0]!r}, so there is nothing to classify"
        advice = "; name the folder that contains one folder per class"
        raise SitusError(reason + advice, field=config.data.modality.label_fields)
    method = make_method(config, loader.classes)
    loader.pipeline.check_model(method.backbone.input.words, method.backbone.name)
    if config.init is not None and fresh:
        for line in setup.start(config, method.backbone):
            note(line)
    freeze(attach(method, config.tuning), config.tuning, new_positions=not config.init_positions)
    return setup.adapt(method.to(ranks.device), loader)


def check_place(config: RunConfig, out: str | Path | None, resume: str | Path | None) -> None:
    """Refuses a partial training without first weights, and a run folder that is missing, given twice or taken."""
    check_start(config.tuning, config.init, new=resume is None)
    if (out is None) == (resume is None):
        raise SitusError("give either a new folder or a run to resume", field=("out", "resume"))
    if out is not None and not begun_there(Path(out)):
        check_target(Path(out))  # before the data is read, which may take minutes
        check_held_out(config.data.for_method(config.method_name, METHODS[config.method_name].needs_targets))


def described_set(requested: RunConfig, config: RunConfig, loader: Loader) -> Iterator[str]:
    """Lines that describe the samples, and what was chosen for them by default: a held-out share, a small batch.

    requested: the config before `resolve_config`.
    """
    yield loader.describe()
    if requested.data.held_out is None and config.data.held_out:
        part = loader.source
        while isinstance(part, Subset | PerClass):
            part = part.source
        assert isinstance(part, Rows)
        count, whole = len(part.source) - len(part), counted(len(part.source), part.things)
        held_out = f"{part.source.name}: has no split for evaluation, so {count:,} of its {whole}"
        held_out += f" {verb(count, 'are')} held out"
        yield f"{held_out} and never trained on (data.held_out sets the fraction; 0 trains on all)"
    if config.data.batch is None and loader.global_batch < BATCH:
        updates = f"{counted(loader.steps_per_epoch, 'updates')} per epoch"
        yield f"batch {loader.global_batch}, because the set is small; this gives {updates} (data.batch sets the batch)"


def describe(config: RunConfig, method: Method, ranks: distributed.Ranks) -> str:
    """One line: what is trained, how large, where."""
    count = sum(p.numel() for p in method.parameters() if p.requires_grad)
    million = count / 1e6
    grid = " x ".join(map(str, method.backbone.grid))
    things = "places" if method.backbone.input.words else "patches"
    tokens = f"{grid} {things}, " if method.backbone.num_tokens else ""
    where = f"{ranks.world} x {ranks.device.type}" if ranks.world > 1 else str(ranks.device)
    name = config.backbone.name
    precision = config.train.precision_on(ranks.device)
    trained = f"{million:.1f} M trained parameters" if million >= 0.1 else f"{count:,} trained parameters"
    if config.tuning.parts != "all":
        trained = f"{million:.3g} M of {sum(p.numel() for p in method.parameters()) / 1e6:.3g} M parameters trained"
        trained += f" ({described(config.tuning)})"
    learned = " + ".join([config.method_name, *(f"{loss.weight:g} {loss.name}" for loss in map(parse, config.added))])
    return f"{learned} on {name}: {tokens}{trained}, {precision}, {where}"


def make_method(config: RunConfig, classes: Sequence[str] | None) -> Method:
    """The method on its backbone, freshly initialised from the run's seed."""
    kind = METHODS[config.method_name]
    modality = config.data.modality
    if kind.needs_targets and classes is None and "words" not in kind.needs_targets:
        reason = f"{config.method_name} needs labels, but {display_path(config.data.path)} has no labels"
        raise SitusError(reason + modality.without_labels(config.data), field=modality.label_fields)
    count = 0 if classes is None else len(classes)
    torch.manual_seed(config.train.seed)
    backbone = create_backbone(
        replace(
            config.backbone,
            img_size=config.backbone.img_size or config.data.size,
            in_chans=config.data.channels,
            num_classes=None if "words" in kind.needs_targets else count if "label" in kind.needs_targets else 0,
        )
    )
    if not modality.ids:
        backbone.require("images")
    backbone.float32_residual = config.train.residual == "float32"
    if (shape := backbone.input.shape) not in (None, config.data.size):
        expected, loaded = (" × ".join(map(str, size)) for size in (shape, config.data.size))
        raise SitusError(
            f"the model takes images of {expected} pixels, but the data is loaded at {loaded} pixels; set only "
            "data.img_size, which sets both sizes",
            field="data.img_size",
        )
    method = create_method(config.method_name, backbone, config.method, count)
    return add_losses(method, [parse(text) for text in config.added])


def make_training_loader(config: RunConfig, ranks: distributed.Ranks, private: Private | None = None) -> Loader:
    """This rank's part of the augmented training set; its augmentation is compiled where the method is."""
    if private is not None and config.data.modality.ids:
        things = config.data.modality.things
        raise SitusError(f"differential privacy supports images and clips, not {things}", field="dp.epsilon")
    # strict: a sample that replaces a broken one would count twice.
    data = config.data if private is None else replace(config.data, strict=True)
    sampler = None if private is None else private.draw
    loader = make_loader(data, config.augment, ranks.device, rank=ranks.rank, world=ranks.world, step_sampler=sampler)
    needs_labels = "label" in METHODS[config.method_name].needs_targets
    if needs_labels and loader.source.multi_label and not loader.source.label_known():
        raise SitusError(
            f"none of the {len(loader.source):,} {loader.source.things} of {loader.source.name} has a known label, so "
            "there is nothing to learn",
            field="data",
        )
    return loader.compile() if config.train.compile and ranks.device.type == "cuda" else loader


def make_eval_loader(
    config: RunConfig, device: torch.device | str = "cpu", *, batch: int | None = None, rank: int = 0, world: int = 1
) -> Loader:
    """The val split as this run's model takes it, not augmented and in its own order; this rank's part of it."""
    size = batch or min(1024, config.data.batch or BATCH)
    data = replace(config.data, split="val", batch=size - size % world)
    return make_loader(data, None, device, rank=rank, world=world)


def check_held_out(data: DataConfig) -> None:
    """Refuses a held-out share of data that has its own evaluation split, where it would have no effect."""
    if data.held_out and data.path and (splits := own_splits(data)):
        raise SitusError(
            f"held_out={data.held_out:g}: {data.path} has its own evaluation split ({', '.join(splits)}), so nothing "
            "more is held out; do not set held_out",
            field="held_out",
        )


def share_held_out(data: DataConfig, *, learns: bool) -> float:
    """The share that a run holds out: the config's, or a fifth of data that has no evaluation split.

    learns: whether the run learns labels; a run without labels trains on all the data.
    """
    if data.held_out is not None:
        return data.held_out
    return HELD_OUT if learns and data.split in (None, *SPLITS["train"]) and not own_splits(data) else 0.0


def own_splits(data: DataConfig) -> list[str]:
    """The data's own evaluation splits."""
    return sorted(splits_at(data) & {*SPLITS["val"], *SPLITS["test"]})


def fitted(data: DataConfig, backbone: BackboneConfig, method: str) -> DataConfig:
    """The data as the model takes it: the size of its inputs, or the tokeniser and the longest sentence in ids."""
    if data.modality.ids and not METHODS[method].reads_text:
        able = ", ".join(name for name in METHODS if METHODS[name].reads_text)
        things = data.modality.things
        raise SitusError(
            f"{method} learns from images and clips, but {data.path} has {things}; methods for {things}: {able}",
            field=("method", "data"),
        )
    return data.modality.fit(data, lambda: _fits(backbone), learns=bool(METHODS[method].needs_targets))


def _fits(config: BackboneConfig) -> ModelInput:
    """What a model takes, from its config alone."""
    backbone = create_shapes(replace(config, img_size=None, weights=None, num_classes=0))
    folder = local_folder(config.name)
    if not backbone.input.words:
        backbone.require("images")
    described: Any = getattr(backbone.model, "pretrained_cfg", None) or {}
    size = config.img_size or backbone.input.shape or tuple(described.get("input_size", ()))[1:]
    home = config.name if hub_address(config.name) else str(folder.parent if folder.is_file() else folder)
    return takes(backbone, home)._replace(size=pair(size) if size and backbone.input.channels else None)


def takes(backbone: Backbone, home: str = "") -> ModelInput:
    """What a model takes. home: the folder of its tokeniser."""
    spec = backbone.input
    places = backbone.num_tokens if spec.words else 0
    return ModelInput(backbone.name, spec.shape, spec.channels, spec.words, places, home, backbone.next_words)


# torchrun --max-restarts repeats the same command with the same new folder, which by then holds the run of the ranks
# that were killed. So the first start leaves a mark there, by which a restart recognises its own run.


def _job() -> str | None:
    """Identifies one torchrun through its restarts; None without torchrun."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"process {os.getppid()} on {socket.gethostname()}" if run_id == "none" else run_id


def mark_start(folder: Path) -> None:
    """Writes this torchrun's mark into the folder of a new run; nothing without torchrun."""
    if (job := _job()) is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / MARK, job)


def begun_there(folder: Path) -> bool:
    """Whether an earlier start of this torchrun began a run there; an incomplete folder of its own is cleaned up."""
    mark_file = folder / MARK
    if not restarts() or not mark_file.is_file() or mark_file.read_text(encoding="utf-8") != _job():
        return False
    if (folder / "config.json").exists():
        return True
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    (folder / CLASSES).unlink(missing_ok=True)
    return False
