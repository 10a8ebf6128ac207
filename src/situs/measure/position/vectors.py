"""A model's position embeddings: their spectrum, and a linear regression from them to places.

A table, or what a rotation does to a token, gives each place a vector. A relative bias belongs to pairs of places and
gives none of them a vector, so it is refused, with the reason.

Spectrum: how many directions the table spans (MJP: Definition 1, Table 6, Figure 4). Regression from a place's vector
to the place (MJP: appendix C.1, Table 8): 1-D errors count places in reading order, 0 to N - 1; 2-D errors count
patches, the mean of both axes. The paper does not state its units, but its numbers imply them: least squares is linear
in its targets, so the error of the index is w · e_row + e_column, about w = 14 times the mean of the axes where both
are equally well predicted. Table 8 has 12.4, 13.5 and 9.7 times. With axes scaled to [0, 1] it would be about 180
times, with their sum about 7.
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

from situs import __version__
from situs.backbones.base import Backbone
from situs.core.position import Positions, coordinates, sincos
from situs.errors import SitusError, counted, missing_extra
from situs.limits import check_value
from situs.models.data import AnyModel, open_several
from situs.results import Cell, Figure, Provenance, Result, Summary, Table, percent, points

if TYPE_CHECKING:
    from numpy.typing import NDArray

FOLDS = 5
NEIGHBOURS = 15
"""The default of UMAP; fewer where there are fewer places."""
FEWEST = 10
"""The fewest places that UMAP can lay out."""
MEANING = """
Lines join neighbouring positions. If the vectors encode the grid, the lines form a flat or bent sheet. Otherwise the
lines form a tangle. The similarity of two positions is the cosine of the angle between their vectors, after the mean
vector is subtracted.

If few principal components explain most of the variance, the table encodes little more than the grid. If many
components are needed, the table encodes noise, or more than the grid. A table is informative only if positions can be
predicted from it.

This is tested by cross-validation. For each fold, a linear regression is fitted on the vectors of the other folds. The
regression then predicts the positions of this fold. 1-D is the error of the position's index in reading order. 2-D is
the mean of the errors of row and column. Situs assumes that Table 8 of MJP's paper defines its 1-D and 2-D errors in
the same way. The reason: on a grid of 14 × 14, the 1-D error is about 10 to 14 times the 2-D error, both here and in
the paper.
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
"""Error over that of a blind guess: below the first the grid is known, above the second it is not."""


@dataclass(frozen=True)
class TableAnalysis:
    """The measurements of one table. name: of the model. note: a remark on it, or ""."""

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
        """Two panels of the places at points [N, 2] or [N, 3], with lines along each row and along each column."""
        panels = [(f"lines along each {along}", points, labels, along, as_image) for along in ("row", "column")]
        return panels, self.table.grid

    @property
    def axes(self) -> tuple[str, ...]:
        """The principal components, with the share of the variance that each holds."""
        shares = zip(("1st", "2nd", "3rd"), self.components.shares, strict=False)
        return tuple(f"{nth} component ({percent(share, 0)})" for nth, share in shares)

    @property
    def few_places(self) -> str:
        """A warning about a fit with hardly more places than channels, or ""."""
        count, channels = self.decoded.fitted, self.table.rows.shape[1]
        counts = f"`{self.name}` has {count} positions to fit a regression on {channels} channels"
        if count <= channels:
            return (
                f"{counts}. Many different regressions therefore fit the positions without error. The regression "
                "with the smallest norm is shown."
            )
        if count < 2 * channels:
            return (
                f"{counts}. These are too few positions for a reliable regression, so the regression overfits. If "
                "the table contains no information, this regression predicts worse than a blind guess."
            )
        return ""

    @property
    def shape(self) -> str:
        """Grid and width, in words."""
        (h, w), dim = self.table.grid, self.table.rows.shape[1]
        return f"{h} × {w} positions, {dim} channels"


SHEETS, SPECTRUM = "The position vectors in two and three dimensions", "How many directions the vectors fill"
READ = "Reading a position from its vector"


