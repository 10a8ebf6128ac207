"""Whether a model obeys the two permutation laws, measured on the model itself.

    row:     blocks(P s) = P blocks(s), weight gradients equal
    column:  blocks'(z P) = blocks(z) P with keyed weights, weight gradients permuted

Each is run forward, backward and through optimiser steps, in float64 and in the model's dtype. There is one finding for
each part and law; nothing is raised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.backbones.layout import Group
from situs.config import checks_arguments
from situs.core.tokens import patchify, take, unpatchify
from situs.errors import SitusError, counted
from situs.locks.equivariance.experiment import Errors, Experiment, Part, merged, parts_of, relative_error
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
from situs.results import Result, Summary, Table, Tone

Law = Literal["row", "column"]
Status = Literal["holds", "needs keyed weights", "refused"]

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest relative difference that counts as rounding."""

INNER = {"hidden": "MLP units", "heads": "heads", "value": "value channels", "query": "query and key channels"}
NOTHING = "nothing to permute"
COVER = (
    "this permutation does not change what the model computes. It makes comparing weights harder, but adds no bits to "
    "the lock's strength"
)

MEANING = """
Row law: if the tokens are permuted, the output is permuted in the same way. Column law: if a key permutes the channels
and the weights, the output is permuted in the same way. Each law is tested in the forward pass, in the backward pass
and over optimiser steps, once with and once without the permutation. After the permutation is undone, the two results
must agree. Each number is their largest relative difference. "Needs keyed weights" means that the law holds only if the
key has permuted the weights. "Refused" means that the law does not hold or could not be tested; the reason is given.
"""


@dataclass(frozen=True)
class Finding:
    """The finding on one part under one law.

    part: "blocks" is all blocks together; "embed" and "finish" are around them; others are leaf modules in them, depths
    as *. errors: by check (forward, backward, steps) in float64; native: in the model's dtype. Checks that were not run
    are left out.
    """

    part: str
    law: Law
    status: Status
    reason: str
    errors: Mapping[str, float] = field(default_factory=dict)
    native: Mapping[str, float] = field(default_factory=dict)

    def numbers(self) -> dict[str, Any]:
        """The finding as JSON holds it; the errors in the model's dtype are called "own" there."""
        numbers = asdict(self)
        return numbers | {"own": numbers.pop("native")}


@dataclass(frozen=True)
class Verification(Result):
    """All findings on a model. control: the error of the column law with one axis of the key left out."""

    file: ClassVar[str] = "verify"
    title: ClassVar[str] = "Permutations that a model obeys"
    meaning: ClassVar[str] = MEANING

    model: str
    dtype: str
    tolerance: float
    own_tolerance: float
    steps: int
    control: float | None
    findings: tuple[Finding, ...]

    def whole(self, law: Law) -> Finding:
        """The finding on all blocks together."""
        return next(finding for finding in self.findings if finding.part == "blocks" and finding.law == law)

    @property
    def worst(self) -> float:
        """The largest float64 error of all laws that hold."""
        return max((error for finding in self._holding for error in finding.errors.values()), default=0.0)

    @property
    def _holding(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status != "refused"]

    @property
    def _failed(self) -> set[str]:
        """The laws that the blocks were not shown to obey."""
        return {"row", "column"} - {finding.law for finding in self._holding if finding.part == "blocks"}

    @property
    def tone(self) -> Tone:
        """Good if the blocks obey both laws."""
        return "unsure" if self._failed else "good"

    @property
    def mark(self) -> str:
        """The tone in words."""
        if not self._failed:
            return "The blocks obey the row law and the column law"
        return f"Not shown to hold for the blocks: {', '.join(f'{law} law' for law in sorted(self._failed)[::-1])}"

    def summary(self) -> Summary:
        """A table of the blocks and the parts around them, and one of the modules in them."""
        header = ("part", "law", "verdict", "forward", "backward", counted(self.steps, "steps"), self.dtype, "why")
        around = [_row(finding) for finding in self.findings if _is_whole(finding.part)]
        laws = {(finding.part, finding.law): finding for finding in self.findings}
        inside = [_module_row(part, laws) for part in dict.fromkeys(part for part, _ in laws) if not _is_whole(part)]
        modules = Table("Module by module", ("module", "row", "column", "forward", "why"), inside)
        control = (
            f"Negative control: if one axis of one tensor is left unpermuted, the error is {self.control or 0:.1e}. "
            "This error must be above the tolerance."
        )
        holding = sum(finding.status == "holds" for finding in self.findings)
        measured = any(finding.errors for finding in self._holding)
        worst = (
            f"the largest relative error of all laws that hold is {self.worst:.1e}"
            if measured
            else "no law was found to hold"
        )
        return Summary(
            f"In float64, {worst} (tolerance: {self.tolerance:.0e}). "
            f"In {self.dtype}, the tolerance is {self.own_tolerance:.0e}.",
            (Table(self.model, header, around), *([modules] if inside else [])),
            () if self.control is None else (control,),
            ((f"{holding} of {len(self.findings)}", "checks in which the law holds without keyed weights"),),
        )

    def numbers(self) -> dict[str, Any]:
        """Every finding, and the largest error of the laws that hold."""
        numbers = asdict(self) | {"findings": [finding.numbers() for finding in self.findings], "worst": self.worst}
        del numbers["provenance"]
        return numbers


