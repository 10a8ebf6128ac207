"""The MODEL argument of verbs: the same seven kinds of model and the same flags everywhere."""

from __future__ import annotations

import getpass
import os
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from cyclopts import Parameter

from situs.cli.parser.flags import POSITIONAL
from situs.errors import SitusError, reason_of
from situs.hub import hub_address

if TYPE_CHECKING:
    from situs.locks.key import Key
    from situs.models import Model


OUT = Path("results")
"""The default folder for results."""

SHAPE = ("weights", "img_size", "patch_size", "in_chans", "model_args", "ema", "key", "withheld")
"""Flags about opening a model."""


@dataclass(frozen=True, kw_only=True)
class ShapeArgs:
    """Flags for building a model from a timm name or from code."""

    topics: ClassVar[dict[str, tuple[str, ...]]] = {"model": SHAPE}

    weights: Annotated[str | None, Parameter(metavar="FILE|pretrained|random")] = None
    """Weights of a timm model: the path of a weight file, "pretrained" (the weights that timm publishes) or
    "random"."""

    img_size: Annotated[int | tuple[int, int] | None, Parameter(metavar="SIDE|HEIGHT,WIDTH")] = None
    """Image size in pixels. Default: the image size of the model. For your own module, Situs detects the size if the
    module accepts only one size."""

    patch_size: Annotated[int | tuple[int, int] | None, Parameter(metavar="SIDE|HEIGHT,WIDTH")] = None
    """For a timm model: patch size in pixels. Default: the patch size of the model."""

    in_chans: Annotated[int | None, Parameter(metavar="CHANNELS")] = None
    """For a timm model or your own module: number of image channels. Default: 3. For your own module without
    --img-size, Situs detects the number."""

    model_args: dict[str, Any] = field(default_factory=dict)
    """Further constructor arguments of a timm model or of your own module."""

    ema: bool = True
    """For a training run with a moving average (EMA) of the weights: use this average."""

    def shape(self) -> dict[str, Any]:
        """The values of these flags, as arguments of `open_model`."""
        values = {field.name: getattr(self, field.name) for field in fields(ShapeArgs)}
        return values | {"ema": None if self.ema else False, "model_args": self.model_args or None}


@dataclass(frozen=True, kw_only=True)
class NamedArgs(ShapeArgs):
    """Which model, and how it is opened."""

    key: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Key file of a locked model. Without the key, the weights stay permuted."""

    withheld: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """File with the parts that were left out of a locked model (situs lock --withhold). This flag needs --key."""

    model: Annotated[str, POSITIONAL, Parameter(metavar="MODEL")]
    """A folder (training run, exported or locked model, timm or Hugging Face model), hf:OWNER/NAME@COMMIT, a timm model
    (NAME=FILE, or NAME with --weights), or your own module (file.py:Name or package.module:name)."""


@dataclass(frozen=True, kw_only=True)
class ModelArgs(NamedArgs):
    """Which model, and where it runs."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """cpu, cuda, cuda:N or mps. Default: cuda if available, otherwise cpu."""


@dataclass(frozen=True, kw_only=True)
class DataArgs(ModelArgs):
    """Which model, on which images."""

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Path of the images. If MODEL is a training run, the default is the data of this run."""

    held_out: Annotated[float | None, Parameter(metavar="RATIO")] = None
    """For data without a val or test split: hold out this fraction of the images for evaluation. Default: as in
    training."""

    count: Annotated[int | None, Parameter(metavar="IMAGES")] = None
    """Use at most this many images, chosen at random with a fixed seed. Default: all."""

    batch: int = 256
    """Images per batch."""


