"""Keys and what they open: `keygen`, `lock`, `unlock`, and certificates for split learning."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from situs.cli.model_args import ShapeArgs
from situs.cli.parser.flags import POSITIONAL
from situs.cli.passphrase import choose_passphrase, read_key
from situs.cli.shell import answer


@dataclass(frozen=True)
class Keygen:
    """A new key in a file that only you may read: 256 random bits, from which every permutation of a lock follows.

    For example: situs keygen --out owner.key
    """

    out: Annotated[Path, Parameter(metavar="FILE")]
    """The file to write; one that exists is never overwritten."""

    passphrase: bool = False
    """Wrap the key with a passphrase: SITUS_PASSPHRASE, or asked for."""

    def run(self) -> None:
        """Writes the key and says what losing it means."""
        from situs.locks import new_key

        key = new_key(self.out, choose_passphrase() if self.passphrase else None)
        wrapped = "with a passphrase" if self.passphrase else "without a passphrase"
        answer(
            {"key": self.out, "id": key.id, "passphrase": self.passphrase},
            f"{self.out}: key {key.id}, {wrapped}, readable by you alone (mode 0600).",
            "Keep a copy elsewhere: what was locked with it cannot be opened without it.",
        )


@dataclass(frozen=True, kw_only=True)
class Lock(ShapeArgs):
    """Locks a model with a key: the channels between its blocks are permuted, so that it is useless without the key.

    Embedding, positions, final norm and head stay clear unless they are withheld; the blocks' weights are moved, never
    changed, and unlock gives back the same files bit for bit. Known small files are taken along (settings, tokenisers,
    README, licence), others left out and named. A lock is obfuscation, not encryption: see situs audit lock.

    For example: situs lock exported --key owner.key --out locked
    """

    model: Annotated[str, POSITIONAL, Parameter(metavar="MODEL")]
    """A run, the folder of a model (an export, or a timm or transformers folder with safetensors), or a timm name with
    its weights (NAME=FILE or --weights)."""

    key: Annotated[Path, Parameter(metavar="FILE")]
    """The key (situs keygen)."""

    out: Annotated[Path, Parameter(metavar="FOLDER")]
    """The folder to write; it must not exist."""

    withhold: Annotated[tuple[str, ...], Parameter(metavar="PART")] = ()
    """Leave a part in a second file for the owner: embedding (all before the blocks), blocks=K (the first K), or
    both: embedding,blocks=K."""

    withheld: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The second file to write (mode 0600); by default beside the locked folder."""

    seal: bool = False
    """Encrypt the files at rest as well (AES-256-GCM); the manifest, with names and shapes, stays readable."""

    cover: bool = False
    """Also move MLP units, heads and their channels: it hinders matching, and is no strength of its own."""

    def run(self) -> None:
        """Writes the locked folder and says what it is."""
        from situs.locks import lock

        asked = {name: getattr(self, name) for name in ("withhold", "withheld", "cover", "seal")}
        locked = lock(self.model, read_key(self.key), self.out, **asked, **self.shape())
        also = "" if locked.withheld is None else f" --withheld {locked.withheld}"
        told = f"Open it with situs unlock {self.out} --key {self.key}{also} --out DIR."
        answer({"locked": self.out, "withheld": locked.withheld, "said": str(locked)}, str(locked), told)


@dataclass(frozen=True)
class Unlock:
    """Opens a locked model with its key: the files that were locked, bit for bit, or nothing.

    The manifest is checked before a tensor is read and each tensor before it is used; the folder appears when all was
    right, its files readable by you alone (mode 0600).

    For example: situs unlock locked --key owner.key --out unlocked
    """

    locked: Annotated[Path, POSITIONAL, Parameter(metavar="LOCKED")]
    """The locked folder."""

    key: Annotated[Path, Parameter(metavar="FILE")]
    """The key it was locked with."""

    out: Annotated[Path, Parameter(metavar="FOLDER")]
    """The folder to write; it must not exist."""

    withheld: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The owner's second file, where parts were withheld."""

    retrained: bool = False
    """The locked weights were trained since: take new values of the same layout (manifest.json beside them)."""

    def run(self) -> None:
        """Writes the open folder and says what it is."""
        from situs.locks import unlock

        key = read_key(self.key)
        said = str(unlock(self.locked, key, self.out, retrained=self.retrained, withheld=self.withheld))
        answer({"unlocked": self.out, "said": said}, said)


@dataclass(frozen=True)
class Certs:
    """A throw-away authority with a server's and a client's certificate, to try split learning out.

    For example: situs split certs --out certs

    For real use take certificates of your own authority, under the same names: ca.pem, server.pem, server.key,
    client.pem, client.key. The client's common name says whose session is whose.
    """

    out: Annotated[Path, Parameter(metavar="FOLDER")]
    """A new folder; only you may look into it."""

    hosts: Annotated[tuple[str, ...], Parameter(metavar="NAME")] = ()
    """Names and addresses of the server, besides localhost."""

    clients: Annotated[tuple[str, ...], Parameter(metavar="NAME")] = ("client",)
    """A pair for each of these clients."""

    days: Annotated[int, Parameter(metavar="N")] = 30
    """How long they are valid."""

    def run(self) -> None:
        """Writes them and prints their fingerprints."""
        from situs.split.transport.certificates import make_certificates

        for line in make_certificates(self.out, hosts=self.hosts, clients=self.clients, days=self.days):
            print(line)
