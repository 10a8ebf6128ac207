"""What an untrusted server of split learning learns of the samples: every defence and permutation, every attacker.

For example: situs audit split runs/ft --defences none,noise=0.5 --count 100 --out look

Each defence is tried alone and with rows, columns and both permuted. An attack that was not tried is no protection.
As it stands it gives the fourth paper's Table 6; `--defences curve` draws what each strength hides and costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from situs.audit.deadline import Deadline, first_ctrl_c
from situs.audit.split.attackers import ATTACKS
from situs.audit.split.audit import DEFENCES, PERMUTED, PUBLIC, SAMPLES
from situs.cli.parser.model_args import ImageArgs, open_from
from situs.cli.progress import remark
from situs.cli.result import INTERRUPTED, asked, present


@dataclass(frozen=True, kw_only=True)
class Args(ImageArgs):
    """What a server learns."""

    count: Annotated[int | None, Parameter(metavar="IMAGES")] = SAMPLES
    """So many images, drawn at random, are attacked; the attacker without an embedding needs 100."""

    batch: int = 64
    """Images at a time."""

    defences: Annotated[tuple[str, ...], Parameter(metavar="DEFENCE,…")] = DEFENCES
    """none, noise=σ (a multiple of the tokens' deviation), lowpass=r (share of frequencies), batch-shuffle=B; curve:
    each of them at several strengths."""

    permute: Annotated[tuple[str, ...], Parameter(metavar="rows,columns")] = PERMUTED
    """Permutations that every defence is also tried with."""

    attacks: Annotated[tuple[str, ...], Parameter(metavar="NAME,…")] = tuple(ATTACKS)
    """Which attackers are tried."""

    base: Annotated[str | None, Parameter(metavar="MODEL")] = None
    """The model before fine-tuning, for the attacker who knows its embedding alone."""

    public: Annotated[int, Parameter(metavar="IMAGES")] = PUBLIC
    """So many further images are the attacker's own."""

    pictures: bool = False
    """Show the images and what was made of them; the page is then private."""

    time_limit: Annotated[float | None, Parameter(metavar="SECONDS")] = None
    """Looked at between attackers: what is finished by then is shown and written, as on Ctrl-C. The same command then
    starts anew."""


def run(args: Args) -> int:
    """Audits, prints the verdict and the table, and writes the page, also of what was finished before a Ctrl-C."""
    from situs.audit.split.audit import audit_split
    from situs.audit.split.result import SplitAudit
    from situs.pages import write_numbers

    def keep(result: SplitAudit) -> None:
        if args.out is not None:
            write_numbers(result, args.out)

    given = asked(args)
    deadline = Deadline(lambda line: remark(f"situs: {line}"), given.pop("time_limit"))
    with first_ctrl_c(deadline):
        found = audit_split(open_from(args), deadline=deadline, keep=keep, **given)
        present(found, args.out)
    return INTERRUPTED if deadline.interrupted else 0
