"""Results as pages: `publish(result, out)` writes the page that `make_page` draws of a result.

`default.page` draws the summary, tables and figures of any result; the results in `PAGES` have a page of their own.

A published result is NAME.json with every number, NAME.html to read, and NAME-PICTURE.png for each figure.
"""

from __future__ import annotations

import html
import itertools
import json
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from situs.config import checks_arguments
from situs.files import write_result
from situs.results import Result, finite
from situs.train import distributed

if TYPE_CHECKING:
    from situs.report.html import Page

PAGES = {
    "Audit": "gradients.page",
    "Comparison": "settings.page",
    "Curves": "curve.page",
    "PromptAudit": "split.texts_page",
    "Reconstruction": "reconstruct.page",
    "Remedies": "remedies.page",
    "SplitAudit": "split.page",
    "TextAudit": "texts.page",
}
"""The class of a result -> the function (module.name, in this package) that makes its page."""

PRIVATE = (
    "This page shows private images and their reconstructions. Protect the page like the images, or make the page "
    "without pictures."
)


def make_page(result: Result) -> Page:
    """The page of a result with its pictures and the definitions of its words; a private one says so at its top."""
    name = type(result).__name__
    module, function = PAGES.get(name, "default.page").split(".")
    page = getattr(import_module(f"situs.pages.{module}"), function)(result)
    page.notice = page.notice or (PRIVATE if result.private else "")
    page.reword(result.provenance.worded)
    return import_module("situs.pages.glossary").add_words(page)


@checks_arguments()
def publish(result: Result, out: Path | str) -> Path:
    """Writes the numbers, figures and page of a result, and returns the path of the page.

    out: a folder, or the page's NAME.html. If the folder has a result of the same kind for other models, it stays, and
    the new result goes to a subfolder. Of several ranks, the first one writes. Only the owner can read the page and
    pictures of a private result (mode 0600).

    >>> page = situs.publish(situs.evaluate_accuracy("runs/ft", count=20), "results")
    >>> page.name
    'accuracy.html'
    """
    if distributed.rank():
        return _file(result, Path(out)).with_suffix(".html")
    page = make_page(result)
    numbers = write_numbers(result, out)
    for picture, content in page.pictures.items():
        write_result(numbers.with_name(f"{numbers.stem}-{picture}.png"), content, private=result.private)
    return page.write(numbers.with_suffix(".html"), private=result.private)


KEPT = "A saved notebook contains this output. Clear the output before you share the notebook."


def as_frame(result: Result) -> str:
    """The page of a result as an HTML frame, for a notebook: its style sheet touches nothing outside."""
    page = make_page(result)
    page.notice = f"{page.notice} {KEPT}" if result.private else page.notice
    attributes = {
        "srcdoc": page.render(),
        "title": page.title,
        "style": "width: 100%; height: 40em; border: 0",
        "onload": "this.style.height = this.contentDocument.documentElement.scrollHeight + 'px'",
    }
    return "<iframe {}></iframe>".format(
        " ".join(f'{name}="{html.escape(value)}"' for name, value in attributes.items())
    )


def write_numbers(result: Result, out: Path | str) -> Path:
    """Writes the numbers where `publish` does; gives the file's path."""
    numbers, file = finite(result.to_json()), _file(result, Path(out))
    if Path(out).suffix != ".html" and "of" in numbers:
        names = [origin.name for origin in result.provenance.of]
        file = _free_folder(file.parent, file.stem, names, numbers["of"]) / file.name
    if not distributed.rank():
        write_result(file, (json.dumps(numbers, indent=2, ensure_ascii=False) + "\n").encode())
    return file


def _file(result: Result, out: Path) -> Path:
    """The file of the numbers; the page has the same name."""
    return out.with_suffix(".json") if out.suffix == ".html" else out / f"{result.file}.json"


def _free_folder(folder: Path, name: str, names: list[str], of: list[str]) -> Path:
    """`folder`, or if it holds that result of other models, the first folder below it that does not."""
    label = re.sub(r"[^\w.=-]+", "-", "+".join(names))[:100].strip(".-") or "model"
    below = (folder / (label if number == 1 else f"{label}-{number}") for number in itertools.count(1))
    return next(path for path in itertools.chain([folder], below) if _is_free(path / f"{name}.json", of))


def _is_free(file: Path, of: list[str]) -> bool:
    """Whether there is no result, or one of the same models."""
    try:
        return json.loads(file.read_text(encoding="utf-8")).get("of") == of
    except FileNotFoundError:
        return True
    except (OSError, ValueError, AttributeError):
        return not file.parent.is_dir()  # an unusable path is reported when it is written to
