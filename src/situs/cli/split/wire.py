"""What the verbs of split learning share: where the server is, and with which certificates."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from situs.cli.pretrain import EVERYDAY
from situs.errors import SitusError

if TYPE_CHECKING:
    from situs.split.transport.certificates import Credentials
    from situs.split.transport.connect import Connection


LOCAL = "local"
"""In the place of a server: none."""

ONE_RANK = {name: paths for name, paths in EVERYDAY.items() if name != "parallel"}
"""Everyday flags of a training on one rank."""


@dataclass(frozen=True, kw_only=True)
class WireArgs:
    """How the two sides know each other."""

    tls: Annotated[Path | None, Parameter(metavar="DIR")] = None
    """Certificates: ca.pem, and NAME.pem and NAME.key of this side."""

    plaintext: bool = False
    """Neither certificates nor encryption, on this machine alone."""

    def credentials(self, side: str) -> Credentials | None:
        """The certificates, or nothing where plaintext is asked for."""
        from situs.split.transport.certificates import read_credentials

        if (self.tls is None) != self.plaintext:
            raise SitusError(
                "give a folder of certificates (situs split certs makes one to try it out), or plaintext",
                field=("tls", "plaintext"),
            )
        return None if self.tls is None else read_credentials(self.tls, side)


@dataclass(frozen=True, kw_only=True)
class ClientArgs(WireArgs):
    """Where a client finds its server."""

    server: Annotated[str, Parameter(metavar="HOST:PORT")]
    """The server; local: none, all in this process."""

    name: Annotated[str, Parameter(metavar="NAME")] = "client"
    """Whose pair this client shows: NAME.pem and NAME.key."""

    patience: Annotated[float, Parameter(metavar="SECONDS")] = 120.0
    """How long the server may be silent before this ends."""

    key: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The key of permutations and noise; by default in the run's folder."""

    def again(self) -> list[str | Path]:
        """The flags that find the same server once more."""
        named = [] if self.name == ClientArgs.name else ["--name", self.name]
        keyed = [] if self.key is None else ["--key", self.key]
        safe = ["--plaintext"] if self.tls is None else ["--tls", self.tls]
        return ["--server", self.server, *safe, *named, *keyed]

    def connect(self) -> Connection:
        """The connection."""
        from situs.split.transport.connect import Connection

        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # a handshake that fails is said in our one sentence
        return Connection(self.server, self.credentials(self.name), patience=self.patience)