@dataclass(frozen=True)
class PositionTables(Result):
    """The position embeddings of several models side by side, and reference tables. seed: of UMAP too."""

    file: ClassVar[str] = "positions"
    meaning: ClassVar[str] = MEANING
    looks: Sequence[TableAnalysis]
    references: Sequence[TableAnalysis]
    seed: int = 0

    def summary(self) -> Summary:
        """A paragraph for each table; a row for each, the references last."""
        rows: list[list[Cell]] = []
        for look in (*self.looks, *self.references):
            decoded = look.decoded
            rows.append(
                [
                    look.title,
                    f"{look.table.grid[0]}×{look.table.grid[1]} × {look.table.rows.shape[1]}",
                    percent(look.spectrum.explained_by(3)),
                    look.spectrum.components_for(0.9),
                    f"{decoded.two.mean:.3f}",
                    f"{decoded.chance_two:.2f}",
                ]
            )
        header = ["table", "grid × channels", "3-PCA", "for 90 %", "2-D error, patches", "blind"]
        sentences = "\n\n".join(map(in_words, self.looks))
        notes = (
            () if has_umap() else ("UMAP is not installed, so its picture is missing: `pip install 'situs[umap]'`.",)
        )
        numbers = tuple(
            (f"{look.decoded.two.mean:.2f} patches",
             f"error of a linear regression on {look.name} (blind guess: {look.decoded.chance_two:.2f})")
            for look in self.looks[:3]
        )  # fmt: skip
        return Summary(sentences, (Table("Position vectors", header, rows),), notes, numbers)

    @property
    def title(self) -> str:
        """Of the page."""
        return f"Positions of {', '.join(dict.fromkeys(look.name for look in self.looks))}"

    def figures(self) -> list[Figure]:
        """For each model: principal components, UMAP and similarity of the places; the spectra of all."""
        figures = [figure for number, look in enumerate(self.looks, start=1) for figure in self._looked(look, number)]
        shown = max(look.spectrum.components_for(0.99) for look in self.looks) + 1
        series = {}
        for look in (*self.looks, *self.references):
            energy = 100 * np.asarray(look.spectrum.energy[:shown])
            series[look.title] = (np.arange(1, len(energy) + 1), energy)
        caption = "Share of the energy Σσ² that is in the n largest singular values σ (MJP's Figure 4)."
        values = (series, "number n of singular values", "accumulated energy, %")
        return [*figures, Figure("energy", caption, "figures.curves", values, section=SPECTRUM)]

    def _looked(self, look: TableAnalysis, number: int) -> list[Figure]:
        def figure(name: str, caption: str, draw: str, values: tuple[Any, ...], section: str, **options: Any) -> Figure:
            return Figure(
                name if number == 1 else f"{name}-{number}", f"{look.title}: {caption}", draw, values, options, section
            )

        drawn, sheets, (h, w) = [], "places.sheets", look.table.grid
        for dims, what in ((2, "plane of the two"), (3, "space of the three")):
            caption = f"the {what} largest principal components, with their shares of the variance."
            values = look.sheets(look.components.points[:, :dims], look.axes[:dims])
            drawn.append(figure(f"pca-{dims}d", caption, sheets, values, SHEETS))
        if has_umap() and len(look.table.rows) >= FEWEST:
            points = umap_points(look.table.rows, seed=self.seed)
            caption = f"UMAP with {min(NEIGHBOURS, len(points) - 1)} neighbours. Large distances mean little."
            drawn.append(figure("umap", caption, sheets, look.sheets(points, ("UMAP, 1st", "UMAP, 2nd")), SHEETS))
        rows, columns, chosen = spread_places((h, w))
        maps = similarities(look.table.rows, chosen).reshape(len(rows), len(columns), h, w)
        some = "" if len(chosen) == h * w else f" The figure has maps for {len(chosen)} evenly spaced positions."
        caption = f"each map shows the similarity of all {h} × {w} positions to the ringed position.{some}"
        values = ({look.title: maps}, rows, columns, "cosine similarity")
        drawn.append(figure("cosine", caption, "places.mosaics", values, "Similarity of the positions", limits=(-1, 1)))
        values = look.sheets(look.decoded.guesses[:, ::-1], ("predicted column", "predicted row"), as_image=True)
        caption = "the predicted position for each vector, by a regression that was fitted without this vector."
        return [*drawn, figure("guesses", caption, sheets, values, READ)]

    def details(self) -> list[Table]:
        """MJP's Tables 6 and 8, the rows of the paper last."""
        looks = (*self.looks, *self.references)
        shares = [[look.title, *(points(look.spectrum.explained_by(count)) for count in SHOWN)] for look in looks]
        errors: list[list[Cell]] = []
        for look in looks:
            decoded = look.decoded
            both = [f"{spread.mean:.3f}\u202f±\u202f{spread.std:.3f}" for spread in (decoded.one, decoded.two)]
            blind = [f"{decoded.chance_one:.2f}", f"{decoded.chance_two:.2f}", percent(decoded.exact, 0)]
            errors.append([look.title, *both, f"{decoded.rows:.3f}", f"{decoded.columns:.3f}", *blind])
        errors += [[f"MJP's paper: {name}", one, two, *[None] * 5] for name, one, two in TABLE_8]
        header = ["mean absolute error", "1-D", "2-D", "row", "column", "blind, 1-D", "blind, 2-D", "right position"]
        return [
            Table(
                SPECTRUM,
                ["explained variance, %", *(f"k = {count}" for count in SHOWN)],
                [*shares, *TABLE_6],
                "Variance explained by the k largest principal components of the table, without prefix tokens. The "
                'rows that begin with "MJP\'s paper" are copied from Table 6 of that paper (models with 14 × 14 '
                "positions and 384 channels).",
            ),
            Table(
                READ,
                header,
                errors,
                f"Cross-validation in {self.looks[0].decoded.folds} folds. 1-D errors are in positions "
                "along the reading order. The other errors are in patches. ± is the standard deviation between "
                "folds. A blind guess is the mean position of the other folds. The last column is the share of "
                "predictions that round to the true position. "
                f"{' '.join(filter(None, (look.few_places for look in self.looks)))}",
            ),
        ]

    def numbers(self) -> dict[str, Any]:
        """Every number of every table."""
        sets = {"models": self.looks, "references": self.references}
        return {name: [to_json(look) for look in looks] for name, looks in sets.items()}


