"""What the verbs that look at a model share: how it is named on the command line, and where their result goes.

A result is a folder: NAME.json with every number, NAME.html to read, NAME-PICTURE.png for each figure.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import tyro

if TYPE_CHECKING:
    from situs.data.loader import Loader
    from situs.evaluate.subject import Subject
    from situs.report.html import Page
    from situs.results import Cell


@dataclass(frozen=True, kw_only=True)
class Looking:
    """What every look at a model takes."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL_OR_RUN")]
    """A run folder, an export folder, or a timm name with --weights."""

    weights: Annotated[str | None, tyro.conf.arg(metavar="FILE|pretrained|random")] = None
    """For a timm name: a weight file, those timm publishes, or none."""

    img_size: Annotated[int | tuple[int, int] | None, tyro.conf.arg(metavar="SIDE|HEIGHT WIDTH")] = None
    """For a timm name: image size in pixels, where it differs from the model's own."""

    ema: bool = True
    """For a run: the mean of the weights where there is one, or the weights themselves."""

    key: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """For a locked export: the key it was locked with; without one it is looked at as it is."""

    withheld: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """For a locked export of which parts were withheld: the owner's second file, beside --key."""

    device: str | None = None
    """cpu, cuda or cuda:N; a GPU where there is one."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("look")
    """Where the numbers (.json), the page (.html) and the figures (.png) go."""


@dataclass(frozen=True, kw_only=True)
class LookingAtImages(Looking):
    """What every look at a model through images takes."""

    data: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """The images; by default those a run was trained on."""

    split: str | None = None
    """train, val or test; val and test stand in for each other. By default val, or all of data that is not split."""

    held_out: Annotated[float | None, tyro.conf.arg(metavar="SHARE")] = None
    """Share of data without val and test that is held out as both; by default what a run held out."""

    count: Annotated[int | None, tyro.conf.arg(metavar="IMAGES")] = None
    """So many of the images, chosen at random and the same every time; all where nothing is said."""

    batch: int = 256
    """Images at a time."""

    seed: int = 0
    """Seed of every draw."""


class Whose(Protocol):
    """What a result is of: a model, a run."""

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> str: ...


def open_looked_at(args: Looking) -> Subject:
    """The model that the flags name, on its device and in eval mode."""
    from situs.core.tokens import pair
    from situs.evaluate.subject import open_subject
    from situs.train.distributed import start

    check_folder(args.out)
    size = None if args.img_size is None else pair(args.img_size)
    ema = None if args.ema else False
    device = start(args.device).device
    with _whole(args.model, args.key, args.withheld) as model:
        subject = open_subject(model, weights=args.weights, img_size=size, ema=ema, device=device)
    if args.key is not None:
        subject = _opened(args.model, subject, args.key, args.withheld)
    tell_locked(subject)
    held = args.held_out if isinstance(args, LookingAtImages) else None
    return subject if held is None else subject.holding_out(held)


@contextmanager
def _whole(model: str, key: Path | None, withheld: Path | None) -> Iterator[str]:
    """What is opened: the model as it is named, or of a lock that is sealed or lacks parts its whole, still locked."""
    from situs.errors import SitusError
    from situs.files import read_json
    from situs.locks.manifest import FORMAT, NAME, read_manifest

    folder = Path(model)
    if not (folder / NAME).is_file() or read_json(folder / NAME).get("format") != FORMAT:
        if withheld is not None:
            raise SitusError(f"{model}: is not locked, so that nothing was withheld (--withheld)")
        yield model
        return
    manifest = read_manifest(folder, None)
    if not manifest.sealed and manifest.withheld is None and withheld is None:
        yield model
        return
    if key is None:
        lacks = "is sealed" if manifest.sealed else "lacks what was withheld when it was locked"
        raise SitusError(f"{model}: {lacks}, so that there is no whole model to look at (--key, --withheld)")
    from situs.cli.passphrase import read_key
    from situs.locks.lock import check, unseal

    owner = read_key(key)
    manifest = check(folder, owner, withheld)
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / folder.resolve().name
        unseal(folder, manifest, owner, whole, withheld)
        shutil.copy(folder / NAME, whole)
        yield str(whole)


def _opened(model: str, subject: Subject, key: Path, withheld: Path | None) -> Subject:
    """The subject of a locked folder with its blocks opened, in memory alone."""
    from situs.cli.passphrase import read_key
    from situs.errors import SitusError
    from situs.locks.owner import open_locked

    if not subject.locked:
        raise SitusError(f"{model}: is not locked, so that no key opens it (--key)")
    return subject.unlocked(open_locked(model, read_key(key), withheld))


def tell_locked(subject: Subject) -> None:
    """Says of a locked model that its numbers are not those of the model."""
    from situs.train import distributed

    if subject.locked and not distributed.rank():
        print(
            f"situs: {subject.name}: without the key its blocks are scrambled, and so is what follows; "
            "open it (--key FILE, or situs unlock)",
            file=sys.stderr,
        )


def tell_left_out(*loaders: Loader) -> None:
    """Says what the evaluation did not see: files that are no images, images that are broken. By the first rank."""
    from situs.train import distributed

    if not distributed.rank():
        for said in dict.fromkeys(said for loader in loaders for said in loader.source.left_out()):
            print(f"situs: {said}", file=sys.stderr)


def check_folder(folder: Path) -> None:
    """Refuses what is no folder to write to, before the work is done."""
    from situs.config import require

    good = folder.is_dir() if folder.exists() else folder.suffix not in (".json", ".html")
    require(good, "out", str(folder), "a folder", "--out")


def print_cells(title: str, header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """A page's table on the terminal."""
    from situs.cli.tables import print_table
    from situs.results import show

    print_table(title, [tuple(header), *(tuple(map(show, row)) for row in rows)])


