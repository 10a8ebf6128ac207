"""The vectors that stand for a model's places: where it has them, their spectrum, and what a linear map reads off.

A table, or what a rotation does to a token, gives each place a vector. A relative bias says how two places stand to
each other and gives neither one, so it is refused, with the reason.

Spectrum: how many directions the table fills (MJP: Definition 1, Table 6, Figure 4). Reading a place off its vector by
a linear map (MJP: appendix C.1, Table 8): units are whole places. 1-D errors count places in reading order, 0 to N - 1;
2-D errors count patches, the mean of both axes. The paper does not say its own, but its figures settle them: least
squares is linear in what it predicts, so the error of the index is w · e_row + e_column, some w = 14 times the mean of
the axes where both are read equally well. Table 8 has 12.4, 13.5 and 9.7 times. With axes scaled to [0, 1] it would be
about 180 times, with their sum about 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.core.position import Positions, coordinates, sincos
from situs.errors import SitusError, missing_extra
from situs.limits import check_value
from situs.models.data import AnyModel, open_several
from situs.results import Cell, Figure, Provenance, Result, Summary, Table, percent

if TYPE_CHECKING:
    from numpy.typing import NDArray

FOLDS = 5
NEIGHBOURS = 15
"""UMAP's own default; fewer where there are fewer places."""
FEWEST = 10
"""Below so many places UMAP's graph has nothing to lay out."""
MEANING = """
Neighbours are joined. Where the vectors know the grid, the lines of rows and of columns form a sheet, however bent;
where they do not, a tangle. How alike two places are is the cosine of the angle between their vectors, the mean vector
taken off.

Few directions: the table holds little but the grid. Many: it holds more than that, or noise. Only a table that can also
be read is informative.

Reading a place: the places are dealt out at random in parts. For each part a linear map is fitted on the vectors of the
others and guesses the places of this one. 1-D: the index in reading order. 2-D: row and column, the mean of both
errors. The paper's Table 8 is in the same units. It does not say so, but a linear fit makes the error of the index w
times the row's plus the column's, w the places in a row, and its 1-D figures are 10 to 14 times its 2-D figures on a
grid of 14: raw indices, mean of both axes. Scaled to [0, 1] they would be 180 times.
"""
TABLE_6 = (
    ["MJP's paper: DeiT-S", "54.61", "68.55", "77.95", "85.54", "90.74"],
    ["MJP's paper: DeiT-S + MJP", "46.74", "58.36", "69.10", "78.13", "84.55"],
)
TABLE_8 = (
    ("DeiT-S", ".945\u202f±\u202f.031", ".076\u202f±\u202f.004"),
    ("DeiT-S + MJP (DAL-LN)", ".566\u202f±\u202f.013", ".042\u202f±\u202f.002"),
    ("DeiT-S + MJP (DAL-NLN)", "1.301\u202f±\u202f.035", ".134\u202f±\u202f.003"),
)
"""MJP's, on 14 × 14 places of 384 channels."""
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
        return self.name if self.table.kind == "reference" else f"{self.name}, {self.table.kind}"

    def sheets(self, points: Any, labels: tuple[str, ...], *, as_image: bool = False) -> tuple[Any, ...]:
        """What draws points [N, 2] or [N, 3] of the places twice, lines along each row and along each column."""
        panels = [(f"lines along each {along}", points, labels, along, as_image) for along in ("row", "column")]
        return panels, self.table.grid

    @property
    def axes(self) -> tuple[str, ...]:
        """The principal components, with the share of the variance that each holds."""
        shares = zip(("1st", "2nd", "3rd"), self.components.shares, strict=False)
        return tuple(f"{nth} component ({percent(share, 0)})" for nth, share in shares)

    @property
    def few_places(self) -> str:
        """What to know of a fit on hardly more places than channels, or nothing."""
        count, channels = self.decoded.fitted, self.table.rows.shape[1]
        said = f"`{self.name}`: {count} places to fit {channels} channels"
        if count <= channels:
            return f"{said}: many maps fit them without error, and the one of least norm was taken."
        if count < 2 * channels:
            return (
                f"{said}: hardly enough, so that the map makes the most of every accident; a table that knows nothing "
                "is read worse than blindly."
            )
        return ""

    @property
    def shape(self) -> str:
        """Grid and width, in words."""
        (h, w), dim = self.table.grid, self.table.rows.shape[1]
        return f"{h} × {w} places, {dim} channels"