def analyze_positions(models: Iterable[AnyModel], *, folds: int = FOLDS, seed: int = 0) -> PositionTables:
    """The position embeddings of models: their spectrum, and a linear regression from them to places.

    models: whatever `open_model` takes. folds: of the cross-validated regression. seed: of the folds and of UMAP.
    """
    looks, opened = [], open_several(models, seed)
    if not opened:
        raise SitusError("name at least one model", field="model")
    for name, model in opened.items():
        note = "" if model.positions else "In training, this model did not use its position vectors."
        tables = tables_of(model.backbone)
        looks += [look_at(name, table, folds=folds, seed=seed, note=note) for table in tables]
    references = look_at_references(looks[0].table, folds=folds, seed=seed)
    facts = {"folds": looks[0].decoded.folds, "seed": seed}
    facts |= {"situs": __version__} | {name: version(name) for name in ("torch", "timm", "scikit-learn")}
    provenance = Provenance(facts, tuple(model.origin for model in opened.values()))
    return PositionTables(looks, references, seed, provenance=provenance)


def look_at(name: str, table: PositionTable, *, folds: int = FOLDS, seed: int = 0, note: str = "") -> TableAnalysis:
    """All measurements of one table; the same for the same seed."""
    rows = table.rows
    decoded = decode_places(rows, table.grid, folds=folds, seed=seed)
    return TableAnalysis(name, table, spectrum(rows), principal(rows), decoded, note)


def look_at_references(table: PositionTable, *, folds: int = FOLDS, seed: int = 0) -> list[TableAnalysis]:
    """The measurements of reference tables of the same shape."""
    count, dim = table.rows.shape
    references = reference_tables(count, table.grid, dim, seed)
    return [
        look_at(name, PositionTable("reference", rows, table.grid), folds=folds, seed=seed)
        for name, rows in references.items()
    ]


def grasp(look: TableAnalysis) -> str:
    """How well the vectors encode the grid, as a predicate."""
    left = look.decoded.left
    return (
        "encodes the grid"
        if left < TAUGHT
        else "roughly encodes the grid"
        if left < ROUGH
        else "does not encode the grid"
    )


def in_words(look: TableAnalysis) -> str:
    """The numbers of one table as a paragraph."""
    decoded, three = look.decoded, look.spectrum.explained_by(3)
    most = look.spectrum.components_for(0.9)
    return (
        f"`{look.name}`, {look.table.kind} of {look.shape}: the three largest principal components explain "
        f"{percent(three)} of the variance; {counted(most, 'components')} explain 90 %. A linear regression predicts "
        f"row and column of a position from its vector, with a mean error of {decoded.two.mean:.2f} patches "
        f"(blind guess: {decoded.chance_two:.2f}), so the {look.table.kind} {grasp(look)}."
        + (f" {look.note}" if look.note else "")
    )


