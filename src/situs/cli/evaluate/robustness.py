"""How a classifier bears corrupted, adversarial and strange images: mCE, ImageNet-A, ImageNet-O.

For example: situs evaluate robustness runs/finetuned --count 1000 --out look
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from situs.cli.parser.model_args import open_from
from situs.cli.result import MeasureArgs, asked, present

if TYPE_CHECKING:
    from situs.evaluate.robustness.run import Progress

_Folder = Annotated[Path | None, Parameter(metavar="FOLDER")]


@dataclass(frozen=True, kw_only=True)
class Args(MeasureArgs):
    """Robustness of a classifier."""

    corruptions: Annotated[tuple[str, ...], Parameter(metavar="NAME,…")] = ("all",)
    """all, none, a kind (noise, blur, weather, digital) or names such as snow,fog; made from --data."""

    severities: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Severities."""

    imagenet_c: _Folder = None
    """Corrupted images that exist: FOLDER/CORRUPTION/SEVERITY/CLASS/IMAGE, or CORRUPTION.npy as in CIFAR-C."""

    imagenet_a: _Folder = None
    """Natural adversarial examples: FOLDER/CLASS/IMAGE. Accuracy and AURRA among these classes."""

    imagenet_o: _Folder = None
    """Images of none of the classifier's classes: FOLDER/CLASS/IMAGE. AUPR against --in-distribution."""

    in_distribution: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Images of the classifier's own classes beside ImageNet-O; by default --data."""

    class_list: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Class names in the order of the outputs, one a line (for ImageNet the 1,000 wnids), where the model has none."""


def run(args: Args) -> None:
    """Measures, prints the tables and writes the page."""
    from situs.evaluate.robustness.run import PublishedSets, evaluate_robustness

    told = asked(args)
    sets = PublishedSets(**{each.name: told.pop(each.name) for each in fields(PublishedSets)})
    model = open_from(args)
    with _progress() as progress:
        found = evaluate_robustness(model, **told, sets=sets, progress=progress)
    present(found, args.out)


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on a terminal; elsewhere a line at every tenth."""
    if not sys.stderr.isatty():
        told = -1

        def line(done: int, steps: int, what: str) -> None:
            nonlocal told
            tenth = 10 * done // max(1, steps)
            if tenth != told or steps == 1:
                print(f"{100 * done // max(1, steps):3d} %  {what}", file=sys.stderr, flush=True)
            told = tenth

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description:<22}"), BarColumn(), TextColumn("{task.percentage:3.0f} %")
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, steps, what: bar.update(task, completed=done, total=steps, description=what)
