"""How a verb ends: its result on the terminal and in files."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from cyclopts import Parameter

from situs.cli.model_args import DataArgs, ImageArgs, LookArgs, check_folder, open_from, open_one_of
from situs.cli.shell import answer, as_document
from situs.cli.tables import print_table, print_verdict
from situs.data.text import COLUMNS, Columns
from situs.errors import SitusError
from situs.results import Result

if TYPE_CHECKING:
    from situs.models import Model


INTERRUPTED = 130
"""Exit status after Ctrl-C, where what was found until then is written."""


@dataclass(frozen=True, kw_only=True)
class MeasureArgs(ImageArgs):
    """Which model, on which images, in which arithmetic."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward."""

    snr_db: Annotated[float | None, Parameter(metavar="DECIBELS")] = None
    """For clips: background noise so many decibels below each, cut from the split's own part of the noise."""


@dataclass(frozen=True, kw_only=True)
class SentenceArgs(MeasureArgs):
    """The same of sentences with labels."""

    topics: ClassVar = MeasureArgs.topics | {"text": ("column", "pair", "label")}

    column: Annotated[str | None, Parameter(name="--text.column", metavar="NAME")] = None
    """Of text: the column of the sentences; by default what the model was trained on, or the only one that holds
    words."""

    pair: Annotated[str, Parameter(name="--text.pair", metavar="NAME")] = ""
    """Of text: the column of the second sentence, by default what the model was trained on; none: single ones."""

    label: Annotated[str | None, Parameter(name="--text.label", metavar="NAME")] = None
    """Of text: the column of the labels; by default what the model was trained on, or label."""


def asked(args: DataArgs, **instead: Any) -> dict[str, Any]:
    """What the flags ask of the function that measures, by its arguments; which model it is stands apart.

    instead: what takes the place of a flag's own value.
    """
    apart = {*(each.name for each in fields(LookArgs)), "held_out"}
    found = {each.name: getattr(args, each.name) for each in fields(args) if each.name not in apart}
    columns = {name: found.pop(name) for name in COLUMNS if name in found}
    return found | ({"text": Columns(**columns)} if columns else {}) | instead


def asked_for(kind: str, args: DataArgs, **instead: Any) -> dict[str, Any]:
    """What the flags ask of one kind of measurement; a flag that is for others alone (`only`) is refused."""
    words = asked(args)
    only: dict[str, tuple[str, ...]] = getattr(args, "only", {})
    for each in fields(args):
        if kind not in (kinds := only.get(each.name, (kind,))):
            if (value := getattr(args, each.name)) != each.default:
                raise SitusError(f"{each.name}={value}: is for {' or '.join(kinds)}, not for {kind}", field=each.name)
            words.pop(each.name, None)
    words.pop("kind", None)
    return words | instead


def measure(args: ImageArgs, place: str) -> None:
    """Calls the function at `place` with what the flags ask, prints its result and writes the page."""
    module, _, name = place.rpartition(".")
    present(getattr(import_module(module), name)(open_from(args), **asked(args)), args.out)


def open_each(sources: Sequence[str], args: LookArgs) -> list[Model]:
    """Several models that share the flags."""
    check_folder(args.out)
    return [open_one_of(source, args) for source in sources]


def present(result: Result, out: Path | None) -> None:
    """Prints the tables and the sentence, or hands over the numbers where a document is asked for; publishes the
    result where there is a place for it, and says where."""
    from situs.pages import publish

    if as_document():
        answer(result.to_json())
    else:
        said = result.in_words()
        for table in said.tables:
            print_table(table)
        print_verdict(said.sentence, result.tone)
        for text in said.notes:
            print(text)
    tell_left_out(result.provenance.left_out)
    if out is None:
        return
    path = publish(result, out)
    if path.parent != out:
        told = f"{out / path.name} is of another model and stays; this one goes to {path.parent}"
        print(f"situs: {told}", file=sys.stderr)
    print(path)


def tell_left_out(said: Iterable[str]) -> None:
    """Says what was not looked at: files that are no images, images that are broken. By the first rank."""
    from situs.train import distributed

    if not distributed.rank():
        for text in dict.fromkeys(said):
            print(f"situs: {text}", file=sys.stderr)