SHEETS, SPECTRUM = "The places in two and three dimensions", "How many directions they fill"
READ = "Reading a place off its vector"


@dataclass(frozen=True)
class PositionTables(Result):
    """The position vectors of several models side by side, and tables whose answers are known. seed: of UMAP too."""

    file: ClassVar[str] = "positions"
    meaning: ClassVar[str] = MEANING
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
                    look.title,
                    f"{look.table.grid[0]}×{look.table.grid[1]} × {look.table.rows.shape[1]}",
                    percent(look.spectrum.explained_by(3)),
                    look.spectrum.components_for(0.9),
                    f"{found.two.mean:.3f}",
                    f"{found.chance_two:.2f}",
                ]
            )
        header = ["table", "grid × channels", "3-PCA", "for 90 %", "2-D error, patches", "blind"]
        said = "\n\n".join(map(in_words, self.looks))
        notes = (
            () if has_umap() else ("UMAP is not installed, so its picture is missing: `pip install 'situs[umap]'`.",)
        )
        numbers = tuple(
            (f"{look.decoded.two.mean:.2f} patches",
             f"error of a linear reader of {look.name} (blind {look.decoded.chance_two:.2f})")
            for look in self.looks[:3]
        )  # fmt: skip
        return Summary(said, (Table("Position vectors", header, rows),), notes, numbers)

    @property
    def title(self) -> str:
        """Of the page."""
        return f"Positions of {', '.join(dict.fromkeys(look.name for look in self.looks))}"

    def figures(self) -> list[Figure]:
        """Of each model the places in their principal components and by UMAP, and how alike they are; all spectra."""
        figures = [figure for number, look in enumerate(self.looks, start=1) for figure in self._looked(look, number)]
        shown = max(look.spectrum.components_for(0.99) for look in self.looks) + 1
        series = {}
        for look in (*self.looks, *self.references):
            energy = 100 * np.asarray(look.spectrum.energy[:shown])
            series[look.title] = (np.arange(1, len(energy) + 1), energy)
        caption = "Share of Σσ² that the n largest singular values hold (MJP's Figure 4)."
        values = (series, "number n of singular values", "accumulated energy, %")
        return [*figures, Figure("energy", caption, "figures.curves", values, section=SPECTRUM)]

    def _looked(self, look: Look, number: int) -> list[Figure]:
        def figure(name: str, said: str, draw: str, values: tuple[Any, ...], section: str, **options: Any) -> Figure:
            return Figure(
                name if number == 1 else f"{name}-{number}", f"{look.title}: {said}", draw, values, options, section
            )

        drawn, sheets, (h, w) = [], "places.sheets", look.table.grid
        for dims, what in ((2, "plane of the two"), (3, "space of the three")):
            said = f"the {what} largest principal components, with the share of the variance that each holds."
            values = look.sheets(look.components.points[:, :dims], look.axes[:dims])
            drawn.append(figure(f"pca-{dims}d", said, sheets, values, SHEETS))
        if has_umap() and len(look.table.rows) >= FEWEST:
            points = umap_points(look.table.rows, seed=self.seed)
            said = f"UMAP with {min(NEIGHBOURS, len(points) - 1)} neighbours. Distances between far places mean little."
            drawn.append(figure("umap", said, sheets, look.sheets(points, ("UMAP, 1st", "UMAP, 2nd")), SHEETS))
        rows, columns, chosen = spread_places((h, w))
        maps = similarities(look.table.rows, chosen).reshape(len(rows), len(columns), h, w)
        some = "" if len(chosen) == h * w else f"; {len(chosen)} places at equal distances are shown"
        said = f"each map shows how alike all {h} × {w} places are to the one that is ringed{some}."
        values = ({look.title: maps}, rows, columns, "cosine similarity")
        drawn.append(figure("cosine", said, "places.mosaics", values, "How alike the places are", limits=(-1, 1)))
        values = look.sheets(look.decoded.guesses[:, ::-1], ("guessed column", "guessed row"), as_image=True)
        said = "where each place is read to be, when the map was fitted without it."
        return [*drawn, figure("guesses", said, sheets, values, READ)]

    def details(self) -> list[Table]:
        """MJP's Tables 6 and 8, the paper's own rows last."""
        looks = (*self.looks, *self.references)
        shares = [
            [look.title, *(f"{100 * look.spectrum.explained_by(count):.2f}" for count in SHOWN)] for look in looks
        ]
        errors: list[list[Cell]] = []
        for look in looks:
            found = look.decoded
            both = [f"{each.mean:.3f}\u202f±\u202f{each.std:.3f}" for each in (found.one, found.two)]
            blind = [f"{found.chance_one:.2f}", f"{found.chance_two:.2f}", percent(found.exact, 0)]
            errors.append([look.title, *both, f"{found.rows:.3f}", f"{found.columns:.3f}", *blind])
        errors += [[f"MJP's paper: {name}", one, two, *[None] * 5] for name, one, two in TABLE_8]
        header = ["mean absolute error", "1-D", "2-D", "row", "column", "blind, 1-D", "blind, 2-D", "right place"]
        return [
            Table(
                SPECTRUM,
                ["explained variance, %", *(f"k = {count}" for count in SHOWN)],
                [*shares, *TABLE_6],
                "By the k largest components of the centred table, prefix tokens left out (MJP's Table 6; its models "
                "have 14 × 14 places, 384 channels).",
            ),
            Table(
                READ,
                header,
                errors,
                f"In {self.looks[0].decoded.folds} folds. 1-D in places, 2-D, row and column in patches; ± the "
                "deviation between folds; blind: the mean of the places fitted on; right place: share of guesses that "
                f"round to the place itself. {' '.join(filter(None, (look.few_places for look in self.looks)))}",
            ),
        ]

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


