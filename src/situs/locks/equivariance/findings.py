"""Whether a model obeys the two laws of permutation, measured on that very model.

    row:     blocks(P s) = P blocks(s), weight gradients equal
    column:  blocks'(z P) = blocks(z) P with keyed weights, weight gradients permuted

Each is run forward, backward and through optimiser steps, in float64 and in the model's own dtype. Findings are
collected, one for each part and law; nothing is raised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.backbones.layout import Group
from situs.core.tokens import patchify, take, unpatchify
from situs.errors import SitusError, counted
from situs.locks.equivariance.experiment import Errors, Experiment, relative_error
from situs.locks.equivariance.parts import Part, merged, parts_of
from situs.locks.equivariance.sample import (
    Sample,
    check_input,
    moved_order,
    own_dtype,
    row_leak,
    row_refusal,
    sample_of,
)
from situs.locks.folder import backbone_of
from situs.locks.groups import random_keys, residual_only
from situs.models.data import AnyModel
from situs.models.inference import evaluating
from situs.progress import task
from situs.results import Result, Summary, Table

Law = Literal["row", "column"]
Status = Literal["holds", "needs keyed weights", "refused"]

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest relative difference that is put down to rounding."""

INNER = {"hidden": "MLP units", "heads": "heads", "value": "value channels", "query": "query and key channels"}
NOTHING = "nothing to permute"
COVER = "leaves the function as it was: cover, no strength"


@dataclass(frozen=True)
class Finding:
    """What was found of one part under one law.

    part: "blocks" is the whole; "embed" and "finish" stand around it; others are leaves in it, their depth as *.
    errors: by check (forward, backward, steps) in float64; own: in the model's own dtype. Checks not run are left out.
    """

    part: str
    law: Law
    status: Status
    reason: str
    errors: Mapping[str, float] = field(default_factory=dict)
    own: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Verification(Result):
    """All findings of a model. control: the error of the column law with one axis of the key left out."""

    file: ClassVar[str] = "verify"

    model: str
    dtype: str
    tolerance: float
    own_tolerance: float
    steps: int
    control: float | None
    findings: tuple[Finding, ...]

    def whole(self, law: Law) -> Finding:
        """The finding of all blocks together."""
        return next(each for each in self.findings if each.part == "blocks" and each.law == law)

    @property
    def worst(self) -> float:
        """The largest float64 error among what was found to hold."""
        held = [error for each in self.findings if each.status != "refused" for error in each.errors.values()]
        return max(held, default=0.0)

    def summary(self) -> Summary:
        """What the numbers are; a row for the whole and what stands around it, and one for each kind of module."""
        header = ("part", "law", "verdict", "forward", "backward", counted(self.steps, "steps"), self.dtype, "why")
        around = [_row(each) for each in self.findings if _is_whole(each.part)]
        laws = {(each.part, each.law): each for each in self.findings}
        inside = [_module_row(part, laws) for part in dict.fromkeys(part for part, _ in laws) if not _is_whole(part)]
        modules = Table("Module by module", ("module", "row", "column", "forward", "why"), inside)
        control = f"Negative control, one axis of the key left out: error {self.control or 0:.1e}, which must not pass."
        held = any(each.errors for each in self.findings if each.status != "refused")
        worst = f"worst of what holds {self.worst:.1e}" if held else "nothing was found to hold"
        return Summary(
            f"Relative errors in float64: {worst}, tolerance {self.tolerance:.0e}; "
            f"in {self.dtype}: tolerance {self.own_tolerance:.0e}.",
            (Table(self.model, header, around), *([modules] if inside else [])),
            () if self.control is None else (control,),
        )

    def numbers(self) -> dict[str, Any]:
        """Every finding, and the worst error of what holds."""
        numbers = asdict(self) | {"worst": self.worst}
        del numbers["provenance"]
        return numbers


def _is_whole(part: str) -> bool:
    return part in ("embed", "blocks", "finish") or part.startswith("blocks,")


def _row(finding: Finding) -> tuple[str, ...]:
    numbers = [finding.errors.get(check) for check in ("forward", "backward", "steps")]
    cells = ["" if each is None else f"{each:.0e}" for each in (*numbers, max(finding.own.values(), default=None))]
    return (finding.part, finding.law, finding.status, *cells, finding.reason)


def _module_row(part: str, laws: Mapping[tuple[str, str], Finding]) -> tuple[str, ...]:
    own = [laws.get((part, "row")), laws.get((part, "column"))]
    errors = [each.errors["forward"] for each in own if each is not None and "forward" in each.errors]
    why = "; ".join(each.reason for each in own if each is not None and each.reason)
    status = ["" if each is None else each.status for each in own]
    return (part, *status, f"{max(errors):.0e}" if errors else "", why)


