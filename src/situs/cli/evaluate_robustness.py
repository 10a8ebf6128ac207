"""How a classifier bears corrupted, adversarial and strange images: mCE, ImageNet-A, ImageNet-O.

For example: situs evaluate robustness runs/finetuned --count 1000 --out look
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from situs.cli.model_args import ImageArgs, open_from
from situs.cli.result import present

if TYPE_CHECKING:
    from situs.evaluate.robustness_run import Progress

_Folder = Annotated[Path | None, Parameter(metavar="FOLDER")]


@dataclass(frozen=True, kw_only=True)
class Args(ImageArgs):
    """Robustness of a classifier."""

    corruptions: str = "all"
    """all, none, a kind (noise, blur, weather, digital) or names such as snow,fog; made from --data."""

    severities: str = "1,2,3,4,5"
    """Severities, apart by commas."""

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

    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward."""


def run(args: Args) -> None:
    """Measures, prints the tables and writes the page."""
    from situs import __version__
    from situs.evaluate.corruptions import find_corruptions, find_severities
    from situs.evaluate.robustness_run import Plan, evaluate_robustness
    from situs.evaluate.robustness_sets import read_class_list
    from situs.results import Provenance

    plan = Plan(
        data=args.data,
        split=args.split,
        count=args.count,
        batch=args.batch,
        seed=args.seed,
        precision=args.precision,
        corruptions=find_corruptions(args.corruptions),
        severities=find_severities(args.severities),
        imagenet_c=args.imagenet_c,
        imagenet_a=args.imagenet_a,
        imagenet_o=args.imagenet_o,
        in_distribution=args.in_distribution,
        names=None if args.class_list is None else read_class_list(args.class_list),
    )
    model = open_from(args)
    with _progress() as progress:
        found = evaluate_robustness(model, plan, progress)
    made = {"data": found.data, "seed": args.seed, "precision": args.precision, "situs": __version__}
    facts = {"name": model.name, **model.facts, "img_size": "x".join(map(str, model.data.size)), **made}
    present(replace(found, provenance=Provenance(facts, (model.origin,))), args.out)


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
