"""The patch-embedding attack: the pixels are the solution of one linear system.

A patch embedding E = X W^T + b followed by an added table has ∂l/∂W = G^T X with G = ∂l/∂E, and ∂l/∂E is also the
gradient of the table's patch rows. Both are in the upload, so X is solved for: attention, labels and loss do not
matter. Exact for one image as long as the N patches are no more than the rank of G, at most D. Local steps on one image
sum both sides over the steps and leave the equation as it is. Who knows how images are normalised also knows that a
pixel is one of 256 values: `bytes` ends the error that is left where the equations bear that out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from situs.audit.attacks.base import (
    FAILED,
    Attack,
    Fact,
    Knowledge,
    Ready,
    Recovery,
    Refused,
    absent,
    joined,
    known_numbers,
    spoiled,
    stack,
)
from situs.audit.attacks.patchembed.equations import Solution, solve_pixels
from situs.audit.attacks.patchembed.through import System, solve_patches, solve_through
from situs.audit.client import known_gradient
from situs.audit.deadline import Deadline
from situs.audit.defences import UNKNOWN, Gradients
from situs.audit.stem import (
    Stem,
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
from situs.methods.base import Method

THROUGH = 120.0
"""Seconds for all images together, where what a model does before its patch embedding is undone step by step."""


def _said(fact: dict[str, Fact], eps: float, exact: bool) -> str | None:
    """Why a solution may not be exact: its equations do not fit, or G is singular up to the rounding of what was sent.

    exact: whether it ought to be, so that nobody has said otherwise.
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
    if known.batch > 1:
        return (
            f"a batch of {known.batch}: the rows of the table's gradient are sums over the images, and no linear "
            "system takes them apart; the one solution stands for every image of the batch"
        )
    patches = patch_count(backbone, stem)
    if patches > backbone.dim:
        return (
            f"{patches} patches are more than {backbone.dim} channels: the system is under-determined, "
            "and of all its solutions the one of least norm is shown"
            + ", unless just one consists of bytes"
            * (known.normalisation is not None)
        )
    return None