def verify(
    source: AnyModel,
    x: Tensor | None = None,
    *,
    groups: Sequence[Group] | None = None,
    steps: int = 3,
    tokens: int = 32,
    seed: int = 0,
    **opening: Any,
) -> Verification:
    """Measures to which permutations of tokens and channels a model is equivariant, and why not.

    source: a model as `situs.models.open_model` takes it, with what else that takes (opening); a timm name without
    weights gets random ones. x: images [B, C, H, W] or ids [B, N]; None: random ones. groups: of the keys; None: the
    model's own. steps: of AdamW. tokens: at most so many patch tokens take part, where the model allows a subset.

    >>> print(situs.verify("runs/ft"))
    """
    if steps < 0:
        raise SitusError(field="steps", value=steps, allowed="at least 0")
    if tokens < 2:
        raise SitusError(field="tokens", value=tokens, allowed="at least 2, for fewer have no order")
    backbone = backbone_of(source, any_weights=True, seed=seed, **opening)
    check_input(backbone, x)
    if "tokens" in backbone.refusals:
        reason = f"convolution: {backbone.refusals['tokens']}"
        refused = tuple(Finding("blocks", law, "refused", reason) for law in ("row", "column"))
        return Verification(backbone.name, "float32", *_tolerances(torch.float32), steps, None, refused)
    reason = ""
    if groups is None:
        try:
            groups = backbone.groups()
        except SitusError as error:  # a finding, not a mistake: the rows may be fine all the same
            groups, reason = (), str(error)
    own = own_dtype(backbone)
    limits, generator = _tolerances(own), torch.Generator().manual_seed(seed)
    keys = random_keys(groups, generator)
    with evaluating(backbone):
        sample = sample_of(backbone, x, tokens, generator)
        with task("verifying", 4) as told:
            told.tell(0, "rows and columns in float64")
            experiment = Experiment(backbone, sample, torch.float64, steps)
            first = _measure(experiment, groups, keys)
            told.tell(1, "a key that leaves one part out")
            control = experiment.control(groups, keys)
            told.tell(2, "part by part")
            leaves = parts_of(experiment, residual_only(groups), keys)
            del experiment  # the copies of the weights that it holds
            told.tell(3, f"rows and columns in {str(own).removeprefix('torch.')}")
            again = first if own == torch.float64 else _measure(Experiment(backbone, sample, own, steps), groups, keys)
        found = {moved: (errors, again[moved]) for moved, errors in first.items()}
        convolution = "word embedding" if backbone.input.shape is None else "convolution (patch embedding)"
        around = "the final norm and the head: they stay with the owner, in clear order"
        findings = (
            _embedding(backbone, sample),
            Finding("embed", "column", "refused", f"{convolution}: it stays with the owner, in clear order"),
            _rows(backbone, found.get("row", ({}, {})), leaves, limits),
            _columns(found, control, reason, leaves, limits),
            *_inner(groups, found, limits),
            *_inside(leaves, columns=bool(groups)),
            Finding("finish", "column", "refused", around),
        )
    return Verification(backbone.name, str(own).removeprefix("torch."), *limits, steps, control, findings)


Measured = dict[str, tuple[Errors, Errors]]
"""What was moved -> errors in float64 and in the model's own dtype."""


def _measure(experiment: Experiment, groups: Sequence[Group], keys: Mapping[str, Tensor]) -> dict[str, Errors]:
    """Errors by what was moved: rows, columns, columns with the weights left clear, each kind of inner group."""
    found: dict[str, Errors] = {}
    if row_refusal(experiment.backbone) is None:
        found["row"] = experiment.row()
    elif "take" not in experiment.backbone.refusals:
        found["row"] = experiment.row_forward()
    residual = residual_only(groups)
    if residual:
        found["column"] = experiment.column(residual, keys)
        found["unkeyed"] = {"forward": experiment.column_forward(residual, keys)}
    for kind in INNER:
        inner = [group for group in groups if group.kind == kind and group.size > 1]
        if inner:
            found[kind] = experiment.column(inner, keys)
    return found


def _tolerances(own: torch.dtype) -> tuple[float, float]:
    return TOLERANCES[torch.float64], TOLERANCES.get(own, TOLERANCES[torch.bfloat16])


def _within(found: tuple[Errors, Errors], limits: tuple[float, float]) -> bool:
    return all(error <= limit for errors, limit in zip(found, limits, strict=True) for error in errors.values())


