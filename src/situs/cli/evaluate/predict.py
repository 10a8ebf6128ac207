"""The class of every image, clip or sentence, with its probability, as one csv file: path, class, probability.

For example: situs predict runs/ft --out predictions.csv

Labels are not needed and not looked at; what cannot be read has a row without a class.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from situs.cli.parser.model_args import ModelArgs, open_from
from situs.cli.result import tell_left_out
from situs.cli.shell import answer
from situs.errors import counted


@dataclass(frozen=True, kw_only=True)
class Args(ModelArgs):
    """The class of every image."""

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """The images; by default those a run was trained on."""

    out: Annotated[Path, Parameter(metavar="FILE")]
    """The csv file to write, whole or not at all."""

    split: str = "all"
    """train, val or test; by default all of the data."""

    count: Annotated[int | None, Parameter(metavar="IMAGES")] = None
    """At most this many images, chosen at random and the same every time; by default all."""

    batch: int = 256
    """Images at a time."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward."""

    column: Annotated[str | None, Parameter(name="--text.column", metavar="NAME")] = None
    """Of text: the column of the sentences; by default what the model was trained on, or the only one that holds
    words."""

    pair: Annotated[str, Parameter(name="--text.pair", metavar="NAME")] = ""
    """Of text: the column of the second sentence, by default what the model was trained on; none: single ones."""


def run(args: Args) -> None:
    """Predicts, writes, and says how often each class was named."""
    from situs.data.text import Columns
    from situs.measure.predict import check_csv, predict

    check_csv(args.out)
    text = Columns(column=args.column, pair=args.pair) if args.column or args.pair else None
    asked = {name: getattr(args, name) for name in ("data", "split", "count", "batch", "precision")}
    found = predict(open_from(args), **asked, text=text)
    found.write(args.out)
    named = found.counts
    few = ", ".join(f"{name} {count:,}" for name, count in list(named.items())[:5])
    more = f", and {len(named) - 5:,} more classes" if len(named) > 5 else ""
    lines = [f"{args.out}: {counted(len(found.rows) - len(found.broken), 'rows')} with a class: {few}{more}"]
    if found.broken:
        lines.append(f"{counted(len(found.broken), 'rows')} without: {', '.join(found.broken[:3])}"
                     f"{', …' if len(found.broken) > 3 else ''} could not be read")  # fmt: skip
    if len(named) == 1 and len(found.rows) > 1 and len(found.classes) > 1:
        lines.append(f"it names one class, {next(iter(named))}, for everything")
    rows = {"file": args.out, "rows": len(found.rows), "named": named, "broken": found.broken}
    answer({**rows, "left_out": list(found.left_out)}, *lines)
    tell_left_out(found.left_out)
