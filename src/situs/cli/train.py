"""Verbs that train: pretrain, finetune, adapt."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from cyclopts import Parameter

from situs.api import NAMED, SHORT, train_finetuning, train_pretraining
from situs.backbones.config import PositionKind
from situs.cli.model_args import read_key
from situs.cli.parser.arguments import Recipe, configured
from situs.cli.parser.flags import POSITIONAL
from situs.cli.result import INTERRUPTED
from situs.cli.shell import answer, new_sibling, next_line
from situs.data.modalities import modality_of
from situs.data.sources.memory import is_memory
from situs.errors import counted
from situs.measure.finetune import FinetuneConfig, data_as_seen
from situs.methods import METHODS
from situs.progress import note
from situs.train.assemble import RunConfig
from situs.train.checkpoint import RunFolder, read_config
from situs.train.contract import TrainResult
from situs.train.run import Rehearsal

EVERYDAY = {"data": (NAMED["data"],), "backbone": (NAMED["backbone"],), "with": ("added",), **SHORT}
"""Short flags -> the fields of the run's config that each sets."""


@dataclass(frozen=True, kw_only=True)
class Training(Recipe):
    """Flags of the training verbs."""

    topics: ClassVar[dict[str, tuple[str, ...]]] = {
        "advanced": (
            "key",
            "withheld",
            "dry_run",
            "parallel",
            "init_positions",
            "validate_every",
            "dp",
            "with",
            "added",
        )
    }

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = None
    """A new folder for the run."""

    resume: Annotated[Path | None, Parameter(metavar="FOLDER")] = None
    """Resume this run, for example after a crash. To make the run longer, add --epochs or --steps."""

    key: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Key file, if training starts from a locked model."""

    withheld: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """File with the parts that were left out of the locked model (situs lock --withhold)."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """cpu, cuda, cuda:N or mps. Default: cuda if available, otherwise cpu."""

    dry_run: bool = False
    """Check the data, the model and one batch, and print how many steps and epochs the training would take. Nothing
    is trained or written."""

    def place(self) -> dict[str, Any]:
        """The flags that are not part of the config, as arguments of `situs.api`'s functions."""

        values = {name: getattr(self, name) for name in ("out", "resume", "device", "withheld", "dry_run")}
        return {**values, "key": None if self.key is None else read_key(self.key)}


@dataclass(frozen=True, kw_only=True)
class Pretrain(Training):
    """Pretrain a model on your images with a method such as MP3. Flags override the TOML file, and the TOML file
    overrides the preset. To use 8 GPUs, replace "situs" by "torchrun --nproc-per-node 8 -m situs".

    For example: situs pretrain --preset samples-mp3 --out runs/mp3
    """

    config: RunConfig = configured(RunConfig, short=EVERYDAY)

    def run(self) -> int:
        """Trains; the exit status is 130 if it was interrupted (and can be resumed)."""
        return report_training(self.out or self.resume, self.config, train_pretraining(self.config, **self.place()))


