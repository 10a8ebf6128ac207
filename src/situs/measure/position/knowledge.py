"""How much a model knows of position: in its embeddings, its features and its answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from situs.backbones.base import Backbone
from situs.data.batch import Batch
from situs.errors import SitusError
from situs.limits import check_values
from situs.measure.consistency import Consistency, measure_consistency
from situs.measure.position.readers import OWN, REMOVED, SHUFFLED, PlaceReading, Probed, probe_places
from situs.measure.position.vectors import TableAnalysis, grasp, look_at, tables_of, to_json
from situs.methods.base import Method
from situs.progress import task
from situs.results import Cell, Figure, Result, Summary, Table, percent

RATIOS = (0.15, 0.5, 0.9)
"""γ of the shuffles: MJP's Table 1, half, nearly all."""
SURE, UNSURE = 0.2, 0.9
"""Error over that of a blind guess: below the first a place is known well, above the second not at all."""
ROUNDING = 1e-5
"""Relative rounding error of float32 through a model."""

CONDITIONS = {
    OWN: "as it is",
    REMOVED: "positions removed: from the content",
    SHUFFLED: "patches shuffled: from the positions",
}
MEANING = """
Linear readers are fitted on the patch features of half of the samples and tested on the others, at every depth: a ridge
regression to row and column, and a linear discriminant over all places. Unlike the regression on the position
embeddings, they have seen every place before, in other samples. With the positions removed, only the content of the
patches is left; with the patches shuffled under their positions, only the positions are. A linear reader gives a lower
bound: another reader may find more, and so may the same one with more samples.

Shuffled patches: a share γ of the patches, in a block mask, is shuffled. Diff.Norm is the mean distance by which the
head's input moves. Mask hidden: every place keeps its position and holds a wrong patch. Mask known: the
masked places lose their positions. `situs evaluate consistency` shows more.

Permutation equivariance: if the tokens that enter the blocks are permuted with their rotations, the output must be
permuted in the same way, and the gradients of every weight must stay the same.
"""
FEATURES = "The place of a patch, read from its features"
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

    def reading(self, condition: str, place: int) -> PlaceReading | None:
        """The reading of the first (0) or last (-1) depth under a condition, if any."""
        readings = self.probed.readings.get(condition)
        return None if readings is None else readings[place]

    def summary(self) -> Summary:
        """The verdict and its figures."""
        first, last = self.probed.readings[OWN][0], self.probed.readings[OWN][-1]
        numbers = (
            (percent(first.right, 0), "of the places read from the tokens that enter the blocks"),
            (percent(last.right, 0), f"after the last norm (chance {percent(last.blind_right)})"),
        )
        return Summary(verdict(self), (Table(self.name, ["", ""], list(at_a_glance(self).items())),), numbers=numbers)

    @property
    def title(self) -> str:
        """Of the page."""
        return f"What {self.name} knows of position"

    def figures(self) -> list[Figure]:
        """The readings at every depth under each condition; the position embeddings and their spectrum."""
        names = [reading.depth.replace("embedding", "embed") for reading in self.probed.readings[OWN]]
        last, figures = self.probed.readings[OWN][-1], []
        for name, label, scale, values, blind, caption in (
            ("named", "places predicted right, %", 100, "right", last.blind_right,
             "Share of the patches whose exact place is predicted. High: it is known."),
            ("error", "mean error, patches", 1, "error", last.blind_error,
             "Mean error of a patch's row and column. Low: they are known."),
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
                f"{look.table.kind.capitalize()} of {look.shape}: neighbouring places are joined; lines along a row "
                "share a colour. `situs evaluate position` shows more of the vectors."
            )
            if look.table.kind == "learned table":
                caption += (
                    " The pixels of a training step can be reconstructed from the gradient of a learned table: "
                    "`situs audit gradients` measures it."
                )
            values = (panels, look.table.grid)
            figures.append(Figure(f"vectors{suffix}", caption, "places.sheets", values, section=VECTORS))
            shares = [100 * share for share in look.spectrum.explained[:20]]
            values = ({look.table.kind: (range(1, len(shares) + 1), shares)}, "principal component", SHARE)
            caption = "The spectrum: the share of each principal component."
            figures.append(Figure(f"spectrum{suffix}", caption, "figures.curves", values, section=VECTORS))
        return figures

    def details(self) -> list[Table]:
        """Every depth, the effect of shuffled patches, and permutation equivariance."""
        vectors = [] if self.looks else [Table(VECTORS, ["vectors", "why"], [["none", self.no_vectors]])]
        return [_read_table(self), *vectors, _shuffled_table(self), _law_table(self)]

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
        return (), "it was trained without its positions, so their embeddings mean nothing"
    try:
        return tuple(look_at(name, table, seed=seed) for table in tables_of(backbone)), ""
    except SitusError as error:
        return (), str(error).removeprefix(f"{backbone.name}: ")