def write_result(
    folder: Path,
    name: str,
    numbers: Mapping[str, Any],
    page: Page,
    pictures: Mapping[str, bytes] | None = None,
    *,
    of: Sequence[Whose] = (),
) -> Path:
    """Writes NAME.json, NAME-PICTURE.png for each picture, and NAME.html last; gives the page's path.

    of: whose result it is. One of other models that stands in the folder is left, and this one goes below, to a folder
    of its own. Where several ranks have come to the result, the first one writes it.
    """
    from situs.errors import SitusError
    from situs.files import write_bytes
    from situs.train import distributed

    if distributed.rank():
        return folder / f"{name}.html"
    if of:
        numbers = {"of": [subject.identity for subject in of], **numbers}
        folder = _own_folder(folder, name, of)
    text = json.dumps(numbers, indent=2, ensure_ascii=False) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture, content in (pictures or {}).items():
            write_bytes(folder / f"{name}-{picture}.png", content)
        write_bytes(folder / f"{name}.json", text.encode())
    except OSError as error:
        raise SitusError(f"{folder}: could not be written: {(error.strerror or str(error)).lower()} (--out)") from error
    return page.write(folder / f"{name}.html")


def _own_folder(folder: Path, name: str, of: Sequence[Whose]) -> Path:
    """`folder`, or where it holds that result of other models the first folder below it that does not."""
    told = [subject.identity for subject in of]
    if _is_free(folder / f"{name}.json", told):
        return folder
    label = re.sub(r"[^\w.=-]+", "-", "+".join(subject.name for subject in of))[:100].strip(".-") or "model"
    tried = (folder / (label if number == 1 else f"{label}-{number}") for number in itertools.count(1))
    chosen = next(place for place in tried if _is_free(place / f"{name}.json", told))
    print(f"situs: {folder / name}.html is of another model and stays; this one goes to {chosen}", file=sys.stderr)
    return chosen


def _is_free(file: Path, told: list[str]) -> bool:
    """Whether there is no result, or one of the same models."""
    try:
        return json.loads(file.read_text(encoding="utf-8")).get("of") == told
    except FileNotFoundError:
        return True
    except (OSError, ValueError, AttributeError):
        return not file.parent.is_dir()  # what cannot be made is told when it is written to
