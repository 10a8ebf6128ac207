"""Verbs of split learning: a client with the data, a server with the blocks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from cyclopts import Parameter

from situs.cli.model_args import OUT, read_key
from situs.cli.parser.arguments import Recipe, configured
from situs.cli.parser.flags import POSITIONAL
from situs.cli.result import INTERRUPTED, present
from situs.cli.shell import answer, new_sibling, next_line
from situs.cli.train import EVERYDAY, report_training
from situs.errors import SitusError, counted
from situs.measure.finetune import FinetuneConfig
from situs.progress import note, took
from situs.split.server import Limits

if TYPE_CHECKING:
    from situs.split.transport.certificates import Credentials
    from situs.split.transport.connect import Connection
    from situs.train.assemble import Start


LOCAL = "local"
"""The value of --server for training without a server."""

ONE_RANK = {name: paths for name, paths in EVERYDAY.items() if name not in ("parallel", "with")}
"""Short flags of a training on one rank."""


@dataclass(frozen=True, kw_only=True)
class WireArgs:
    """How client and server authenticate each other."""

    tls: Annotated[Path | None, Parameter(metavar="FOLDER")] = None
    """Folder of certificates (see situs split certs)."""

    plaintext: bool = False
    """Use no certificates and no encryption. Server and client must then run on the same machine."""

    def credentials(self, side: str) -> Credentials | None:
        """The certificates; None with --plaintext."""
        from situs.split.transport.certificates import read_credentials

        if (self.tls is None) != self.plaintext:
            raise SitusError(
                "give either --tls with a folder of certificates, or --plaintext (then nothing is encrypted); for "
                "tests, the command `situs split certs` makes a folder of certificates",
                field=("tls", "plaintext"),
            )
        return None if self.tls is None else read_credentials(self.tls, side)


@dataclass(frozen=True, kw_only=True)
class ClientArgs(WireArgs):
    """How a client reaches its server."""

    server: Annotated[str, Parameter(metavar="HOST:PORT")]
    """Address of the server. With --server local, the blocks run in this process."""

    name: Annotated[str, Parameter(metavar="NAME")] = "client"
    """Name of this client. The --tls folder must contain the certificate NAME.pem and the key NAME.key of the
    client."""

    patience: Annotated[float, Parameter(metavar="SECONDS")] = 120.0
    """Stop if the server gives no answer for this many seconds."""

    key: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Key file. Default: the key in the run's folder."""

    def again(self) -> list[str | Path]:
        """The flags that reach the same server again."""
        named = [] if self.name == ClientArgs.name else ["--name", self.name]
        keyed = [] if self.key is None else ["--key", self.key]
        safe = ["--plaintext"] if self.tls is None else ["--tls", self.tls]
        return ["--server", self.server, *safe, *named, *keyed]

    def connect(self) -> Connection:
        """Connects to the server."""
        from situs.split.transport.connect import Connection

        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # a failed handshake is reported in one sentence of ours
        return Connection(self.server, self.credentials(self.name), patience=self.patience)