class PatchEmbedding(Attack):
    """∂l/∂W_patch = G^T X, solved for X."""

    name: ClassVar[str] = "patchembed"
    about: ClassVar[str] = "one linear solve with the gradients of the patch embedding and of the position table"
    closed_form: ClassVar[bool] = True

    def spoiled(self, known: Knowledge, noise: float) -> str | None:
        """Whatever is dropped behind the table leaves both of its sides as they are."""
        return spoiled(replace(known, training=replace(known.training, dropout=0.0)), noise)

    def prepare(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> Ready | Refused:
        stem = find_stem(backbone)
        if isinstance(stem, str):
            return Refused(stem)
        bias = () if stem.bias is None else (stem.bias,)
        stems = [each for each in find_stems(backbone) if absent(sent, (each.weight, each.table)) is None]
        views = [view_of(backbone, each) for each in stems]
        limit = None if all(view is None or view.affine for view in views) else THROUGH
        reads = tuple(dict.fromkeys(name for each in stems for name in (each.weight, each.table)))
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
        # Each with its own scale.
        groups = [[upload] for upload in uploads] if known.sent == torch.int8 else [uploads]
        parts: list[Recovery] = []
        for group in groups:
            if parts and parts[-1].partial is not None:
                break
            parts.append(self._by_every_path(backbone, group, known, deadline))
        found = joined(parts)
        if known.hides(backbone):
            for fact in found.facts:  # hidden patches are no part of these equations, whatever noise explains
                fact.update(fits=False, verdict=FAILED)
        return found

    def _by_every_path(
        self, backbone: Backbone, uploads: Sequence[Gradients], known: Knowledge, deadline: Deadline | None
    ) -> Recovery:
        """The same by each layer that is fed the image: of each upload the solution that fits, and of those the one
        that noise leaves least open."""
        stems = [each for each in find_stems(backbone) if absent(uploads[0], (each.weight, each.table)) is None]
        if len(stems) < 2:
            return self.recover_shown(backbone, uploads, known, deadline, *stems)
        paths = [self.recover_shown(backbone, uploads, known, deadline, stem) for stem in stems]
        cut = next((path.partial for path in paths if path.partial is not None), None)
        images, facts = [], []
        for number in range(min(len(path.facts) for path in paths)):
            at = min(range(len(paths)), key=lambda at: _off(paths[at].facts[number]))
            images.append(paths[at].images[number])
            facts.append(paths[at].facts[number] | {"layer": stems[at].weight})
        return Recovery(torch.stack(images), facts, partial=cut)

    def recover_shown(
        self,
        backbone: Backbone,
        uploads: Sequence[Gradients],
        known: Knowledge,
        deadline: Deadline | None = None,
        stem: Stem | None = None,
    ) -> Recovery:
        """The images behind uploads none of whose patches is hidden; of the first where the deadline is over while it
        is undone what the model does before its patch embedding. stem: by which of the model's layers."""
        stem, trained = require_stem(backbone) if stem is None else stem, known.trained(backbone)
        table = torch.stack([patch_rows(trained, stem, upload, known) for upload in uploads])
        weight = flat_weight(stack(uploads, stem.weight), stem)
        sent, sigma = _errors(uploads[0], stem, known, table.shape[1])
        system = System(weight, table, sent, sigma)
        view = view_of(backbone, stem)
        normalisation = known.normalisation if known.batch == 1 else None
        if view is None:
            errs = [known.variance(part) for part in (weight, table)]
            each = None if errs[0] is None or errs[1] is None else errs[0].mean(dim=2) + errs[1].sum(dim=1)
            found, facts, patches = solve_patches(system, normalisation, each)
            images = to_images(patches, backbone, stem)
        else:
            view.stop = view.stop if deadline is None else deadline.over
            found, facts, images = solve_through(view, system, normalisation)
        exact = _caveat(backbone, stem, known) is None
        told: list[dict[str, Fact]] = []
        for index, more in enumerate(facts):
            fact = facts_of(found, index, table.shape[1]) | more
            # The rows of a batch are sums, so that noise may explain the misfit of what cannot be right.
            fact["fits"] = known.batch == 1 and bool(fact["fits"] or fact.get("bytes"))
            fact["verdict"] = more.get("verdict") or _said(fact, torch.finfo(system.sent).eps, exact)
            told.append(fact)
        cut = "a part of what the model does to the last image before its patch embedding was undone"
        return Recovery(images.float(), told, partial=cut if view is not None and view.stopped else None)


def _off(fact: dict[str, Fact]) -> tuple[bool, bool, float]:
    """By what solutions of one upload are compared: that they fit, that nothing speaks against them, what is open."""
    share = fact.get("open")
    return fact["fits"] is not True, fact.get("verdict") is not None, share if isinstance(share, float) else 1.0


def _errors(upload: Gradients, stem: Stem, known: Knowledge, patches: int) -> tuple[torch.dtype, float]:
    """The type of what was sent, and the deviation of even errors on it.

    An equation has one number of the weight's gradient and as many of the table's as there are patches."""
    weight, table = (known.noise_on(upload[name]) for name in (stem.weight, stem.table))
    return known.type_of(upload[stem.table]), math.sqrt((weight**2 + patches * table**2) / (1 + patches))


def facts_of(found: Solution, index: int, unknowns: int) -> dict[str, Fact]:
    """What a solution says of one upload."""
    condition = float(found.condition[index])
    return {
        "rank": int(found.rank[index]),
        "unknowns": unknowns,
        "condition": condition if math.isfinite(condition) else None,
        "residual": float(found.residual[index]),
        "expected_residual": float(found.expected[index]),
        "fits": bool(found.fits[index]),
        "open": float(found.open[index]),
    }


# --- the table's gradient without what a loss on the table adds -----------------------------------------------------
# DAL, MJP's loss on the table, has a gradient that the attacker computes. Clipping shrinks it by the factor that it
# leaves on all gradients, which he does not know but finds.


def patch_rows(method: Method, stem: Stem, upload: Gradients, known: Knowledge) -> Tensor:
    """∂l/∂E_pos on the patch rows of one upload in float64, [N, D]; NaN where it overflowed."""
    rows = known_numbers(table_rows(upload[stem.table], stem))
    extra = known_gradient(method, stem, upload, known.when._replace(seed=known.seed))
    if extra is None:
        return rows
    extra = extra.double()
    return rows - _factor(extra, rows, stem, upload, known) * extra


def _factor(extra: Tensor, rows: Tensor, stem: Stem, upload: Gradients, known: Knowledge) -> float:
    """What clipping left of DAL's gradient `extra` [N, D]: a factor in [0, 1].

    The patch embedding's bias has the sum over all tokens; what the table and E_unk have beyond it is DAL's. A model
    without that bias is asked its equations: with any other factor the pixels meet them worse.
    """
    if not known.defence.per_sample:
        return 1.0
    if stem.bias is None or stem.bias not in upload:
        return _factor_that_fits(extra, rows, stem, upload, known)
    whole = extra.sum(dim=0)
    hidden = upload.get(UNKNOWN, torch.zeros_like(upload[stem.bias]))
    left = rows.sum(dim=0) + known_numbers(hidden) - known_numbers(upload[stem.bias])
    there = left.isfinite()
    whole, left = whole[there], left[there]
    return float((whole @ left / (whole @ whole).clamp(min=1e-300)).clamp(0, 1))


def _factor_that_fits(extra: Tensor, rows: Tensor, stem: Stem, upload: Gradients, known: Knowledge) -> float:
    from scipy.optimize import minimize_scalar

    weight = flat_weight(known_numbers(upload[stem.weight]), stem)
    sent, sigma = _errors(upload, stem, known, len(rows))

    def off(factor: float) -> float:
        return float(solve_pixels(weight[None], (rows - factor * extra)[None], sent, sigma).residual)

    best = min((off(step / 16), step / 16) for step in range(17))[1]
    around = (max(0.0, best - 1 / 16), min(1.0, best + 1 / 16))
    found: Any = minimize_scalar(off, bounds=around, method="bounded", options={"xatol": 1e-12})
    return float(found.x)
