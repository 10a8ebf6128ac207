"""Two tables of `situs bench step` side by side: what became faster or slower beyond the spread, what else differs.

For example (after: the same `situs bench step`, once something has changed, with --out after):
situs bench compare before/step.json after/step.json
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from situs.cli.parser.flags import POSITIONAL
from situs.cli.parser.model_args import check_folder
from situs.cli.result import present


@dataclass(frozen=True)
class Args:
    """Two tables of steps."""

    before: Annotated[Path, POSITIONAL, Parameter(metavar="A")]
    """The JSON file of the first."""

    after: Annotated[Path, POSITIONAL, Parameter(metavar="B")]
    """The JSON file of the second."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = None
    """Where the numbers (.json) and the page (.html) go."""


def run(args: Args) -> None:
    """Reads both, prints the table and writes the page."""
    from situs.bench import compare_steps

    check_folder(args.out, "comparison")
    present(compare_steps(args.before, args.after), args.out)
