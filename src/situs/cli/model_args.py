"""How a verb is given its MODEL: the same seven kinds, through the same flags, everywhere."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from cyclopts import Parameter

from situs.cli.parser.flags import POSITIONAL
from situs.errors import SitusError

if TYPE_CHECKING:
    from situs.models import Model


OUT = Path("results")
"""Where results go, of every verb that is not told."""

SHAPE = ("weights", "img_size", "patch_size", "in_chans", "model_args", "ema", "key", "withheld")
"""Flags that say how a model is opened."""


@dataclass(frozen=True, kw_only=True)
class ShapeArgs:
    """How a model is made where its name or its code alone is given."""

    topics: ClassVar[dict[str, tuple[str, ...]]] = {"model": SHAPE}

    weights: Annotated[str | None, Parameter(metavar="FILE|pretrained|random")] = None
    """For a timm name: a file, what timm publishes, or random."""

    img_size: Annotated[int | tuple[int, int] | None, Parameter(metavar="SIDE|HEIGHT,WIDTH")] = None
    """In pixels, where not the model's own; own modules need it."""

    patch_size: Annotated[int | tuple[int, int] | None, Parameter(metavar="SIDE|HEIGHT,WIDTH")] = None
    """For a timm name: in pixels, where not the model's own."""

    in_chans: Annotated[int | None, Parameter(metavar="CHANNELS")] = None
    """Of an image, for a timm name or your own module; else 3."""

    model_args: dict[str, Any] = field(default_factory=dict)
    """Arguments for a timm model or your own."""

    ema: bool = True
    """For a run: the mean of its weights."""

    def shape(self) -> dict[str, Any]:
        """What is asked of a model that is made, by the arguments of `open_model`."""
        asked = {each.name: getattr(self, each.name) for each in fields(ShapeArgs)}
        return asked | {"ema": None if self.ema else False, "model_args": self.model_args or None}


@dataclass(frozen=True, kw_only=True)
class OpenArgs(ShapeArgs):
    """How models are opened."""

    key: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """For a locked folder; without it the model is scrambled."""

    withheld: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """For a locked folder: the owner's second file, beside --key."""


@dataclass(frozen=True, kw_only=True)
class NamedArgs(OpenArgs):
    """Which model."""

    model: Annotated[str, POSITIONAL, Parameter(metavar="MODEL")]
    """A run, an export or another model's folder (timm, Hugging Face), a locked folder, a timm name with its weights
    (NAME=FILE or --weights), or your own module (file.py:Name, package.module:name)."""


@dataclass(frozen=True, kw_only=True)
class ModelArgs(NamedArgs):
    """Which model, and where it runs."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """cpu, cuda or cuda:N; by default a GPU where there is one."""


@dataclass(frozen=True, kw_only=True)
class LookArgs(ModelArgs):
    """Which model, and where what is found goes."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = OUT
    """For the numbers (.json), the page (.html) and its figures; none: not written."""


@dataclass(frozen=True, kw_only=True)
class DataArgs(ModelArgs):
    """Which model, on which images."""

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """The images; by default those a run was trained on."""

    held_out: Annotated[float | None, Parameter(metavar="SHARE")] = None
    """Share to hold out as val and test, of data that has no such splits; by default what a run held out."""

    count: Annotated[int | None, Parameter(metavar="IMAGES")] = None
    """At most this many images, chosen at random and the same every time; by default all."""

    batch: int = 256
    """Images at a time."""


@dataclass(frozen=True, kw_only=True)
class ImageArgs(LookArgs, DataArgs):
    """Which model, on which images, and where what is found goes."""

    split: str | None = None
    """train, val, test or all; val and test stand in for each other. By default val, or all of data that is not
    split."""

    seed: int = 0
    """Seed of every draw."""


@dataclass(frozen=True, kw_only=True)
class FewImagesArgs(ImageArgs):
    """The same, on a few images."""

    count: Annotated[int | None, Parameter(metavar="IMAGES")] = 64
    """At most this many images, chosen at random and the same every time."""


def check_folder(folder: Path | None, *results: str) -> None:
    """Refuses what is no folder to write to, before the work is done. results: names of those that will be written
    whatever model they are of; that one is there already is said."""
    if folder is None:
        return
    try:
        there = bool(folder.stat())
    except (FileNotFoundError, NotADirectoryError):
        there = False
    except OSError as error:  # above it something may not be read, or its name is too long
        said = f"out={folder}: cannot be written: {(error.strerror or str(error)).lower()}"
        raise SitusError(said, field="out") from error
    if not folder.is_dir() if there else folder.suffix in (".json", ".html"):
        raise SitusError(field="out", value=str(folder), allowed="a folder")
    above = next(each for each in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(each))
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise SitusError(f"out={folder}: cannot be written, for {above} cannot be", field="out")
    if "settings" in results and (folder / "study.toml").exists():
        raise SitusError(f"out={folder}: is the folder of a study, whose settings.json is its own", field="out")
    for name in results:
        if any((folder / f"{name}.{kind}").exists() for kind in ("json", "html")):
            print(
                f"situs: {folder / name}.html and .json are there, and what this finds replaces them", file=sys.stderr
            )


def open_from(
    args: NamedArgs, source: str | None = None, *, any_weights: bool = False, device: str | None = None
) -> Model:
    """The model that the flags name, on its device and in eval mode.

    source: the model, where it is not `args.model`. any_weights: a name without weights gets random ones. device:
    instead of that of the flags.
    """
    if isinstance(args, LookArgs):
        check_folder(args.out)
    model = open_named(source or args.model, args, any_weights=any_weights, device=device)
    if not isinstance(args, DataArgs) or args.held_out is None:
        return model
    from situs.train.inputs import check_held_out

    check_held_out(replace(model.samples, path=args.data or model.samples.path, held_out=args.held_out))
    return model.holding_out(args.held_out)


def open_named(source: str, args: OpenArgs, *, any_weights: bool = False, device: str | None = None) -> Model:
    """The model `source` by the flags; see `open_from`. One that is scrambled is said to be."""
    from situs.models import open_model
    from situs.train import distributed

    model = open_model(source, any_weights=any_weights, **asked_of(source, args, device))
    if model.locked and not distributed.rank():
        print(
            f"situs: {model.name}: without the key its blocks are scrambled, and so is what follows; "
            "open it (--key FILE, or situs unlock)",
            file=sys.stderr,
        )
    return model


def asked_of(source: str, args: OpenArgs, device: str | None = None) -> dict[str, Any]:
    """What the flags ask of `open_model`, by its arguments. device: instead of that of the flags."""
    from situs.api import unlock_of
    from situs.cli.passphrase import read_key
    from situs.train.distributed import start

    unlock = unlock_of(source, None if args.key is None else read_key(args.key), args.withheld)
    chosen = device or start(getattr(args, "device", None)).device
    return {**args.shape(), "unlock": unlock, "seed": getattr(args, "seed", 0), "device": chosen}


def open_one_of(source: str, args: OpenArgs) -> Model:
    """One of several models that share the flags: each takes those that are for its kind."""
    from situs.models.open import is_locked

    none: dict[str, Any] = {}
    if Path(source).exists():  # a folder brings its own
        none = {"weights": None, "img_size": None, "patch_size": None, "in_chans": None, "model_args": {}}
    elif "=" in source:
        none = {"weights": None}
    if not is_locked(source):
        none |= {"key": None, "withheld": None}
    return open_named(source, replace(args, **none))
