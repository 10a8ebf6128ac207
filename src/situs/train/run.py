"""A whole run from one config: backbone, data, method, optimiser, loop, folder.

The config holds what the user chose, with paths that hold from anywhere, the size of its inputs, which is the model's
own unless it is given, the share that is held out, and the mean and deviation of clips (`settled`). What else follows
(the model's channels from the data's, the classes from the labels) is computed here and never written back.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from situs.backbones import BackboneConfig, create_backbone
from situs.backbones.base import Backbone
from situs.backbones.lora import merge_lora
from situs.config import Checked, choice, choices_of, from_dict
from situs.data.augment.recipes import AugmentConfig
from situs.data.config import BATCH, NO_DATA, DataConfig
from situs.data.loader import Loader, make_loader
from situs.data.open import SAMPLES, settle
from situs.data.sources.memory import check_same, spoken
from situs.data.sources.subset import PerClass, Rows, Subset
from situs.errors import SitusError, counted
from situs.files import absolute, cache_folder
from situs.limits import Natural
from situs.methods import METHODS, create_method
from situs.methods.base import Method
from situs.train import distributed, restart
from situs.train.checkpoint import CLASSES, MARK, Checkpoint, RunFolder, check_target, read_config, run_and_step
from situs.train.config import TrainConfig
from situs.train.contract import Hook, TrainResult
from situs.train.export.write import load_checkpoint
from situs.train.inputs import check_held_out, fitted, share_held_out
from situs.train.loop import fit
from situs.train.optim import OptimConfig
from situs.train.private.accounting import DpConfig
from situs.train.private.run import Private, private_of
from situs.train.private.secret import FILE as SECRET
from situs.train.tuning import TuningConfig, attach, check_start, freeze
from situs.train.tuning import describe as described


@dataclass(frozen=True)
class RunConfig(Checked):
    """Everything that makes a run what it is; written as config.json beside it."""

    method: Any = choice(METHODS, "mp3")
    """What is learned."""

    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    """The model. Its input's size, channels and classes follow from the data."""

    data: DataConfig = field(default_factory=DataConfig)
    """The images, clips of sound, or sentences."""

    augment: AugmentConfig = field(default_factory=AugmentConfig)
    """What happens to a training image or clip."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    """How the weights move."""

    train: TrainConfig = field(default_factory=TrainConfig)
    """How long, in which precision, how often it speaks."""

    tuning: TuningConfig = field(default_factory=TuningConfig)
    """Which weights are trained, where it starts from others."""

    dp: DpConfig = field(default_factory=DpConfig)
    """Differential privacy, where its epsilon or noise is given."""

    init: str | None = None
    """Weights to start from: a run, an export, a weight file or a timm name."""

    init_positions: bool = True
    """Whether positions are taken from `init` too, where both have the kind."""

    probe_every: Natural = 0
    """Epochs between two looks at kNN and positions; 0: none."""

    @property
    def method_name(self) -> str:
        """The method's name in `METHODS`."""
        return choices_of(RunConfig)["method"].name_of(self.method)


def settled(config: RunConfig) -> RunConfig:
    """The config with absolute paths, so that a run is found again from anywhere, with the size of its inputs, and with
    the share that is held out."""
    backbone, data, init = config.backbone, config.data, config.init
    if not data.path:
        raise SitusError(NO_DATA, field="data")
    data = data.for_method(config.method_name, METHODS[config.method_name].needs_targets)
    if data.path != SAMPLES:
        data = replace(data, path=absolute(data.path))
    data = replace(data, held_out=share_held_out(data, learns=bool(METHODS[config.method_name].needs_targets)))
    data = settle(data)
    if init is not None:
        init = absolute(init)
    name, mark = backbone.name.removeprefix("hf:"), "hf:" if backbone.name.startswith("hf:") else ""
    held = Path(name) if name.endswith(".json") else Path(name) / "config.json"
    if held.is_file():  # and not a timm name, whatever else is named so here
        backbone = replace(backbone, name=mark + absolute(name))
    if backbone.weights is not None:
        backbone = replace(backbone, weights=absolute(backbone.weights))
    data = fitted(data, backbone, config.method_name)
    return replace(config, backbone=backbone, data=data, init=init)


