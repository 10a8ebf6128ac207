"""The patch-embedding attack: the pixels are the solution of one linear system.

A patch embedding E = X W^T + b followed by an added table has ∂l/∂W = G^T X with G = ∂l/∂E, and ∂l/∂E is also the
gradient of the table's patch rows. Both are in the upload, so X is solved for: attention, labels and loss do not
matter. Exact for one image as long as the N patches are no more than the rank of G, at most D. Local steps on one image
sum both sides over the steps and leave the equation as it is. An attacker who knows how images are normalised also
knows that a pixel is one of 256 values: `bytes` removes the remaining error where the equations confirm them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from situs.audit.attacks.base import (
    FAILED,
    Attack,
    Fact,
    Knowledge,
    Normalisation,
    Ready,
    Recovery,
    Refused,
    absent,
    joined,
    known_numbers,
    spoiled,
    stack,
)
from situs.audit.attacks.patchembed.bytes import byte_values, read_bytes
from situs.audit.attacks.patchembed.equations import Solution, judge, solve_pixels, whiten
from situs.audit.client import known_gradient
from situs.audit.deadline import Deadline
from situs.audit.defences import UNKNOWN, Gradients
from situs.audit.stem import (
    Scaled,
    Stem,
    View,
    fill,
    find_stem,
    find_stems,
    flat_weight,
    patch_count,
    require_stem,
    table_rows,
    to_images,
    view_of,
)
from situs.backbones.base import Backbone
from situs.findings import FIT
from situs.methods.base import Method

# ---------------------------------------------------------------------------------------------------------------------
# The patch embedding's equations solved for the image, with its bytes where the equations confirm them.
#
# Where the layer's input are the image's patches, that is `solve_patches`. Where the model transforms the image before
# (`stem.View`), the equations give the layer's input, and `solve_through` goes back from there to the image.


NEAR = 0.25
"""A recovered number counts as a byte if it is no farther from it than this share of the step between bytes."""

UNDONE = 1e-3
"""A transform before the layer counts as undone if the residual is at most this share of the layer's input."""


class System(NamedTuple):
    """∂l/∂W [B, D, K] and G [B, N, D], the type they were sent in, and the deviation of the noise on them."""

    weight: Tensor
    table: Tensor
    sent: torch.dtype
    sigma: float


def solve_patches(
    system: System, normalisation: Normalisation | None, errs: Tensor | None = None
) -> tuple[Solution, list[dict[str, Fact]], Tensor]:
    """The solution, further facts of each upload, and patches [B, N, K] as bytes where these were read.

    Channels are last within K.
    """
    solution = solve_pixels(*system, errs)
    if normalisation is None:
        return solution, [{} for _ in system.weight], solution.patches
    white, right = whiten(*system, errs)
    patches, read = read_bytes(white, right, solution.patches, solution.rank, normalisation)
    shares = read.double().mean(dim=1).tolist()
    return solution, [{"bytes": share == 1, "bytes_share": share} for share in shares], patches


def solve_through(
    view: View, system: System, normalisation: Normalisation | None
) -> tuple[Solution, list[dict[str, Fact]], Tensor]:
    """The solution, further facts of each upload, and images [B, C, H, W]; those of the first uploads if stopped."""
    system, errs = _standardised(view, system)
    columns = None if view.scaled is None or normalisation is None else _by_channel(view.scaled, view.shape)
    if columns is not None and normalisation is not None:
        solution, facts, images = _solve_scaled(view, columns, system, normalisation, errs)
    else:
        solution = solve_pixels(*system, errs)
        unseen = view.unseen() if view.affine else None
        inverted = list[tuple[Tensor, float]]()
        for patches in solution.patches:
            if view.stopped:
                break
            inverted.append(view.image(view.spread * patches + view.centre))
        images = torch.stack([image for image, _ in inverted])
        kind = "affine" if view.affine else "not affine"
        facts = [{"input": kind, "unseen": unseen, "input_residual": residual} for _, residual in inverted]
    for index, fact in enumerate(facts):
        if view.invariant and normalisation is not None:
            images[index] = fill(images[index], view.invariant, normalisation)
        elif normalisation is not None and not fact.get("bytes"):
            rows = slice(index, index + 1)
            one = system._replace(weight=system.weight[rows], table=system.table[rows])
            rounded = _rounded(view, images[index], one, normalisation, errs[rows])
            fact["bytes"] = rounded is not None
            images[index] = images[index] if rounded is None else rounded
        input_residual, residual = fact.get("input_residual"), float(solution.residual[index])
        verdict = None if fact.get("bytes") else _doubt(view, input_residual, residual, system.sigma)
        if verdict is not None:
            fact.update(fits=False, verdict=verdict)
    return solution, facts, images


