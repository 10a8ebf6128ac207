"""A page that runs a small model in the browser: move the patches of a picture and see what it makes of them.

For example: situs play runs/ft --out play.html
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from situs.cli.parser.model_args import NamedArgs, open_from
from situs.errors import counted


@dataclass(frozen=True, kw_only=True)
class Args(NamedArgs):
    """A page that runs a small model in the browser."""

    out: Annotated[Path, Parameter(metavar="FILE")] = Path("play.html")
    """The page to write, NAME.html."""

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """The pictures in it; by default a run's own, else those that come with Situs. Whoever has the page has them."""

    split: str | None = None
    """train, val or test; by default val, or all of data that is not split."""

    count: Annotated[int, Parameter(metavar="IMAGES")] = 60
    """So many pictures; accuracy is measured on all of them."""

    most_mb: Annotated[float, Parameter(metavar="MB")] = 8.0
    """Size of the page at most, in megabytes; weights are kept in 32 bits where that is enough, else in 16."""


def run(args: Args) -> None:
    """Writes the page and says what is in it."""
    from situs.play import write_playground

    model = open_from(args, device="cpu")
    made = write_playground(model, args.out, args.data, split=args.split, count=args.count, most_mb=args.most_mb)
    moved = f", which moves its logits by at most {made.error:.1e}" if made.bits < 32 else ""
    print(f"{made.path}: {made.megabytes:.2f} MB, {made.weights:,} weights in {made.bits} bits{moved}")
    holds = f"{counted(made.images, 'pictures')} from {made.data} and the model itself"
    print(f"It holds {holds}: give it to whom you would give both.")