def _is_whole(part: str) -> bool:
    return part in ("embed", "blocks", "finish") or part.startswith("blocks,")


def _row(finding: Finding) -> tuple[str, ...]:
    numbers = [finding.errors.get(check) for check in ("forward", "backward", "steps")]
    native = max(finding.native.values(), default=None)
    cells = ["" if error is None else f"{error:.0e}" for error in (*numbers, native)]
    return (finding.part, finding.law, finding.status, *cells, finding.reason)


def _module_row(part: str, laws: Mapping[tuple[str, str], Finding]) -> tuple[str, ...]:
    pair = [laws.get((part, "row")), laws.get((part, "column"))]
    findings = [finding for finding in pair if finding is not None]
    errors = [finding.errors["forward"] for finding in findings if "forward" in finding.errors]
    reasons = "; ".join(finding.reason for finding in findings if finding.reason)
    status = ["" if finding is None else finding.status for finding in pair]
    return (part, *status, f"{max(errors):.0e}" if errors else "", reasons)


@checks_arguments()
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

    Equivariant: with the input permuted, the output is permuted in the same way and otherwise the same. Locks and split
    learning use such permutations.

    source, opening: as `situs.open_model` takes them; a timm name without weights gets random ones. x: images
    [B, C, H, W] or ids [B, N]; None: random ones. groups: to permute; None: the model's. steps: of AdamW. tokens: at
    most so many patch tokens take part, if the model supports a subset.

    >>> findings = situs.verify("runs/ft")  # print(findings) shows them all
    >>> findings.whole("row").status, findings.whole("column").status
    ('holds', 'needs keyed weights')
    """
    if steps < 0:
        raise SitusError(field="steps", value=steps, allowed="at least 0")
    if tokens < 2:
        raise SitusError(field="tokens", value=tokens, allowed="at least 2")
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
        except SitusError as error:  # a finding: the row law may hold all the same
            groups, reason = (), str(error)
    dtype = own_dtype(backbone)
    limits, generator = _tolerances(dtype), torch.Generator().manual_seed(seed)
    keys = random_keys(groups, generator)
    with evaluating(backbone):
        sample = sample_of(backbone, x, tokens, generator)
        with task("verifying", 4) as progress:
            progress.tell(now="rows and columns in float64")
            experiment = Experiment(backbone, sample, torch.float64, steps)
            first = _measure(experiment, groups, keys)
            progress.tell(1, "negative control")
            control = experiment.control(groups, keys)
            progress.tell(2, "module by module")
            leaves = parts_of(experiment, residual_only(groups), keys)
            del experiment  # with its copies of the weights
            progress.tell(3, f"rows and columns in {str(dtype).removeprefix('torch.')}")
            native = first
            if dtype != torch.float64:
                native = _measure(Experiment(backbone, sample, dtype, steps), groups, keys)
        measured = {moved: (errors, native[moved]) for moved, errors in first.items()}
        convolution = "word embedding" if backbone.input.shape is None else "convolution (patch embedding)"
        around = "the final norm and the head are not locked"
        findings = (
            _embedding(backbone, sample),
            Finding("embed", "column", "refused", f"{convolution}: it is not locked"),
            _rows(backbone, measured.get("row", ({}, {})), leaves, limits),
            _columns(measured, control, reason, leaves, limits),
            *_inner(groups, measured, limits),
            *_inside(leaves, columns=bool(groups)),
            Finding("finish", "column", "refused", around),
        )
    return Verification(backbone.name, str(dtype).removeprefix("torch."), *limits, steps, control, findings)


Measured = dict[str, tuple[Errors, Errors]]
"""What was moved -> errors in float64 and in the model's dtype."""


def _measure(experiment: Experiment, groups: Sequence[Group], keys: Mapping[str, Tensor]) -> dict[str, Errors]:
    """Errors by what was moved: rows, columns, columns with clear weights, each kind of inner group."""
    errors: dict[str, Errors] = {}
    if row_refusal(experiment.backbone) is None:
        errors["row"] = experiment.row()
    elif "take" not in experiment.backbone.refusals:
        errors["row"] = experiment.row_forward()
    residual = residual_only(groups)
    if residual:
        errors["column"] = experiment.column(residual, keys)
        errors["unkeyed"] = {"forward": experiment.column_forward(residual, keys)}
    for kind in INNER:
        inner = [group for group in groups if group.kind == kind and group.size > 1]
        if inner:
            errors[kind] = experiment.column(inner, keys)
    return errors


