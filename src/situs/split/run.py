"""A whole split training from one config, the client's part of it: method, data, veil, loop, folder.

    OUT/config.json, classes.json, metrics.jsonl, checkpoints/     a run folder that holds the client's tensors alone
    OUT/split.json                                                 the session and how features are hidden
    OUT/owner.key                                                  the key, unless one was given

Where the server began anew, both sides go back to the newest checkpoint that they share, and the steps come again.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
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
from situs.split.parts import cut, digest, layout, own_names, trained_order
from situs.split.remote import SplitStepper, attach
from situs.split.server import agreed
from situs.train import distributed
from situs.train.assemble import RunConfig, Start, described_set, make_method, make_training_loader, resolve_config
from situs.train.checkpoint import Checkpoint, RunFolder, check_target, read_config
from situs.train.checkpoint.files import with_checksum
from situs.train.contract import TrainLoader, TrainResult
from situs.train.loop import fit
from situs.train.optim import BACKBONE

PATIENT = 20
"""Times that a training may go back without a step in between before it gives up."""


class SplitFolder(RunFolder):
    """The client's run folder: the server writes its checkpoint of a step first, so the client's is never alone."""

    client: Client
    limit: int

    def begin(self, step: int, *rest: Any) -> None:
        self.wait()  # the server lets go of its oldest now, so the client's last must be on the disk
        self.client.save(step)
        super().begin(step, *rest)

    @cached_property
    def start(self) -> Checkpoint | None:
        """The checkpoint of the step that the server stands at; step 0 has none."""
        found = None if self.limit == 0 else self.latest(self.limit)
        if found is None and self.limit:
            raise SitusError(f"{self.path}: the checkpoint of step {self.limit} has just disappeared")
        return found


class Ahead:
    """A loader whose next batch is read and augmented while the step before it waits for the server."""

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
        finally:  # nobody waits: the collector may let it go while another thread starts, and holds what is waited for
            pool.shutdown(wait=False, cancel_futures=True)


def initialising(config: RunConfig, backbone: Backbone) -> Sequence[str]:
    """The weights that `config.init` names, of any model but a locked one."""
    return starting()(config, backbone)


@dataclass(frozen=True)
class Place:
    """Where a split training is kept and what it is given besides its config."""

    out: Path
    resume: bool
    key: AnyKey | None
    start: Start
    quiet: bool


def train_split(
    config: RunConfig,
    call: Call,
    hide: Hide = Hide(),  # noqa: B008  (frozen)
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    key: AnyKey | None = None,
    start: Start = initialising,
    device: str | None = None,
    quiet: bool = False,
) -> TrainResult:
    """Trains what `config` says with a server's blocks, in a new folder `out` or going on in `resume`.

    call: how the server is asked (`situs.split.transport.connect.Connection`, or a `Server` in this process). hide:
    what it is shown; a run that is gone on with has its own. key: what permutations and noise follow from; None makes
    one in the run's folder. start: puts the weights of `config.init` into a new backbone.
    """
    if (out is None) == (resume is None):
        raise SitusError("give either a new folder or a run to resume", field=("out", "resume"))
    asked, config = config, resolve_config(config)
    _check(config)
    folder = Path(out if out is not None else resume)  # pyright: ignore[reportArgumentType]
    if resume is None:
        check_target(folder)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    loader = make_training_loader(replace(config, train=_plain(config)), distributed.Ranks(0, 1, where))
    for line in described_set(asked, config, loader):
        note(line)
    place = Place(folder, resume is not None, key, start, quiet)
    hiding = Hiding(hide.permute, hide.defence, hide.wire, session=secrets.token_hex(16))
    return _Training(config, loader, where, place).run(call, hiding)


def _plain(config: RunConfig) -> Any:
    return replace(config.train, compile=False, graph=False)


def _check(config: RunConfig) -> None:
    if config.method_name != "supervised":
        said = f"method={config.method_name}: a split training is supervised: its labels stay with the client"
        raise SitusError(said, field="method")
    if config.tuning.parts != "all" or config.dp.on:  # said, since nobody may believe in a promise that is not kept
        field = "dp" if config.dp.on else "tuning.parts"
        raise SitusError(f"{field}: split training trains every weight, and without DP-SGD; leave it out", field=field)
    if config.train.precision == "fp16":
        raise SitusError("precision='fp16': split training takes bf16 or fp32", field="train.precision")
    if distributed.world() > 1:
        raise SitusError("split training runs on one rank: start a single client")


class _Training:
    """What stays the same however often both sides go back."""

    def __init__(self, config: RunConfig, loader: Any, device: torch.device, place: Place) -> None:
        self.config, self.loader, self.device, self.place = config, loader, device, place
        self.made = place.resume

    def run(self, call: Call, hiding: Hiding) -> TrainResult:
        """Trains to the end, however often the server begins anew."""
        method = self._method()
        hiding, key = self._settle(method, hiding)
        client, left, last = hiding.client(call), PATIENT, -1
        while True:
            try:
                result = self._go_on(method, client, hiding, key)
            except RewoundError as error:
                left = PATIENT if client.step > last else left - 1
                last = max(last, client.step)
                if not left:
                    raise SitusError(
                        f"both sides went back {PATIENT} times without a step in between: {error}"
                    ) from None
                note(f"the server restarted at step {client.step}: both continue from their newest checkpoint")
                method = self._method()
                continue
            except GoneError as error:
                if not self.made:
                    raise
                said = f"{error}; what was saved is in {self.place.out}, and resuming it goes on from there"
                raise SitusError(said, field="server") from None
            with contextlib.suppress(RewoundError, SitusError):  # all is on both disks
                client.bye()
            return result

    def _method(self) -> Method:
        method = make_method(self.config, self.loader.classes)
        if self.config.init is not None:
            for line in self.place.start(self.config, method.backbone):
                note(line)
        return method.to(self.device)

    def _settle(self, method: Method, hiding: Hiding) -> tuple[Hiding, Key | None]:
        """How features are hidden: as a run that is gone on with has it, or as asked."""
        if self.place.resume:
            hiding = read_hiding(self.place.out)
            return hiding, key_of(self.place.out, hiding, self.place.key)
        init, key = self.config.init, None
        if "columns" in hiding.permute and init is not None and not is_locked(init):
            raise SitusError(
                f"permute=columns: the blocks of {init} are clear, and so the server knows them: lock it with a key, "
                "give the server the locked folder, and start here from it with the key",
                field=("permute", "init"),
            )
        if hiding.secret:
            key = draw_key() if self.place.key is None else as_key(self.place.key)
            locked = init if init is not None and is_locked(init) else None
            hiding = replace(hiding, key_id=key.id, locked=locked)
            if hiding.veil.kind == "noise":
                scale = noise_scale(method.backbone, self.loader.source, self.config.data, self.device)
                hiding = replace(hiding, scale=scale)
            hiding.cut(method.backbone, key)  # refused before anything is written
        return hiding, key

    def _create(self, hiding: Hiding, key: Key | None) -> SplitFolder:
        """The folder of a new run, once the server has said that it will train it."""
        made = SplitFolder.create(self.place.out, self.config, classes=self.loader.classes)
        if key is not None and self.place.key is None:
            write_key(key, self.place.out / KEY)
        write_text(self.place.out / FACTS, with_checksum(to_dict(hiding), FACTS))
        self.made = True
        return cast(SplitFolder, made)

    def _go_on(self, method: Method, client: Client, hiding: Hiding, key: Key | None) -> TrainResult:
        """From the newest checkpoint that both sides have."""
        config, backbone = self.config, method.backbone
        order, served = trained_order(method, config.optim), own_names(method, "server")
        training = agreed(config.optim, config.train.precision_on(self.device))
        with contextlib.ExitStack() as held:
            folder, whole = None, []
            if self.made:
                folder = cast(SplitFolder, SplitFolder.open(self.place.out, config))
                held.enter_context(folder.hold())
                whole = [step for step in folder.steps() if folder.whole(step) is not None]
            welcome = client.hello(layout(backbone), training, whole)
            if config.init is not None:
                self._check_blocks(method, hiding, key, welcome.digest)
            if folder is None:
                folder = self._create(hiding, key)
                held.enter_context(folder.hold())
            folder.client, folder.limit = client, welcome.step
            entrance = hiding.cut(backbone, key)
            cut(method, "client")
            attach(backbone, client, entrance, sum(name in served for name in order))
            every, quiet = config.probe_every, self.place.quiet
            hooks = validation_hooks(every)(config, self.loader, self.device) if every else ()
            stepper, loader = partial(SplitStepper, client=client, order=order), Ahead(self.loader)
            return fit(method, loader, _plain(config), config.optim, folder, hooks=hooks, stepper=stepper, quiet=quiet)

    def _check_blocks(self, method: Method, hiding: Hiding, key: Key | None, served: str) -> None:
        """Refuses a server whose blocks are not those of the weights that the client starts from."""
        state = method.state_dict()
        if "columns" in hiding.permute:
            assert key is not None
            state |= keyed(method.backbone, state, key, hiding)
        if digest(state, own_names(method, "server")) != served:
            raise SitusError(
                f"init={self.config.init}: the server's blocks are not those that belong to it: start both sides from "
                "the same weights, the server from the locked folder where channels are permuted",
                field="init",
            )


def keyed(backbone: Backbone, state: dict[str, Any], key: Key, hiding: Hiding) -> dict[str, Any]:
    """The tensors of a method's state that the channels' key moves, as the server holds them."""
    front = f"{BACKBONE}model."
    own = {name.removeprefix(front): value for name, value in state.items() if name.startswith(front)}
    keys = column_permutations(backbone, key, hiding.session, hiding.locked)
    moved = permute_state(own, residual_only(backbone.groups()), keys)
    return {front + name: value for name, value in moved.items()}


def recorded_config(run: Path) -> RunConfig:
    """The config of a client's run."""
    return from_dict(RunConfig, read_config(run), where=f"{run}/config.json")