# --- in words ------------------------------------------------------------------------------------------------------


def verdict(audit: PositionAudit) -> str:
    """One paragraph: what positions the model has, and what its features and answers know of them."""
    parts = [_has(audit), *_vectors(audit), _features(audit), _source(audit), _answers(audit), _law(audit)]
    return " ".join(part for part in parts if part)


def _has(audit: PositionAudit) -> str:
    grid = " × ".join(map(str, audit.grid))
    if audit.kinds and audit.trained:
        return f"`{audit.name}` encodes its {grid} places by {' and by '.join(KINDS[k] for k in audit.kinds)}."
    if audit.hierarchical:
        return f"`{audit.name}` adds no positions to its {grid} tokens; its windows carry some."
    why = "was trained without them" if audit.kinds else "has none"
    return f"`{audit.name}` uses no positions: it {why}."


def _vectors(audit: PositionAudit) -> list[str]:
    return [
        f"Its {look.table.kind} {grasp(look)}: a linear regression reads row and column of a place with a mean error "
        f"of {look.decoded.two.mean:.2f} patches (blind guess: {look.decoded.chance_two:.2f})."
        for look in audit.looks
    ]


def _features(audit: PositionAudit) -> str:
    first, last = audit.reading(OWN, 0), audit.reading(OWN, -1)
    assert first is not None
    assert last is not None
    how = (
        "reveal the place of a patch"
        if last.left < SURE or last.right > 0.5
        else "reveal roughly where a patch is"
        if last.left < UNSURE
        else "reveal no place to a linear reader"
    )
    return (
        f"Its features {how}: a linear reader predicts the exact place of {percent(first.right, 0)} of the patches "
        f"that enter the blocks and of {percent(last.right, 0)} after the final norm (chance: "
        f"{percent(last.blind_right)}), there with a mean error of {last.error:.2f} patches (blind: "
        f"{last.blind_error:.2f})."
    )


def _source(audit: PositionAudit) -> str:
    content, positions = audit.reading(REMOVED, -1), audit.reading(SHUFFLED, -1)
    if content is None or positions is None:
        last = audit.reading(OWN, -1)
        assert last is not None
        return "" if last.left >= UNSURE else "All of that comes from the content of the patches and their neighbours."
    if content.left >= UNSURE:
        return (
            f"With the positions removed the error is {content.error:.2f}: the features get the places from the "
            f"positions alone; a linear reader fitted on {audit.probed.fitted} samples reads no place from the "
            "content."
        )
    return (
        f"With the positions removed the error is {content.error:.2f}, from the content of the patches; with the "
        f"patches shuffled it is {positions.error:.2f}, from the positions alone."
    )


def _answers(audit: PositionAudit) -> str:
    # A mask of one patch has nothing to shuffle.
    rows = [row for row in audit.shuffled if not row.mask_known and row.masked > 1 and row.clean_norm]
    if not rows:
        return ""
    row = rows[0]
    moved = row.diff_norm / row.clean_norm
    if max(row.diff_norm / row.clean_norm for row in rows) < ROUNDING:
        return f"Shuffled patches do not move its {audit.reads}: the order of the patches does not matter to it."
    shuffled, far = percent(row.ratio, 0), percent(moved, 0)
    text = f"With {shuffled} of the patches shuffled its {audit.reads} moves by {far} of its length"
    if row.consistency is None:
        return f"{text}."
    return f"{text}, and {percent(row.consistency, 0)} of its answers stay the same."


