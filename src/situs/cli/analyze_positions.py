"""What the vectors that stand for a model's places hold: pictures, spectrum, and what a linear map reads off them.

Several models stand side by side on one page. A timm name carries its weights behind "=" or takes those of --weights:
situs analyze positions runs/mjp vit_small_patch14_dinov2=dino.safetensors
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from situs.evaluate.subject import Subject

NAME = "positions"


@dataclass(frozen=True)
class Args:
    """Position vectors of one or several models."""

    models: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL_OR_RUN …")]
    """Run folders, export folders, or timm names; a name's weights may follow it: NAME=FILE, NAME=pretrained."""

    weights: Annotated[str | None, tyro.conf.arg(metavar="FILE|pretrained|random")] = None
    """For timm names that carry none: a weight file, those timm publishes, or none."""

    img_size: Annotated[int | tuple[int, int] | None, tyro.conf.arg(metavar="SIDE|HEIGHT WIDTH")] = None
    """For timm names: image size in pixels, where it differs from the model's own."""

    ema: bool = True
    """For runs: the mean of the weights where there is one, or the weights themselves."""

    folds: int = 5
    """Folds of the cross-validated regression."""

    seed: int = 0
    """Seed of the folds, of UMAP and of random weights."""

    device: str | None = None
    """cpu, cuda or cuda:N; a GPU where there is one."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("look")
    """Where the numbers (.json), the page (.html) and the figures (.png) go."""


def run(args: Args) -> None:
    """Looks at every model's table and rotation, prints a line for each, and writes the page."""
    from situs.analyze.positions import look_at, look_at_references, to_json
    from situs.analyze.positions_page import make_page, overview
    from situs.analyze.tables import tables_of
    from situs.cli.result import write_result
    from situs.cli.tables import print_table
    from situs.results import show

    looks, subjects = [], open_all(args)
    for name, subject in subjects.items():
        note = "" if subject.positions else "Its positions took no part in its training."
        tables = tables_of(subject.backbone)
        looks += [look_at(name, table, folds=args.folds, seed=args.seed, note=note) for table in tables]
    references = look_at_references(looks[0].table, folds=args.folds, seed=args.seed)
    facts = {"folds": looks[0].decoded.folds, "seed": args.seed, **versions()}
    page, pictures = make_page(looks, references, facts, seed=args.seed)
    numbers = {
        **facts,
        "models": [to_json(look) for look in looks],
        "references": [to_json(look) for look in references],
    }
    header, rows = overview(looks, references)
    print_table("Position vectors", [[show(cell) for cell in row] for row in (header, *rows)])
    print(write_result(args.out, NAME, numbers, page, pictures, of=[*subjects.values()]))


def open_all(args: Args) -> dict[str, Subject]:
    """The models in the order they were named, by a name of their own."""
    import torch

    from situs.cli.result import Looking, open_looked_at
    from situs.errors import SitusError

    if not args.models:
        raise SitusError("name at least one model: a run folder, an export folder or a timm name")
    found: dict[str, Subject] = {}
    for model in args.models:
        name, weights, size = model, None, None
        if not Path(model).exists():  # a folder brings its own
            name, _, weights = model.partition("=")
            weights, size = weights or args.weights, args.img_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(args.seed)
            looking = Looking(
                model=name, weights=weights, img_size=size, ema=args.ema, device=args.device, out=args.out
            )
            subject = open_looked_at(looking)
        found[_label(subject, model, found)] = subject
    return found


def _label(subject: Subject, model: str, taken: Collection[str]) -> str:
    """The model's own name; where that is taken, with its weights or its folder's folder."""
    from situs.errors import SitusError

    told = subject.facts.get("weights") or Path(model).resolve().parent.name
    for label in (subject.name, f"{subject.name} ({told})"):
        if label not in taken:
            return label
    raise SitusError(f"{model}: cannot be told from another model of that name; rename its folder or file")


def versions() -> dict[str, str]:
    """What made the numbers."""
    from importlib.metadata import version

    return {name: version(name) for name in ("situs", "torch", "timm", "scikit-learn")}