def report_training(run: Path | None, config: RunConfig, result: TrainResult | Rehearsal) -> int:
    """Prints what the training (or its dry run) reached and the next commands; gives the exit status."""
    if isinstance(result, Rehearsal):
        answer(asdict(result), *(result.lines() if os.environ.get("RANK", "0") == "0" else ()))
        return 0
    answer({"run": run, "steps": result.step, "interrupted": result.interrupted, "metrics": result.metrics})
    main_rank = os.environ.get("RANK", "0") == "0"
    assert run is not None
    if result.skipped and main_rank and (command := _list_broken(run)):
        note(f"{command} lists every sample that cannot be read")
    if result.interrupted:
        return INTERRUPTED
    if main_rank:
        metrics = {name: value for name, value in result.metrics.items() if name != "gradient_norm"}
        facts = "".join(f", {name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items())
        with_labels = bool({"label", "mask", "objects", "words"} & {*METHODS[config.method_name].needs_targets})
        note(f"done: {counted(result.step, 'steps')}{facts}; the run is in {run}")
        note(next_line(_next_command(run, with_labels), ["export", run, "--out", new_sibling(run, "exported")]))
    return 0


def _list_broken(run: Path) -> str:
    """The command that lists every broken image of a run's data; empty for data that `data check` does not read."""
    data = read_config(run)["data"]
    if is_memory(data["path"]) or not modality_of(data["kind"], data["target"]).pixels:
        return ""
    return shlex.join(["situs", "data", "check", data["path"], *["--multi-label"] * data["multi_label"]])


def _next_command(run: Path, with_labels: bool) -> list[str | Path]:
    """The next command for a run: evaluate it if it learned labels, otherwise fine-tune it, or extract its features."""
    if with_labels:
        return ["evaluate", "accuracy", run]
    if len(RunFolder.open(run, writer=False).classes() or ()) > 1:
        return ["finetune", "--from", run, "--out", new_sibling(run, "tuned")]
    return ["features", run, "--out", f"{new_sibling(run, 'features')}.safetensors"]


@dataclass(frozen=True, kw_only=True)
class Finetune(Training):
    """Fine-tune a pretrained model to predict classes, masks, objects or words. The backbone and the image
    size are those of the pretrained model. The log shows top-1 accuracy (multi-label: mAP, masks: mIoU, objects: AP,
    words: perplexity) on the validation split.

    For example: situs finetune --from runs/mp3 --positions learned --epochs 3 --out runs/ft
    """

    source: Annotated[str | None, Parameter(name="--from", metavar="MODEL")] = None
    """The pretrained model: a training run, an export, a model folder, a locked model with --key, or a timm model with
    weights (NAME=FILE or NAME=pretrained)."""

    positions: Annotated[PositionKind | None, Parameter(metavar="KIND")] = None
    """Position embedding: learned, sincos, learned_sincos, relative or none. Default: as in the pretrained model. For a
    model pretrained with MP3, the default is "learned"."""

    validate_every: Annotated[int | None, Parameter(metavar="N")] = None
    """Number of epochs between evaluations on the validation split. With 0, the model is never evaluated. Default:
    5."""

    config: FinetuneConfig = configured(
        FinetuneConfig,
        data_as_seen,
        {**EVERYDAY, **{name: (NAMED[name],) for name in ("train", "dp")}},
        without=("probe_every",),
    )

    def run(self) -> int:
        """Fine-tunes; the log holds val_top1 and val_balanced, or val_map (multi-label), val_miou (masks), val_ap
        (objects) or val_perplexity (language model)."""
        options = {"source": self.source, "positions": self.positions, "validate_every": self.validate_every}
        result = train_finetuning(self.config, **options, **self.place())
        return report_training(self.out or self.resume, self.config, result)


@dataclass(frozen=True, kw_only=True)
class Adapt:
    """Train a classifier on your images, from pretrained weights and few labels. Cross-validation chooses the best of
    five recipes: class means, a linear probe, training only the head, LoRA, and training all layers.

    The test images are your test split. If there is no test split, a fifth of your images become test images. The test
    images are used only once, at the end.

    For example: situs adapt runs/mp3 --data samples --minutes 2 --out runs/adapted
    """

    model: Annotated[str, POSITIONAL, Parameter(metavar="MODEL")]
    """The pretrained model: a training run, an export, a model folder, a locked model with --key, or a timm model with
    weights (NAME=FILE or NAME=pretrained)."""

    data: Annotated[str, Parameter(metavar="PATH")]
    """Labelled images: one folder per class, with or without splits."""

    out: Annotated[Path, Parameter(metavar="FOLDER")]
    """A new folder for the training run, its export and the results page."""

    unlabelled: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Further images without labels. These images are used only for pretraining with --method."""

    method: Literal["droppos", "mp3", "part", "mae", "none"] = "none"
    """Also pretrain the model on your images with this method. The five recipes are then compared with and without this
    pretraining."""

    minutes: float = 30.0
    """Time limit in minutes. Situs first prints which recipes fit into this time."""

    img_size: Annotated[int | tuple[int, int] | None, Parameter(metavar="SIDE|HEIGHT,WIDTH")] = None
    """Image size in pixels. A smaller size is faster. Default: the image size of the model. For a timm model on a CPU,
    a short time limit makes the default smaller."""

    patch_size: Annotated[int | tuple[int, int] | None, Parameter(metavar="SIDE|HEIGHT,WIDTH")] = None
    """For a timm model: patch size in pixels. Default: the patch size of the model."""

    model_args: dict[str, Any] = field(default_factory=dict)
    """Further constructor arguments of a timm model."""

    held_out: Annotated[float | None, Parameter(metavar="RATIO")] = None
    """For data without a test split: fraction of the images to use as test images. Default: 0.2."""

    batch: int | None = None
    """Images per step. The default is a tenth of the images, but at least 8 and at most 256."""

    seed: int = 0
    """Random seed of the cross-validation folds, the order of the images and the augmentation."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """cpu, cuda, cuda:N or mps. Default: cuda if available, otherwise cpu."""

    key: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Key file, if MODEL is a locked model."""

    withheld: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """File with the parts that were left out of the locked model (situs lock --withhold)."""

    def run(self) -> None:
        """Adapts, prints the table of all candidates and the path of the page."""
        from situs.api import adapt
        from situs.cli.result import present

        data = {"path": self.data, "img_size": self.img_size, "held_out": self.held_out}
        names = ("out", "unlabelled", "method", "minutes", "batch", "seed", "device", "withheld")
        options = {name: getattr(self, name) for name in names}
        key = None if self.key is None else read_key(self.key)
        data = {name: value for name, value in data.items() if value is not None}
        shape = {"patch_size": self.patch_size, "model_args": self.model_args}
        backbone = {name: value for name, value in shape.items() if value}
        present(adapt(self.model, data=data, key=key, backbone=backbone, **options), None)
        print(self.out / "adapt.html")
        predictions = new_sibling(self.out, "predicted.csv")
        print(next_line(["evaluate", "accuracy", self.out], ["predict", self.out, "--out", predictions]))