class Loaded(NamedTuple):
    """A run that was trained, ready to be used. classes: names in label order, where it has a classifier.

    checkpoint: where its weights come from; ema: whether they are the mean of the run's.
    """

    config: RunConfig
    method: Method
    run: RunFolder
    classes: tuple[str, ...] | None
    checkpoint: Checkpoint
    ema: bool


def make_method(config: RunConfig, classes: Sequence[str] | None) -> Method:
    """The method on its backbone, freshly initialised from the run's seed."""
    kind = METHODS[config.method_name]
    modality = config.data.modality
    if kind.needs_targets and classes is None and "words" not in kind.needs_targets:
        said = f"{config.method_name} needs labels, and {spoken(config.data.path)} has none"
        raise SitusError(said + modality.without_labels(config.data), field=modality.label_fields)
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
    backbone.wide = config.train.residual == "float32"
    if (shape := backbone.input.shape) not in (None, config.data.size):
        own, read = (" × ".join(map(str, size)) for size in (shape, config.data.size))
        said = f"the model takes images of {own} pixels, and the data is read at {read}; data.img_size alone says both"
        raise SitusError(said, field="data.img_size")
    return create_method(config.method_name, backbone, config.method, count)


def make_training_loader(config: RunConfig, ranks: distributed.Ranks, private: Private | None = None) -> Loader:
    """This rank's part of the augmented training set; its augmentation is compiled where the method is."""
    if private is not None and config.data.modality.ids:
        things = config.data.modality.things
        raise SitusError(f"differential privacy is for arrays here, not for {things}", field="dp.epsilon")
    data = config.data if private is None else replace(config.data, strict=True)  # another in its place came twice
    drawn = None if private is None else private.draws
    loader = make_loader(data, config.augment, ranks.device, rank=ranks.rank, world=ranks.world, drawn=drawn)
    wanted = "label" in METHODS[config.method_name].needs_targets
    if wanted and loader.source.multi_label and not loader.source.label_known():
        said = f"none of the {len(loader.source):,} {loader.source.things} of {loader.source.name} has a label"
        raise SitusError(f"{said} that is known, so there is nothing to learn", field="data")
    return loader.compile() if config.train.compile and ranks.device.type == "cuda" else loader


def make_eval_loader(
    config: RunConfig, device: torch.device | str = "cpu", *, batch: int | None = None, rank: int = 0, world: int = 1
) -> Loader:
    """The val split, not augmented and in its own order, as this run's model sees it; all, or this rank's part."""
    size = batch or min(1024, config.data.batch or BATCH)
    data = replace(config.data, split="val", batch=size - size % world)
    return make_loader(data, None, device, rank=rank, world=world)


Hooks = Callable[[RunConfig, Loader, torch.device], Sequence[Hook]]
Adapt = Callable[[Method, Loader], Method]
"""Another method over the same tensors, given the one that the config names and the training loader."""
Start = Callable[[RunConfig, Backbone], Sequence[str]]
"""Puts the tensors that `RunConfig.init` names into a new backbone; gives what a user should know, a line each."""


def cannot_start(config: RunConfig, backbone: Backbone) -> Sequence[str]:
    """A `Start` that reads nothing."""
    raise SitusError(f"init={config.init}: nothing was given that reads it for {backbone.name}", field="start")


