"""Pooled features of every image, as one file: features [n, D], ids, labels, what made them; their names beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class Args:
    """Pooled features of every image."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL_OR_RUN")]
    """A run folder, an export folder, or a timm name with --weights."""

    out: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """The file to write: .safetensors, .npz or .npy. NAME.names.csv beside it says which image each row is."""

    data: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """The images; by default those a run was trained on."""

    split: str = "train"
    """train, val or test."""

    held_out: Annotated[float | None, tyro.conf.arg(metavar="SHARE")] = None
    """Share of data without val and test that is held out as both; by default what a run held out."""

    pool: Literal["mean", "cls"] = "mean"
    """The mean of the patch tokens, or the CLS token."""

    weights: Annotated[str | None, tyro.conf.arg(metavar="FILE|pretrained|random")] = None
    """For a timm name: a weight file, those timm publishes, or none."""

    img_size: Annotated[int | tuple[int, int] | None, tyro.conf.arg(metavar="SIDE|HEIGHT WIDTH")] = None
    """For a timm name: image size in pixels, where it differs from the model's own."""

    ema: bool = True
    """For a run: the mean of the weights where there is one, or the weights themselves."""

    batch: int = 256
    """Images at a time."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward."""

    device: str | None = None
    """cpu, cuda or cuda:N; a GPU where there is one."""


def run(args: Args) -> None:
    """Extracts and writes them, and says what was written."""
    from situs import __version__
    from situs.cli.result import tell_left_out, tell_locked
    from situs.core.tokens import pair
    from situs.data.sampler import sample_of
    from situs.evaluate.features import check_form, extract, write_features
    from situs.evaluate.subject import load_set, open_subject
    from situs.train.distributed import start

    check_form(args.out)
    device = start(args.device).device
    size = None if args.img_size is None else pair(args.img_size)
    ema = None if args.ema else False
    subject = open_subject(args.model, weights=args.weights, img_size=size, ema=ema, device=device)
    tell_locked(subject)
    if args.held_out is not None:
        subject = subject.holding_out(args.held_out)
    loader = load_set(subject, args.data, args.split, args.batch, device)
    found = extract(subject.backbone, loader, args.pool, positions=subject.positions, precision=args.precision)
    mean, std = subject.data.normalisation
    facts = {
        **subject.facts,
        "data": loader.source.name,
        "pool": args.pool,
        "positions": subject.positions,
        "precision": args.precision,
        "img_size": subject.data.size,
        "mean": mean,
        "std": std,
        "situs": __version__,
    }
    rows = sample_of(found.ids).tolist()
    found = replace(found, names=tuple(loader.source.key(row) for row in rows))
    write_features(args.out, found, facts, loader.classes)
    count, dim = found.features.shape
    labels = "with labels" if found.labels is not None else "without labels"
    print(f"{args.out}: {count} features of {dim} numbers, {labels}")
    tell_left_out(loader)