def to_json(look: TableAnalysis) -> dict[str, Any]:
    """Every number of one table."""
    decoded = look.decoded
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
            "folds": decoded.folds,
            "places_fitted_on": decoded.fitted,
            "mae_1d": decoded.one._asdict(),
            "mae_2d": decoded.two._asdict(),
            "mae_row": decoded.rows,
            "mae_column": decoded.columns,
            "blind_1d": decoded.chance_one,
            "blind_2d": decoded.chance_two,
            "exact": decoded.exact,
        },
    }


# --- the tables ---------------------------------------------------------------------------------------------------

INSTEAD = (
    "`situs evaluate attention` shows how its heads use positions, and `evaluate position` (kind `all`) shows what its "
    "features know about position"
)


class PositionTable(NamedTuple):
    """kind: in words. rows: the vectors of the places, row by row of `grid`, [N, D] float64 on the CPU."""

    kind: str
    rows: Tensor
    grid: tuple[int, ...]


def tables_of(backbone: Backbone) -> tuple[PositionTable, ...]:
    """A model's position embeddings: its table, its rotation, or both (EVA-02); a model without any is refused."""
    backbone.require("tokens")
    with torch.enable_grad():  # whether a table is learned shows in its gradient
        places = backbone.positions()
    tables, grid = [], (1, *backbone.grid)[-2:]  # a sequence is drawn as one row
    if places.table is not None:
        rows = places.table.detach().double().cpu()
        tables.append(PositionTable(_kind_of(rows, grid, places.table.requires_grad), rows, grid))
    if places.rotary is not None:
        tables.append(PositionTable("rotation", rotation_features(places.rotary), grid))
    if not tables:
        raise SitusError(f"{backbone.name}: {_nothing(backbone, places)}")
    if backbone.num_tokens < 2:
        raise SitusError(f"{backbone.name}: has a single position, so there is nothing to compare", field="img_size")
    for table in tables:
        _check_rows(backbone.name, table)
    return tuple(tables)


def rotation_features(rotary: Tensor) -> Tensor:
    """The sines and cosines that rotate a token at each place, as its vector: [L, 1, H, N, 2d] -> [N, L * H * 2d].

    A rotary model uses a place only by rotating, so these hold all it knows of it. They enter products of queries and
    keys and are never added to a token: their lengths and angles do not compare with those of a learned table.
    """
    count = rotary.shape[-2]
    return rotary.detach().double().cpu()[:, 0].movedim(-2, 0).reshape(count, -1)


def reference_tables(count: int, grid: tuple[int, ...], dim: int, seed: int = 0) -> dict[str, Tensor]:
    """Tables of the same shape for reference: sines and cosines of row and column, and random numbers."""
    noise = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    even = max(dim - dim % 4, 4)
    return {"sin-cos (reference)": sincos(grid, even).double(), "random (reference)": noise * 0.02}


def _kind_of(rows: Tensor, grid: tuple[int, ...], learned: bool) -> str:
    # By its values: an export does not say whether its table was trained.
    dim = rows.shape[1]
    if dim % 4 == 0 and torch.allclose(rows, sincos(grid, dim).double(), atol=2e-3):
        return "sin-cos table"
    return "learned table" if learned else "fixed table"


def _nothing(backbone: Backbone, places: Positions) -> str:
    if places.bias is not None:
        return f"its positions are biases between pairs of tokens, so no position has a vector; {INSTEAD}"
    if "rows" in backbone.refusals:
        return f"has no table of positions: {backbone.refusals['rows']}; {INSTEAD}"
    return (
        "has no positions, so there is nothing to analyse; `situs evaluate position` (kind `all`) shows what its "
        "features know about position"
    )


