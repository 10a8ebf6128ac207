"""Features of every image, as one file: features [n, D] or of its patches [n, N, D], ids, labels, what made them.

For example: situs features runs/mp3 --out features.safetensors
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from situs.cli.parser.model_args import DataArgs, open_from
from situs.cli.result import asked, tell_left_out
from situs.cli.shell import answer
from situs.errors import SitusError


@dataclass(frozen=True, kw_only=True)
class Args(DataArgs):
    """Features of every image, or of its patches."""

    out: Annotated[Path, Parameter(metavar="FILE")]
    """The file to write: .safetensors, .npz or .npy. NAME.names.csv beside it says which image each row is."""

    split: str = "train"
    """train, val or test, or all of them."""

    tokens: Literal["pooled", "patches"] = "pooled"
    """One vector an image, or one a patch, row by row of the model's grid."""

    pool: Literal["mean", "cls"] = "mean"
    """The mean of the patch tokens, or the CLS token, where they are pooled."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward."""

    column: Annotated[str | None, Parameter(name="--text.column", metavar="NAME")] = None
    """Of text: the column of the sentences; by default what the model was trained on, or the only one that holds
    words."""


def run(args: Args) -> None:
    """Extracts and writes them, and says what was written."""
    from situs.measure.features import check_form, extract_features, write_features

    if args.tokens == "patches" and args.pool != "mean":
        raise SitusError(f"pool={args.pool}: of patches nothing is pooled; leave it out", field=("pool", "tokens"))
    check_form(args.out)
    found = extract_features(open_from(args), **asked(args))
    write_features(args.out, found)
    count, *patches, dim = found.features.shape
    labels = "with labels" if found.labels is not None else "without labels"
    said = f"{args.out}: {count} features of {'× '.join(f'{each} ' for each in (*patches, dim))}numbers, {labels}"
    known = found.labels is not None
    answer({"file": args.out, "shape": [count, *patches, dim], "labels": known, "left_out": found.left_out}, said)
    tell_left_out(found.left_out)
