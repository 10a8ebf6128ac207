"""The client's part of a split training from one config: method, data, veil, loop, folder.

    OUT/config.json, classes.json, metrics.jsonl, checkpoints/     a run folder with only the client's tensors
    OUT/split.json                                                 the session and how features are hidden
    OUT/owner.key                                                  the key, unless one was given

If the server restarts, both sides go back to the newest checkpoint that they share and repeat the steps after it.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch

from situs.backbones.base import Backbone
from situs.config import from_dict, to_dict
from situs.errors import SitusError
from situs.files import write_text
from situs.locks.groups import permute_state, residual_only
from situs.locks.key import AnyKey, Key, as_key, draw_key, write_key
from situs.measure.hooks import validation_hooks
from situs.methods.base import Batch, Method
from situs.models.open import is_locked
from situs.models.start import starting
from situs.progress import note
from situs.split.client import Call, Client, RewoundError
from situs.split.hiding import FACTS, KEY, Hide, Hiding, column_permutations, key_of, noise_scale, read_hiding
from situs.split.message import GoneError
from situs.split.parts import cut, digest, layout, side_names, trained_order
from situs.split.remote import SplitStepper, attach
from situs.split.server import agreed
from situs.train import distributed
from situs.train.assemble import RunConfig, Start, described_set, make_method, make_training_loader, resolve_config
from situs.train.checkpoint import Checkpoint, RunFolder, check_target, read_config
from situs.train.checkpoint.files import with_checksum
from situs.train.contract import TrainLoader, TrainResult
from situs.train.loop import fit
from situs.train.optim import BACKBONE

MAX_REWINDS = 20
"""Times that a training may go back to a checkpoint without a step in between."""


TASKS = ("supervised", "language")
"""Methods whose targets stay with the client."""


class SplitFolder(RunFolder):
    """The client's run folder: the server writes its checkpoint of a step first, so the client never has one alone."""

    client: Client
    limit: int

    def begin(self, step: int, *rest: Any) -> None:
        self.wait()  # the server deletes its oldest now, so the client's last must be on disk
        self.client.save(step)
        super().begin(step, *rest)

    @cached_property
    def start(self) -> Checkpoint | None:
        """The checkpoint of the server's step; step 0 has none."""
        checkpoint = self.latest(self.limit)
        if checkpoint is None and self.limit:
            raise SitusError(f"{self.path}: the checkpoint of step {self.limit} has disappeared")
        return checkpoint


class PrefetchLoader:
    """A loader that reads and augments the next batch while the current step waits for the server."""

    def __init__(self, loader: TrainLoader) -> None:
        self.loader, self.data_wait = loader, 0.0
        self.steps_per_epoch, self.global_batch, self.mark = loader.steps_per_epoch, loader.global_batch, loader.mark

    def iterate(self, epoch: int, start_step: int) -> Iterator[Batch]:
        """The epoch's batches from number `start_step` on."""
        pool = ThreadPoolExecutor(1, "situs-batches")
        try:
            batches = self.loader.iterate(epoch, start_step)
            ahead = pool.submit(next, batches, None)
            while True:
                began = time.perf_counter()
                batch = ahead.result()
                self.data_wait += time.perf_counter() - began
                if batch is None:
                    return
                ahead = pool.submit(next, batches, None)
                yield batch
        finally:  # without waiting: the garbage collector may run this while another thread starts, and would deadlock
            pool.shutdown(wait=False, cancel_futures=True)


def train_split(
    config: RunConfig,
    call: Call,
    hide: Hide = Hide(),  # noqa: B008  (frozen)
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    key: AnyKey | None = None,
    start: Start | None = None,
    device: str | None = None,
    quiet: bool = False,
) -> TrainResult:
    """Trains as `config` says with a server's blocks, in a new folder `out` or continuing the run `resume`.

    call: the transport (`situs.split.transport.connect.Connection`, or a `Server` in this process). hide: how features
    are hidden; a resumed run has its own. key: determines permutations and noise; None makes one in the run's folder.
    start: loads the weights of `config.init` into a new backbone; default: those of any model but a locked one.
    """
    if (out is None) == (resume is None):
        raise SitusError("give either a new folder or a run to resume", field=("out", "resume"))
    requested, config = config, resolve_config(config)
    _check(config)
    folder = Path(out if out is not None else resume)  # pyright: ignore[reportArgumentType]
    if resume is None:
        check_target(folder)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    loader = make_training_loader(replace(config, train=_plain(config)), distributed.Ranks(0, 1, where))
    for line in described_set(requested, config, loader):
        note(line)
    if config.data.modality.ids:
        note("the server sees the length of every sentence, because the client sends the attention mask")
    hiding = Hiding(hide.permute, hide.defence, hide.wire, session=secrets.token_hex(16))
    begin = start or starting()
    return _Training(config, loader, where, folder, resume is not None, key, begin, quiet).run(call, hiding)


def _plain(config: RunConfig) -> Any:
    return replace(config.train, compile=False, graph=False)


def _check(config: RunConfig) -> None:
    if config.method_name not in TASKS:
        raise SitusError(
            f"method={config.method_name}: must be one of {', '.join(TASKS)} in split training",
            field="method",
        )
    if config.tuning.parts != "all" or config.dp.on:  # refused rather than ignored: dp is a promise
        field, why = ("dp", "has no DP-SGD") if config.dp.on else ("tuning.parts", "trains every weight")
        raise SitusError(f"{field}: leave this field out, because split training {why}", field=field)
    if config.train.precision == "fp16":
        raise SitusError("precision='fp16': split training supports bf16 and fp32", field="train.precision")
    if distributed.world() > 1:
        raise SitusError("split training runs in one process, but torchrun has started several; start a single client")


