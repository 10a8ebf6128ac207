"""How much a model knows of position: in its embeddings, its features and its answers.

Linear readers of a patch's place from its features, at every depth, are fitted in closed form. One pass over half of
the images gathers two sums per depth: of the features at each place, and of their products. They give two readers:
ridge regression to (row, column), and linear discriminant analysis with the places as classes. The ridge is chosen by
two-fold cross-validation, from the same sums. A second pass tests the readers on the other images. Three conditions
separate where the knowledge comes from:

    as it is              the model as it was trained
    positions removed     from the content of the patches alone
    patches shuffled      from the positions alone: they stay, under patches in random order
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.core.permutation import random_permutation
from situs.core.position import coordinates
from situs.core.random import uniform
from situs.core.tokens import take
from situs.data.batch import Batch
from situs.errors import SitusError
from situs.limits import check_values
from situs.measure.consistency import Consistency, measure_consistency
from situs.measure.features import Layer, patch_layers
from situs.measure.position.vectors import TableAnalysis, grasp, look_at, tables_of, to_json
from situs.methods.base import Method
from situs.progress import task
from situs.results import Cell, Figure, Result, Summary, Table, percent

OWN, REMOVED, SHUFFLED = "as it is", "positions removed", "patches shuffled"


@dataclass(frozen=True)
class Probed:
    """Readings by condition, each in the model's order. fitted, tested: images."""

    readings: dict[str, list[PlaceReading]]
    fitted: int
    tested: int


def conditions_of(backbone: Backbone, positions: bool) -> tuple[str, ...]:
    """The conditions of a model: one without positions, or trained without them, has nothing to remove."""
    return (OWN, REMOVED, SHUFFLED) if positions and backbone.positions().kinds else (OWN,)


@torch.no_grad()
def probe_places(backbone: Backbone, batches: Iterable[Batch], *, positions: bool = True, seed: int = 0) -> Probed:
    """Reads places from the features of a model in eval mode. batches: iterated twice, in the same order.

    Every other image fits the readers, the others test them. positions: False for a model trained without them.
    """
    backbone.require("tokens")
    if backbone.num_tokens < 2:
        raise SitusError(f"{backbone.name}: has only one patch, but this analysis needs at least two", field="img_size")
    halves: dict[Key, tuple[Sums, Sums]] = {}

    def fit(first: int, key: Key, layer: Layer) -> None:
        pair = halves.setdefault(key, (Sums(layer.grid), Sums(layer.grid)))
        for which, half in enumerate(pair):
            half.add(layer.patches[(which - first) % 2 :: 2])

    _walk(backbone, batches, 0, positions, seed, fit)
    readers = {key: Reader(*pair) for key, pair in halves.items()}
    _walk(backbone, batches, 1, positions, seed, lambda _, key, layer: readers[key].read(layer.patches))
    if not readers or not all(reader.images for reader in readers.values()):
        reason = "a linear probe of positions needs at least two samples: one to fit the probe, and one to test it"
        raise SitusError(reason, field=("count", "data"))
    readings: dict[str, list[PlaceReading]] = {}
    for (condition, depth), reader in readers.items():
        readings.setdefault(condition, []).append(reader.reading(depth))
    fitted, tested = (sum(half.images for half in next(iter(halves.values()))), next(iter(readers.values())).images)
    return Probed(readings, fitted, tested)


Key = tuple[str, str]
"""Condition and depth."""


def _walk(
    backbone: Backbone,
    batches: Iterable[Batch],
    part: int,
    positions: bool,
    seed: int,
    see: Callable[[int, Key, Layer], None],
) -> None:
    """Calls `see` with every depth of images part, part + 2, … under each condition, and the number of the first."""
    conditions = conditions_of(backbone, positions)
    passed = used = 0
    for batch in batches:
        chosen = slice((part - passed) % 2, None, 2)
        passed += len(batch.ids)
        ids = batch.ids[chosen]
        if not len(ids):
            continue
        tokens = backbone.embed(batch.inputs[chosen])
        for condition in conditions:
            inputs = tokens
            if condition == SHUFFLED:
                noise = uniform(seed, 0, ids, "audit.positions", (tokens.shape[1],))
                inputs = take(tokens, random_permutation(noise))
            places = backbone.positions() if positions and condition != REMOVED else None
            patch_layers(backbone, inputs, places, lambda layer, n=used, c=condition: see(n, (c, layer.depth), layer))
        used += len(ids)