def see_through(
    patches: Tensor, backbone: Backbone, stem: Stem, known: Knowledge, facts: list[dict[str, Fact]]
) -> Tensor:
    """The images [B, C, H, W] behind patches that another attack recovered, the same number for each of its facts.

    The patches may be right while their layer does not see all of an image: the facts then say so.
    """
    view, normalisation = view_of(backbone, stem), known.normalisation
    if view is None:
        return to_images(patches, backbone, stem)
    noise = known.defence.noise_level(known.step.batch)
    inverted = [view.image(inputs.double()) for inputs in patches]
    unseen, count = view.unseen() if view.affine else None, len(patches) // len(facts)
    for number, fact in enumerate(facts):
        fact["unseen"] = unseen
        residuals = [residual for _, residual in inverted[number * count : (number + 1) * count]]
        doubt = _doubt(view, max(residuals), 0.0, noise)
        if doubt is not None and fact.get("fits"):
            fact.update(dict.fromkeys(fact.keys() & {"proof"}), fits=False, verdict=doubt)
    if view.invariant and normalisation is not None:
        return torch.stack([fill(image, view.invariant, normalisation) for image, _ in inverted])
    return torch.stack([image for image, _ in inverted])


def _standardised(view: View, system: System) -> tuple[System, Tensor]:
    """The equations for the layer's input with mean 0 and deviation 1, as pixels have; and the variance [B, D] that
    this adds to their errors."""
    table = torch.where(system.table.isfinite(), system.table, 0.0)
    moved = (system.weight - table.mT @ view.centre) / view.spread
    step, far = torch.finfo(system.sent).eps / 2, float(view.centre.square().mean()) / view.spread**2
    errs = (step**2 * system.weight.square().nanmean(dim=-1) + system.sigma**2) / view.spread**2
    errs = errs + far * (step**2 * table.square().sum(dim=1) + system.sigma**2 * table.shape[1])
    return system._replace(weight=moved), errs.nan_to_num(0.0)


def _doubt(view: View, input_residual: Fact, residual: float, noise: float) -> str | None:
    """Why an image may be wrong, or one of many, although the layer's input is known. noise: its deviation."""
    if view.invariant:
        whose = "of each channel" if view.invariant == "channel" else "of the image"
        return (
            f"solved up to gain and offset {whose}, which the model's own normalisation removes: both are chosen "
            "so that the picture ranges from black to white, and its figures understate what can be seen"
        )
    if not view.affine and isinstance(input_residual, float) and input_residual > max(UNDONE, FIT * residual):
        return "what the model does to an image before its patch embedding could not be undone: the attack failed"
    if not view.affine:
        return (
            "what the model does to an image before its patch embedding is not affine: several images give the "
            "same input of this layer, and the picture is one of them"
        )
    if noise and view.scaled is None:
        return (
            "undoing what the model does before its patch embedding makes the noise larger: another attack "
            "may come closer"
        )
    return None


def _rounded(view: View, image: Tensor, system: System, normalisation: Normalisation, errs: Tensor) -> Tensor | None:
    """The image [C, H, W] as bytes, if all its numbers are near bytes, the layer sees all, and the equations fit."""
    values = byte_values(*normalisation, device=image.device)
    low, step = values[:, :1, None], ((values[:, 255] - values[:, 0]) / 255)[:, None, None]
    number = ((image - low) / step).round().clamp(0, 255)
    rounded = values.gather(1, number.long().flatten(1)).view_as(image)
    if float(((image - rounded) / step).abs().max()) > NEAR:
        return None
    inputs, _, against = view.feed.derivative(rounded.unsqueeze(0))
    generator = torch.Generator().manual_seed(0)
    if not bool(against(torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype).to(inputs.device)).all()):
        return None  # what the layer does not see is left at 0, which may be a byte by chance
    white, right = whiten(*system, errs)
    return rounded if bool(judge(white, right, (inputs - view.centre) / view.spread, system.sent).fits) else None