@dataclass
class _Training:
    """One training, across all restarts of the server. created: whether its folder exists."""

    config: RunConfig
    loader: Any
    device: torch.device
    out: Path
    resume: bool
    key: AnyKey | None
    start: Start
    quiet: bool

    def __post_init__(self) -> None:
        self.created = self.resume

    def run(self, call: Call, hiding: Hiding) -> TrainResult:
        """Trains to the end, across restarts of the server."""
        method = self._method()
        hiding, key = self._resolve(method, hiding)
        client, rewinds, last = hiding.client(call), MAX_REWINDS, -1
        while True:
            try:
                result = self._go_on(method, client, hiding, key)
            except RewoundError as error:
                rewinds = MAX_REWINDS if client.step > last else rewinds - 1
                last = max(last, client.step)
                if not rewinds:
                    raise SitusError(
                        f"client and server went back to a checkpoint {MAX_REWINDS} times without "
                        f"completing a step; the last error: {error}"
                    ) from None
                note(f"the server restarted at step {client.step}: both continue from their newest common checkpoint")
                method = self._method()
                continue
            except GoneError as error:
                if not self.created:
                    raise
                reason = f"{error}; the last checkpoint is in {self.out}; to continue, resume this run"
                raise SitusError(reason, field="server") from None
            with contextlib.suppress(RewoundError, SitusError):  # both sides have saved everything
                client.bye()
            return result

    def _method(self) -> Method:
        method = make_method(self.config, self.loader.classes)
        if self.config.init is not None:
            for line in self.start(self.config, method.backbone):
                note(line)
        return method.to(self.device)

    def _resolve(self, method: Method, hiding: Hiding) -> tuple[Hiding, Key | None]:
        """How features are hidden, and the key: those of a resumed run, or `hiding` completed."""
        if self.resume:
            hiding = read_hiding(self.out)
            return hiding, key_of(self.out, hiding, self.key)
        init, key = self.config.init, None
        if "columns" in hiding.permute and init is not None and not is_locked(init):
            raise SitusError(
                f"permute=columns: needs locked blocks, but the blocks of {init} are not locked, so the server knows "
                f"them. First lock {init} with a key. Then start the server from the locked folder, and the client "
                "from the locked folder with the key",
                field=("permute", "init"),
            )
        if hiding.secret:
            key = draw_key() if self.key is None else as_key(self.key)
            locked = init if init is not None and is_locked(init) else None
            hiding = replace(hiding, key_id=key.id, locked=locked)
            if hiding.veil.kind == "noise":
                scale = noise_scale(method.backbone, self.loader.source, self.config.data, self.device)
                hiding = replace(hiding, scale=scale)
            hiding.cut(method.backbone, key)  # refuses before anything is written
        return hiding, key

    def _create(self, hiding: Hiding, key: Key | None) -> SplitFolder:
        """The folder of a new run, after the server has accepted it."""
        folder = SplitFolder.create(self.out, self.config, classes=self.loader.classes)
        if key is not None and self.key is None:
            write_key(key, self.out / KEY)
        write_text(self.out / FACTS, with_checksum(to_dict(hiding), FACTS))
        self.created = True
        return cast(SplitFolder, folder)

    def _go_on(self, method: Method, client: Client, hiding: Hiding, key: Key | None) -> TrainResult:
        """Trains from the newest checkpoint that both sides have."""
        config, backbone = self.config, method.backbone
        order, served = trained_order(method, config.optim), side_names(method, "server")
        training = agreed(config.optim, config.train.precision_on(self.device))
        with contextlib.ExitStack() as stack:
            folder, whole = None, []
            if self.created:
                folder = cast(SplitFolder, SplitFolder.open(self.out, config))
                stack.enter_context(folder.hold())
                whole = [step for step in folder.steps() if folder.whole(step) is not None]
            welcome = client.hello(layout(backbone), training, whole)
            if config.init is not None:
                self._check_blocks(method, hiding, key, welcome.digest)
            if folder is None:
                folder = self._create(hiding, key)
                stack.enter_context(folder.hold())
            folder.client, folder.limit = client, welcome.step
            entrance = hiding.cut(backbone, key)
            cut(method, "client")
            attach(backbone, client, entrance, sum(name in served for name in order))
            every, quiet = config.probe_every, self.quiet
            hooks = validation_hooks(every)(config, self.loader, self.device) if every else ()
            stepper, loader = partial(SplitStepper, client=client, order=order), PrefetchLoader(self.loader)
            return fit(method, loader, _plain(config), config.optim, folder, hooks=hooks, stepper=stepper, quiet=quiet)

    def _check_blocks(self, method: Method, hiding: Hiding, key: Key | None, served: str) -> None:
        """Refuses a server whose blocks are not those of the client's initial weights."""
        state = method.state_dict()
        if "columns" in hiding.permute:
            assert key is not None
            state |= keyed(method.backbone, state, key, hiding)
        if digest(state, side_names(method, "server")) != served:
            raise SitusError(
                f"init={self.config.init}: the server's blocks come from other weights; start both sides from the same "
                "weights. With permute=columns, start both from the same locked folder (the client with its key)",
                field="init",
            )


def keyed(backbone: Backbone, state: dict[str, Any], key: Key, hiding: Hiding) -> dict[str, Any]:
    """The tensors of a method's state that the key moves, as the server has them."""
    front = f"{BACKBONE}model."
    inner = {name.removeprefix(front): value for name, value in state.items() if name.startswith(front)}
    keys = column_permutations(backbone, key, hiding.session, hiding.locked)
    moved = permute_state(inner, residual_only(backbone.groups()), keys)
    return {front + name: value for name, value in moved.items()}


def recorded_config(run: Path) -> RunConfig:
    """The config of a client's run."""
    return from_dict(RunConfig, read_config(run), where=f"{run}/config.json")
