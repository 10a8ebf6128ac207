"""How much a model knows of position, and how much of that shows: in its vectors, its features and its answers."""

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
from situs.measure.position.vectors import Look, grasp, look_at, tables_of, to_json
from situs.methods.base import Method
from situs.progress import task
from situs.results import Cell, Figure, Result, Summary, Table, percent

RATIOS = (0.15, 0.5, 0.9)
"""γ of the shuffles: MJP's Table 1, half, nearly all."""
SURE, UNSURE = 0.2, 0.9
"""Below the first share of a blind reader's error a place is known well, above the second not at all."""
ROUNDING = 1e-5
"""A share of a vector's length that float32 loses on its way through a model."""

CONDITIONS = {
    OWN: "as it is",
    REMOVED: "positions removed: what contents tell",
    SHUFFLED: "patches shuffled: what positions tell",
}
MEANING = """
Linear readers are fitted on the patch features of half of the images and read the others, at every depth: a ridge
regression to row and column, and a linear discriminant over all places. Unlike the regression on the places' vectors,
they have seen every place before, in other images. With the positions removed only what the patches show is left; with
the patches shuffled under their positions, only the positions are. A linear reader gives a lower bound: what it cannot
read, another may. Few images give it little to learn from; with more of them it reads no worse.

Shuffled patches: a share γ of the patches, in a block mask, is shuffled. Diff.Norm is how far the vector that the head
reads moves, as a mean over the images. Not told: every place keeps its position and holds a wrong patch. Told: the
masked places are forgotten. `situs evaluate consistency` shows more.

The law: permute the tokens that enter the blocks, their rotation with them, and the same tokens must come out permuted,
forward and in the gradients of every weight.
"""
FEATURES = "Where a patch is, read off its features"
VECTORS, SHARE = "The vectors of the places", "share of the variance, %"

KINDS = {
    "table": "a vector added to each token",
    "rotary": "rotations of queries and keys",
    "bias": "biases between pairs of tokens",
}


