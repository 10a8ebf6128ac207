"""A client and a server in one process, and local training beside them: what the tests of split learning compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from builders import small_vit
from torch import Tensor

from situs.backbones.base import Backbone
from situs.core.random import normal, uniform
from situs.data.batch import Batch
from situs.locks.groups import invert_keys, permute_state, residual_only
from situs.locks.key import Key
from situs.locks.veil import Veil
from situs.methods import create_method
from situs.methods.base import Method
from situs.methods.supervised import SupervisedConfig
from situs.split.client import Client
from situs.split.hiding import column_permutations, make_cut
from situs.split.message import Expected, Message
from situs.split.parts import cut, layout, side_names, trained_order
from situs.split.remote import SplitStepper, attach
from situs.split.server import Limits, Server, agreed
from situs.train.checkpoint import RunFolder
from situs.train.config import TrainConfig
from situs.train.loop import fit
from situs.train.optim import BACKBONE, OptimConfig

KEY = Key(bytes(range(32)))
SESSION = "0123456789abcdef" * 2
TRAIN = TrainConfig(epochs=None, max_steps=3, precision="fp32", seed=3, log_every=2, save_every=100)
OPTIM = OptimConfig(lr=1e-2, warmup_epochs=0.5, clip=0.5, layer_decay=0.8, ema=0.9, weight_decay=0.1)


class Loader:
    """Random images and labels, the same for a step every time."""

    steps_per_epoch, data_wait, mark = 4, 0.0, "noise"

    def __init__(self, shape: tuple[int, ...] = (3, 16, 16), batch: int = 8, classes: int = 5) -> None:
        self.shape, self.global_batch, self.classes = shape, batch, classes

    def iterate(self, epoch: int, start_step: int) -> Iterator[Batch]:
        for step in range(start_step, self.steps_per_epoch):
            ids = torch.arange(self.global_batch) + step * self.global_batch
            label = (uniform(0, epoch, ids, "label", (1,))[:, 0] * self.classes).long()
            yield Batch(normal(0, epoch, ids, "x", self.shape), ids, {"label": label})


class Words(Loader):
    """Random ids of words, the last of some sentences padding."""

    def iterate(self, epoch: int, start_step: int) -> Iterator[Batch]:
        for batch in super().iterate(epoch, start_step):
            ids = (batch.inputs.abs() * 10).long() % 40
            mask = torch.ones(ids.shape, dtype=torch.bool)
            mask[::2, -3:] = False
            yield Batch(ids, batch.ids, batch.targets | {"words": ids.where(mask, -1)}, mask)


def vit(dtype: torch.dtype = torch.float32, **fields: Any) -> Backbone:
    torch.manual_seed(11)
    return small_vit(16, depth=4, num_classes=5, **{"drop_path": 0.2, **fields}).to(dtype)


def method_of(backbone: Backbone) -> Method:
    """The next word, for a model with a head for it, else classes."""
    if backbone.next_words:
        return create_method("language", backbone)
    return create_method("supervised", backbone, SupervisedConfig())


def train_locally(method: Method, loader: Loader, out: Path, train: TrainConfig = TRAIN, optim: OptimConfig = OPTIM):
    fit(method, loader, train, optim, RunFolder.create(out, {}), quiet=True)
    return whole_state(out)


def whole_state(run: Path) -> dict[str, dict[str, Tensor]]:
    """Every tensor of a run's newest checkpoint but its generators and log, file by file."""
    newest = RunFolder.open(run).newest()
    return {name: newest.tensors(name) for name in ("model", "optimizer", "ema")}


class Pair:
    """A server with its blocks and a client with the rest, each made from the same backbone, joined by a call."""

    def __init__(
        self, make: Any, out: Path, permute: tuple[str, ...] = (), defence: Veil | None = None, *,
        optim: OptimConfig = OPTIM, train: TrainConfig = TRAIN, wire: torch.dtype | None = None,
        limits: Limits | None = None, shared: bool = False,
    ) -> None:  # fmt: skip
        self.make, self.out, self.optim, self.train = make, out, optim, train
        self.permute, self.keys = permute, {}
        self.seen: list[Message] = []
        self.server = Server(
            self.served, optim, out / "server", seed=train.seed, limits=limits or Limits(), shared=shared
        )
        self.method = method_of(make())
        self.order = trained_order(self.method, optim)
        served = side_names(self.method, "server")
        self.facts = layout(self.method.backbone), agreed(optim, "fp32")
        veil = replace(defence or Veil(), rows="rows" in permute, columns="columns" in permute)
        entrance = make_cut(self.method.backbone, veil, KEY, run=SESSION)
        cut(self.method, "client")
        self.client = Client(self.call, SESSION, wire=wire)
        attach(self.method.backbone, self.client, entrance, len([name for name in self.order if name in served]))

    def served(self) -> Method:
        """The method that the server starts from: with columns, its blocks are keyed."""
        backbone = self.make()
        if "columns" in self.permute:
            self.keys = column_permutations(backbone, KEY, SESSION, None)
            state = permute_state(backbone.model.state_dict(), residual_only(backbone.groups()), self.keys)
            backbone.model.load_state_dict(state)
        return method_of(backbone)

    def call(self, message: Message, expected: Mapping[str, Expected]) -> Message:
        self.seen.append(message)
        wanted = self.server.expected("me", message.kind, message.facts)
        assert message.tensors.keys() <= wanted.keys()
        answer = self.server.answer("me", message)
        assert answer.tensors.keys() == expected.keys()
        return answer

    def run(self, loader: Loader) -> dict[str, dict[str, Tensor]]:
        """Trains; gives both sides' tensors together, the server's with its channels back in their order."""
        self.client.hello(*self.facts, [])
        stepper = partial(SplitStepper, client=self.client, order=self.order)
        fit(
            self.method,
            loader,
            self.train,
            self.optim,
            SplitRun.create(self.out / "client", {}).of(self.client),
            stepper=stepper,
            quiet=True,
        )
        mine = whole_state(self.out / "client")
        theirs = whole_state(self.out / "server" / "sessions" / SESSION)
        assert not mine["model"].keys() & theirs["model"].keys()
        return {name: mine[name] | self.opened(theirs[name]) for name in mine}

    def opened(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self.keys:
            return state
        groups, inverse, found = residual_only(self.make().groups()), invert_keys(self.keys), {}
        for name, value in state.items():
            own, _, kind = name.partition("/")
            own = own.removeprefix(f"{BACKBONE}model.")
            found[name] = permute_state({own: value}, groups, inverse)[own] if kind != "step" else value
        return found


class SplitRun(RunFolder):
    """A run folder whose checkpoints are the server's too."""

    def of(self, client: Client) -> SplitRun:
        self.client = client
        return self

    def begin(self, step: int, *rest: Any) -> None:
        self.client.save(step)
        super().begin(step, *rest)


def farthest(a: Mapping[str, Mapping[str, Tensor]], b: Mapping[str, Mapping[str, Tensor]]) -> float:
    """The largest difference between two trainings, over every tensor of theirs."""
    assert a.keys() == b.keys()
    worst = 0.0
    for file in a:
        assert a[file].keys() == b[file].keys(), a[file].keys() ^ b[file].keys()
        for name, value in a[file].items():
            worst = max(worst, float((value.double() - b[file][name].double()).abs().max()))
    return worst


def steps(train: TrainConfig, count: int) -> TrainConfig:
    return replace(train, max_steps=count)
