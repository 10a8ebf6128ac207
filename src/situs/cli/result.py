"""How a verb shows its result: on the terminal and in files."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from cyclopts import Parameter

from situs.cli.model_args import DataArgs, ImageArgs, ModelArgs, check_folder, open_from, open_one_of
from situs.cli.shell import answer, as_document
from situs.cli.tables import print_table, print_verdict
from situs.data.text import COLUMNS, Columns
from situs.errors import SitusError
from situs.results import Result

if TYPE_CHECKING:
    from situs.models import Model


INTERRUPTED = 130
"""Exit status after Ctrl-C, when the findings so far were written."""


@dataclass(frozen=True, kw_only=True)
class MeasureArgs(ImageArgs):
    """Which model, on which images, in which precision."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of the forward pass."""

    snr_db: Annotated[float | None, Parameter(metavar="DECIBELS")] = None
    """For audio clips: add background noise. The value is the signal-to-noise ratio in dB."""


@dataclass(frozen=True, kw_only=True)
class SentenceArgs(MeasureArgs):
    """The same for labelled sentences."""

    topics: ClassVar = MeasureArgs.topics | {"text": ("column", "pair", "label")}

    column: Annotated[str | None, Parameter(name="--text.column", metavar="NAME")] = None
    """For text data: column that contains the sentences. Default: the column used in training, or the only text
    column."""

    pair: Annotated[str, Parameter(name="--text.pair", metavar="NAME")] = ""
    """For text data: column that contains the second sentence of each pair. Use "none" for single sentences. Default:
    as in training."""

    label: Annotated[str | None, Parameter(name="--text.label", metavar="NAME")] = None
    """For text data: column that contains the labels. Default: the column used in training, or the column named
    "label"."""


def options_of(args: DataArgs) -> dict[str, Any]:
    """The flags as arguments of the function that measures, without those about opening the model."""
    opening = {*(field.name for field in fields(ModelArgs)), "out", "held_out"}
    options = {field.name: getattr(args, field.name) for field in fields(args) if field.name not in opening}
    columns = {name: options.pop(name) for name in COLUMNS if name in options}
    return options | ({"text": Columns(**columns)} if columns else {})


def options_for(kind: str, args: DataArgs, **overrides: Any) -> dict[str, Any]:
    """The flags as arguments of one kind of measurement; a flag for other kinds (the verb's `only`) is refused."""
    options = options_of(args)
    only: dict[str, tuple[str, ...]] = getattr(args, "only", {})
    for field in fields(args):
        if kind not in (kinds := only.get(field.name, (kind,))):
            if (value := getattr(args, field.name)) != field.default:
                raise SitusError(
                    f"{field.name}={value}: applies only to {' or '.join(kinds)}, not to {kind}", field=field.name
                )
            options.pop(field.name, None)
    options.pop("kind", None)
    return options | overrides


def measure(args: ImageArgs, function: str) -> None:
    """Calls a function ("package.module.name") with the flags as arguments, prints its result and writes the page."""
    module, _, name = function.rpartition(".")
    present(getattr(import_module(module), name)(open_from(args), **options_of(args)), args.out)


def open_each(sources: Sequence[str], args: ImageArgs) -> list[Model]:
    """Several models that share the flags."""
    check_folder(args.out)
    return [open_one_of(source, args) for source in sources]


def present(result: Result, out: Path | None) -> None:
    """Prints the tables and the verdict, or with --json the numbers; publishes the result to `out` and prints the path
    of its page."""
    from situs.pages import publish

    if as_document():
        answer(result.to_json())
    else:
        summary = result.in_words()
        for table in summary.tables:
            print_table(table)
        print_verdict(summary.sentence, result.tone)
        for text in summary.notes:
            print(text)
    print_skipped(result.provenance.left_out)
    if out is None:
        return
    path = publish(result, out)
    if path.parent != out:
        print(
            f"situs: {out / path.name} shows another model and was kept, so the new page is in {path.parent}",
            file=sys.stderr,
        )
    print(path)


def print_skipped(reasons: Iterable[str]) -> None:
    """Says on the first rank which files were skipped: those that are no images, and broken images."""
    from situs.train import distributed

    if not distributed.rank():
        for text in dict.fromkeys(reasons):
            print(f"situs: {text}", file=sys.stderr)