# --- maps that only move and scale: bytes are read as from plain patches --------------------------------------------


class _Columns(NamedTuple):
    """Numbers of a patch, [K], in an order with the channels last, and factor and offset of each in that order."""

    order: Tensor
    scale: Tensor
    shift: Tensor


def _by_channel(scaled: Scaled, shape: tuple[int, int, int]) -> _Columns | None:
    """The columns, if each holds one channel with the same factor and offset in every patch, and every channel has as
    many; else None."""
    channel = scaled.index // (shape[1] * shape[2])
    same = bool((channel == channel[:1]).all())
    for part in (scaled.scale, scaled.shift):
        same = same and bool((part - part[:1]).abs().max() <= 1e-9 * part.abs().max())
    scale, owner = scaled.scale[0], channel[0]
    counts = torch.bincount(owner, minlength=shape[0])
    if not same or not bool((scale != 0).all()) or not bool((counts == counts[0]).all()):
        return None
    rank = torch.zeros_like(owner)
    for c in range(shape[0]):
        rank[owner == c] = torch.arange(int(counts[0]), device=owner.device)
    order = (rank * shape[0] + owner).argsort()
    return _Columns(order, scale[order], scaled.shift[0][order])


def _solve_scaled(
    view: View, columns: _Columns, system: System, normalisation: Normalisation, errs: Tensor
) -> tuple[Solution, list[dict[str, Fact]], Tensor]:
    """As `solve_through`, with the pixels themselves as unknowns."""
    assert view.scaled is not None
    factor = columns.scale / view.spread
    pixels = system._replace(weight=system.weight[..., columns.order] / factor)
    errs = errs / float(factor.abs().min()) ** 2
    solution, facts, patches = solve_patches(pixels, normalisation, errs)
    where = view.scaled.index[:, columns.order].flatten()
    size = int(torch.tensor(view.shape).prod())
    images = patches.new_zeros(len(patches), size).index_add_(1, where, patches.flatten(1))
    times = torch.bincount(where, minlength=size).to(images)
    images = (images / times.clamp(min=1)).view(-1, *view.shape)
    unseen = int((times == 0).sum())
    facts = [fact | {"input": "affine", "unseen": unseen, "bytes": fact["bytes"] and not unseen} for fact in facts]
    return solution, facts, images


# --- the attack ------------------------------------------------------------------------------------------------------


THROUGH = 120.0
"""Seconds for all images together where the transform before the patch embedding is undone step by step."""


def _verdict(fact: dict[str, Fact], eps: float, exact: bool) -> str | None:
    """Why a solution may not be exact: its equations do not fit, or G is singular up to the rounding of the upload.

    exact: whether it should be, since no caveat applies.
    """
    if fact.get("bytes"):
        return None
    if not fact["fits"]:
        return FAILED
    if not exact:
        return None
    if fact["rank"] != fact["unknowns"]:
        return "for some images rounding and noise leave G fewer directions than there are patches"
    if isinstance(fact["condition"], float) and fact["condition"] * eps > 0.1:
        return (
            f"for some images G is nearly singular (condition above {0.1 / eps:.0e}): weak directions drown in rounding"
        )
    return None


def _caveat(backbone: Backbone, stem: Stem, known: Knowledge) -> str | None:
    if known.step.batch > 1:
        return (
            f"a batch of {known.step.batch}: the rows of the table's gradient are sums over the images, and no linear "
            "system takes them apart; the one solution stands for every image of the batch"
        )
    patches = patch_count(backbone, stem)
    if patches > backbone.dim:
        return (
            f"{patches} patches are more than {backbone.dim} channels: the system is under-determined, "
            "and of all its solutions the one of least norm is shown"
            + ", unless exactly one consists of bytes"
            * (known.normalisation is not None)
        )
    return None


