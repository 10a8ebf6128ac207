"""Measures, on a model itself, which permutations of its tokens and channels it obeys, and what breaks the others.

Row: the order of the tokens (private split learning). Column: the order of the channels (locked models). Each is run
forward, backward and through optimiser steps, in float64 and in the model's own dtype. A part that is refused is a
finding, not an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from situs.cli.model_args import ModelArgs, open_from
from situs.cli.tables import print_table

if TYPE_CHECKING:
    from situs.locks.verify import Finding, Verdict


@dataclass(frozen=True, kw_only=True)
class Args(ModelArgs):
    """Which permutations a model obeys."""

    steps: int = 3
    """Steps of AdamW after which the two trainings are compared; 0 for none."""

    tokens: int = 32
    """How many patch tokens take part at most, where the model allows a subset."""

    seed: int = 0
    """Of the weights (where none are given), the inputs and the keys."""

    modules: bool = True
    """Also list the verdicts module by module."""

    json: bool = False
    """Print JSON instead of tables."""


def run(args: Args) -> None:
    """Opens the model, verifies it and prints what was found."""
    from situs.locks.verify import verify

    backbone = open_from(args, any_weights=True).backbone
    verdict = verify(backbone, steps=args.steps, tokens=args.tokens, seed=args.seed)
    if args.json:
        print(json.dumps(asdict(verdict) | {"worst": verdict.worst}, indent=2))
    else:
        show(verdict, modules=args.modules)


def show(verdict: Verdict, *, modules: bool) -> None:
    """The tables, and below them what the numbers are."""
    whole = [each for each in verdict.findings if not _is_module(each)]
    heading = ("part", "law", "verdict", "forward", "backward", f"{verdict.steps} steps", verdict.dtype, "why")
    print_table(verdict.model, [heading, *map(_row, whole)])
    inside = {each.part: each for each in verdict.findings if _is_module(each)}
    if modules and inside:
        laws = {(each.part, each.law): each for each in verdict.findings}
        rows = [_module_row(laws.get((part, "row")), laws.get((part, "column")), part) for part in inside]
        print_table("Module by module", [("module", "row", "column", "forward", "why"), *rows])
    print(
        f"Relative errors in float64: worst of what holds {verdict.worst:.1e}, tolerance {verdict.tolerance:.0e}; "
        f"in {verdict.dtype}: tolerance {verdict.own_tolerance:.0e}."
    )
    if verdict.control is not None:
        print(f"Negative control, one axis of the key left out: error {verdict.control:.1e}, which must not pass.")


def _is_module(finding: Finding) -> bool:
    return finding.part not in ("embed", "blocks", "finish") and not finding.part.startswith("blocks,")


def _row(finding: Finding) -> tuple[str, ...]:
    checks = tuple(_number(finding.errors, check) for check in ("forward", "backward", "steps"))
    own = f"{max(finding.own.values()):.0e}" if finding.own else ""
    return (finding.part, finding.law, finding.status, *checks, own, finding.reason)


def _module_row(row: Finding | None, column: Finding | None, part: str) -> tuple[str, ...]:
    errors = [each.errors["forward"] for each in (row, column) if each is not None and "forward" in each.errors]
    why = "; ".join(each.reason for each in (row, column) if each is not None and each.reason)
    status = tuple("" if each is None else each.status for each in (row, column))
    return (part, *status, f"{max(errors):.0e}" if errors else "", why)


def _number(errors: Mapping[str, float], check: str) -> str:
    return f"{errors[check]:.0e}" if check in errors else ""
