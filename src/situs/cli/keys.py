"""Verbs about keys: `keygen`, `lock`, `unlock`, and certificates for split learning."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from situs.cli.model_args import ShapeArgs, ask_passphrase, read_key
from situs.cli.parser.flags import POSITIONAL
from situs.cli.shell import answer
from situs.errors import SitusError


@dataclass(frozen=True)
class Keygen:
    """Make a key file that only you can read. The file contains 256 random bits. situs lock permutes the weights of a
    model, and derives all permutations from these bits.

    For example: situs keygen --out owner.key
    """

    out: Annotated[Path, Parameter(metavar="FILE")]
    """Output file. An existing file is never overwritten."""

    passphrase: bool = False
    """Encrypt the key with a passphrase. The passphrase comes from SITUS_PASSPHRASE or from the terminal."""

    def run(self) -> None:
        """Writes the key and warns about losing it."""
        from situs.locks import new_key

        key = new_key(self.out, choose_passphrase() if self.passphrase else None)
        wrapped = "with a passphrase" if self.passphrase else "without a passphrase"
        answer(
            {"key": self.out, "id": key.id, "passphrase": self.passphrase},
            f"{self.out}: key {key.id}, {wrapped}, readable by you alone (mode 0600).",
            "Keep a copy of the key elsewhere: without the key, a locked model cannot be unlocked.",
        )


@dataclass(frozen=True, kw_only=True)
class Lock(ShapeArgs):
    """Lock a model with a key. The key permutes the channels of the features that pass from block to block.
    Without the key, the model's accuracy is near chance, until an attacker fine-tunes the model or finds the key.

    The patch or token embedding, the position embedding, the final norm and the head are not permuted, so the lock does
    not hide them. With --withhold embedding, everything before the blocks is left out of the locked folder. With the
    key, situs unlock restores the original files bit for bit. Configs, tokenisers, README and licence are copied.
    Other files are not copied, and the output lists their names. A lock is obfuscation, not encryption: situs audit
    lock measures how much security remains.

    For example: situs lock exported --key owner.key --out locked
    """

    model: Annotated[str, POSITIONAL, Parameter(metavar="MODEL")]
    """A training run, an export, a timm or transformers folder with safetensors, or a timm model (NAME=FILE, or NAME
    with --weights)."""

    key: Annotated[Path, Parameter(metavar="FILE")]
    """The key file (situs keygen)."""

    out: Annotated[Path, Parameter(metavar="FOLDER")]
    """Output folder. It must not exist."""

    withhold: Annotated[tuple[str, ...], Parameter(metavar="PART")] = ()
    """Parts to leave out of the locked folder: embedding (everything before the blocks), blocks=K (the first K blocks),
    or embedding,blocks=K (both). Situs writes these parts to a second file, for the owner."""

    withheld: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Path of the file with the withheld parts. Only you can read this file (mode 0600). Default: next to the locked
    folder."""

    seal: bool = False
    """Also encrypt the files (AES-256-GCM). The manifest with the names and shapes of the tensors stays readable."""

    cover: bool = False
    """Also permute MLP units, attention heads and the channels within each head. An attacker with the original weights
    then needs more work to match them with the locked weights, but can still compute the permutations: the lock does
    not become more secure."""

    def run(self) -> None:
        """Writes the locked folder and prints how to open it."""
        from situs.locks import lock

        options = {name: getattr(self, name) for name in ("withhold", "withheld", "cover", "seal")}
        locked = lock(self.model, read_key(self.key), self.out, **options, **self.shape())
        second = "" if locked.withheld is None else f" --withheld {locked.withheld}"
        opening = f"To unlock the model: situs unlock {self.out} --key {self.key}{second} --out DIR"
        answer({"locked": self.out, "withheld": locked.withheld, "said": str(locked)}, str(locked), opening)


@dataclass(frozen=True)
class Unlock:
    """Undo the lock of a model with its key, and restore the original files bit for bit.

    Situs first checks the manifest and every tensor. If a check fails, nothing is written. Only you can read the output
    files (mode 0600).

    For example: situs unlock locked --key owner.key --out unlocked
    """

    locked: Annotated[Path, POSITIONAL, Parameter(metavar="LOCKED")]
    """The folder of the locked model."""

    key: Annotated[Path, Parameter(metavar="FILE")]
    """The key file that was used to lock the model."""

    out: Annotated[Path, Parameter(metavar="FOLDER")]
    """Output folder. It must not exist."""

    withheld: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """File with the parts that were left out of the locked model (situs lock --withhold)."""

    retrained: bool = False
    """Accept weights that were trained after locking. Names and shapes of the tensors must still agree with
    manifest.json."""

    def run(self) -> None:
        """Writes the unlocked folder and says what it is."""
        from situs.locks import unlock

        key = read_key(self.key)
        unlocked = unlock(self.locked, key, self.out, retrained=self.retrained, withheld=self.withheld)
        answer({"unlocked": self.out, "said": str(unlocked)}, str(unlocked))


@dataclass(frozen=True)
class Certs:
    """Make certificates to try out split learning: a temporary certificate authority, and certificates for a server and
    its clients.

    In production, use certificates of your own authority with the same file names: ca.pem, server.pem and server.key,
    and NAME.pem and NAME.key for each client. The server identifies a client by the common name of the client
    certificate.

    For example: situs split certs --out certs
    """

    out: Annotated[Path, Parameter(metavar="FOLDER")]
    """Output folder, new or empty. Only you will be able to read it."""

    hosts: Annotated[tuple[str, ...], Parameter(metavar="NAME")] = ()
    """Host names and IP addresses of the server. The name localhost is always included."""

    clients: Annotated[tuple[str, ...], Parameter(metavar="NAME")] = ("client",)
    """Names of the clients. For each NAME, Situs writes the files NAME.pem and NAME.key."""

    days: Annotated[int, Parameter(metavar="N")] = 30
    """Number of days for which the certificates are valid."""

    def run(self) -> None:
        """Writes the certificates and prints their fingerprints."""
        from situs.split.transport.certificates import make_certificates

        for line in make_certificates(self.out, hosts=self.hosts, clients=self.clients, days=self.days):
            print(line)


def choose_passphrase() -> str:
    """A new passphrase: from SITUS_PASSPHRASE, or asked for twice."""
    from situs.locks.key import PASSPHRASE

    if from_environment := os.environ.get(PASSPHRASE):
        return from_environment
    first = ask_passphrase("Passphrase for the key: ")
    if not first:
        raise SitusError("the passphrase must not be empty", field="passphrase")
    if ask_passphrase("Repeat it: ") != first:
        raise SitusError("the two passphrases differ: no key was written", field="passphrase")
    return first