# --- the readers ----------------------------------------------------------------------------------------------------
# With the features x at place n of image b, both readers follow from P_n = Σ_b x and Q = Σ x xᵀ.


RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
"""Candidates to add to the diagonal of the features' correlation matrix, whose diagonal is 1."""
MIDDLE = 1e-2
"""The ridge where there is no second half to choose it on."""


@dataclass(frozen=True)
class PlaceReading:
    """Scores of the readers at one depth, on images that they were not fitted on.

    error: mean absolute error in patches, mean of row and column. r2: of the regression, mean of the axes. right: share
    of patches whose exact position is predicted. blind_*: of a guess without features. ridge: the one that was chosen.
    """

    depth: str
    grid: tuple[int, ...]
    error: float
    r2: float
    right: float
    blind_error: float
    blind_right: float
    ridge: float

    @property
    def left(self) -> float:
        """The error over that of a blind guess: 0 is perfect, 1 is no better."""
        return self.error / self.blind_error


class Sums:
    """Over images of one depth: places P [N, D] and products Q [D, D], float64 on the features' device."""

    def __init__(self, grid: tuple[int, ...]) -> None:
        self.grid, self.images = grid, 0
        self.places = self.products = torch.zeros((), dtype=torch.float64)

    def add(self, features: Tensor) -> None:
        """features: [B, N, D]."""
        x = features.double()
        flat = x.flatten(0, 1)
        self.places, self.products = self.places + x.sum(dim=0), self.products + flat.T @ flat
        self.images += len(features)

    def __add__(self, other: Sums) -> Sums:
        both = Sums(self.grid)
        both.images = self.images + other.images
        both.places, both.products = self.places + other.places, self.products + other.products
        return both


class Moments(NamedTuple):
    """mean, scale: of each channel, [D]. total: their correlations, [D, D]. means: of each place, as scores [N, D]."""

    mean: Tensor
    scale: Tensor
    total: Tensor
    means: Tensor


def moments(sums: Sums) -> Moments:
    """The statistics that both readers need."""
    means = sums.places / sums.images
    mean = means.mean(dim=0)
    covariance = sums.products / (sums.images * len(means)) - torch.outer(mean, mean)
    scale = covariance.diagonal().clamp(min=0).sqrt()
    # A channel that hardly varies is rounding error: an infinite scale removes it.
    scale = torch.where(scale > 1e-7 * (scale.max() + mean.abs()), scale, torch.inf)
    return Moments(mean, scale, covariance / torch.outer(scale, scale), (means - mean) / scale)