def train_run(
    config: RunConfig,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    device: str | None = None,
    start_over: bool = False,
    hooks: Hooks | None = None,
    start: Start = cannot_start,
    adapt: Adapt = lambda method, _: method,
    say: Callable[[str], None] = lambda _: None,
    quiet: bool = False,
) -> TrainResult:
    """Trains what `config` says, in a new folder `out` or going on in `resume`.

    Started again by torchrun (--max-restarts), it goes on with what it has begun in `out`.

    start_over: a resumed run that has no whole checkpoint left begins again, and what it had is set aside.
    hooks: makes the probes, given the config, the training loader and the device. start: puts the tensors of
    `config.init` into a new backbone (`situs.models.initialise.starting`). adapt: the method that is trained instead,
    with the same tensors. say: receives a few lines. quiet: the loop says nothing.
    """
    check_place(config, out, resume, start_over)
    asked, config = config, settled(config)
    private = private_of(config.dp, config.method_name, config.augment)
    ranks = distributed.start(device)
    if ranks.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        # The compiler's own choice is a folder that a reboot empties.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder("compiled")))
    speak = say if ranks.main else lambda _: None
    held = contextlib.ExitStack()
    try:
        resume = _begun(out, ranks, speak) if resume is None else resume
        if resume is not None:
            check_same(read_config(Path(resume))["data"]["path"], config.data.path)
        run = None if resume is None else RunFolder.open(resume, config, writer=ranks.main)
        if run is not None:
            held.enter_context(run.hold())
        fresh = _begins(run, start_over, ranks)
        loader = make_training_loader(config, ranks, private)
        held.callback(loader.close)
        for line in described_set(asked, config, loader):
            speak(line)
        told = _tell_skipped(loader, loader.source.notes, speak)
        method = prepare(config, loader, ranks, start if fresh else None, adapt, speak)
        watching = () if hooks is None else hooks(config, loader, ranks.device)
        speak(describe(config, method, ranks))
        _tell_begin(watching if fresh else (), method)
        if run is None:
            assert out is not None
            if ranks.main:
                restart.mark(Path(out))
            run = RunFolder.create(out, config, classes=loader.classes, writer=ranks.main)
        how: dict[str, Any] = {"hooks": watching, "quiet": quiet}
        try:
            if private is not None:
                total = config.train.total_steps(loader.steps_per_epoch)
                how["stepper"], ledger = private.open(run, method, loader, total, speak)
                how["hooks"] = (*watching, ledger)
            result = fit(method, loader, config.train, config.optim, run, **how)
        except BaseException:
            if ranks.main and not run.resumed:
                _withdraw(run)
            raise
        if private is not None and result.step == result.total:
            private.close(run)
        _tell_skipped(loader, told, speak)  # a streamed set is read while it is trained on
        return result
    finally:
        held.close()
        distributed.stop()


def described_set(asked: RunConfig, config: RunConfig, loader: Loader) -> Iterator[str]:
    """What the samples are, and what was chosen for them that nobody asked for: what is held out, a small batch.

    asked: the config before it was settled.
    """
    yield loader.describe()
    if asked.data.held_out is None and config.data.held_out:
        part = loader.source
        while isinstance(part, Subset | PerClass):
            part = part.source
        assert isinstance(part, Rows)
        count, whole = len(part.source) - len(part), counted(len(part.source), part.things)
        named = f"{part.source.name}: has no split to be judged on, so that {count:,} of its {whole} are held out"
        yield f"{named} and never trained on; data.held_out says another share, and 0 trains on all"
    if config.data.batch is None and loader.global_batch < BATCH:
        updates = f"{counted(loader.steps_per_epoch, 'updates')} an epoch"
        yield (f"batch {loader.global_batch}: the set is small, and is gone through in {updates} (data.batch)")


def _tell_begin(hooks: Sequence[Hook], method: Method) -> None:
    """Shows the weights that a run starts from to those hooks that look at them (`begin`)."""
    for hook in hooks:
        if (begin := getattr(hook, "begin", None)) is not None:
            begin(method)


def prepare(
    config: RunConfig,
    loader: Loader,
    ranks: distributed.Ranks,
    start: Start | None,
    adapt: Adapt,
    speak: Callable[[str], Any],
) -> Method:
    """The method that is trained, on its device, with the tensors of `config.init`; start: None where a checkpoint has
    all of them."""
    learns = loader.source.target == "label" and "label" in METHODS[config.method_name].needs_targets
    if learns and start is not None and len(classes := loader.source.seen()) == 1:
        said = f"{loader.source.name}: all of it is of one class, {classes[0]!r}, and there is nothing to tell apart"
        more = "; name the folder that holds a folder for each class"
        raise SitusError(said + more, field=config.data.modality.label_fields)
    method = make_method(config, loader.classes)
    loader.pipeline.check_model(method.backbone.input.words, method.backbone.name)
    if config.init is not None and start is not None:
        for line in start(config, method.backbone):
            speak(line)
    freeze(attach(method, config.tuning), config.tuning, new_positions=not config.init_positions)
    return adapt(method.to(ranks.device), loader)


