"""Train with a server's blocks: pictures, labels, embedding, positions and head stay here.

For example: situs split train --server 127.0.0.1:7443 --tls certs --preset samples-mp3 --method supervised
--permute rows,columns --out runs/split

Without permutations the result is local training's to the bit. After a crash it goes on (--resume).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from cyclopts import Parameter

from situs.cli.parser.arguments import Recipe, configured
from situs.cli.pretrain import tell
from situs.cli.result import INTERRUPTED
from situs.cli.shell import answer, next_line
from situs.cli.split.wire import LOCAL, ONE_RANK, ClientArgs
from situs.errors import SitusError, counted
from situs.measure.finetune import FinetuneConfig
from situs.progress import note, took

if TYPE_CHECKING:
    from situs.train.assemble import Start


@dataclass(frozen=True, kw_only=True)
class Args(Recipe, ClientArgs):
    """Train with a server."""

    topics: ClassVar[dict[str, tuple[str, ...]]] = {
        "seldom": ("name", "patience", "withheld", "dry_run", "print_config")
    }

    out: Annotated[Path | None, Parameter(metavar="DIR")] = None
    """A new folder for the client's part of the run."""

    resume: Annotated[Path | None, Parameter(metavar="DIR")] = None
    """A run to go on with."""

    source: Annotated[str | None, Parameter(name="--from", metavar="MODEL")] = None
    """Weights to start from, the server's too."""

    withheld: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The owner's second file, where parts of that folder were withheld."""

    permute: Annotated[tuple[Literal["rows", "columns"], ...], Parameter(metavar="WHAT")] = ()
    """rows: tokens mixed each step; columns: channels by the key; else none."""

    defence: Annotated[str, Parameter(metavar="WHAT")] = ""
    """none (by default), noise=σ (of the tokens' deviation), lowpass=r (share of frequencies kept), batch-shuffle or
    batch-shuffle=B."""

    wire: Literal["own", "bf16"] = "own"
    """bf16: rounded, in half the bytes."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """cpu, cuda or cuda:N; by default a GPU where there is one."""

    dry_run: bool = False
    """Check data, model, one batch and the length here, and ask no server and write nothing."""

    config: FinetuneConfig = configured(FinetuneConfig, short=ONE_RANK)


def run(args: Args) -> int:
    """Trains; exit status 130 where it was interrupted (and can be resumed)."""
    from situs.api import unlock_of
    from situs.cli.locks.passphrase import read_key
    from situs.models.start import starting
    from situs.split.run import Hide, train_split
    from situs.train.assemble import Setup
    from situs.train.rehearse import rehearse

    config = args.config if args.source is None else dataclasses.replace(args.config, init=args.source)
    key = None if args.key is None else read_key(args.key)
    start = starting(None if config.init is None else unlock_of(config.init, key, args.withheld))
    if args.dry_run:
        found = rehearse(config, Setup(start), out=args.out, resume=args.resume, device=args.device)
        return tell(args.out or args.resume, config, found)
    if args.server == LOCAL:
        return _alone(args, config, start)
    hide = Hide(args.permute, args.defence or "none", args.wire)
    with args.connect() as call:
        result = train_split(
            config, call, hide, out=args.out, resume=args.resume, key=key, start=start, device=args.device
        )
        wire = max(0.0, call.waited - call.served)
        note(f"asked again {counted(call.again, 'times')}; {took(wire)} on the wire, {took(call.served)} at the server")
    folder = args.out or args.resume
    answer({"run": folder, "steps": result.step, "interrupted": result.interrupted, "metrics": result.metrics})
    if result.interrupted:
        return INTERRUPTED
    told = {name: value for name, value in result.metrics.items() if name != "gradient_norm"}
    facts = "".join(f", {name.replace('_', ' ')} {value:.4g}" for name, value in told.items())
    note(f"done: {counted(result.step, 'steps')}{facts}; the client's part is in {folder}")
    assert folder is not None
    note(next_line(["split", "infer", folder, *args.again()]))
    note("with the server's folder, situs split merge makes one run of both parts")
    return 0


def _alone(args: Args, config: FinetuneConfig, start: Start) -> int:
    """Without a server: an ordinary run, whose blocks were given what a server would have been given."""
    from situs.split.local import train_defended

    folder = args.out or args.resume
    if folder is None or (args.out is not None and args.resume is not None):
        raise SitusError("give a new folder or a run to go on with, and not both", field=("out", "resume"))
    how = {"permute": args.permute, "resume": args.resume is not None, "start": start, "device": args.device}
    return tell(folder, config, train_defended(config, args.defence or None, folder, **how))