class PatchEmbedding(Attack):
    """∂l/∂W_patch = G^T X, solved for X."""

    needs: ClassVar[str] = "gradients of the patch embedding and of a learned position table"
    difference: ClassVar[str] = "APRIL's table gradient as G in the patch embedding's own equation: holds for any block"
    measured: ClassVar[str] = "benchmarks/gradients.py"
    name: ClassVar[str] = "patchembed"
    about: ClassVar[str] = "one linear solve with the gradients of the patch embedding and of the position table"
    closed_form: ClassVar[bool] = True

    def spoiled(self, known: Knowledge, noise: float) -> str | None:
        """Whatever is dropped behind the table leaves both of its sides as they are."""
        return spoiled(replace(known, step=replace(known.step, dropout=0.0)), noise)

    def prepare(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> Ready | Refused:
        stem = find_stem(backbone)
        if isinstance(stem, str):
            return Refused(stem)
        bias = () if stem.bias is None else (stem.bias,)
        stems = [path for path in find_stems(backbone) if absent(sent, (path.weight, path.table)) is None]
        views = [view_of(backbone, path) for path in stems]
        limit = None if all(view is None or view.affine for view in views) else THROUGH
        reads = tuple(dict.fromkeys(name for path in stems for name in (path.weight, path.table)))
        ready = Ready((*reads, *bias, UNKNOWN), _caveat(backbone, stem, known), limit)
        return ready if stems else absent(sent, (stem.weight, stem.table)) or ready

    def recover(
        self,
        backbone: Backbone,
        uploads: Sequence[Gradients],
        known: Knowledge | None = None,
        deadline: Deadline | None = None,
    ) -> Recovery:
        known = Knowledge() if known is None else known
        uploads = [known.without_lost(upload) for upload in uploads]
        # int8: every upload has a scale of its own.
        groups = [[upload] for upload in uploads] if known.step.dtype == torch.int8 else [uploads]
        parts: list[Recovery] = []
        for group in groups:
            if parts and parts[-1].partial is not None:
                break
            parts.append(self._by_every_path(backbone, group, known, deadline))
        recovery = joined(parts)
        if known.hides(backbone):
            for fact in recovery.facts:  # hidden patches are no part of these equations, whatever noise explains
                fact.update(fits=False, verdict=FAILED)
        return recovery

    def _by_every_path(
        self, backbone: Backbone, uploads: Sequence[Gradients], known: Knowledge, deadline: Deadline | None
    ) -> Recovery:
        """The same by each layer whose input is the image: of each upload the solution that fits, and of those the one
        that noise leaves least uncertain."""
        stems = [path for path in find_stems(backbone) if absent(uploads[0], (path.weight, path.table)) is None]
        if len(stems) < 2:
            return self.recover_shown(backbone, uploads, known, deadline, *stems)
        paths = [self.recover_shown(backbone, uploads, known, deadline, stem) for stem in stems]
        cut = next((path.partial for path in paths if path.partial is not None), None)
        images, facts = [], []
        for number in range(min(len(path.facts) for path in paths)):
            best = min(range(len(paths)), key=lambda at: _rank(paths[at].facts[number]))
            images.append(paths[best].images[number])
            facts.append(paths[best].facts[number] | {"layer": stems[best].weight})
        return Recovery(torch.stack(images), facts, partial=cut)

    def recover_shown(
        self,
        backbone: Backbone,
        uploads: Sequence[Gradients],
        known: Knowledge,
        deadline: Deadline | None = None,
        stem: Stem | None = None,
    ) -> Recovery:
        """The images behind uploads without hidden patches; of the first uploads where the deadline ends before the
        transform before the patch embedding is undone for all. stem: by which of the model's layers."""
        stem, trained = require_stem(backbone) if stem is None else stem, known.trained(backbone)
        table = torch.stack([patch_rows(trained, stem, upload, known) for upload in uploads])
        weight = flat_weight(stack(uploads, stem.weight), stem)
        sent, sigma = _errors(uploads[0], stem, known, table.shape[1])
        system = System(weight, table, sent, sigma)
        view = view_of(backbone, stem)
        normalisation = known.normalisation if known.step.batch == 1 else None
        if view is None:
            errs = [known.variance(part) for part in (weight, table)]
            variance = None if errs[0] is None or errs[1] is None else errs[0].mean(dim=2) + errs[1].sum(dim=1)
            solution, more, patches = solve_patches(system, normalisation, variance)
            images = to_images(patches, backbone, stem)
        else:
            view.stop = view.stop if deadline is None else deadline.over
            solution, more, images = solve_through(view, system, normalisation)
        exact = _caveat(backbone, stem, known) is None
        facts: list[dict[str, Fact]] = []
        for index, further in enumerate(more):
            fact = facts_of(solution, index, table.shape[1]) | further
            # The rows of a batch are sums: noise may explain the misfit of a solution that cannot be right.
            fact["fits"] = known.step.batch == 1 and bool(fact["fits"] or fact.get("bytes"))
            fact["verdict"] = further.get("verdict") or _verdict(fact, torch.finfo(system.sent).eps, exact)
            facts.append(fact)
        cut = "a part of what the model does to the last image before its patch embedding was undone"
        return Recovery(images.float(), facts, partial=cut if view is not None and view.stopped else None)


def _rank(fact: dict[str, Fact]) -> tuple[bool, bool, float]:
    """Order of solutions of one upload, the best first: it fits, has no verdict against it, is least uncertain."""
    share = fact.get("open")
    return fact["fits"] is not True, fact.get("verdict") is not None, share if isinstance(share, float) else 1.0


def _errors(upload: Gradients, stem: Stem, known: Knowledge, patches: int) -> tuple[torch.dtype, float]:
    """The type of the upload, and the deviation of uniform errors on its numbers.

    An equation has one number of the weight's gradient and as many of the table's as there are patches.
    """
    weight, table = (known.noise_on(upload[name]) for name in (stem.weight, stem.table))
    return known.type_of(upload[stem.table]), math.sqrt((weight**2 + patches * table**2) / (1 + patches))


def facts_of(solution: Solution, index: int, unknowns: int) -> dict[str, Fact]:
    """What the attacker can say of the solution of one upload."""
    condition = float(solution.condition[index])
    return {
        "rank": int(solution.rank[index]),
        "unknowns": unknowns,
        "condition": condition if math.isfinite(condition) else None,
        "residual": float(solution.residual[index]),
        "expected_residual": float(solution.expected[index]),
        "fits": bool(solution.fits[index]),
        "open": float(solution.open[index]),
    }


# --- the table's gradient without what a loss on the table adds -----------------------------------------------------
# DAL, MJP's loss on the table, has a gradient that the attacker computes. Clipping shrinks it by the factor that it
# leaves on all gradients; the attacker does not know it and estimates it.


def patch_rows(method: Method, stem: Stem, upload: Gradients, known: Knowledge) -> Tensor:
    """∂l/∂E_pos on the patch rows of one upload in float64, [N, D]; NaN where it overflowed."""
    rows = known_numbers(table_rows(upload[stem.table], stem))
    extra = known_gradient(method, stem, upload, known.step.when._replace(seed=known.step.seed))
    if extra is None:
        return rows
    extra = extra.double()
    return rows - _factor(extra, rows, stem, upload, known) * extra


def _factor(extra: Tensor, rows: Tensor, stem: Stem, upload: Gradients, known: Knowledge) -> float:
    """What clipping left of DAL's gradient `extra` [N, D]: a factor in [0, 1].

    The gradient of the patch embedding's bias is the sum over all tokens; what the table and E_unk have beyond it is
    DAL's. Without a bias it is the factor with which the pixels fit their equations best.
    """
    if not known.defence.per_sample:
        return 1.0
    if stem.bias is None or stem.bias not in upload:
        return _factor_that_fits(extra, rows, stem, upload, known)
    whole = extra.sum(dim=0)
    hidden = upload.get(UNKNOWN, torch.zeros_like(upload[stem.bias]))
    left = rows.sum(dim=0) + known_numbers(hidden) - known_numbers(upload[stem.bias])
    finite = left.isfinite()
    whole, left = whole[finite], left[finite]
    return float((whole @ left / (whole @ whole).clamp(min=1e-300)).clamp(0, 1))


def _factor_that_fits(extra: Tensor, rows: Tensor, stem: Stem, upload: Gradients, known: Knowledge) -> float:
    from scipy.optimize import minimize_scalar

    weight = flat_weight(known_numbers(upload[stem.weight]), stem)
    sent, sigma = _errors(upload, stem, known, len(rows))

    def residual(factor: float) -> float:
        return float(solve_pixels(weight[None], (rows - factor * extra)[None], sent, sigma).residual)

    best = min((residual(step / 16), step / 16) for step in range(17))[1]
    around = (max(0.0, best - 1 / 16), min(1.0, best + 1 / 16))
    minimum: Any = minimize_scalar(residual, bounds=around, method="bounded", options={"xatol": 1e-12})
    return float(minimum.x)