def regress(stats: Moments, targets: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Ridge regression of the places' targets [N, sides]: weights A [D, sides] and offset b, so that ŷ = x A + b."""
    centre = targets.mean(dim=0)
    weights = _solve(stats.total, stats.means.T @ (targets - centre) / len(targets), ridge)
    weights = weights / stats.scale[:, None]
    return weights, centre - stats.mean @ weights


def squared_error(sums: Sums, targets: Tensor, weights: Tensor, offset: Tensor) -> Tensor:
    """Σ ‖x A + b - y‖² over images, from their sums alone."""
    residual = offset - targets
    cross = ((sums.places @ weights) * residual).sum()
    return (weights * (sums.products @ weights)).sum() + 2 * cross + sums.images * residual.square().sum()


def choose_ridge(first: Sums, second: Sums, targets: Tensor) -> float:
    """The one of `RIDGES` with the lowest error of each half under a regression on the other half."""
    if not (first.images and second.images):
        return MIDDLE
    pairs = [(moments(a), b) for a, b in ((first, second), (second, first))]
    errors = [sum(squared_error(b, targets, *regress(a, targets, r)) for a, b in pairs) for r in RIDGES]
    return RIDGES[int(torch.stack(errors).argmin())]  # pyright: ignore[reportArgumentType]


class Reader:
    """Both readers of one depth, and their scores so far on other images."""

    def __init__(self, first: Sums, second: Sums) -> None:
        both = first + second if second.images else first
        self.grid = both.grid
        self.targets = coordinates(both.grid, both.places.device).double()
        self.ridge = choose_ridge(first, second, self.targets)
        stats = moments(both)
        self.mean, self.scale = stats.mean, stats.scale
        self.weights, self.offset = regress(stats, self.targets, self.ridge)
        within = stats.total - stats.means.T @ stats.means / len(self.targets)
        self.scores = _solve(within, stats.means.T, self.ridge)
        self.bias = -0.5 * (stats.means * self.scores.T).sum(dim=1)
        sides = self.targets.shape[1]
        self.tally = torch.zeros(2 + sides, dtype=torch.float64, device=self.targets.device)  # |e|, e² by axis, right
        self.images = 0

    def read(self, features: Tensor) -> None:
        """features: [B, N, D] of other images."""
        x = features.double()
        errors = x @ self.weights + self.offset - self.targets
        named = ((x - self.mean) / self.scale @ self.scores + self.bias).argmax(dim=-1)
        right = (named == torch.arange(named.shape[1], device=named.device)).sum()
        squares = errors.square().sum(dim=(0, 1))
        self.tally += torch.stack([errors.abs().mean(dim=-1).sum(), *squares, right.double()])
        self.images += len(features)

    def reading(self, depth: str) -> PlaceReading:
        """The scores so far."""
        error, *squares, right = (self.tally / (self.images * len(self.targets))).tolist()
        if not math.isfinite(error):
            raise SitusError(
                f"{depth}: its features contain NaN or infinite numbers, so no position can be read from them"
            )
        away = self.targets - self.targets.mean(dim=0)
        spread = away.square().mean(dim=0).tolist()
        # An axis with one place has no variance: it is left out of the mean.
        shares = [1 - square / all_ for square, all_ in zip(squares, spread, strict=True) if all_ > 0]
        blind = float(away.abs().mean())
        r2 = sum(shares) / len(shares)
        return PlaceReading(depth, self.grid, error, r2, right, blind, 1 / len(away), self.ridge)


def _solve(matrix: Tensor, right: Tensor, ridge: float) -> Tensor:
    """(matrix + ridge · 1)⁻¹ right, for a positive semidefinite matrix (up to rounding)."""
    eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    return torch.linalg.solve(matrix + ridge * eye, right)


# --- all of it together -----------------------------------------------------------------------------------------------


RATIOS = (0.15, 0.5, 0.9)
"""γ of the shuffles: MJP's Table 1, half, nearly all."""
SURE, UNSURE = 0.2, 0.9
"""Error over that of a blind guess: below the first a place is known well, above the second not at all."""
ROUNDING = 1e-5
"""Relative rounding error of float32 through a model."""

CONDITIONS = {
    OWN: "unchanged",
    REMOVED: "positions removed (content alone)",
    SHUFFLED: "patches shuffled (positions alone)",
}
MEANING = """
Linear probes predict the position of a patch from its features, at every depth. They are fitted on half of the samples
and tested on the other half. One probe is a ridge regression that predicts row and column. The other probe is a
linear discriminant over all positions. With the positions removed, a probe can use only the content of the patches.
With the patches shuffled, a probe can use only the positions that the model adds. The features reveal at least as much
about positions as a linear probe finds: another probe, or more samples, may find more. A further regression predicts
positions from the position embeddings. It is fitted on some positions, and tested on the others. The probes of the
features are fitted on all positions; they are tested on the same positions, but in other samples.

Another test shuffles the patches inside a mask made of rectangles. γ is the fraction of patches in the mask. Diff.Norm
is the mean distance between the features of a sample (the input of the classification head) before and after the
shuffle. "Mask hidden" means that the model does not know which patches are shuffled: the position embeddings stay in
place, so the shuffled patches have wrong positions. "Mask known" means that the patches in the mask lose their
positions. `situs evaluate consistency` measures this effect in more detail.

Permutation equivariance of the transformer blocks means: if the tokens are permuted before the blocks, the output of
the blocks is permuted in the same way, and the gradients of all weights stay the same. With RoPE, the rotations are
permuted together with the tokens.
"""
FEATURES = "The position of a patch, read from its features"
VECTORS, SHARE = "The position embeddings", "share of the variance, %"

KINDS = {
    "table": "a vector added to each token",
    "rotary": "rotations of queries and keys",
    "bias": "biases between pairs of tokens",
}


@dataclass(frozen=True)
class PositionAudit(Result):
    """All measurements. kinds: of `Positions`. trained: whether the training used them. looks: at the position
    embeddings, or none and `no_vectors` says why. rows: permutation equivariance by `situs.locks.verify`, or None.
    """

    file: ClassVar[str] = "positions-audit"
    meaning: ClassVar[str] = MEANING

    name: str
    grid: tuple[int, ...]
    kinds: tuple[str, ...]
    trained: bool
    hierarchical: bool
    reads: str
    looks: tuple[TableAnalysis, ...]
    no_vectors: str
    probed: Probed
    shuffled: tuple[Consistency, ...]
    rows: Mapping[str, Any] | None = None

    def summary(self) -> Summary:
        """The verdict; a row for each depth."""
        first, last = self.probed.readings[OWN][0], self.probed.readings[OWN][-1]
        numbers = (
            (percent(first.right, 0), "of the positions can be read before the blocks"),
            (
                percent(last.right, 0),
                f"of the positions after the final norm (chance: {percent(last.blind_right)})",
            ),
        )
        return Summary(verdict(self), (_read_table(self),), numbers=numbers)

    @property
    def title(self) -> str:
        """Of the page."""
        return f"What {self.name} knows of position"

    def figures(self) -> list[Figure]:
        """The readings at every depth under each condition; the position embeddings and their spectrum."""
        names = [reading.depth.replace("embedding", "embed") for reading in self.probed.readings[OWN]]
        last, figures = self.probed.readings[OWN][-1], []
        for name, label, scale, values, blind, caption in (
            ("named", "positions predicted correctly, %", 100, "right", last.blind_right,
             "Share of the patches whose exact position is predicted."),
            ("error", "mean error, patches", 1, "error", last.blind_error,
             "Mean error of the predicted row and column. A low error means that the features reveal the position."),
        ):  # fmt: skip
            series = {
                CONDITIONS[condition]: (range(len(names)), [scale * getattr(reading, values) for reading in readings])
                for condition, readings in self.probed.readings.items()
            }
            options = {"x_names": names, "level": ("blind", scale * blind)}
            figures.append(Figure(name, caption, "figures.curves", (series, "after block", label), options, FEATURES))
        for number, look in enumerate(self.looks, start=1):
            suffix = "" if number == 1 else f"-{number}"
            guesses = look.decoded.guesses[:, ::-1]
            panels = [
                ("principal components", look.components.points[:, :2], look.axes[:2]),
                ("read by regression", guesses, ("predicted column", "predicted row"), "row", True),
            ]
            caption = (
                f"{look.table.kind.capitalize()} of {look.shape}. Lines join neighbouring positions; lines along the "
                "same row have the same colour. `situs evaluate position` analyses these vectors in more detail."
            )
            if look.table.kind == "learned table":
                caption += (
                    " The gradient of a learned table can reveal the images of a training step: "
                    "`situs audit gradients` measures how much."
                )
            values = (panels, look.table.grid)
            figures.append(Figure(f"vectors{suffix}", caption, "places.sheets", values, section=VECTORS))
            shares = [100 * share for share in look.spectrum.explained[:20]]
            values = ({look.table.kind: (range(1, len(shares) + 1), shares)}, "principal component", SHARE)
            caption = "The share of the variance that each principal component explains."
            figures.append(Figure(f"spectrum{suffix}", caption, "figures.curves", values, section=VECTORS))
        return figures

    def details(self) -> list[Table]:
        """The effect of shuffled patches, and permutation equivariance."""
        vectors = [] if self.looks else [Table(VECTORS, ["vectors", "why"], [["none", self.no_vectors]])]
        return [*vectors, _shuffled_table(self), _law_table(self)]

    def numbers(self) -> dict[str, Any]:
        """Every number."""
        readings = {c: [asdict(reading) for reading in depths] for c, depths in self.probed.readings.items()}
        return {
            "name": self.name,
            "grid": list(self.grid),
            "kinds": list(self.kinds),
            "positions_in_training": self.trained,
            "verdict": verdict(self),
            "vectors": [to_json(look) for look in self.looks],
            "no_vectors_why": self.no_vectors or None,
            "images_fitted_on": self.probed.fitted,
            "images_read": self.probed.tested,
            "readings": readings,
            "shuffled": [row.numbers() for row in self.shuffled],
            "row_law": self.rows,
        }


def measure_positions(
    name: str,
    model: Backbone | Method,
    batches: Iterable[Batch],
    *,
    positions: bool = True,
    classifier: bool = False,
    ratios: Sequence[float] = RATIOS,
    seed: int = 0,
) -> PositionAudit:
    """Measures a backbone, or a run's method with its tokens, on samples that are iterated three times.

    positions: for a backbone, whether its training used them. classifier: whether its head was trained.
    """
    backbone = model.backbone if isinstance(model, Method) else model
    backbone.require("tokens")
    check_values("ratios", ratios, "[0, 1]")  # before the long part
    positions = model.sees_positions if isinstance(model, Method) else positions
    with task("positions", 3) as steps:
        steps.tell(0, "position embeddings")
        looks, no_vectors = _look(name, backbone, positions, seed)
        steps.tell(1, "features")
        probed = probe_places(backbone, batches, positions=positions, seed=seed)
        steps.tell(2, "answers")
        shuffled = measure_consistency(
            model, batches, ratios, seed=seed, positions=positions, classifier=classifier, no_top1="it is not measured"
        )
    return PositionAudit(
        name=name,
        grid=backbone.grid,
        kinds=backbone.positions().kinds,
        trained=positions,
        hierarchical="take" in backbone.refusals,
        reads=backbone.head_input,
        looks=looks,
        no_vectors=no_vectors,
        probed=probed,
        shuffled=tuple(shuffled.rows),
    )


def _look(name: str, backbone: Backbone, positions: bool, seed: int) -> tuple[tuple[TableAnalysis, ...], str]:
    if not positions:
        return (), "it was trained without positions, so its position embeddings mean nothing"
    try:
        return tuple(look_at(name, table, seed=seed) for table in tables_of(backbone)), ""
    except SitusError as error:
        return (), str(error).removeprefix(f"{backbone.name}: ")


# --- in words ------------------------------------------------------------------------------------------------------


def verdict(audit: PositionAudit) -> str:
    """One paragraph: what positions the model has, and what its features and answers know of them."""
    grid = " × ".join(map(str, audit.grid))
    if audit.kinds and audit.trained:
        parts = [f"`{audit.name}` encodes its {grid} positions by {' and by '.join(KINDS[k] for k in audit.kinds)}."]
    elif audit.hierarchical:
        parts = [f"`{audit.name}` adds no positions to its {grid} tokens, but its windows partly encode positions."]
    else:
        parts = [f"`{audit.name}` uses no positions: it {'was trained without them' if audit.kinds else 'has none'}."]
    parts += [
        f"Its {look.table.kind} {grasp(look)}: a linear regression predicts row and column with a mean error of "
        f"{look.decoded.two.mean:.2f} patches (blind guess: {look.decoded.chance_two:.2f})."
        for look in audit.looks
    ]
    return " ".join(filter(None, [*parts, _features(audit), _source(audit), _answers(audit), _law(audit)]))


def _features(audit: PositionAudit) -> str:
    first, *_, last = audit.probed.readings[OWN]
    how = (
        "reveal the position of a patch"
        if last.left < SURE or last.right > 0.5
        else "reveal roughly where a patch is"
        if last.left < UNSURE
        else "reveal no position to a linear probe"
    )
    return (
        f"Its features {how}. The fraction of patches whose exact position a linear probe finds is "
        f"{percent(first.right, 0)} before the blocks, and {percent(last.right, 0)} after the final norm (chance: "
        f"{percent(last.blind_right)}). The mean error after the final norm is {last.error:.2f} patches (blind guess: "
        f"{last.blind_error:.2f})."
    )


def _source(audit: PositionAudit) -> str:
    last = {condition: readings[-1] for condition, readings in audit.probed.readings.items()}
    if REMOVED not in last:
        return "" if last[OWN].left >= UNSURE else "The features know positions only from the content of the patches."
    content = last[REMOVED].error
    if last[REMOVED].left >= UNSURE:
        return (
            f"If the model runs without positions, the error is {content:.2f} patches (blind guess: "
            f"{last[REMOVED].blind_error:.2f}), so a linear probe fitted on {audit.probed.fitted} samples finds "
            "no position in the content. As far as this probe shows, the features know positions only from the "
            "position embeddings."
        )
    return (
        f"From the content alone (positions removed), a linear probe predicts positions with an error of {content:.2f} "
        f"patches. From the positions alone (patches shuffled), its error is {last[SHUFFLED].error:.2f} patches."
    )


def _answers(audit: PositionAudit) -> str:
    # A mask of one patch has nothing to shuffle.
    rows = [row for row in audit.shuffled if not row.mask_known and row.masked > 1 and row.clean_norm]
    if not rows:
        return ""
    row = rows[0]
    moved = row.diff_norm / row.clean_norm
    if max(row.diff_norm / row.clean_norm for row in rows) < ROUNDING:
        return f"Shuffling the patches does not change the {audit.reads}, so the model does not use their order."
    shuffled, far = percent(row.ratio, 0), percent(moved, 0)
    text = f"If {shuffled} of the patches are shuffled, the {audit.reads} changes by {far} of its norm"
    if row.consistency is None:
        return f"{text}."
    return f"{text}, and {percent(row.consistency, 0)} of the model's answers stay the same."


def _law(audit: PositionAudit) -> str:
    if audit.rows is None:
        return ""
    reason = audit.rows["reason"]
    if audit.rows["status"] == "refused":
        return f"The model's blocks are not permutation equivariant: {reason}."
    worst = max(audit.rows["errors"].values())
    because = f" ({reason})" if reason else ""
    rotated = " and from the rotations of RoPE" * ("rotary" in audit.kinds)
    return (
        f"The model's blocks are permutation equivariant, up to an error of {worst:.0e} in float64{because}. The "
        f"blocks know the positions of patches only from the values of the tokens{rotated}, not from their order."
    )


# --- tables of the page --------------------------------------------------------------------------------------------


def _read_table(audit: PositionAudit) -> Table:
    short, rows = {OWN: "own:", REMOVED: "removed:", SHUFFLED: "shuffled:"}, []
    header = ["after"]
    for condition in audit.probed.readings:
        header += [f"{short[condition]} error", *["R²"] * (condition == OWN), "exact position"]
    for depth in zip(*audit.probed.readings.values(), strict=True):
        row: list[Cell] = [depth[0].depth]
        for condition, reading in zip(audit.probed.readings, depth, strict=True):
            row += [f"{reading.error:.2f}", *[f"{reading.r2:.3f}"] * (condition == OWN), percent(reading.right)]
        rows.append(row)
    caption = (
        "The error (in patches) and R² are averaged over row and column. Exact position: the fraction of patches whose "
        "exact position is predicted."
    )
    if audit.hierarchical:
        caption += (
            " This model merges patches between its stages, so its patch grid is coarser at the end than at the start. "
            "The table has rows only for the start and the end, not for each block."
        )
    return Table(FEATURES, header, rows, caption)


def _shuffled_table(audit: PositionAudit) -> Table:
    answers = any(row.consistency is not None for row in audit.shuffled)
    header = ["γ", "mask", "patches", "Diff.Norm", "of its norm"] + ["answers that stay the same"] * answers
    rows: list[list[Cell]] = []
    for row in audit.shuffled:
        share = percent(row.diff_norm / row.clean_norm) if row.clean_norm else None
        mask = "known" if row.mask_known else "hidden"
        cells: list[Cell] = [f"{row.ratio:g}", mask, row.masked, f"{row.diff_norm:.3g}"]
        stay = [None if row.consistency is None else percent(row.consistency)] if answers else []
        rows.append([*cells, share, *stay])
    caption = "" if answers else "The model has no trained classifier, so there are no answers to compare."
    return Table("The effect of shuffled patches", header, rows, caption)


def _law_table(audit: PositionAudit) -> Table:
    title, law, caption = "Permutation equivariance of the blocks: blocks(P s) = P blocks(s)", audit.rows, ""
    if law is None:
        return Table(title, ["check", ""], [["not measured", None]])
    errors = [(f"error in float64, {check}", f"{error:.1e}") for check, error in law["errors"].items()]
    rows: list[Sequence[Cell]] = [["verdict", law["status"]], *errors]
    if law["reason"]:
        rows.append(["reason" if law["status"] == "refused" else "but", law["reason"]])
    first = audit.probed.readings[OWN][0]
    if law["status"] == "holds" and first.right > 10 * first.blind_right:
        caption = (
            "In split learning, permuting the tokens does not hide their order from the server that runs the blocks. A "
            f"server that has {audit.probed.fitted} samples of its own, and the weights of the client's embedding, can "
            "fit a linear probe that predicts positions. This probe predicts the exact position of "
            f"{percent(first.right, 0)} of the tokens that the client sends."
        )
    return Table(title, ["check", ""], rows, caption)
