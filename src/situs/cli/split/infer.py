"""Accuracy of a split training with the server still at work: features are hidden as they were in training.

For example: situs split infer runs/split --server 127.0.0.1:7443 --tls certs

With --server local there is none: a run's own blocks are given what a server's would be.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from situs.cli.parser.flags import POSITIONAL
from situs.cli.split.wire import LOCAL, ClientArgs
from situs.errors import SitusError


@dataclass(frozen=True, kw_only=True)
class Args(ClientArgs):
    """Accuracy with a server's blocks."""

    run: Annotated[Path, POSITIONAL, Parameter(metavar="RUN")]
    """The client's part of a split training."""

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """The images; by default the val split of the run's own."""

    count: Annotated[int | None, Parameter(metavar="N")] = None
    """At most so many of them."""

    permute: Annotated[tuple[Literal["rows"], ...] | None, Parameter(metavar="rows")] = None
    """With --server local: whether rows are permuted, by default as they were in training; of an ordinary run too."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """With --server local: cpu, cuda or cuda:N; by default a GPU where there is one."""

    out: Annotated[Path | None, Parameter(metavar="DIR")] = None
    """Where to write the page and the numbers."""


def run(args: Args) -> None:
    """Measures and prints."""
    from situs.cli.locks.passphrase import read_key
    from situs.cli.result import present
    from situs.measure.accuracy import evaluate_accuracy
    from situs.split.local import infer_defended
    from situs.split.whole import open_split

    if args.server == LOCAL:
        asked = {"permute": args.permute, "count": args.count, "device": args.device}
        present(infer_defended(args.run, args.data, **asked), args.out)
        return
    if args.permute is not None:
        raise SitusError("permute: with a server rows are permuted as they were in training", field="permute")
    key = None if args.key is None else read_key(args.key)
    with args.connect() as call, open_split(args.run, call, key=key) as model:
        present(evaluate_accuracy(model, data=args.data, count=args.count), args.out)