# --- the tables ---------------------------------------------------------------------------------------------------

INSTEAD = (
    "ask `situs evaluate attention` what its heads do with them, `evaluate position` (kind all) what its features know"
)


class PositionTable(NamedTuple):
    """kind: in words. rows: the vectors of the places, row by row of `grid`, [N, D] float64 on the CPU."""

    kind: str
    rows: Tensor
    grid: tuple[int, ...]


def tables_of(backbone: Backbone) -> tuple[PositionTable, ...]:
    """What can be analysed of a model's positions: its table, its rotation, or both (EVA-02); never nothing."""
    backbone.require("tokens")
    with torch.enable_grad():  # whether a table is learned shows in its gradient
        places = backbone.positions()
    found, grid = [], (1, *backbone.grid)[-2:]  # a sequence is drawn as one row
    if places.table is not None:
        rows = places.table.detach().double().cpu()
        found.append(PositionTable(_kind_of(rows, grid, places.table.requires_grad), rows, grid))
    if places.rotary is not None:
        found.append(PositionTable("rotation", rotation_features(places.rotary), grid))
    if not found:
        raise SitusError(f"{backbone.name}: {_nothing(backbone, places)}")
    if backbone.num_tokens < 2:
        raise SitusError(f"{backbone.name}: has a single place, so no two can be compared", field="img_size")
    for table in found:
        _check_rows(backbone.name, table)
    return tuple(found)


def rotation_features(rotary: Tensor) -> Tensor:
    """The sines and cosines that turn a token at each place, as its vector: [L, 1, H, N, 2d] -> [N, L * H * 2d].

    Turning is all a rotary model does with a place, so these hold whatever it knows of one. They enter products of
    queries and keys and are never added to a token: their lengths and angles are not those of a learned table.
    """
    count = rotary.shape[-2]
    return rotary.detach().double().cpu()[:, 0].movedim(-2, 0).reshape(count, -1)


def reference_tables(count: int, grid: tuple[int, ...], dim: int, seed: int = 0) -> dict[str, Tensor]:
    """Tables of the same shape whose answers are known: sines and cosines of row and column, and random numbers."""
    noise = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    even = max(dim - dim % 4, 4)
    return {"sin-cos (reference)": sincos(grid, even).double(), "random (reference)": noise * 0.02}


