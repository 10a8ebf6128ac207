"""Serve a model's blocks to clients that train with them: this side is sent features, and no pictures and no labels.

For example: situs split serve --preset samples-mp3 --method supervised --listen 127.0.0.1:7443 --tls certs
--out runs/server

Optimiser and precision must be the client's; the rate comes with each step. Ctrl-C ends it; started again with the same
folder it goes on, and its clients with it. Every refusal is in OUT/refused.log.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from cyclopts import Parameter

from situs.cli.parser.arguments import Recipe, configured
from situs.cli.split.wire import ONE_RANK, WireArgs
from situs.measure.finetune import FinetuneConfig
from situs.split.server import Limits


@dataclass(frozen=True, kw_only=True)
class Args(Recipe, WireArgs):
    """Serve blocks."""

    topics: ClassVar[dict[str, tuple[str, ...]]] = {"seldom": ("clients", "largest_batch", "shared", "print_config")}

    out: Annotated[Path, Parameter(metavar="DIR")]
    """Where the trainings are kept; one that is there goes on."""

    listen: Annotated[str, Parameter(metavar="HOST:PORT")] = "127.0.0.1:7443"
    """Where to listen; port 0 takes a free one and says which."""

    source: Annotated[str | None, Parameter(name="--from", metavar="MODEL")] = None
    """Weights to start from: a run, an export, a weight file, or a locked folder, which is taken as it lies there."""

    deny: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Clients to turn away: common names or fingerprints of certificates, one a line; read again when it changes."""

    shared: bool = False
    """All clients train the same blocks, their steps in turn; by default each has its own."""

    clients: Annotated[int, Parameter(metavar="N")] = Limits.clients
    """Trainings held at once."""

    largest_batch: Annotated[int, Parameter(metavar="N")] = Limits.batch
    """Samples that one message may hold."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """cpu, cuda or cuda:N; by default a GPU where there is one."""

    config: FinetuneConfig = configured(FinetuneConfig, short=ONE_RANK)


def run(args: Args) -> int:
    """Serves until it is asked to stop."""
    from situs.folder_lock import lock_folder
    from situs.split.serving import make_server
    from situs.split.transport.serve import run_server
    from situs.train.interrupt import Interrupt

    credentials = args.credentials("server")
    config = args.config if args.source is None else dataclasses.replace(args.config, init=args.source)
    limits = Limits(clients=args.clients, batch=args.largest_batch)
    with Interrupt() as interrupt:
        server = make_server(config, args.out, limits=limits, shared=args.shared, device=args.device, say=_say)
        with lock_folder(args.out):
            service = run_server(
                server, args.listen, credentials, deny=args.deny, say=_say, stopped=lambda: interrupt.asked
            )
    refused = ", ".join(f"{count} {code}" for code, count in sorted(service.refused.items()))
    _say(f"stopped; refused: {refused or 'nothing'}")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)