@dataclass(frozen=True, kw_only=True)
class ImageArgs(DataArgs):
    """Which model, on which images, and where the results go."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = OUT
    """Folder for the results (JSON and HTML). With --out none, no files are written."""

    split: str | None = None
    """Split to use: train, val, test or all. If the data has a val split but no test split (or the reverse), both names
    select the split that exists. Default: val. For data without splits, the default is all images."""

    seed: int = 0
    """Random seed."""


@dataclass(frozen=True, kw_only=True)
class FewImagesArgs(ImageArgs):
    """The same, on a few images."""

    count: Annotated[int | None, Parameter(metavar="IMAGES")] = 64
    """Use at most this many images, chosen at random with a fixed seed."""


def check_folder(folder: Path | None, *results: str) -> None:
    """Refuses an `out` that cannot be written, before the work is done. results: names of the results to be written; if
    one exists already, a line says that it is replaced."""
    if folder is None:
        return
    try:
        exists = bool(folder.stat())
    except (FileNotFoundError, NotADirectoryError):
        exists = False
    except OSError as error:  # a parent may not be read, or the name is too long
        reason = f"out={folder}: cannot be written: {reason_of(error)}"
        raise SitusError(reason, field="out") from error
    if not folder.is_dir() if exists else folder.suffix in (".json", ".html"):
        raise SitusError(field="out", value=str(folder), allowed="a folder")
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise SitusError(f"out={folder}: cannot be written because {parent} is not writable", field="out")
    if "settings" in results and (folder / "study.toml").exists():
        raise SitusError(
            f"out={folder}: is the folder of a study, and a study has its own settings.json; choose another folder",
            field="out",
        )
    for name in results:
        if any((folder / f"{name}.{kind}").exists() for kind in ("json", "html")):
            print(f"situs: {folder / name}.html and .json exist and will be replaced", file=sys.stderr)


def open_from(
    args: NamedArgs, source: str | None = None, *, any_weights: bool = False, device: str | None = None
) -> Model:
    """The model that the flags name, on its device and in eval mode.

    source: overrides `args.model`. any_weights: a name without weights gets random ones. device: overrides --device.
    """
    if isinstance(args, ImageArgs):
        check_folder(args.out)
    model = open_named(source or args.model, args, any_weights=any_weights, device=device)
    if not isinstance(args, DataArgs) or args.held_out is None:
        return model
    from situs.train.assemble import check_held_out

    check_held_out(replace(model.samples, path=args.data or model.samples.path, held_out=args.held_out))
    return model.holding_out(args.held_out)


def open_named(source: str, args: NamedArgs, *, any_weights: bool = False, device: str | None = None) -> Model:
    """The model `source` by the flags; see `open_from`. Warns if its weights are still permuted."""
    from situs.models import open_model
    from situs.train import distributed

    model = open_model(source, any_weights=any_weights, **opening_arguments(source, args, device))
    if model.locked and not distributed.rank():
        print(
            f"situs: {model.name}: without the key, its blocks stay permuted and the results are meaningless; give "
            "--key FILE, or unlock the model with situs unlock",
            file=sys.stderr,
        )
    if "left out" in model.notes and not distributed.rank():
        print(f"situs: {source}: these tensors of the file are not used: {model.notes['left out']}", file=sys.stderr)
    return model


def opening_arguments(source: str, args: NamedArgs, device: str | None = None) -> dict[str, Any]:
    """The values of the flags as arguments of `open_model`. device: overrides --device."""
    from situs.api import unlock_of
    from situs.train.distributed import start

    unlock = unlock_of(source, None if args.key is None else read_key(args.key), args.withheld)
    chosen = device or start(getattr(args, "device", None)).device
    return {**args.shape(), "unlock": unlock, "seed": getattr(args, "seed", 0), "device": chosen}


def open_one_of(source: str, args: NamedArgs) -> Model:
    """One of several models that share the flags: flags that do not apply to its kind are ignored."""
    from situs.models.open import is_locked

    ignored: dict[str, Any] = {}
    if Path(source).exists() or hub_address(source):  # a folder holds its weights and shape
        ignored = {"weights": None, "img_size": None, "patch_size": None, "in_chans": None, "model_args": {}}
    elif "=" in source:
        ignored = {"weights": None}
    if not is_locked(source):
        ignored |= {"key": None, "withheld": None}
    return open_named(source, replace(args, **ignored))


def read_key(path: Path) -> Key:
    """The key in a file; asks for its passphrase if it has one."""
    from situs.locks.key import PASSPHRASE, load_key, needs_passphrase

    wrapped = needs_passphrase(path)
    return load_key(
        path, (os.environ.get(PASSPHRASE) or ask_passphrase(f"Passphrase of {path}: ")) if wrapped else None
    )


def ask_passphrase(question: str) -> str:
    """Asked for on the terminal; never a flag, which other users could see."""
    if not sys.stdin.isatty():
        raise SitusError(
            "the key needs a passphrase, but there is no terminal to enter the passphrase; set SITUS_PASSPHRASE"
        )
    return getpass.getpass(question)