def _kind_of(rows: Tensor, grid: tuple[int, ...], learned: bool) -> str:
    # Judged by its values: an export does not say whether its table was trained.
    dim = rows.shape[1]
    if dim % 4 == 0 and torch.allclose(rows, sincos(grid, dim).double(), atol=2e-3):
        return "sin-cos table"
    return "learned table" if learned else "fixed table"


def _nothing(backbone: Backbone, places: Positions) -> str:
    if places.bias is not None:
        return f"its positions are biases between pairs of tokens, so that no place has a vector; {INSTEAD}"
    if "rows" in backbone.refusals:
        return f"has no table of positions: {backbone.refusals['rows']}; {INSTEAD}"
    return "has no positions, so there is nothing to analyse; `situs evaluate position` (kind all) tells what it knows"


def _check_rows(name: str, table: PositionTable) -> None:
    if not torch.isfinite(table.rows).all():
        raise SitusError(f"{name}: its {table.kind} holds numbers that are not finite")
    if not table.rows.any():
        raise SitusError(
            f"{name}: its {table.kind} is all zeros (as after a method that never used it, which an export erases), so "
            "there is nothing to analyse"
        )
    if not (table.rows - table.rows[0]).any():
        raise SitusError(f"{name}: every place has the same vector in its {table.kind}, so they cannot be told apart")


# --- what they hold -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spectrum:
    """Shares of a table P [N, D], one for each of its min(N, D) directions, the largest first.

    explained: of the variance, by principal component (σᵢ² of the centred P over their sum), not accumulated. energy:
    of Σσ² that the first n singular values of P as it is hold, accumulated.
    """

    explained: tuple[float, ...]
    energy: tuple[float, ...]

    def explained_by(self, count: int) -> float:
        """The share of the variance that the first `count` components explain (Table 6)."""
        return sum(self.explained[:count])

    def components_for(self, share: float) -> int:
        """How many components explain at least `share` of the variance."""
        total = 0.0
        for count, part in enumerate(self.explained, start=1):
            total += part
            if total >= share - 1e-12:
                return count
        return len(self.explained)


def spectrum(table: Tensor) -> Spectrum:
    """The spectrum of a table [N, D] of patch places; a prefix token's own row belongs to no place and stays out.

    Definition 1 gives Σσ(PV)²/Σσ(P)². Table 6 speaks of PCA, which centres P; Figure 4 of the singular values of P,
    which does not: each is taken as it says.
    """
    explained = _squares(table - table.mean(dim=0))
    energy = _squares(table)
    return Spectrum(tuple(explained.tolist()), tuple(energy.cumsum(0).tolist()))


def _squares(table: Tensor) -> Tensor:
    """The squared singular values, as shares of their sum."""
    values = torch.linalg.svdvals(table.double()).square()
    return values / values.sum()


class Spread(NamedTuple):
    """A mean over folds and the standard deviation of the folds around it."""

    mean: float
    std: float


@dataclass(frozen=True)
class Decoded:
    """What a linear map reads off the vectors of places it was not fitted on.

    one: mean absolute error of the index (Table 8's 1D). two: of (row, column), mean of both. rows, columns: of each.
    chance_one, chance_two: of the mean place of the other folds, which knows nothing. folds: how many. fitted: places
    a map is fitted on. exact: share of places whose guess, rounded, is right. guesses: [N, 2].
    """

    one: Spread
    two: Spread
    rows: float
    columns: float
    chance_one: float
    chance_two: float
    folds: int
    fitted: int
    exact: float
    guesses: NDArray[np.float64]

    @property
    def left(self) -> float:
        """The error as a share of one who knows nothing: 0 is certain, 1 is no better."""
        return self.two.mean / self.chance_two