def _tolerances(dtype: torch.dtype) -> tuple[float, float]:
    return TOLERANCES[torch.float64], TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16])


def _within(errors: tuple[Errors, Errors], limits: tuple[float, float]) -> bool:
    return all(error <= limit for by_check, limit in zip(errors, limits, strict=True) for error in by_check.values())


def _rows(
    backbone: Backbone, errors: tuple[Errors, Errors], leaves: Sequence[Part], limits: tuple[float, float]
) -> Finding:
    refusal = row_refusal(backbone)
    if refusal is None and backbone.num_tokens == 1:
        return Finding("blocks", "row", "holds", f"{NOTHING}: there is one token")
    if refusal is None and not _within(errors, limits):
        refusal = _why(errors, limits, leaves, "row")
    if refusal is not None:
        return Finding("blocks", "row", "refused", refusal, *errors)
    return Finding("blocks", "row", "holds", row_leak(backbone) or "", *errors)


def _columns(
    measured: Measured, control: float | None, reason: str, leaves: Sequence[Part], limits: tuple[float, float]
) -> Finding:
    if "column" not in measured:
        return Finding("blocks", "column", "refused", reason or "no residual group is known")
    errors, clear = measured["column"], measured["unkeyed"][0]["forward"]
    status: Status = "refused"
    if not _within(errors, limits):
        why = _why(errors, limits, leaves, "column")
    elif control is None:
        why = "there is no negative control, so the test proves nothing"
    elif control <= limits[0]:
        why = "a key that leaves one axis of a tensor unpermuted also passes the test, so the test proves nothing"
    elif clear <= limits[0]:
        status, why = "holds", "even with unlocked weights"
    else:
        status, why = "needs keyed weights", f"with unlocked weights the error is {clear:.1g}"
    return Finding("blocks", "column", status, why, *errors)


def _inner(groups: Sequence[Group], measured: Measured, limits: tuple[float, float]) -> list[Finding]:
    findings = []
    for kind, plural in INNER.items():
        part = f"blocks, {plural}"
        if kind in measured:
            good = _within(measured[kind], limits)
            status: Status = "needs keyed weights" if good else "refused"
            reason = COVER if good else "this permutation changes what the model computes"
            findings.append(Finding(part, "column", status, reason, *measured[kind]))
        elif any(group.kind == kind for group in groups):
            findings.append(Finding(part, "column", "holds", f"{NOTHING}: each group has only one entry"))
        elif groups and kind == "query":
            reason = (
                "RoPE rotates these channels in pairs, and each pair has its own angle, so these channels must not "
                "be permuted"
            )
            findings.append(Finding(part, "column", "refused", reason))
    return findings


def _why(errors: tuple[Errors, Errors], limits: tuple[float, float], parts: Sequence[Part], law: Law) -> str:
    """Why a law is refused: rounding in the model's dtype, or the first module that breaks it."""
    if _within((errors[0], {}), limits):
        grown = f"{max(errors[1].values()):.0e}, above {limits[1]:.0e}"
        return f"the law holds in float64, but in the model's dtype rounding errors grow to {grown}"
    by_part = ((part.row if law == "row" else part.column, part) for part in parts)
    broken = [part for error, part in by_part if error is not None and not error <= limits[0]]
    if not broken:
        return "the law holds in each tested module, but fails in the operations between the modules"
    first = min(broken, key=lambda part: part.turn)
    return f"the law first fails in {first.name}: {first.operation}"


def _inside(parts: Sequence[Part], *, columns: bool) -> list[Finding]:
    """Row and column findings on the leaf modules."""
    findings = []
    for part in merged(parts):
        if part.row is not None:
            good = part.row <= TOLERANCES[torch.float64]
            reason = "" if good else f"{part.operation}: its output rows are not in the order of its input rows"
            findings.append(Finding(part.name, "row", "holds" if good else "refused", reason, {"forward": part.row}))
        if columns:
            findings.append(_column_of(part))
    return findings


def _column_of(part: Part) -> Finding:
    if part.column is None:
        return Finding(part.name, "column", "needs keyed weights", "its weights are used by another module")
    status: Status = "needs keyed weights" if part.keyed else "holds"
    if not part.column <= TOLERANCES[torch.float64]:
        status, reason = "refused", f"{part.operation}: the key does more than permute its output"
    elif part.moves:
        reason = "its output is permuted by the key"
    else:
        reason = "reads permuted channels, but its output is unchanged" if part.keyed else "sees no key"
    return Finding(part.name, "column", status, reason, {"forward": part.column})


@torch.no_grad()
def _embedding(backbone: Backbone, sample: Sample) -> Finding:
    """Whether shuffling patches (or words) before the embedding equals shuffling tokens behind it."""
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
        return Finding(
            "embed", "row", "holds", "only if whole patches or words are permuted", native={"forward": error}
        )
    reason = "convolution: its patches overlap, or it reads pixels outside its patch"
    return Finding("embed", "row", "refused", reason, native={"forward": error})
