"""How robust a classifier is: corrupted (mCE), adversarial (ImageNet-A) and unknown images (ImageNet-O).

For example: situs evaluate robustness runs/ft --count 100 --out look
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from situs.cli.parser.model_args import open_from
from situs.cli.result import MeasureArgs, asked, present

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
    from situs.measure.robustness.run import PublishedSets, evaluate_robustness

    told = asked(args)
    sets = PublishedSets(**{each.name: told.pop(each.name) for each in fields(PublishedSets)})
    present(evaluate_robustness(open_from(args), **told, sets=sets), args.out)
