"""A throw-away authority with a server's and a client's certificate, to try split learning out.

For example: situs split certs --out certs

For real use take certificates of your own authority, under the same names: ca.pem, server.pem, server.key, client.pem,
client.key. The client's common name says whose session is whose.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


@dataclass(frozen=True)
class Args:
    """Certificates to try it out."""

    out: Annotated[Path, Parameter(metavar="DIR")]
    """A new folder; only you may look into it."""

    hosts: Annotated[tuple[str, ...], Parameter(metavar="NAME")] = ()
    """Names and addresses of the server, besides localhost."""

    clients: Annotated[tuple[str, ...], Parameter(metavar="NAME")] = ("client",)
    """A pair for each of these clients."""

    days: Annotated[int, Parameter(metavar="N")] = 30
    """How long they are valid."""


def run(args: Args) -> None:
    """Writes them and prints their fingerprints."""
    from situs.split.transport.certificates import make_certificates

    for line in make_certificates(args.out, hosts=args.hosts, clients=args.clients, days=args.days):
        print(line)
