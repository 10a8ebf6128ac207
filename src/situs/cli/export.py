"""The model of a run in a folder of its own that timm (or transformers) loads without Situs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from situs.cli.parser.flags import POSITIONAL


@dataclass(frozen=True)
class Args:
    """The model of a run in a folder of its own."""

    source: Annotated[Path, POSITIONAL, Parameter(metavar="RUN")]
    """The run folder."""

    out: Annotated[Path, Parameter(metavar="FOLDER")]
    """The folder to write; it must not exist or be empty."""

    ema: bool = True
    """The mean of the weights where there is one, or the weights themselves."""

    force: bool = False
    """Replace an export that is already there."""


def run(args: Args) -> None:
    """Writes the export and says how to load it."""
    from situs.models.export import export_run

    export = export_run(args.source, args.out, ema=None if args.ema else False, force=args.force)
    print(f"{args.out}: {export.architecture} after {export.step} updates")
    for note in export.notes:
        print(note)
    if export.library == "timm":
        print(f'Load it with timm.create_model("local-dir:{args.out}", pretrained=True).')