@dataclass(frozen=True)
class PositionAudit(Result):
    """All that was found. kinds: of `Positions`. trained: whether they took part in training. looks: at its vectors, or
    none and `no_vectors` says why. rows: the law of permuted tokens as `situs.locks.verify` found it, or None.
    """

    file: ClassVar[str] = "positions-audit"
    meaning: ClassVar[str] = MEANING

    name: str
    grid: tuple[int, ...]
    kinds: tuple[str, ...]
    trained: bool
    hierarchical: bool
    reads: str
    looks: tuple[Look, ...]
    no_vectors: str
    probed: Probed
    shuffled: tuple[Consistency, ...]
    rows: Mapping[str, Any] | None = None

    def reading(self, condition: str, place: int) -> PlaceReading | None:
        """The first (0) or last (-1) depth's reading under a condition, where there is one."""
        found = self.probed.readings.get(condition)
        return None if found is None else found[place]

    def summary(self) -> Summary:
        """The verdict, and the figures that it speaks of."""
        first, last = self.probed.readings[OWN][0], self.probed.readings[OWN][-1]
        numbers = (
            (percent(first.right, 0), "of tokens that enter the blocks tell their place"),
            (percent(last.right, 0), f"after the last norm (chance {percent(last.blind_right)})"),
        )
        return Summary(verdict(self), (Table(self.name, ["", ""], list(at_a_glance(self).items())),), numbers=numbers)

    @property
    def title(self) -> str:
        """Of the page."""
        return f"What {self.name} knows of position"

    def figures(self) -> list[Figure]:
        """What is read at every depth under each condition; the vectors of the places and their spectrum."""
        names = [each.depth.replace("embedding", "embed") for each in self.probed.readings[OWN]]
        last, figures = self.probed.readings[OWN][-1], []
        for name, label, scale, values, blind, caption in (
            ("named", "patches whose place is named, %", 100, "right", last.blind_right,
             "How often the very place is named, of all there are; high: it is known."),
            ("error", "mean error, patches", 1, "error", last.blind_error,
             "How far off a patch's row and column are read, mean of both; low: it is known."),
        ):  # fmt: skip
            series = {
                CONDITIONS[condition]: (range(len(names)), [scale * getattr(each, values) for each in readings])
                for condition, readings in self.probed.readings.items()
            }
            options = {"x_names": names, "level": ("blind", scale * blind)}
            figures.append(Figure(name, caption, "figures.curves", (series, "after block", label), options, FEATURES))
        for number, look in enumerate(self.looks, start=1):
            own = "" if number == 1 else f"-{number}"
            guesses = look.decoded.guesses[:, ::-1]
            panels = [
                ("principal components", look.components.points[:, :2], look.axes[:2]),
                ("read off by regression", guesses, ("guessed column", "guessed row"), "row", True),
            ]
            caption = (
                f"{look.table.kind.capitalize()} of {look.shape}: the places with neighbours joined; lines along a row "
                "share a colour. `situs evaluate position` (vectors) shows more."
            )
            if look.table.kind == "learned table":
                caption += (
                    " A learned table has a gradient of its own, from which the pixels of a training step can be "
                    "solved for: `situs audit gradients` measures it."
                )
            values = (panels, look.table.grid)
            figures.append(Figure(f"vectors{own}", caption, "places.sheets", values, section=VECTORS))
            shares = [100 * share for share in look.spectrum.explained[:20]]
            values = ({look.table.kind: (range(1, len(shares) + 1), shares)}, "principal component", SHARE)
            caption = "The spectrum: how much each principal component holds."
            figures.append(Figure(f"spectrum{own}", caption, "figures.curves", values, section=VECTORS))
        return figures

    def details(self) -> list[Table]:
        """Every depth, what shuffled patches do, and the law."""
        vectors = [] if self.looks else [Table(VECTORS, ["vectors", "why"], [["none", self.no_vectors]])]
        return [_read_table(self), *vectors, _shuffled_table(self), _law_table(self)]

    def numbers(self) -> dict[str, Any]:
        """Every number."""
        readings = {c: [asdict(each) for each in found] for c, found in self.probed.readings.items()}
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
            "shuffled": [asdict(row) for row in self.shuffled],
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
    """Audits a backbone, or a run's method with its own tokens, on images; they are gone through three times.

    positions: for a backbone, whether its own took part in training. classifier: whether its head was trained.
    """
    backbone = model.backbone if isinstance(model, Method) else model
    backbone.require("tokens")
    check_values("ratios", ratios, "[0, 1]")  # before the long part
    positions = model.sees_positions if isinstance(model, Method) else positions
    with task("positions", 3) as told:
        told.tell(0, "its vectors")
        looks, no_vectors = _look(name, backbone, positions, seed)
        told.tell(1, "its features")
        probed = probe_places(backbone, batches, positions=positions, seed=seed)
        told.tell(2, "its answers")
        shuffled = measure_consistency(
            model, batches, ratios, seed=seed, positions=positions, classifier=classifier, no_top1="it is not asked for"
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


def _look(name: str, backbone: Backbone, positions: bool, seed: int) -> tuple[tuple[Look, ...], str]:
    if not positions:
        return (), "its positions took no part in its training, so that their vectors mean nothing"
    try:
        return tuple(look_at(name, table, seed=seed) for table in tables_of(backbone)), ""
    except SitusError as error:
        return (), str(error).removeprefix(f"{backbone.name}: ")


# --- in words ------------------------------------------------------------------------------------------------------


def verdict(audit: PositionAudit) -> str:
    """One paragraph: what the model has, knows and gives away."""
    said = [_has(audit), *_vectors(audit), _features(audit), _source(audit), _answers(audit), _law(audit)]
    return " ".join(part for part in said if part)


def _has(audit: PositionAudit) -> str:
    grid = " × ".join(map(str, audit.grid))
    if audit.kinds and audit.trained:
        return f"`{audit.name}` is told its {grid} places by {' and by '.join(KINDS[k] for k in audit.kinds)}."
    if audit.hierarchical:
        return f"`{audit.name}` adds no positions to its {grid} tokens; its windows know some of them."
    why = "was trained without them" if audit.kinds else "has none"
    return f"`{audit.name}` is told no positions: it {why}."


def _vectors(audit: PositionAudit) -> list[str]:
    return [
        f"Its {look.table.kind} {grasp(look)}: row and column are read off a place's vector with a mean error "
        f"of {look.decoded.two.mean:.2f} patches (a blind guess: {look.decoded.chance_two:.2f})."
        for look in audit.looks
    ]


def _features(audit: PositionAudit) -> str:
    first, last = audit.reading(OWN, 0), audit.reading(OWN, -1)
    assert first is not None
    assert last is not None
    how = (
        "give the place away"
        if last.left < SURE or last.right > 0.5
        else "say where a patch is"
        if last.left < UNSURE
        else "keep it from a linear reader"
    )
    return (
        f"Its features {how}: a linear reader names the very place of {percent(first.right, 0)} of the patches that "
        f"enter the blocks and of {percent(last.right, 0)} after the final norm (chance: {percent(last.blind_right)}), "
        f"where it errs by {last.error:.2f} patches (blind: {last.blind_error:.2f})."
    )


def _source(audit: PositionAudit) -> str:
    content, told = audit.reading(REMOVED, -1), audit.reading(SHUFFLED, -1)
    if content is None or told is None:
        last = audit.reading(OWN, -1)
        assert last is not None
        return "" if last.left >= UNSURE else "All of that comes from what the patches show and their company."
    if content.left >= UNSURE:
        return (
            f"Without the positions it errs by {content.error:.2f}: what the features know of place was told; in what "
            f"the patches show, {audit.probed.fitted} images teach a linear reader to find none of it."
        )
    return (
        f"Without the positions it errs by {content.error:.2f}, from what the patches show; with positions under "
        f"shuffled patches by {told.error:.2f}, from the positions alone."
    )


def _answers(audit: PositionAudit) -> str:
    # A mask of one patch has nothing to shuffle.
    rows = [each for each in audit.shuffled if not each.told and each.masked > 1 and each.clean_norm]
    if not rows:
        return ""
    row = rows[0]
    moved = row.diff_norm / row.clean_norm
    if max(each.diff_norm / each.clean_norm for each in rows) < ROUNDING:
        return f"Shuffled patches move its {audit.reads} not at all: the order of its patches is nothing to it."
    shuffled, far = percent(row.ratio, 0), percent(moved, 0)
    said = f"With {shuffled} of the patches shuffled its {audit.reads} moves by {far} of its length"
    return f"{said}." if row.consistency is None else f"{said}, and {percent(row.consistency, 0)} of its answers stay."


def _law(audit: PositionAudit) -> str:
    if audit.rows is None:
        return ""
    reason = audit.rows["reason"]
    if audit.rows["status"] == "refused":
        return f"Its blocks do not treat tokens as a set: {reason}."
    worst = max(audit.rows["errors"].values())
    told = f" ({reason})" if reason else ""
    return f"Its blocks treat tokens as a set, to {worst:.0e} in float64{told}: what it knows of order comes with them."


def at_a_glance(audit: PositionAudit) -> dict[str, Cell]:
    """The figures that the verdict speaks of."""
    kinds = [KINDS[kind] for kind in audit.kinds] or ["none"]
    found: dict[str, Cell] = {"positions": "; ".join(kinds) + ("" if audit.trained else " (not used in training)")}
    for look in audit.looks:
        found[f"{look.table.kind}, 3-PCA"] = f"{percent(look.spectrum.explained_by(3))} of the variance"
        found[f"{look.table.kind}, reading error"] = (
            f"{look.decoded.two.mean:.2f} patches (blind {look.decoded.chance_two:.2f})"
        )
    for condition in audit.probed.readings:
        first, last = audit.probed.readings[condition][0], audit.probed.readings[condition][-1]
        found[f"features, {condition}"] = (
            f"error {first.error:.2f} → {last.error:.2f} patches, place named {percent(first.right)} → "
            f"{percent(last.right)}, from embedding to norm (blind {last.blind_error:.2f}, {percent(last.blind_right)})"
        )
    if audit.rows is not None:
        found["blocks(P s) = P blocks(s)"] = "holds" if audit.rows["status"] == "holds" else "refused"
    return found


# --- tables of the page --------------------------------------------------------------------------------------------


def _read_table(audit: PositionAudit) -> Table:
    short, rows = {OWN: "own:", REMOVED: "removed:", SHUFFLED: "shuffled:"}, []
    header = ["after"]
    for condition in audit.probed.readings:
        header += [f"{short[condition]} error", *["R²"] * (condition == OWN), "named"]
    for depth in zip(*audit.probed.readings.values(), strict=True):
        row: list[Cell] = [depth[0].depth]
        for condition, each in zip(audit.probed.readings, depth, strict=True):
            row += [f"{each.error:.2f}", *[f"{each.r2:.3f}"] * (condition == OWN), percent(each.right)]
        rows.append(row)
    caption = "Error in patches, mean of row and column; R² of both; named: the very place, of all."
    if audit.hierarchical:
        caption += " This model gives its blocks no row of their own, and its end has a coarser grid than its start."
    return Table(FEATURES, header, rows, caption)


def _shuffled_table(audit: PositionAudit) -> Table:
    answers = any(row.consistency is not None for row in audit.shuffled)
    header = ["γ", "mask", "patches", "Diff.Norm", "of its length"] + ["answers that stay"] * answers
    rows: list[list[Cell]] = []
    for row in audit.shuffled:
        share = percent(row.diff_norm / row.clean_norm) if row.clean_norm else None
        cells: list[Cell] = [f"{row.ratio:g}", "told" if row.told else "not told", row.masked, f"{row.diff_norm:.3g}"]
        stay = [None if row.consistency is None else percent(row.consistency)] if answers else []
        rows.append([*cells, share, *stay])
    caption = "" if answers else "It has no trained classifier, so there are no answers to compare."
    return Table("What shuffled patches do", header, rows, caption)


def _law_table(audit: PositionAudit) -> Table:
    title, law, caption = "Whether the blocks mind the order: blocks(P s) = P blocks(s)", audit.rows, ""
    if law is None:
        return Table(title, ["law", ""], [["not measured", None]])
    errors = [(f"error in float64, {check}", f"{error:.1e}") for check, error in law["errors"].items()]
    rows: list[Sequence[Cell]] = [["verdict", law["status"]], *errors]
    if law["reason"]:
        rows.append(["reason" if law["status"] == "refused" else "but", law["reason"]])
    first = audit.probed.readings[OWN][0]
    if law["status"] == "holds" and first.right > 10 * first.blind_right:
        caption = (
            "Permuting the tokens (split learning) hides their order from the blocks and not from who runs them: with "
            f"{audit.probed.fitted} images of one's own and this embedding, a linear reader names the place of "
            f"{percent(first.right, 0)} of the tokens that are sent."
        )
    return Table(title, ["law", ""], rows, caption)
