"""What a model is made of, and which methods and locks apply to it (or why not).

For example: situs info vit_base_patch16_224
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from situs.cli.parser.model_args import NamedArgs, open_from
from situs.cli.shell import answer, as_document


@dataclass(frozen=True, kw_only=True)
class Args(NamedArgs):
    """What a model is made of."""


def run(args: Args) -> None:
    """Opens the model, of a name or a folder its shapes alone, describes it and prints that."""
    from situs.cli.tables import print_table
    from situs.models.describe import describe

    info = describe(open_from(args, any_weights=True, device="meta").backbone)
    answer(asdict(info))
    for table in () if as_document() else info.tables():
        print_table(table)