@dataclass(frozen=True, kw_only=True)
class Serve(Recipe, WireArgs):
    """Serve the blocks of a model to clients that train with these blocks. The server receives features, but no images
    or labels.

    Server and client must use the same optimiser and precision. The learning rate comes from the client. After Ctrl-C,
    start the server again with the same folder to continue unfinished trainings. The server logs refused requests in
    OUT/refused.log.

    For example: situs split serve --preset samples-mp3 --method supervised --listen 127.0.0.1:7443 --tls certs --out
    runs/server
    """

    topics: ClassVar[dict[str, tuple[str, ...]]] = {
        "advanced": (
            "clients",
            "shared",
            "deny",
            "init",
            "init_positions",
            "probe_every",
        )
    }

    out: Annotated[Path, Parameter(metavar="FOLDER")]
    """Folder for the trainings. The server continues unfinished trainings in this folder."""

    listen: Annotated[str, Parameter(metavar="HOST:PORT")] = "127.0.0.1:7443"
    """Address of the server. With port 0, the server chooses a free port and prints this port."""

    source: Annotated[str | None, Parameter(name="--from", metavar="MODEL")] = None
    """Initial weights: a training run, an export, a weight file, or a locked model. The server does not need the key of
    a locked model."""

    deny: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """File that lists the clients to refuse. Each line contains the common name or the fingerprint of a certificate.
    The server reloads the file when the file changes."""

    shared: bool = False
    """All clients train the same blocks, and take turns. By default, the server keeps separate blocks for each
    client."""

    clients: Annotated[int, Parameter(metavar="N")] = Limits.clients
    """Largest number of trainings that the server keeps in memory at the same time."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """cpu, cuda, cuda:N or mps. Default: cuda if available, otherwise cpu."""

    config: FinetuneConfig = configured(FinetuneConfig, short=ONE_RANK, without=("added",))

    def run(self) -> int:
        """Serves until Ctrl-C."""
        from situs.folder_lock import lock_folder
        from situs.split.serving import make_server
        from situs.split.transport.serve import run_server, split_address
        from situs.train.interrupt import Interrupt

        credentials = self.credentials("server")
        split_address(self.listen, "listen", plaintext=self.plaintext)  # before the server makes its folder
        config = self.config if self.source is None else dataclasses.replace(self.config, init=self.source)
        limits = Limits(clients=self.clients)
        with Interrupt() as interrupt:
            server = make_server(config, self.out, limits=limits, shared=self.shared, device=self.device, say=_say)
            with lock_folder(self.out):
                service = run_server(
                    server, self.listen, credentials, deny=self.deny, say=_say, stopped=lambda: interrupt.requested
                )
        refused = ", ".join(f"{count} {code}" for code, count in sorted(service.refused.items()))
        _say(f"stopped; refused requests: {refused or 'none'}")
        return 0


def _say(line: str) -> None:
    print(line, flush=True)


@dataclass(frozen=True, kw_only=True)
class Train(Recipe, ClientArgs):
    """Train a model whose blocks run on a server. Images, labels, embedding, positions and head stay on this machine.
    Without permutations and defences, the result is bit for bit the same as in local training.

    For example: situs split train --server 127.0.0.1:7443 --tls certs --preset samples-mp3 --method supervised
    --permute rows,columns --out runs/split
    """

    topics: ClassVar[dict[str, tuple[str, ...]]] = {
        "advanced": (
            "name",
            "patience",
            "withheld",
            "wire",
            "init",
            "init_positions",
            "probe_every",
        )
    }

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = None
    """A new folder for the client's part of the run."""

    resume: Annotated[Path | None, Parameter(metavar="FOLDER")] = None
    """Resume this run."""

    source: Annotated[str | None, Parameter(name="--from", metavar="MODEL")] = None
    """Initial weights, the same as on the server."""

    withheld: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """File with the parts that were left out of the locked model (situs lock --withhold)."""

    permute: Annotated[tuple[Literal["rows", "columns"], ...], Parameter(metavar="WHAT")] = ()
    """rows: permute the tokens, in a new order at each step. columns: permute the channels of the tokens with the key.
    Default: no permutation."""

    defence: Annotated[str, Parameter(name="--defences", metavar="NAME")] = ""
    """none (default), batch-shuffle=B (shuffle tokens among B samples), noise=σ (its standard deviation is
    σ times that of the tokens), or lowpass=r (keep the lowest fraction r of frequencies)."""

    wire: Literal["own", "bf16"] = "own"
    """Number format of the messages: own (the precision of the model) or bf16 (bfloat16, which halves the size of fp32
    messages)."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """cpu, cuda, cuda:N or mps. Default: cuda if available, otherwise cpu."""

    config: FinetuneConfig = configured(FinetuneConfig, short=ONE_RANK, without=("added",))

    def run(self) -> int:
        """Trains; the exit status is 130 if it was interrupted (and can be resumed)."""
        from situs.api import unlock_of
        from situs.models.start import starting
        from situs.split.run import Hide, train_split

        config = self.config if self.source is None else dataclasses.replace(self.config, init=self.source)
        key = None if self.key is None else read_key(self.key)
        start = starting(None if config.init is None else unlock_of(config.init, key, self.withheld))
        if self.server == LOCAL:
            return _train_local(self, config, start)
        hide = Hide(self.permute, self.defence or "none", self.wire)
        with self.connect() as call:
            result = train_split(
                config, call, hide, out=self.out, resume=self.resume, key=key, start=start, device=self.device
            )
            wire = max(0.0, call.waited - call.served)
            repeated = counted(call.again, "repeated requests")
            note(f"{repeated}; {took(wire)} were spent in the network and {took(call.served)} at the server")
        folder = self.out or self.resume
        answer({"run": folder, "steps": result.step, "interrupted": result.interrupted, "metrics": result.metrics})
        if result.interrupted:
            return INTERRUPTED
        metrics = {name: value for name, value in result.metrics.items() if name != "gradient_norm"}
        facts = "".join(f", {name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items())
        note(f"done: {counted(result.step, 'steps')}{facts}; the client's part is in {folder}")
        assert folder is not None
        note(next_line(["split", "infer", folder, *self.again()]))
        note("if you also have the server's folder, `situs split merge` joins both parts into one run")
        return 0


def _train_local(args: Train, config: FinetuneConfig, start: Start) -> int:
    """Trains without a server: an ordinary run whose blocks see the tokens as a server would."""
    from situs.split.local import train_defended

    folder = args.out or args.resume
    if folder is None or (args.out is not None and args.resume is not None):
        raise SitusError("give either a new folder or a run to resume", field=("out", "resume"))
    options = {"permute": args.permute, "resume": args.resume is not None, "start": start, "device": args.device}
    return report_training(folder, config, train_defended(config, args.defence or None, folder, **options))


@dataclass(frozen=True, kw_only=True)
class Infer(ClientArgs):
    """Measure the accuracy of a model that was trained by split learning, or generate text. The server runs the blocks.
    Situs uses the same permutations and defence as in training.

    With --server local, no server is needed, but RUN must contain the blocks. To generate text, RUN can also be a
    language model whose blocks the server has loaded (situs split serve --from). A locked language model needs --key.

    For example: situs split infer runs/split --server 127.0.0.1:7443 --tls certs
    """

    topics: ClassVar[dict[str, tuple[str, ...]]] = {"advanced": ("name", "patience", "withheld", "seed", "prompts")}

    folder: Annotated[Path, POSITIONAL, Parameter(metavar="RUN")]
    """The client's part of the run (the output folder of situs split train)."""

    generate: Annotated[str | None, Parameter(metavar="TEXT")] = None
    """Generate a continuation of this text. The words are printed during generation."""

    prompts: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Generate a continuation of each line of this file."""

    max_tokens: Annotated[int, Parameter(metavar="N")] = 128
    """Largest number of tokens to generate for each text."""

    temperature: float = 0.0
    """With 0, the next token is the most probable token. Otherwise, the next token is sampled from softmax(logits /
    temperature)."""

    seed: int = 0
    """Random seed for the sampling of tokens."""

    defence: Annotated[str, Parameter(name="--defences", metavar="NAME")] = "none"
    """Defence for generated text: none or noise=σ (noise whose standard deviation is σ times that of the word vectors).
    If RUN is the output folder of situs split train, do not set this flag: the defence of the training is used."""

    withheld: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """File with the parts that were left out of the locked model (situs lock --withhold)."""

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Path of the images. Default: the val split of the training data."""

    count: Annotated[int | None, Parameter(metavar="N")] = None
    """Use at most this many images. Default: all."""

    permute: Annotated[tuple[Literal["rows"], ...] | None, Parameter(metavar="rows")] = None
    """With --server local: permute the tokens (rows) before the blocks. Default: as in training."""

    device: Annotated[str | None, Parameter(metavar="NAME")] = None
    """With --server local: cpu, cuda, cuda:N or mps. Default: cuda if available, otherwise cpu."""

    out: Annotated[Path | None, Parameter(metavar="FOLDER")] = OUT
    """Folder for the results (JSON and HTML). With --out none, no files are written."""

    def run(self) -> None:
        """Evaluates, or generates."""
        from situs.measure.accuracy import evaluate_accuracy
        from situs.measure.perplexity import evaluate_perplexity
        from situs.split.local import infer_defended
        from situs.split.whole import open_split

        if self.generate is not None or self.prompts is not None:
            self._generate()
            return
        if self.defence != "none":
            raise SitusError(
                "defence: cannot be changed, because the run keeps the defence of its training; do not set `defence`",
                field="defence",
            )
        if self.server == LOCAL:
            options = {"permute": self.permute, "count": self.count, "device": self.device}
            present(infer_defended(self.folder, self.data, **options), self.out)
            return
        if self.permute is not None:
            raise SitusError(
                "permute: applies only with server=local. With any other server, the tokens (rows) are permuted "
                "as in training, and this cannot be changed; do not set `permute`",
                field="permute",
            )
        key = None if self.key is None else read_key(self.key)
        with self.connect() as call, open_split(self.folder, call, key=key) as model:
            measure = evaluate_perplexity if model.backbone.next_words else evaluate_accuracy
            present(measure(model, data=self.data, count=self.count), self.out)

    def _generate(self) -> None:
        """Prints what follows each prompt, piece by piece."""
        import torch

        from situs.files import read_lines
        from situs.split.generate import open_writer

        for name in ("data", "count", "permute"):
            if getattr(self, name) is not None:
                raise SitusError(f"{name}: has no effect when text is generated; leave it out", field=name)
        device = self.device or ("cuda" if self.server == LOCAL and torch.cuda.is_available() else "cpu")
        lines = [] if self.prompts is None else read_lines(self.prompts, "prompts")
        texts = [*([] if self.generate is None else [self.generate]), *lines]
        key = None if self.key is None else read_key(self.key)
        options = {"key": key, "withheld": self.withheld, "defence": self.defence, "device": device}
        words = {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}
        with contextlib.ExitStack() as stack:
            call = None if self.server == LOCAL else stack.enter_context(self.connect())
            writer = stack.enter_context(open_writer(self.folder, call, **options))
            began, written = time.perf_counter(), []
            for text in texts:
                print(text if len(texts) > 1 else "", end="", flush=True)
                pieces = []
                for piece in writer.write(text, **words):
                    pieces.append(piece)
                    print(piece, end="", flush=True)
                print()
                written.append({"prompt": text, "text": "".join(pieces)})
            seconds = time.perf_counter() - began
            answer({"texts": written, "tokens": writer.count, "seconds": seconds})
            note(f"{counted(writer.count, 'tokens')}, {writer.count / max(seconds, 1e-9):.3g} tokens per second")


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Join the parts of client and server into one ordinary run. Situs can then evaluate, export and audit this run,
    and can resume the training.

    For example: situs split merge runs/split runs/server --out runs/whole
    """

    client: Annotated[Path, POSITIONAL, Parameter(metavar="RUN")]
    """The client's part (the output folder of situs split train)."""

    server: Annotated[Path, POSITIONAL, Parameter(metavar="SERVER")]
    """The output folder of situs split serve, or its subfolder for one training."""

    out: Annotated[Path, Parameter(metavar="FOLDER")]
    """A new folder for the joined run."""

    key: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Key file, if the training permuted the channels and the client's folder does not contain the key."""

    def run(self) -> None:
        """Writes the run and prints the next commands."""
        from situs.split.whole import merge

        step = merge(self.client, self.server, self.out, key=None if self.key is None else read_key(self.key))
        exported = new_sibling(self.out, "exported")
        answer(
            {"run": self.out, "steps": step},
            f"{self.out}: contains the joined run after {counted(step, 'steps')}",
            next_line(["evaluate", "accuracy", self.out], ["export", self.out, "--out", exported]),
        )
