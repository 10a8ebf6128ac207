"""What a model is made of, and which methods and locks apply to it (or why not)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from situs.cli.parser.model_args import NamedArgs, open_from


@dataclass(frozen=True, kw_only=True)
class Args(NamedArgs):
    """What a model is made of."""

    json: bool = False
    """Print JSON instead of tables."""


def run(args: Args) -> None:
    """Opens the model, of a name or a folder its shapes alone, describes it and prints that."""
    from situs.cli.tables import print_table
    from situs.models.describe import describe

    info = describe(open_from(args, any_weights=True, device="meta").backbone)
    if args.json:
        print(json.dumps(asdict(info), indent=2))
    else:
        for table in info.tables():
            print_table(table)
