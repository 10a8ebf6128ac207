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
from situs.cli.parser.arguments import Recipe, configured
from situs.cli.parser.flags import POSITIONAL
from situs.cli.result import INTERRUPTED
from situs.cli.shell import answer, beside, next_line
from situs.data.modalities import modality_of
from situs.data.sources.memory import is_memory
from situs.errors import counted
from situs.measure.finetune import FinetuneConfig, data_as_seen
from situs.methods import METHODS
from situs.progress import note
from situs.train.assemble import RunConfig
from situs.train.checkpoint import RunFolder, read_config
from situs.train.contract import TrainResult
from situs.train.rehearse import Rehearsal

EVERYDAY = {"data": (NAMED["data"],), "backbone": (NAMED["backbone"],), "with": ("added",), **SHORT}
"""Everyday flags, each for fields of the run's config."""


@dataclass(frozen=True, kw_only=True)
class Training(Recipe):
    """What every training verb takes."""

    topics: ClassVar[dict[str, tuple[str, ...]]] = {
        "seldom": (
            "key",
            "withheld",
            "dry_run",
            "print_config",
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
    """A run to go on with, after a crash, a Ctrl-C or a full disk; --epochs or --steps makes it longer."""

    key: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The key of a locked folder that the training starts from."""

    withheld: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The owner's second file, where parts of that folder were withheld."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """cpu, cuda or cuda:N; by default a GPU where there is one."""

    dry_run: bool = False
    """Check data, model, one batch and the length, and write nothing (shards of a remote set go to its cache)."""

    def place(self) -> dict[str, Any]:
        """What is no part of the config, by the names of `situs.api.PLACE`."""
        from situs.cli.passphrase import read_key

        own = {name: getattr(self, name) for name in ("out", "resume", "device", "withheld", "dry_run")}
        return {**own, "key": None if self.key is None else read_key(self.key)}


@dataclass(frozen=True, kw_only=True)
class Pretrain(Training):
    """Train a method on your images: a preset, a TOML file and flags, each laid over the one before.

    For example: situs pretrain --preset samples-mp3 --out runs/mp3

    On many GPUs: torchrun --nproc-per-node 8 -m situs pretrain and the same flags.
    """

    config: RunConfig = configured(RunConfig, short=EVERYDAY)

    def run(self) -> int:
        """Trains; exit status 130 where it was interrupted (and can be resumed)."""
        return tell(self.out or self.resume, self.config, train_pretraining(self.config, **self.place()))


def tell(run: Path | None, config: RunConfig, result: TrainResult | Rehearsal) -> int:
    """Says what was reached and what can be done with it, or what would be; gives the exit status."""
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
        told = {name: value for name, value in result.metrics.items() if name != "gradient_norm"}
        facts = "".join(f", {name.replace('_', ' ')} {value:.4g}" for name, value in told.items())
        learned = bool({"label", "mask", "objects", "words"} & {*METHODS[config.method_name].needs_targets})
        note(f"done: {counted(result.step, 'steps')}{facts}; the run is in {run}")
        note(next_line(_follow(run, learned), ["export", run, "--out", beside(run, "exported")]))
    return 0


def _list_broken(run: Path) -> str:
    """The command that lists every broken image of a run's data; empty for what `data check` does not read."""
    data = read_config(run)["data"]
    if is_memory(data["path"]) or not modality_of(data["kind"], data["target"]).pixels:
        return ""
    return shlex.join(["situs", "data", "check", data["path"], *["--multi-label"] * data["multi_label"]])


def _follow(run: Path, learned: bool) -> list[str | Path]:
    """What a run is for, as the words of a verb: what has learned labels is judged, what has not learns those of its
    data, or where there are none gives features."""
    if learned:
        return ["evaluate", "accuracy", run]
    if len(RunFolder.open(run, writer=False).classes() or ()) > 1:
        return ["finetune", "--from", run, "--out", beside(run, "tuned")]
    return ["features", run, "--out", f"{beside(run, 'features')}.safetensors"]


@dataclass(frozen=True, kw_only=True)
class Finetune(Training):
    """Train a classifier, a segmentation, a detection or a language model, starting from a pretrained one.

    For example: situs finetune --from runs/mp3 --positions learned --epochs 3 --out runs/ft

    Backbone and image size are the model's own; the log holds top-1 (or mIoU) on the validation split.
    """

    source: Annotated[str | None, Parameter(name="--from", metavar="MODEL")] = None
    """The pretrained model: a run, an export, a model's folder, a locked one with its --key, or a timm name (NAME=FILE,
    NAME=pretrained)."""

    positions: Annotated[PositionKind | None, Parameter(metavar="KIND")] = None
    """learned, sincos, learned_sincos, relative or none; by default the run's own, and learned after MP3."""

    validate_every: Annotated[int | None, Parameter(metavar="N")] = None
    """Epochs between looks at the validation split, else 5; 0: none."""

    config: FinetuneConfig = configured(
        FinetuneConfig,
        data_as_seen,
        {**EVERYDAY, **{name: (NAMED[name],) for name in ("train", "dp")}},
        without=("probe_every",),
    )

    def run(self) -> int:
        """Fine-tunes; the log holds val_top1 and val_balanced, or val_map of multi-label data, val_miou of masks,
        val_ap of objects, and val_perplexity of words."""
        asked = {"source": self.source, "positions": self.positions, "validate_every": self.validate_every}
        return tell(self.out or self.resume, self.config, train_finetuning(self.config, **asked, **self.place()))


@dataclass(frozen=True, kw_only=True)
class Adapt:
    """The best classifier that public weights, your images and few labels give, chosen by cross-validation.

    For example: situs adapt runs/mp3 --data samples --minutes 2 --out runs/adapted

    Class means, a linear probe, the head, LoRA and all layers are compared on the training labels; the test images,
    your test split or a fifth that is set aside first, are looked at once, at the end.
    """

    model: Annotated[str, POSITIONAL, Parameter(metavar="MODEL")]
    """The pretrained model: a run, an export, a model's folder, a locked one with its --key, or a timm name (NAME=FILE,
    NAME=pretrained)."""

    data: Annotated[str, Parameter(metavar="PATH")]
    """Images with labels, in a folder a class, with or without splits."""

    out: Annotated[Path, Parameter(metavar="FOLDER")]
    """A new folder for the run, its export and the page."""

    unlabelled: Annotated[str | None, Parameter(metavar="PATH")] = None
    """More images for --method, without labels."""

    method: Literal["droppos", "mp3", "mae", "none"] = "none"
    """Pretrain on the own images too, and try every way from there as well."""

    minutes: float = 30.0
    """How long it may take; what fits into that is said beforehand."""

    img_size: Annotated[int | tuple[int, int] | None, Parameter(metavar="SIDE|HEIGHT,WIDTH")] = None
    """In pixels, where not the model's own: smaller is faster."""

    patch_size: Annotated[int | tuple[int, int] | None, Parameter(metavar="SIDE|HEIGHT,WIDTH")] = None
    """For a timm name: in pixels, where not the model's own."""

    model_args: dict[str, Any] = field(default_factory=dict)
    """For a timm name: further arguments of the model."""

    held_out: Annotated[float | None, Parameter(metavar="SHARE")] = None
    """Share to set aside for the test, of data that has no such split; by default 0.2."""

    batch: int | None = None
    """Images a step; by default 256, or a tenth of a smaller set, and 8 at least."""

    seed: int = 0
    """Seed of folds, order and augmentation."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """cpu, cuda or cuda:N; by default a GPU where there is one."""

    key: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The key of a locked folder."""

    withheld: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The owner's second file, where parts of that folder were withheld."""

    def run(self) -> None:
        """Adapts, prints the table of all, and says where the run, its export and the page are."""
        from situs.api import adapt
        from situs.cli.passphrase import read_key
        from situs.cli.result import present

        data = {"path": self.data, "img_size": self.img_size, "held_out": self.held_out}
        names = ("out", "unlabelled", "method", "minutes", "batch", "seed", "device", "withheld")
        asked = {name: getattr(self, name) for name in names}
        key = None if self.key is None else read_key(self.key)
        given = {name: value for name, value in data.items() if value is not None}
        shape = {"patch_size": self.patch_size, "model_args": self.model_args}
        backbone = {name: value for name, value in shape.items() if value}
        present(adapt(self.model, data=given, key=key, backbone=backbone, **asked), None)
        print(f"{self.out / 'adapt.html'}")
        print(
            next_line(
                ["evaluate", "accuracy", self.out], ["predict", self.out, "--out", beside(self.out, "predicted.csv")]
            )
        )