def check_place(config: RunConfig, out: str | Path | None, resume: str | Path | None, start_over: bool) -> None:
    """Refuses a start from nothing where there must be one, and a place for a run that is none, or two, or taken."""
    check_start(config.tuning, config.init, new=resume is None)
    if (out is None) == (resume is None):
        raise SitusError("give a new folder or a run to go on with, and not both", field=("out", "resume"))
    if out is not None:
        if start_over:
            raise SitusError(
                "start_over: is for a run to go on with, and a new one is given", field=("start_over", "resume")
            )
        if not restart.begun(Path(out)):
            check_target(Path(out))  # said before the data is read, which may take minutes
            check_held_out(config.data.for_method(config.method_name, METHODS[config.method_name].needs_targets))


def _begun(out: str | Path | None, ranks: distributed.Ranks, speak: Callable[[str], None]) -> str | Path | None:
    """The new folder, where torchrun has started this run again and it has begun there; all ranks ask."""
    if not distributed.from_main(ranks.main and out is not None and restart.begun(Path(out)), ranks.device):
        return None
    speak(f"started again by torchrun ({distributed.restarts()}): the run goes on")
    return out


def _begins(run: RunFolder | None, start_over: bool, ranks: distributed.Ranks) -> bool:
    """Whether a run starts at step 0, and so from `init`; refused where one has lost its checkpoints."""
    if run is not None and ranks.main and start_over:
        run.start_over()
    return distributed.from_main(run is None or (ranks.main and run.start is None), ranks.device)


def _tell_skipped(loader: Loader, told: Sequence[str], speak: Callable[[str], None]) -> list[str]:
    """Says how many samples were broken, and what else was noted, where it is not among `told`; gives all of it."""
    found = loader.source.left_out()
    for line in found:
        if line not in told:
            speak(line)
    return found


def _withdraw(run: RunFolder) -> None:
    """Takes a new run's folder away where nothing was done in it yet, so that the same command can be given again."""
    done = (run.metrics, run.path / "nan", *run.checkpoints.glob("*"))
    if not any(path.exists() for path in done):
        for name in ("config.json", CLASSES, MARK, SECRET):
            (run.path / name).unlink(missing_ok=True)
        for folder in (run.checkpoints, run.path):
            with contextlib.suppress(OSError):
                folder.rmdir()


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
    return f"{config.method_name} on {name}: {tokens}{trained}, {precision}, {where}"


def load_run(
    path: str | Path, device: torch.device | str = "cpu", *, ema: bool | None = None, as_trained: bool = False
) -> Loaded:
    """A trained run: its method with the weights of its newest checkpoint, or its best where that stays, in eval mode.

    path: the run's folder, or one of its checkpoints.

    ema: the mean of the weights; None takes it where there is one. as_trained: LoRA's products stay apart and what was
    frozen is frozen, as in the run's own steps; else it is an ordinary model.
    """
    if not is_run(path):
        raise SitusError(f"{path}: holds no run, there is no config.json with checkpoints beside it")
    path, step = run_and_step(path)
    config = from_dict(RunConfig, read_config(path), where=f"{path}/config.json")
    run = RunFolder.open(path, writer=False)
    checkpoint = run.chosen(step)
    classes = run.classes()
    # The weights are the checkpoint's: the files that the run once started from may be gone.
    bare = replace(
        config,
        init=None,
        tuning=TuningConfig(),
        backbone=replace(config.backbone, name=_bare_name(config), weights=None),
    )
    method = make_method(bare, classes)
    attach(method, config.tuning)
    mean = load_checkpoint(method, checkpoint, ema=ema)
    if as_trained:
        freeze(method, config.tuning, new_positions=not config.init_positions)
    else:
        merge_lora(method.backbone)
    return Loaded(config, method.to(device).eval(), run, classes, checkpoint, mean)


def _bare_name(config: RunConfig) -> str:
    """The model's name; of a folder its config.json alone, which must still be there."""
    name = config.backbone.name
    folder = Path(name.removeprefix("hf:"))
    if not folder.is_absolute():
        return name
    file = folder if folder.is_file() else folder / "config.json"
    if not file.is_file():
        raise SitusError(f"{folder}: is gone, and the run's model is made by its config.json; put it back there")
    return str(file)


def is_run(path: str | Path) -> bool:
    """Whether a path is a run folder or one of its checkpoints (and not an export, a file or a name)."""
    path = run_and_step(path)[0] if Path(path).is_dir() else Path(path)
    return (Path(path) / "config.json").is_file() and (Path(path) / "checkpoints").is_dir()
