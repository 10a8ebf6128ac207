"""Split learning: a client with the data, a server with the blocks."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from cyclopts import Parameter

from situs.cli.model_args import OUT
from situs.cli.parser.arguments import Recipe, configured
from situs.cli.parser.flags import POSITIONAL
from situs.cli.result import INTERRUPTED, present
from situs.cli.shell import answer, beside, next_line
from situs.cli.train import EVERYDAY, tell
from situs.errors import SitusError, counted
from situs.measure.finetune import FinetuneConfig
from situs.progress import note, took
from situs.split.server import Limits

if TYPE_CHECKING:
    from situs.split.transport.certificates import Credentials
    from situs.split.transport.connect import Connection
    from situs.train.assemble import Start


LOCAL = "local"
"""In the place of a server: none."""


ONE_RANK = {name: paths for name, paths in EVERYDAY.items() if name not in ("parallel", "with")}
"""Everyday flags of a training on one rank."""


@dataclass(frozen=True, kw_only=True)
class WireArgs:
    """How the two sides know each other."""

    tls: Annotated[Path | None, Parameter(metavar="FOLDER")] = None
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


@dataclass(frozen=True, kw_only=True)
class Serve(Recipe, WireArgs):
    """Serve a model's blocks to clients that train with them: this side is sent features, and no pictures and no
    labels.

    For example: situs split serve --preset samples-mp3 --method supervised --listen 127.0.0.1:7443 --tls certs
    --out runs/server

    Optimiser and precision must be the client's; the rate comes with each step. Ctrl-C ends it; started again with the
    same folder it goes on, and its clients with it. Every refusal is in OUT/refused.log.
    """

    topics: ClassVar[dict[str, tuple[str, ...]]] = {
        "seldom": (
            "clients",
            "largest_batch",
            "shared",
            "print_config",
            "deny",
            "init",
            "init_positions",
            "probe_every",
        )
    }

    out: Annotated[Path, Parameter(metavar="FOLDER")]
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

    config: FinetuneConfig = configured(FinetuneConfig, short=ONE_RANK, without=("added",))

    def run(self) -> int:
        """Serves until it is asked to stop."""
        from situs.folder_lock import lock_folder
        from situs.split.serving import make_server
        from situs.split.transport.serve import run_server
        from situs.train.interrupt import Interrupt

        credentials = self.credentials("server")
        config = self.config if self.source is None else dataclasses.replace(self.config, init=self.source)
        limits = Limits(clients=self.clients, batch=self.largest_batch)
        with Interrupt() as interrupt:
            server = make_server(config, self.out, limits=limits, shared=self.shared, device=self.device, say=_say)
            with lock_folder(self.out):
                service = run_server(
                    server, self.listen, credentials, deny=self.deny, say=_say, stopped=lambda: interrupt.asked
                )
        refused = ", ".join(f"{count} {code}" for code, count in sorted(service.refused.items()))
        _say(f"stopped; refused: {refused or 'nothing'}")
        return 0


def _say(line: str) -> None:
    print(line, flush=True)


@dataclass(frozen=True, kw_only=True)
class Train(Recipe, ClientArgs):
    """Train with a server's blocks: pictures, labels, embedding, positions and head stay here.

    For example: situs split train --server 127.0.0.1:7443 --tls certs --preset samples-mp3 --method supervised
    --permute rows,columns --out runs/split

    Without permutations the result is local training's to the bit.
    """

    topics: ClassVar[dict[str, tuple[str, ...]]] = {
        "seldom": (
            *(
                "name",
                "patience",
                "withheld",
                "dry_run",
                "print_config",
                "wire",
                "init",
                "init_positions",
                "probe_every",
            ),
        )
    }

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = None
    """A new folder for the client's part of the run."""

    resume: Annotated[Path | None, Parameter(metavar="FOLDER")] = None
    """A run to go on with."""

    source: Annotated[str | None, Parameter(name="--from", metavar="MODEL")] = None
    """Weights to start from, the server's too."""

    withheld: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The owner's second file, where parts of that folder were withheld."""

    permute: Annotated[tuple[Literal["rows", "columns"], ...], Parameter(metavar="WHAT")] = ()
    """rows: tokens mixed each step; columns: channels by the key; else none."""

    defence: Annotated[str, Parameter(name="--defences", metavar="NAME")] = ""
    """none (by default), noise=σ (of the tokens' deviation), lowpass=r (share of frequencies kept), batch-shuffle or
    batch-shuffle=B."""

    wire: Literal["own", "bf16"] = "own"
    """bf16: rounded, in half the bytes."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """cpu, cuda or cuda:N; by default a GPU where there is one."""

    dry_run: bool = False
    """Check data, model, one batch and the length here, and ask no server and write nothing."""

    config: FinetuneConfig = configured(FinetuneConfig, short=ONE_RANK, without=("added",))

    def run(self) -> int:
        """Trains; exit status 130 where it was interrupted (and can be resumed)."""
        from situs.api import unlock_of
        from situs.cli.passphrase import read_key
        from situs.models.start import starting
        from situs.split.run import Hide, train_split
        from situs.train.assemble import Setup
        from situs.train.rehearse import rehearse

        config = self.config if self.source is None else dataclasses.replace(self.config, init=self.source)
        key = None if self.key is None else read_key(self.key)
        start = starting(None if config.init is None else unlock_of(config.init, key, self.withheld))
        if self.dry_run:
            found = rehearse(config, Setup(start), out=self.out, resume=self.resume, device=self.device)
            return tell(self.out or self.resume, config, found)
        if self.server == LOCAL:
            return _alone(self, config, start)
        hide = Hide(self.permute, self.defence or "none", self.wire)
        with self.connect() as call:
            result = train_split(
                config, call, hide, out=self.out, resume=self.resume, key=key, start=start, device=self.device
            )
            wire = max(0.0, call.waited - call.served)
            asked = f"asked again {counted(call.again, 'times')}"
            note(f"{asked}; {took(wire)} on the wire, {took(call.served)} at the server")
        folder = self.out or self.resume
        answer({"run": folder, "steps": result.step, "interrupted": result.interrupted, "metrics": result.metrics})
        if result.interrupted:
            return INTERRUPTED
        told = {name: value for name, value in result.metrics.items() if name != "gradient_norm"}
        facts = "".join(f", {name.replace('_', ' ')} {value:.4g}" for name, value in told.items())
        note(f"done: {counted(result.step, 'steps')}{facts}; the client's part is in {folder}")
        assert folder is not None
        note(next_line(["split", "infer", folder, *self.again()]))
        note("with the server's folder, situs split merge makes one run of both parts")
        return 0


def _alone(args: Train, config: FinetuneConfig, start: Start) -> int:
    """Without a server: an ordinary run, whose blocks were given what a server would have been given."""
    from situs.split.local import train_defended

    folder = args.out or args.resume
    if folder is None or (args.out is not None and args.resume is not None):
        raise SitusError("give a new folder or a run to resume, and not both", field=("out", "resume"))
    how = {"permute": args.permute, "resume": args.resume is not None, "start": start, "device": args.device}
    return tell(folder, config, train_defended(config, args.defence or None, folder, **how))


@dataclass(frozen=True, kw_only=True)
class Infer(ClientArgs):
    """Accuracy of a split training with the server still at work: features are hidden as they were in training.

    For example: situs split infer runs/split --server 127.0.0.1:7443 --tls certs

    With --server local there is none: a run's own blocks are given what a server's would be.
    """

    folder: Annotated[Path, POSITIONAL, Parameter(metavar="RUN")]
    """The client's part of a split training."""

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """The images; by default the val split of the run's own."""

    count: Annotated[int | None, Parameter(metavar="N")] = None
    """At most so many of them."""

    permute: Annotated[tuple[Literal["rows"], ...] | None, Parameter(metavar="rows")] = None
    """With --server local: whether rows are permuted, by default as they were in training; of an ordinary run too."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """With --server local: cpu, cuda or cuda:N; by default a GPU where there is one."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = OUT
    """For the numbers (.json) and the page (.html); none: not written."""

    def run(self) -> None:
        """Measures and prints."""
        from situs.cli.passphrase import read_key
        from situs.measure.accuracy import evaluate_accuracy
        from situs.split.local import infer_defended
        from situs.split.whole import open_split

        if self.server == LOCAL:
            asked = {"permute": self.permute, "count": self.count, "device": self.device}
            present(infer_defended(self.folder, self.data, **asked), self.out)
            return
        if self.permute is not None:
            raise SitusError("permute: with a server rows are permuted as they were in training", field="permute")
        key = None if self.key is None else read_key(self.key)
        with self.connect() as call, open_split(self.folder, call, key=key) as model:
            present(evaluate_accuracy(model, data=self.data, count=self.count), self.out)


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Joins a client's and a server's part to an ordinary run, which evaluate, export, audit and --resume open.

    For example: situs split merge runs/split runs/server --out runs/whole
    """

    client: Annotated[Path, POSITIONAL, Parameter(metavar="RUN")]
    """The client's part."""

    server: Annotated[Path, POSITIONAL, Parameter(metavar="SERVER")]
    """The server's folder, or that of one session in it."""

    out: Annotated[Path, Parameter(metavar="FOLDER")]
    """A new folder for the run."""

    locked: bool = False
    """Leave channels as the server has them, in a locked folder that situs unlock --retrained opens; needs no key."""

    key: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """The key that channels were permuted by, where it is not in the client's folder."""

    def run(self) -> None:
        """Writes the run and says where it stands."""
        from situs.cli.passphrase import read_key
        from situs.split.whole import merge, merge_locked

        if self.locked:
            step = merge_locked(self.client, self.server, self.out)
            told = f"Open it with situs unlock {self.out} --retrained --key FILE --out DIR."
            answer(
                {"locked": self.out, "steps": step},
                f"{self.out}: locked as it was, after {counted(step, 'steps')}",
                told,
            )
            return
        step = merge(self.client, self.server, self.out, key=None if self.key is None else read_key(self.key))
        told = next_line(
            ["evaluate", "accuracy", self.out], ["export", self.out, "--out", beside(self.out, "exported")]
        )
        answer({"run": self.out, "steps": step}, f"{self.out}: the whole run after {counted(step, 'steps')}", told)
