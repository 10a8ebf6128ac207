"""Nearest neighbours on frozen features, layer by layer: CLS and the mean of the patches, the training split as bank.

For example: situs evaluate knn runs/mp3 --k 20 --out look
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from cyclopts import Parameter

from situs.cli.model_args import ImageArgs, open_from
from situs.cli.result import present


@dataclass(frozen=True, kw_only=True)
class Args(ImageArgs):
    """kNN accuracy of each layer."""

    k: int = 20
    """Neighbours."""

    temperature: Annotated[float | None, Parameter(metavar="τ|None")] = 0.07
    """τ of the weights exp(similarity / τ); None counts every neighbour as one."""

    train_count: Annotated[int | None, Parameter(metavar="IMAGES")] = 10_000
    """At most so many images of the training split as the bank; None for all."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward."""


def run(args: Args) -> None:
    """Measures, prints the table and writes the page."""
    from situs.evaluate.knn_layers import knn_by_layer
    from situs.models.data import check_labels, load_bank, made_with

    model = open_from(args)
    bank, test = load_bank(
        model, args.data, split=args.split, batch=args.batch, train_count=args.train_count, count=args.count
    )
    found = knn_by_layer(
        model.trained,
        bank,
        test,
        k=args.k,
        temperature=args.temperature,
        precision=args.precision,
        positions=model.positions,
        classes=len(check_labels(test)),
    )
    made = made_with(model, test, args.seed, args.precision, beside=[bank], more={"bank_data": bank.source.name})
    present(replace(found, provenance=made), args.out)