def _rows(
    backbone: Backbone, found: tuple[Errors, Errors], leaves: Sequence[Part], limits: tuple[float, float]
) -> Finding:
    refusal = row_refusal(backbone)
    if refusal is None and backbone.num_tokens == 1:
        return Finding("blocks", "row", "holds", f"{NOTHING}: there is one token")
    if refusal is None and not _within(found, limits):
        refusal = _why(found, limits, leaves, "row")
    if refusal is not None:
        return Finding("blocks", "row", "refused", refusal, *found)
    return Finding("blocks", "row", "holds", row_leak(backbone) or "", *found)


def _columns(
    measured: Measured, control: float | None, reason: str, leaves: Sequence[Part], limits: tuple[float, float]
) -> Finding:
    if "column" not in measured:
        return Finding("blocks", "column", "refused", reason or "no residual group is known")
    found, clear = measured["column"], measured["unkeyed"][0]["forward"]
    status: Status = "refused"
    if not _within(found, limits):
        why = _why(found, limits, leaves, "column")
    elif control is None or control <= limits[0]:
        why = "a key with one axis left out passes too"
    elif clear <= limits[0]:
        status, why = "holds", "even with clear weights"
    else:
        status, why = "needs keyed weights", f"with clear weights the error is {clear:.1g}"
    return Finding("blocks", "column", status, why, *found)


def _inner(groups: Sequence[Group], measured: Measured, limits: tuple[float, float]) -> list[Finding]:
    found = []
    for kind, what in INNER.items():
        part = f"blocks, {what}"
        if kind in measured:
            good = _within(measured[kind], limits)
            status: Status = "needs keyed weights" if good else "refused"
            reason = COVER if good else "the function changes with this key"
            found.append(Finding(part, "column", status, reason, *measured[kind]))
        elif any(group.kind == kind for group in groups):
            found.append(Finding(part, "column", "holds", f"{NOTHING}: there is one in each group"))
        elif groups and kind == "query":
            reason = "RoPE turns these channels in pairs, each by an angle of its own"
            found.append(Finding(part, "column", "refused", reason))
    return found


def _why(found: tuple[Errors, Errors], limits: tuple[float, float], parts: Sequence[Part], law: Law) -> str:
    """Why a law is refused: lost in the rounding of the model's own dtype, or broken, and where first."""
    if _within((found[0], {}), limits):
        grown = f"{max(found[1].values()):.0e}, above {limits[1]:.0e}"
        return f"holds in float64; in the model's own dtype rounding grows to {grown}"
    errors = ((part.row if law == "row" else part.column, part) for part in parts)
    broken = [part for error, part in errors if error is not None and not error <= limits[0]]
    if not broken:
        return "the law fails between the modules, in none of them alone"
    first = min(broken, key=lambda part: part.turn)
    return f"the law fails from {first.name} on: {first.operation}"


def _inside(parts: Sequence[Part], *, columns: bool) -> list[Finding]:
    """Row and column findings of the leaves."""
    found = []
    for part in merged(parts):
        if part.row is not None:
            good = part.row <= TOLERANCES[torch.float64]
            reason = "" if good else f"{part.operation}: the rows do not come out in the order they went in"
            found.append(Finding(part.name, "row", "holds" if good else "refused", reason, {"forward": part.row}))
        if columns:
            found.append(_column_of(part))
    return found


def _column_of(part: Part) -> Finding:
    if part.column is None:
        return Finding(part.name, "column", "needs keyed weights", "its weights are read as part of a larger step")
    status: Status = "needs keyed weights" if part.keyed else "holds"
    if not part.column <= TOLERANCES[torch.float64]:
        status, reason = "refused", f"{part.operation}: its output neither moves with the key nor stays"
    elif part.moves:
        reason = "its output moves with the key"
    else:
        reason = "reads the keyed stream; its output stays" if part.keyed else "sees no key"
    return Finding(part.name, "column", status, reason, {"forward": part.column})


@torch.no_grad()
def _embedding(backbone: Backbone, sample: Sample) -> Finding:
    """Shuffling patches (or words) before the embedding is shuffling tokens behind it, unless patches overlap."""
    x = sample.x
    tokens = backbone.embed(x)
    order = moved_order(x.shape[0], tokens.shape[1], torch.Generator().manual_seed(2)).to(x.device)
    if backbone.input.shape is None:
        moved = x.gather(1, order)
    else:
        size = backbone.input.patch or 1
        moved = unpatchify(take(patchify(x, size), order), backbone.grid, size)
    error = relative_error(take(tokens, order), backbone.embed(moved))
    if error <= TOLERANCES.get(own_dtype(backbone), 1e-1):
        return Finding("embed", "row", "holds", "whole patches or words only", own={"forward": error})
    reason = "convolution: its patches overlap or it sees beyond them"
    return Finding("embed", "row", "refused", reason, own={"forward": error})