def _check_rows(name: str, table: PositionTable) -> None:
    if not torch.isfinite(table.rows).all():
        raise SitusError(f"{name}: its {table.kind} contains NaN or infinite numbers")
    if not table.rows.any():
        raise SitusError(
            f"{name}: its {table.kind} is all zeros, so there is nothing to analyse (`situs export` writes zeros "
            "here if the model was trained without positions)"
        )
    if not (table.rows - table.rows[0]).any():
        raise SitusError(f"{name}: its {table.kind} has the same vector for all positions, so no position can be read")


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
    """The spectrum of a table [N, D] of the patches' places, without prefix tokens.

    Definition 1 gives Σσ(PV)²/Σσ(P)². Table 6 uses PCA, which centres P; Figure 4 uses the singular values of P, which
    does not: so do we.
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
    """Errors of a linear regression on the vectors of places that it was not fitted on.

    one: mean absolute error of the index (Table 8's 1D). two: of (row, column), mean of both. rows, columns: of each.
    chance_one, chance_two: of the mean place of the other folds, a blind guess. folds: how many. fitted: places in a
    fit. exact: share of places whose prediction, rounded, is right. guesses: [N, 2].
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
        """The error over that of a blind guess: 0 is perfect, 1 is no better."""
        return self.two.mean / self.chance_two


def decode_places(table: Tensor, grid: tuple[int, ...], *, folds: int = FOLDS, seed: int = 0) -> Decoded:
    """Cross-validated least squares from the vectors [N, D] to the index and to (row, column).

    The folds are shuffled; there are at most as many folds as places. With fewer places than channels the solution of
    least norm is taken, as scikit-learn does.
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
    for fitted, test in KFold(folds, shuffle=True, random_state=seed).split(vectors):
        guesses[test] = LinearRegression().fit(vectors[fitted], targets[fitted]).predict(vectors[test])
        middles[test] = targets[fitted].mean(axis=0)
        members.append(test)
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
        fitted=min(len(vectors) - len(test) for test in members),
        exact=float(right.mean()),
        guesses=guesses[:, 1:],
    )


def _over(errors: NDArray[np.float64], members: list[NDArray[np.intp]]) -> Spread:
    """Mean and standard deviation of the folds' means."""
    means = [float(errors[fold].mean()) for fold in members]
    return Spread(float(np.mean(means)), float(np.std(means)))


class Components(NamedTuple):
    """points: [N, k], the places along the k largest principal components. shares: of the variance, [k]."""

    points: NDArray[np.float64]
    shares: tuple[float, ...]


def principal(table: Tensor, count: int = 3) -> Components:
    """The places of a table [N, D] in its `count` largest principal components; those that do not exist are 0."""
    from sklearn.decomposition import PCA

    rows = table.double().cpu().numpy()
    existing = min(count, *rows.shape)
    pca = PCA(n_components=existing, svd_solver="full")
    points = pca.fit_transform(rows)
    missing = count - existing
    shares = (*pca.explained_variance_ratio_.tolist(), *(0.0,) * missing)
    return Components(np.pad(points, ((0, 0), (0, missing))), shares)


def has_umap() -> bool:
    """Whether the extra [umap] is installed."""
    return find_spec("umap") is not None


def umap_points(table: Tensor, *, seed: int = 0) -> NDArray[np.float64]:
    """The places of a table [N, D] in the plane by UMAP, [N, 2]; only small distances mean something."""
    rows = table.double().cpu().numpy()
    if len(rows) < FEWEST:
        raise SitusError(f"UMAP needs at least {FEWEST} positions, but the table has {len(rows)}")
    if not has_umap():
        raise missing_extra("umap-learn", "umap", "the UMAP picture")
    from umap import UMAP  # pyright: ignore[reportMissingImports]

    # One thread: only then does a seed fix the layout, and UMAP warns about more.
    layout = UMAP(n_components=2, n_neighbors=min(NEIGHBOURS, len(rows) - 1), random_state=seed, n_jobs=1)
    return np.asarray(layout.fit_transform(rows), dtype=np.float64)


def similarities(table: Tensor, places: Tensor) -> Tensor:
    """Cosine similarity of the vectors of `places` [k] and of every place, [k, N], after subtracting the mean vector:
    a vector common to all places would make them all similar."""
    centred = table - table.mean(dim=0)
    unit = centred / centred.norm(dim=1, keepdim=True).clamp(min=1e-30)
    return unit[places] @ unit.T


def spread_places(grid: tuple[int, ...]) -> tuple[list[int], list[int], Tensor]:
    """At most five rows and five columns at equal distances over the grid, and the places where they meet."""
    rows, columns = (torch.arange(n := min(5, side)).add(0.5).mul(side / n).floor().long() for side in grid)
    return rows.tolist(), columns.tolist(), (rows[:, None] * grid[1] + columns).flatten()
