"""One look at a model's position vectors: spectrum, projection and what a linear map reads off them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, ClassVar

from situs.errors import SitusError
from situs.measure.tables import PositionTable, reference_tables, tables_of
from situs.measure.vectors import FOLDS, Components, Decoded, Spectrum, decode_places, principal, spectrum
from situs.models.data import AnyModel, open_several
from situs.results import Cell, Provenance, Result, Summary, Table, percent

SHOWN = (3, 4, 5, 6, 7)
"""The dimensions of MJP's Table 6."""
TAUGHT, ROUGH = 0.15, 0.6
"""Below the first share of a blind guess's error the grid is known, above the second hardly."""


@dataclass(frozen=True)
class Look:
    """What was found of one table. name: of the model. note: what a reader must know of it, or nothing."""

    name: str
    table: PositionTable
    spectrum: Spectrum
    components: Components
    decoded: Decoded
    note: str = ""

    @property
    def title(self) -> str:
        """The model and which of its positions this is."""
        return f"{self.name}, {self.table.kind}"

    @property
    def shape(self) -> str:
        """Grid and width, in words."""
        (h, w), dim = self.table.grid, self.table.rows.shape[1]
        return f"{h} × {w} places, {dim} channels"


@dataclass(frozen=True)
class PositionTables(Result):
    """The position vectors of several models side by side, and tables whose answers are known. seed: of UMAP too."""

    file: ClassVar[str] = "positions"
    looks: Sequence[Look]
    references: Sequence[Look]
    seed: int = 0

    def summary(self) -> Summary:
        """A paragraph a table; a row a table, the known ones last."""
        rows: list[list[Cell]] = []
        for look in (*self.looks, *self.references):
            found = look.decoded
            rows.append(
                [
                    look.title if look in self.looks else look.name,
                    f"{look.table.grid[0]}×{look.table.grid[1]} × {look.table.rows.shape[1]}",
                    percent(look.spectrum.explained_by(3)),
                    look.spectrum.components_for(0.9),
                    f"{found.two.mean:.3f}",
                    f"{found.chance_two:.2f}",
                ]
            )
        header = ["table", "grid × channels", "3-PCA", "for 90 %", "2-D error, patches", "blind"]
        said = "\n\n".join(map(in_words, self.looks))
        return Summary(said, (Table("Position vectors", header, rows),))

    def numbers(self) -> dict[str, Any]:
        """Every number of every table."""
        sets = {"models": self.looks, "references": self.references}
        return {name: [to_json(look) for look in looks] for name, looks in sets.items()}


def analyze_positions(models: Iterable[AnyModel], *, folds: int = FOLDS, seed: int = 0) -> PositionTables:
    """What the vectors that stand for the places of models hold: their spectrum, and what a linear map reads off them.

    models: whatever `open_model` takes. folds: of the cross-validated regression. seed: of the folds and of UMAP.
    """
    looks, opened = [], open_several(models, seed)
    if not opened:
        raise SitusError("name at least one model", field="model")
    for name, model in opened.items():
        note = "" if model.positions else "Its positions took no part in its training."
        tables = tables_of(model.backbone)
        looks += [look_at(name, table, folds=folds, seed=seed, note=note) for table in tables]
    references = look_at_references(looks[0].table, folds=folds, seed=seed)
    facts = {"folds": looks[0].decoded.folds, "seed": seed}
    facts |= {name: version(name) for name in ("situs", "torch", "timm", "scikit-learn")}
    made = Provenance(facts, tuple(model.origin for model in opened.values()))
    return PositionTables(looks, references, seed, provenance=made)


def look_at(name: str, table: PositionTable, *, folds: int = FOLDS, seed: int = 0, note: str = "") -> Look:
    """Everything that is computed of one table; the same for the same seed."""
    rows = table.rows
    found = decode_places(rows, table.grid, folds=folds, seed=seed)
    return Look(name, table, spectrum(rows), principal(rows), found, note)


def look_at_references(table: PositionTable, *, folds: int = FOLDS, seed: int = 0) -> list[Look]:
    """Tables of the same shape whose answers are known, to hold the others against."""
    count, dim = table.rows.shape
    made = reference_tables(count, table.grid, dim, seed)
    return [
        look_at(name, PositionTable("reference", rows, table.grid), folds=folds, seed=seed)
        for name, rows in made.items()
    ]


def grasp(look: Look) -> str:
    """How well the vectors know the grid, as a predicate."""
    left = look.decoded.left
    return "knows the grid" if left < TAUGHT else "knows the grid roughly" if left < ROUGH else "does not know the grid"


def in_words(look: Look) -> str:
    """What the numbers of one table say."""
    found, three = look.decoded, look.spectrum.explained_by(3)
    most = look.spectrum.components_for(0.9)
    return (
        f"`{look.name}`, {look.table.kind} of {look.shape}: its three largest principal components hold "
        f"{percent(three)} of the variance, and it takes {most} to hold 90 %. Row and column of a place are "
        f"read off its vector with a mean error of {found.two.mean:.2f} patches (a blind guess: "
        f"{found.chance_two:.2f}): it {grasp(look)}." + (f" {look.note}" if look.note else "")
    )


def to_json(look: Look) -> dict[str, Any]:
    """Every number of one table."""
    found = look.decoded
    return {
        "name": look.name,
        "kind": look.table.kind,
        "grid": list(look.table.grid),
        "channels": look.table.rows.shape[1],
        "note": look.note or None,
        "explained_variance": list(look.spectrum.explained),
        "explained_variance_of": {str(count): look.spectrum.explained_by(count) for count in SHOWN},
        "components_for_90_percent": look.spectrum.components_for(0.9),
        "accumulated_singular_energy": list(look.spectrum.energy),
        "regression": {
            "unit_1d": "places in reading order",
            "unit_2d": "patches, mean of row and column",
            "folds": found.folds,
            "places_fitted_on": found.fitted,
            "mae_1d": found.one._asdict(),
            "mae_2d": found.two._asdict(),
            "mae_row": found.rows,
            "mae_column": found.columns,
            "blind_1d": found.chance_one,
            "blind_2d": found.chance_two,
            "exact": found.exact,
        },
    }
