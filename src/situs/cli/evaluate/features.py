"""Pooled features of every image, as one file: features [n, D], ids, labels, what made them; their names beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from situs.cli.parser.model_args import ModelArgs, open_from
from situs.cli.result import tell_left_out


@dataclass(frozen=True, kw_only=True)
class Args(ModelArgs):
    """Pooled features of every image."""

    out: Annotated[Path, Parameter(metavar="FILE")]
    """The file to write: .safetensors, .npz or .npy. NAME.names.csv beside it says which image each row is."""

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """The images; by default those a run was trained on."""

    split: str = "train"
    """train, val or test."""

    held_out: Annotated[float | None, Parameter(metavar="SHARE")] = None
    """Share of data without val and test that is held out as both; by default what a run held out."""

    count: Annotated[int | None, Parameter(metavar="IMAGES")] = None
    """So many of the images, chosen at random and the same every time; all where nothing is said."""

    pool: Literal["mean", "cls"] = "mean"
    """The mean of the patch tokens, or the CLS token."""

    batch: int = 256
    """Images at a time."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward."""


def run(args: Args) -> None:
    """Extracts and writes them, and says what was written."""
    from situs.evaluate.features import check_form, extract_features, write_features

    check_form(args.out)
    model = open_from(args).holding_out(args.held_out)
    images = {"split": args.split, "count": args.count, "batch": args.batch}
    found = extract_features(model, args.data, pool=args.pool, precision=args.precision, **images)
    write_features(args.out, found)
    count, dim = found.features.shape
    labels = "with labels" if found.labels is not None else "without labels"
    print(f"{args.out}: {count} features of {dim} numbers, {labels}")
    tell_left_out(found.left_out)
