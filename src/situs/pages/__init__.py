"""Results as pages: a result's type -> its page, and `publish(result, out)`, which writes it.

A published result is three kinds of files: NAME.json with every number, NAME.html to read, NAME-PICTURE.png for each
figure.
"""

from __future__ import annotations

import itertools
import json
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from situs.errors import SitusError
from situs.files import write_bytes
from situs.results import Result
from situs.train import distributed

if TYPE_CHECKING:
    from situs.report.html import Page

PAGES = {
    "Attention": "attention.page",
    "ClassAccuracy": "accuracy.page",
    "ClassProbes": "probe.class_page",
    "ConsistencyCurve": "consistency.page",
    "Correlations": "correlation.page",
    "Ensemble": "ensemble.page",
    "LayerKnn": "knn.page",
    "LockAudit": "lock.audit_page",
    "PositionAudit": "positions_audit.page",
    "PositionCurve": "position.curve_page",
    "PositionGrid": "position.grid_page",
    "PositionProbes": "probe.position_page",
    "PositionTables": "positions.page",
    "Reconstruction": "reconstruct.page",
    "Robustness": "robustness.page",
    "Runs": "runs.page",
    "Study": "lock.study_page",
    "Verification": "lock.verify_page",
}
"""The class of a result -> the function of a module here that makes its page; loaded when it is asked for."""


def make_page(result: Result) -> Page:
    """The page of a result, its pictures among it."""
    name = type(result).__name__
    if name not in PAGES:
        raise SitusError(f"{name}: has no page; those of {', '.join(sorted(PAGES))} have one")
    module, function = PAGES[name].split(".")
    return getattr(import_module(f"situs.pages.{module}"), function)(result)


def publish(result: Result, out: Path | str) -> Path:
    """Writes the numbers, the pictures and the page, the page last; gives its path.

    out: a folder, or a page's own NAME.html. A folder's result of the same kind that is of other models is left, and
    this one goes to a folder of its own below. Where several ranks have come to the result, the first one writes it.
    """
    out = Path(out)
    named = out.suffix == ".html"
    folder, name = (out.parent, out.stem) if named else (out, result.file)
    page_name = f"{name if named else result.page_file or name}.html"
    if distributed.rank():
        return folder / page_name
    page, numbers = make_page(result), result.to_json()
    if not named and "of" in numbers:
        folder = _own_folder(out, name, [origin.name for origin in result.provenance.of], numbers["of"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for picture, content in page.pictures.items():
            write_bytes(folder / f"{name}-{picture}.png", content)
        write_bytes(folder / f"{name}.json", (json.dumps(numbers, indent=2, ensure_ascii=False) + "\n").encode())
    except OSError as error:
        raise SitusError(
            f"{folder}: could not be written: {(error.strerror or str(error)).lower()}", field="out"
        ) from error
    return page.write(folder / page_name)


def _own_folder(folder: Path, name: str, names: list[str], of: list[str]) -> Path:
    """`folder`, or where it holds that result of other models the first folder below it that does not."""
    label = re.sub(r"[^\w.=-]+", "-", "+".join(names))[:100].strip(".-") or "model"
    below = (folder / (label if number == 1 else f"{label}-{number}") for number in itertools.count(1))
    return next(place for place in itertools.chain([folder], below) if _is_free(place / f"{name}.json", of))


def _is_free(file: Path, of: list[str]) -> bool:
    """Whether there is no result, or one of the same models."""
    try:
        return json.loads(file.read_text(encoding="utf-8")).get("of") == of
    except FileNotFoundError:
        return True
    except (OSError, ValueError, AttributeError):
        return not file.parent.is_dir()  # what cannot be made is told when it is written to
