"""What shuffled patches do to a classifier (MJP, Table 1 and Figure 3): top-1, Diff.Norm and consistency over γ.

The patches inside a block mask are shuffled among themselves, and the answer is compared with that on the original.
Everything is measured twice. *Mask known*: the masked places lose their positions. On a plain ViT the order inside the
mask then changes nothing, so the numbers measure lost positions. *Mask hidden*: every place keeps its position and
holds a wrong patch, so the numbers measure shuffling itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.core.jigsaw import draw_puzzle, move_patches, puzzle_noise_shape
from situs.core.masking import count_of
from situs.core.random import uniform
from situs.errors import SitusError
from situs.limits import check_values
from situs.measure.accuracy import hard
from situs.methods.base import Batch, Method, encode_moved
from situs.models.data import AnyData, AnyModel, Chosen, examples, load_set, made_with, opened, top1_reason
from situs.models.inference import Total, evaluating
from situs.models.model import check_classifier
from situs.results import Cell, Figure, Result, Summary, Table, percent, points
from situs.train.step import autocast

RATIOS = (0.0, 0.03, 0.09, 0.15, 0.27, 0.5, 0.75, 0.9)
"""γ: those the paper trains with, its Table 1's .15, and Figure 3's far end."""
TABLE_1 = 0.15
"""γ of the paper's Table 1, of which a result speaks first."""
MEANING = """
`x` is a sample. `x̃` is the same sample after the patches inside a mask of rectangular blocks are shuffled. γ is the
fraction of patches in the mask. F is the vector that the classifier reads. Diff.Norm is the mean of ‖F(x) − F(x̃)‖ over
the samples. The mean of ‖F(x) − F(x̃)‖² is also shown: Eq. 6 of the MJP paper (masked jigsaw puzzles) uses the square,
but the paper's published code prints the norm. Consistency is the fraction of samples whose answer stays the same,
right or wrong.

"Mask hidden" means that the model does not know which patches are shuffled: the position embeddings stay in place, so
the shuffled patches have wrong positions. The numbers then measure the effect of shuffling. "Mask known" means that the
position embeddings inside the mask are removed. On a plain ViT, shuffling inside the mask then changes nothing, so the
numbers measure the effect of lost positions. The MJP paper does not say if its mask was hidden or known.
"""
MASKS = {True: "mask known", False: "mask hidden"}


