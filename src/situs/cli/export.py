"""The model of a run in a folder of its own that timm (or transformers) loads without Situs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from situs.cli.flags import POSITIONAL


@dataclass(frozen=True)
class Args:
    """The model of a run in a folder of its own."""

    source: Annotated[Path, POSITIONAL, Parameter(metavar="RUN")]
    """The run folder."""

    out: Annotated[Path, Parameter(metavar="DIR")]
    """The folder to write; it must not exist or be empty."""

    ema: bool = True
    """The mean of the weights where there is one, or the weights themselves."""

    force: bool = False
    """Replace an export that is already there."""


def run(args: Args) -> None:
    """Writes the export and says how to load it."""
    from situs.config import to_dict
    from situs.train.card import ModelProvenance, last_metrics
    from situs.train.export import write_export
    from situs.train.run import load_run

    ema = None if args.ema else False
    config, method, folder, classes = load_run(args.source, ema=ema)
    checkpoint = folder.latest()
    assert checkpoint is not None  # load_run found one
    mean, std = config.data.normalisation
    provenance = ModelProvenance(
        method=config.method_name,
        data=config.data.path,
        recipe=to_dict(config),
        metrics=last_metrics(folder.records(), checkpoint.step),
        step=checkpoint.step,
        ema=args.ema and bool(checkpoint.tensors("ema")),
        mean=mean,
        std=std,
        crop=config.data.crop_share,
        classes=classes,
    )
    export = write_export(method, args.out, provenance, force=args.force)
    print(f"{args.out}: {method.backbone.source['architecture']} after {checkpoint.step} updates")
    for note in export.notes:
        print(note)
    if export.library == "timm":
        print(f'Load it with timm.create_model("local-dir:{args.out}", pretrained=True).')
