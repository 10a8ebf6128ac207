"""Where the result of a look at a model goes.

A result is a folder: NAME.json with every number, NAME.html to read, NAME-PICTURE.png for each figure.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from situs.data.loader import Loader
    from situs.report.html import Page
    from situs.results import Cell


class Whose(Protocol):
    """What a result is of: a model, a run."""

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> str: ...


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
        numbers = {"of": [model.identity for model in of], **numbers}
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
    told = [model.identity for model in of]
    if _is_free(folder / f"{name}.json", told):
        return folder
    label = re.sub(r"[^\w.=-]+", "-", "+".join(model.name for model in of))[:100].strip(".-") or "model"
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