@dataclass(frozen=True)
class Consistency:
    """One γ with the mask known to the model or hidden from it. F is the vector that the head reads.

    masked: int(γN), the places shuffled in each sample. top1: share of right answers on shuffled samples, None without
    matching labels. diff_norm: mean of ‖F(x) - F(x̃)‖. diff_norm_squared: mean of its square (Eq. 6). consistency: share
    of samples whose answer stays the same, None without a classifier. clean_norm: mean of ‖F(x)‖, for scale.
    """

    ratio: float
    masked: int
    mask_known: bool
    count: int
    top1: float | None
    diff_norm: float
    diff_norm_squared: float
    consistency: float | None
    clean_norm: float

    def numbers(self) -> dict[str, Any]:
        """As JSON holds it: `mask_known` is the key "told"."""
        return {"told" if name == "mask_known" else name: value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Shuffled:
    """How a model sees samples with shuffled patches: a run through its method, another model through its backbone.

    positions: whether the backbone uses its positions. grid: of the patches that are shuffled; that of the tokens
    where there are tokens.
    """

    backbone: Backbone
    method: Method | None
    positions: bool
    grid: tuple[int, ...]

    @property
    def no_mask(self) -> str | None:
        """Why the mask cannot be known to this model, or None where it can."""
        if not self.backbone.num_tokens:
            return (
                "the model is a convolutional network, so it has no positions to remove: patches are shuffled in the "
                "image, and the model does not know which patches were shuffled"
            )
        if not (self.positions and self.backbone.positions().kinds):
            windows = " (its windows still reveal positions)" if "take" in self.backbone.refusals else ""
            return f"the model adds no positions that could be removed, so knowing the mask changes nothing{windows}"
        return None

    @property
    def unknown(self) -> str:
        """What a masked place gets when the mask is known, in words."""
        learned = None if self.method is None else self.method.unknown_position()
        if learned is not None:
            return learned.words
        kinds = self.backbone.positions().kinds
        parts = {
            "table": "a zero vector instead of its position embedding",
            "rotary": "no rotation (as if its coordinates were 0)",
            "bias": "no relative bias",
        }
        return (
            " and ".join(parts[kind] for kind in kinds)
            + ", because this model has no learned vector for unknown positions"
        )

    def read(
        self, inputs: Tensor, index: Tensor | None = None, forgotten: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The vector [B, D] that the head reads and its logits, for inputs whose patches are moved by `index`.

        forgotten: [B, N] bool, places that lose their position.
        """
        if not self.backbone.num_tokens:
            return self.backbone.read_pixels(inputs if index is None else move_patches(inputs, self.grid, index))
        if self.method is not None:
            features = self.method.encode(inputs, forgotten, index)
        else:
            features = encode_moved(self.backbone, inputs, forgotten, index, positions=self.positions)
        return self.backbone.pooled(features), self.backbone.head(features)


@dataclass(frozen=True)
class ConsistencyCurve(Result):
    """Every γ, with the mask known and hidden. reads: F, the vector that the head reads, in words.

    unknown: what a masked place gets when the mask is known; no_mask: why it cannot be known; one of the two is None.
    no_top1: why there is no top-1. grid, seed: of the masks. example: a picture [C, H, W] in [0, 1] to show them on.
    """

    file: ClassVar[str] = "consistency"
    subject: ClassVar[str] = "consistency under shuffled patches"
    meaning: ClassVar[str] = MEANING
    rows: Sequence[Consistency]
    reads: str
    unknown: str | None
    no_mask: str | None
    grid: tuple[int, ...]
    no_top1: str | None = None
    example: Tensor | None = None
    seed: int = 0

    def summary(self) -> Summary:
        """The result at the γ nearest to Table 1's; a row for each γ, mask known and hidden."""
        header = ["γ", "patches shuffled", "", "top-1, %", "consistency, %", "Diff.Norm", "Diff.Norm² (Eq. 6)"]
        cells: list[list[Cell]] = [
            [f"{r.ratio:g}", r.masked, MASKS[r.mask_known], points(r.top1), points(r.consistency), r.diff_norm,
             r.diff_norm_squared]
            for r in self.rows
        ]  # fmt: skip
        table = Table(self.provenance.title(self.provenance.counted(self.rows[0].count)), header, cells)
        masked_place = self.no_mask or f"a patch in the mask gets {self.unknown}"
        things = self.provenance.things
        norm = f"F is the {self.reads}. On the original {things}, the mean norm of F is {self.rows[0].clean_norm:.4g}."
        notes = [f"Mask known: {masked_place}. {norm}"]
        if any(row.masked < 2 and row.ratio for row in self.rows):
            notes.append("A mask with fewer than two patches has no patches to shuffle.")
        if self.no_top1 is not None:
            notes.append(f"There is no top-1: {self.no_top1}.")
        return Summary(self._sentence(), (table,), (" ".join(notes),), self._numbers())

    def _sentence(self) -> str:
        ratios = [row.ratio for row in self.rows if row.masked > 1]  # one patch has none to change places with
        if not ratios:
            patches = math.prod(self.grid)
            return f"Nothing was shuffled: with these values of γ at most one of {patches} patches is in the mask."
        ratio = min(ratios, key=lambda ratio: abs(ratio - TABLE_1))
        at = {row.mask_known: row for row in self.rows if row.ratio == ratio}
        row = at[False]
        part = f"{percent(row.diff_norm / row.clean_norm)} of its norm" if row.clean_norm else "from a norm of 0"
        text = f"With {percent(ratio, None)} of the patches shuffled and the mask hidden from the model, "
        if row.consistency is not None:
            text += f"{percent(row.consistency)} of {row.count:,} answers stay the same, and "
        text += f"the {self.reads} changes by {row.diff_norm:.3g} ({part})."
        if True in at:
            known = at[True]
            same = (
                "" if known.consistency is None else f"{percent(known.consistency)} of the answers stay the same and "
            )
            text += f" If the model knows the mask, {same}the {self.reads} changes by {known.diff_norm:.3g}."
        return text

    def numbers(self) -> dict[str, Any]:
        """Every row, and what a reader must know of them."""
        return {
            "feature": self.reads,
            "unknown": self.unknown,
            "not_told_why": self.no_mask,
            "no_top1_why": self.no_top1,
            "rows": [row.numbers() for row in self.rows],
        }

    def _numbers(self) -> tuple[tuple[str, str], ...]:
        """Where the fewest answers stay the same, the mask hidden."""
        rows = [row for row in self.rows if not row.mask_known]
        worst = min(rows, key=lambda row: (row.consistency or 0, -row.ratio), default=None)
        numbers = []
        if worst is not None and worst.consistency is not None:
            share = f"of answers stay the same at γ = {worst.ratio:g} with the mask hidden"
            numbers.append((percent(worst.consistency), share))
        if worst is not None and worst.clean_norm:
            moved = f"relative change of the {self.reads} at γ = {worst.ratio:g} with the mask hidden"
            numbers.append((percent(worst.diff_norm / worst.clean_norm), moved))
        return tuple(numbers)

    def figures(self) -> list[Figure]:
        """The shares of answers, the norms, and one sample at every γ."""
        gamma, figures = "γ, fraction of the patches that are shuffled", []
        shares = self._series("consistency", "consistency, ", 100) | self._series("top1", "top-1, ", 100)
        if any(row.consistency is not None for row in self.rows):
            caption = (
                f"For each γ: the fraction of {self.provenance.things} whose answer after the shuffle is the same as "
                "before, and the fraction whose answer after the shuffle is right."
            )
            figures.append(Figure("shares", caption, "figures.curves", (shares, gamma, "fraction of all, %")))
        norms = self._series("diff_norm", "")
        norms["‖F(x)‖ itself, for scale"] = [row.ratio for row in self.rows], [row.clean_norm for row in self.rows]
        label = f"Diff.Norm, ‖F(x) − F(x̃)‖\nof the {self.reads}"
        caption = f"Diff.Norm for each γ: the mean distance between the {self.reads} before and after the shuffle."
        figures.append(Figure("norms", caption, "figures.curves", (norms, gamma, label)))
        if self.example is not None:
            ratios, images, masks = sorted({row.ratio for row in self.rows})[:8], [], []
            for ratio in ratios:
                mask, index = puzzle(self.grid, torch.zeros(1, dtype=torch.int64), ratio, self.seed)
                images.append(move_patches(self.example[None].cpu(), self.grid, index)[0])
                masks.append(mask[0])
            caption = "One sample at each γ. The mask is outlined; the patches inside it are shuffled."
            titles = [f"γ = {ratio:g}" for ratio in ratios]
            figures.append(Figure("images", caption, "puzzles.outlined", (images, titles, masks, self.grid)))
        return figures

    def _series(self, name: str, label: str, scale: float = 1.0) -> dict[str, tuple[list[float], list[float]]]:
        """A line with the mask known and one with it hidden, where they have the number."""
        lines = {}
        for known, words in MASKS.items():
            rows = [row for row in self.rows if row.mask_known == known and getattr(row, name) is not None]
            if rows:
                lines[f"{label}{words}"] = [row.ratio for row in rows], [scale * getattr(row, name) for row in rows]
        return lines


def puzzle(grid: tuple[int, ...], ids: Tensor, ratio: float, seed: int) -> tuple[Tensor, Tensor]:
    """Mask and index [B, N] of each sample at γ = ratio: the same whatever batch it stands in."""
    return draw_puzzle(uniform(seed, 0, ids, f"consistency/{ratio}", puzzle_noise_shape(grid, ratio)), grid, ratio)


def shuffled(
    model: Backbone | Method, *, positions: bool = True, grid: tuple[int, ...] | None = None, size: tuple[int, int]
) -> Shuffled:
    """A backbone or a run's method, ready to see shuffled patches. grid: for a network without tokens. size: of its
    inputs."""
    method = model if isinstance(model, Method) else None
    backbone, positions = (model, positions) if isinstance(model, Backbone) else (model.backbone, model.sees_positions)
    if backbone.num_tokens:
        if grid not in (None, backbone.grid):
            raise SitusError(
                f"grid={grid}: {backbone.name} has the fixed grid {backbone.grid}; leave grid out", field="grid"
            )
        return Shuffled(backbone, method, positions, backbone.grid)
    side = 14 if size[0] % 14 == 0 and size[1] % 14 == 0 else 8  # the papers' 14 a side where that divides
    cut = grid or (method.grid if method is not None and all(method.grid) else (side, side))
    if min(cut) < 1 or size[0] % cut[0] or size[1] % cut[1]:
        raise SitusError(f"grid={cut}: must divide the input size {size[0]}x{size[1]}", field="grid")
    return Shuffled(backbone, method, False, cut)


def evaluate_consistency(
    model: AnyModel,
    data: AnyData = None,
    *,
    ratios: Sequence[float] = RATIOS,
    grid: tuple[int, int] | None = None,
    precision: str = "fp32",
    seed: int = 0,
    **chosen: Unpack[Chosen],
) -> ConsistencyCurve:
    """What shuffled patches do to a classifier: top-1, Diff.Norm and consistency at each γ, mask known and hidden.

    model: whatever `open_model` takes. data: a path or a source; None for the samples that a run was trained on.
    ratios: γ. grid: for a network without tokens, the patches to shuffle. chosen: see `load_set`.
    """
    model = opened(model, seed)
    check_classifier(model)
    shuffled(model.trained, positions=model.positions, grid=grid, size=model.data.size)  # refuses a wrong grid
    loader = load_set(model, data, shared=True, **chosen)
    curve = measure_consistency(
        model.trained,
        loader,
        ratios,
        seed=seed,
        precision=precision,
        positions=model.positions,
        no_top1=top1_reason(model, loader),
        classes=None if loader.classes is None else len(loader.classes),
        grid=grid,
    )
    return replace(curve, example=examples(loader, 1)[0], provenance=made_with(model, loader, seed, precision))


def measure_consistency(
    model: Backbone | Method,
    batches: Iterable[Batch],
    ratios: Sequence[float] = RATIOS,
    *,
    seed: int = 0,
    precision: str = "fp32",
    positions: bool = True,
    classifier: bool = True,
    no_top1: str | None = None,
    classes: int | None = None,
    grid: tuple[int, ...] | None = None,
) -> ConsistencyCurve:
    """Every γ, with the mask hidden and (where possible) known, in one pass over the data; waits once, at its end.

    positions: for a backbone, whether it uses its positions. classifier: False where the head was never trained; then
    only norms are measured. no_top1: why the data's labels are not the head's outputs, where that is so. classes: how
    many the data has, to be checked. grid: for a network without tokens, the patches that are shuffled.
    """
    check_values("ratios", ratios, "[0, 1]")
    sums, view, mask_options, labels = Total(), None, (False,), no_top1 is None
    with evaluating(model):
        for batch in batches:
            if view is None:
                high, wide = batch.inputs.shape[-2:]
                view = shuffled(model, positions=positions, grid=grid, size=(high, wide))
                mask_options = (False,) if view.no_mask else (True, False)
            with autocast(batch.inputs.device, precision):
                labelled_batch = batch if labels else batch._replace(targets={})
                sums.add(_measure(view, labelled_batch, ratios, mask_options, seed, classes))
    count, *means = sums.over_ranks().tolist()
    assert view is not None  # or there would be no sums
    labelled, clean, *rest = (value / count for value in means)
    rows = []
    for number, (ratio, known) in enumerate((ratio, known) for ratio in ratios for known in mask_options):
        norm, square, same, right = rest[4 * number : 4 * number + 4]
        rows.append(
            Consistency(
                ratio=ratio,
                masked=count_of(ratio, view.grid[0] * view.grid[1]),
                mask_known=known,
                count=int(count),
                top1=right if classifier and labelled == 1.0 else None,
                diff_norm=norm,
                diff_norm_squared=square,
                consistency=same if classifier else None,
                clean_norm=clean,
            )
        )
    if rows[0].top1 is None and no_top1 is None:
        no_top1 = (
            "the model has another number of classes than the data"
            if classifier
            else "the model's head was not trained"
        )
    unknown = None if view.no_mask else view.unknown
    return ConsistencyCurve(rows, view.backbone.head_input, unknown, view.no_mask, view.grid, no_top1, seed=seed)


def _measure(
    view: Shuffled, batch: Batch, ratios: Sequence[float], mask_options: Sequence[bool], seed: int, classes: int | None
) -> Tensor:
    """One batch's sums, float64: samples, labelled ones, ‖F(x)‖; then norm, square, same and right for each row."""
    clean, logits = view.read(batch.inputs)
    clean, answers = clean.double(), logits.argmax(dim=-1)
    truth = batch.targets.get("label") if classes in (None, logits.shape[-1]) else None
    count = float(len(batch.ids))
    sums = [clean.new_full((), count), clean.new_full((), 0.0 if truth is None else count), clean.norm(dim=-1).sum()]
    for ratio in ratios:
        mask, index = puzzle(view.grid, batch.ids, ratio, seed)
        for known in mask_options:
            moved, logits = view.read(batch.inputs, index, mask if known else None)
            square, answer = (moved.double() - clean).square().sum(dim=-1), logits.argmax(dim=-1)
            right = torch.zeros_like(answer) if truth is None else answer == hard(truth)
            sums += [square.sqrt().sum(), square.sum(), (answer == answers).sum(), right.sum()]
    return torch.stack([part.double() for part in sums])