def _law(audit: PositionAudit) -> str:
    if audit.rows is None:
        return ""
    reason = audit.rows["reason"]
    if audit.rows["status"] == "refused":
        return f"Its blocks are not permutation equivariant: {reason}."
    worst = max(audit.rows["errors"].values())
    because = f" ({reason})" if reason else ""
    return (
        f"Its blocks are permutation equivariant, to {worst:.0e} in float64{because}: all they know of order comes "
        "with the tokens."
    )


def at_a_glance(audit: PositionAudit) -> dict[str, Cell]:
    """The figures of the verdict."""
    kinds = [KINDS[kind] for kind in audit.kinds] or ["none"]
    cells: dict[str, Cell] = {"positions": "; ".join(kinds) + ("" if audit.trained else " (not used in training)")}
    for look in audit.looks:
        cells[f"{look.table.kind}, 3-PCA"] = f"{percent(look.spectrum.explained_by(3))} of the variance"
        cells[f"{look.table.kind}, error of a regression"] = (
            f"{look.decoded.two.mean:.2f} patches (blind {look.decoded.chance_two:.2f})"
        )
    for condition in audit.probed.readings:
        first, last = audit.probed.readings[condition][0], audit.probed.readings[condition][-1]
        cells[f"features, {condition}"] = (
            f"error {first.error:.2f} → {last.error:.2f} patches, exact place {percent(first.right)} → "
            f"{percent(last.right)}, from embedding to norm (blind {last.blind_error:.2f}, {percent(last.blind_right)})"
        )
    if audit.rows is not None:
        cells["blocks(P s) = P blocks(s)"] = "holds" if audit.rows["status"] == "holds" else "refused"
    return cells


# --- tables of the page --------------------------------------------------------------------------------------------


def _read_table(audit: PositionAudit) -> Table:
    short, rows = {OWN: "own:", REMOVED: "removed:", SHUFFLED: "shuffled:"}, []
    header = ["after"]
    for condition in audit.probed.readings:
        header += [f"{short[condition]} error", *["R²"] * (condition == OWN), "exact place"]
    for depth in zip(*audit.probed.readings.values(), strict=True):
        row: list[Cell] = [depth[0].depth]
        for condition, reading in zip(audit.probed.readings, depth, strict=True):
            row += [f"{reading.error:.2f}", *[f"{reading.r2:.3f}"] * (condition == OWN), percent(reading.right)]
        rows.append(row)
    caption = "Error in patches and R²: means of row and column. Exact place: share of the patches."
    if audit.hierarchical:
        caption += " This model has no rows for single blocks, and its last grid is coarser than its first."
    return Table(FEATURES, header, rows, caption)


def _shuffled_table(audit: PositionAudit) -> Table:
    answers = any(row.consistency is not None for row in audit.shuffled)
    header = ["γ", "mask", "patches", "Diff.Norm", "of its length"] + ["answers that stay the same"] * answers
    rows: list[list[Cell]] = []
    for row in audit.shuffled:
        share = percent(row.diff_norm / row.clean_norm) if row.clean_norm else None
        mask = "known" if row.mask_known else "hidden"
        cells: list[Cell] = [f"{row.ratio:g}", mask, row.masked, f"{row.diff_norm:.3g}"]
        stay = [None if row.consistency is None else percent(row.consistency)] if answers else []
        rows.append([*cells, share, *stay])
    caption = "" if answers else "It has no trained classifier, so there are no answers to compare."
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
            "Permuting the tokens (split learning) does not hide their order from the server that runs the blocks: "
            f"with {audit.probed.fitted} samples of its own and this embedding, a linear reader predicts the place of "
            f"{percent(first.right, 0)} of the tokens that are sent."
        )
    return Table(title, ["check", ""], rows, caption)