def decode_places(table: Tensor, grid: tuple[int, ...], *, folds: int = FOLDS, seed: int = 0) -> Decoded:
    """Cross-validated least squares from the vectors [N, D] to the index and to (row, column).

    The folds are shuffled; where the places are fewer than the folds asked for, each is a fold of its own. With fewer
    places than channels the map of least norm is taken, as scikit-learn does.
    """
    from sklearn.linear_model import LinearRegression
    from sklearn.model_selection import KFold

    vectors = table.double().cpu().numpy()
    check_value("folds", folds, ">= 2")
    folds = min(folds, len(vectors))
    places = coordinates(grid).double().numpy()
    index = np.arange(len(vectors), dtype=np.float64)
    targets = np.column_stack([index, places])
    guesses, middles, members = np.empty_like(targets), np.empty_like(targets), []
    for fitted, held in KFold(folds, shuffle=True, random_state=seed).split(vectors):
        guesses[held] = LinearRegression().fit(vectors[fitted], targets[fitted]).predict(vectors[held])
        middles[held] = targets[fitted].mean(axis=0)
        members.append(held)
    errors, chance = np.abs(guesses - targets), np.abs(middles - targets).mean(axis=0)
    right = (np.rint(guesses[:, 1:]) == places).all(axis=1)
    return Decoded(
        one=_over(errors[:, 0], members),
        two=_over(errors[:, 1:].mean(axis=1), members),
        rows=float(errors[:, 1].mean()),
        columns=float(errors[:, 2].mean()),
        chance_one=float(chance[0]),
        chance_two=float(chance[1:].mean()),
        folds=folds,
        fitted=min(len(vectors) - len(held) for held in members),
        exact=float(right.mean()),
        guesses=guesses[:, 1:],
    )


def _over(errors: NDArray[np.float64], members: list[NDArray[np.intp]]) -> Spread:
    """Mean and deviation of the folds' own means."""
    means = [float(errors[held].mean()) for held in members]
    return Spread(float(np.mean(means)), float(np.std(means)))


class Components(NamedTuple):
    """points: [N, k], the places along the k largest principal components. shares: of the variance, [k]."""

    points: NDArray[np.float64]
    shares: tuple[float, ...]


def principal(table: Tensor, count: int = 3) -> Components:
    """The places of a table [N, D] in its `count` largest principal components; those that do not exist are 0."""
    from sklearn.decomposition import PCA

    rows = table.double().cpu().numpy()
    held = min(count, *rows.shape)
    pca = PCA(n_components=held, svd_solver="full")
    points = pca.fit_transform(rows)
    missing = count - held
    shares = (*pca.explained_variance_ratio_.tolist(), *(0.0,) * missing)
    return Components(np.pad(points, ((0, 0), (0, missing))), shares)


def has_umap() -> bool:
    """Whether the extra [umap] is installed."""
    return find_spec("umap") is not None


def umap_points(table: Tensor, *, seed: int = 0) -> NDArray[np.float64]:
    """The places of a table [N, D] laid out in the plane by UMAP, [N, 2]: near ones near, far ones anywhere."""
    rows = table.double().cpu().numpy()
    if len(rows) < FEWEST:
        raise SitusError(f"UMAP of {len(rows)} places: needs at least {FEWEST}")
    if not has_umap():
        raise missing_extra("umap-learn", "umap", "the UMAP picture")
    from umap import UMAP  # pyright: ignore[reportMissingImports]

    # One thread: a seed fixes the layout only then, and UMAP warns where more are asked for.
    layout = UMAP(n_components=2, n_neighbors=min(NEIGHBOURS, len(rows) - 1), random_state=seed, n_jobs=1)
    return np.asarray(layout.fit_transform(rows), dtype=np.float64)


def similarities(table: Tensor, places: Tensor) -> Tensor:
    """Cosine of the angle between the vectors of `places` [k] and of every place, [k, N]; the mean vector is taken off.

    Without that a vector common to all places, which tells none from another, makes everything look alike.
    """
    centred = table - table.mean(dim=0)
    unit = centred / centred.norm(dim=1, keepdim=True).clamp(min=1e-30)
    return unit[places] @ unit.T


def spread_places(grid: tuple[int, ...]) -> tuple[list[int], list[int], Tensor]:
    """Rows and columns, at most five of each, at equal distances over the grid, and the places where they meet.

    They stand in the middle of equal parts, so that borders weigh no more than the rest.
    """
    rows, columns = (torch.arange(n := min(5, side)).add(0.5).mul(side / n).floor().long() for side in grid)
    return rows.tolist(), columns.tolist(), (rows[:, None] * grid[1] + columns).flatten()
