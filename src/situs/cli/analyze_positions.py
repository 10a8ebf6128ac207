"""What the vectors that stand for a model's places hold: pictures, spectrum, and what a linear map reads off them.

Several models stand side by side on one page. A timm name carries its weights behind "=" or takes those of --weights:
situs analyze positions runs/mjp vit_small_patch14_dinov2=dino.safetensors
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from situs.cli.flags import POSITIONAL
from situs.cli.model_args import OpenArgs, open_one_of

if TYPE_CHECKING:
    from situs.models import Model


@dataclass(frozen=True, kw_only=True)
class Args(OpenArgs):
    """Position vectors of one or several models."""

    models: Annotated[tuple[str, ...], POSITIONAL, Parameter(metavar="MODEL …")]
    """Runs, exports and other folders, timm names; a name's weights may follow it: NAME=FILE, NAME=pretrained."""

    folds: int = 5
    """Folds of the cross-validated regression."""

    seed: int = 0
    """Seed of the folds, of UMAP and of random weights."""

    out: Annotated[Path, Parameter(metavar="FOLDER")] = Path("look")
    """Where the numbers (.json), the page (.html) and the figures (.png) go."""


def run(args: Args) -> None:
    """Looks at every model's table and rotation, prints a line for each, and writes the page."""
    from situs.analyze.positions import PositionTables, look_at, look_at_references
    from situs.analyze.tables import tables_of
    from situs.cli.model_args import check_folder
    from situs.cli.result import present
    from situs.results import Provenance

    check_folder(args.out)
    looks, models = [], open_all(args)
    for name, model in models.items():
        note = "" if model.positions else "Its positions took no part in its training."
        tables = tables_of(model.backbone)
        looks += [look_at(name, table, folds=args.folds, seed=args.seed, note=note) for table in tables]
    references = look_at_references(looks[0].table, folds=args.folds, seed=args.seed)
    facts = {"folds": looks[0].decoded.folds, "seed": args.seed, **versions()}
    made = Provenance(facts, tuple(model.origin for model in models.values()))
    present(PositionTables(looks, references, args.seed, provenance=made), args.out)


def open_all(args: Args) -> dict[str, Model]:
    """The models in the order they were named, by a name of their own."""
    from situs.errors import SitusError

    if not args.models:
        raise SitusError("name at least one model: a run folder, an export folder or a timm name")
    found: dict[str, Model] = {}
    for source in args.models:
        model = open_one_of(source, args)
        found[_label(model, source, found)] = model
    return found


def _label(model: Model, source: str, taken: Collection[str]) -> str:
    """The model's own name; where that is taken, with its weights or its folder's folder."""
    from situs.errors import SitusError

    told = model.facts.get("weights") or Path(source).resolve().parent.name
    for label in (model.name, f"{model.name} ({told})"):
        if label not in taken:
            return label
    raise SitusError(f"{source}: cannot be told from another model of that name; rename its folder or file")


def versions() -> dict[str, str]:
    """What made the numbers."""
    from importlib.metadata import version

    return {name: version(name) for name in ("situs", "torch", "timm", "scikit-learn")}
