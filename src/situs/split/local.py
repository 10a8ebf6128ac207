"""A defence in a training on one machine: what split training gives, at the speed of any other training here.

Permutations of rows and columns change no number of a training but by rounding, so the defence of the patch tokens is
all that is left of a view; rows may be permuted here too, to see that. Both stand between the embedding and the blocks
of a model that is trained as ever: random numbers are drawn before the step, by sample and epoch, and the step may be
compiled and recorded. Nothing is sent and no key is needed; how much a defence costs is learned here, and what it hides
is learned by an audit.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from situs.backbones.base import Backbone, Features, Stream, Taps
from situs.core.permutation import invert
from situs.core.random import bits
from situs.core.tokens import take
from situs.core.when import When
from situs.data.batch import Batch
from situs.errors import SitusError
from situs.files import read_json, write_text
from situs.locks.features import Defence, Words, apply_defence, draw_defence, parse_defence, row_orders
from situs.locks.key import SEED_BYTES, Key
from situs.measure.accuracy import ClassAccuracy, evaluate_accuracy, hard, labels_of
from situs.measure.knn import knn_accuracy
from situs.measure.multi_label import LabelAccuracy
from situs.methods.base import Draws, Method, Output
from situs.methods.supervised import Supervised, SupervisedConfig, label_loss
from situs.models import open_model
from situs.models.data import load_bank
from situs.models.defended import FILE as FACTS
from situs.models.inference import evaluating
from situs.split.scale import noise_scale
from situs.split.view import make_view
from situs.train.assemble import RunConfig, Setup, Start, cannot_start, settled
from situs.train.checkpoint import run_and_step
from situs.train.contract import RunState, TrainResult
from situs.train.run import train_run


class Defended(Supervised):
    """Supervised training whose blocks are given defended tokens. scale: what a σ of noise is a multiple of.

    rows: whether all p + N rows of a sample are given in an order of its own, new in every epoch.
    """

    def __init__(
        self, backbone: Backbone, config: SupervisedConfig, defence: Defence, scale: float, *, rows: bool = False
    ) -> None:
        super().__init__(backbone, config)
        self.defence, self.scale, self.rows = defence, scale, rows

    def draw(self, batch: Batch, when: When) -> Draws:
        if batch.mask is not None:
            raise SitusError("split training takes no batches with padding, as sentences have")
        shape = len(batch.ids), self.backbone.num_tokens, self.backbone.dim
        words = self.words(batch, when.seed, when.epoch)
        given = draw_defence(self.defence, words, shape, self.backbone.grid)
        draws = {} if given is None else {"defence": given.to(batch.ids.device)}
        if self.rows:
            orders = row_orders(words, len(batch.ids), self.backbone.num_prefix + self.backbone.num_tokens)
            draws["rows"] = orders.to(batch.ids.device)
        return draws

    def words(self, batch: Batch, seed: int, epoch: int) -> Words:
        """Words for a batch's samples, new in every epoch."""
        size = len(batch.ids)
        return lambda purpose, count: bits(seed, epoch, batch.ids, f"split.{purpose}", (count // size,)).flatten()

    def defended(self, images: Tensor, draws: Draws) -> Features:
        """Features of images, as the client has them when it has put the server's answer in order."""
        backbone, given = self.backbone, draws.get("defence")
        stream = backbone.assemble(backbone.embed(images), backbone.positions())
        z, back = apply_defence(stream.z, self.defence, given, prefix=stream.prefix, scale=self.scale)
        order = draws.get("rows")
        out = backbone.blocks(replace(stream, z=z if order is None else take(z, order))).z
        return backbone.finish(replace(stream, z=back(out if order is None else take(out, invert(order)))))

    def forward(self, batch: Batch, draws: Draws) -> Output:
        logits = self.backbone.head(self.defended(batch.inputs, draws))
        loss, metrics = label_loss(logits, batch, self.config.label_smoothing)
        return Output(loss, metrics, {"logits": logits.detach()})


def train_defended(
    config: RunConfig, defence: str | None, out: str | Path, *, permute: tuple[str, ...] = (), resume: bool = False,
    start: Start = cannot_start, device: str | None = None, quiet: bool = False,
) -> TrainResult:  # fmt: skip
    """Trains a classifier under a feature defence; `out` is an ordinary run that also says what the defence was.

    permute: ("rows",) for rows in a new order in every epoch. resume: goes on with what has begun there, and None for
    its defence and permutation. A σ is a multiple of what it was at the first step. start: see `Setup`.
    """
    if config.method_name != "supervised":
        said = f"method={config.method_name}: a split training is supervised: its labels stay with the client"
        raise SitusError(said, field="method")
    config, facts = settled(config), Path(out) / FACTS  # a σ is measured on what the model is given
    before = _used(Path(out)) if resume and facts.exists() else None
    if defence is None and before is not None:
        defence, permute = before["defence"], (*before["permute"],)
    told = parse_defence(defence or "none")
    used: dict[str, Any] = {"defence": str(told), "scale": 1.0, "permute": _rows_alone(permute)}
    for name in ("defence", "permute"):
        if before is not None and before[name] != used[name]:
            allowed = f"{before[name]}, which {out} was trained under so far"
            raise SitusError(field=name, value=used[name], allowed=allowed)

    def adapt(method: Method, loader: Any) -> Method:
        device = next(method.parameters()).device
        make_view(method.backbone, permute, told, key=Key(bytes(SEED_BYTES)))  # refuses what this model cannot do
        if before is not None:
            used["scale"] = before["scale"]
        elif told.kind == "noise":
            used["scale"] = noise_scale(method.backbone, loader.source, config.data, device)
        return Defended(method.backbone, method.config, told, used["scale"], rows=bool(permute))

    place: dict[str, Any] = {"resume" if resume else "out": out}
    noting = _Noting(facts, used)
    return train_run(config, Setup(start, adapt, lambda *_: [noting]), **place, device=device, quiet=quiet)


def _rows_alone(permute: tuple[str, ...]) -> list[str]:
    if {*permute} - {"rows"}:
        said = "permute=columns: is nothing where no server is; columns change no number of a training"
        raise SitusError(said, field="permute")
    return list(permute)


def _used(run: Path) -> dict[str, Any]:
    """What a run, or one of its checkpoints, was trained under; nothing of a run that `train_defended` has not made."""
    nothing, facts = {"defence": "none", "scale": 1.0, "permute": []}, run_and_step(run)[0] / FACTS
    return {**nothing, **(read_json(facts) if facts.is_file() else {})}


@dataclass(frozen=True)
class _Noting:
    """Writes down what the defence was as soon as there is something trained under it, so that a resume knows."""

    path: Path
    used: Mapping[str, Any]

    def after_step(self, state: RunState) -> None:  # noqa: ARG002
        if not self.path.exists():
            write_text(self.path, json.dumps(self.used))

    def after_epoch(self, state: RunState) -> None:
        """Nothing more."""


@dataclass(frozen=True)
class DefendedScores:
    """What is left of a task under the defence that it was trained with.

    top1, knn: shares of `count` images; knn: by the 20 nearest of `bank` training images, of what the head reads. now:
    the defence in the trained model's own units, as an audit of it must be told: a σ was a multiple of the tokens'
    deviation when the training began, and an embedding that grows leaves the noise behind.
    """

    defence: str
    now: str
    top1: float
    knn: float
    count: int
    bank: int


def infer_defended(
    run: str | Path, data: str | Path | None = None, *, permute: tuple[str, ...] | None = None,
    count: int | None = None, device: str | None = None,
) -> ClassAccuracy | LabelAccuracy:  # fmt: skip
    """Accuracy of a run whose blocks are given what a server would be: under its defence, its rows permuted as in its
    training, or as `permute` says. Of an ordinary run, which has no defence, rows alone."""
    used = _used(Path(run))
    asked = (*used["permute"],) if permute is None else permute
    model = open_model(run, device=device or ("cuda" if torch.cuda.is_available() else "cpu"))
    _rows_alone(asked)
    told, secret = parse_defence(used["defence"]), Key(bytes(SEED_BYTES))
    view = make_view(model.backbone, asked, told, key=secret, scale=used["scale"])
    backbone, numbers = model.backbone, itertools.count()
    plain = backbone.run_layers

    def shown(stream: Stream, keys: int | None, taps: Taps = ()) -> Tensor:
        at = ("infer", str(next(numbers)))
        z, mask, back = view.show(stream.z, stream.mask, prefix=stream.prefix, grid=backbone.grid, at=at)
        return back(plain(replace(stream, z=z, mask=mask), keys, taps))

    backbone.run_layers = shown  # the one way into its blocks
    return evaluate_accuracy(model, data, count=count)


def evaluate_defended(
    run: str | Path, data: str | Path | None = None, *, count: int | None = None, train_count: int | None = None,
    batch: int = 256, k: int = 20, device: str | None = None,
) -> DefendedScores:  # fmt: skip
    """Accuracy and nearest neighbours of a run of `train_defended`, every image under its defence, the bank's too."""
    used = _used(Path(run))
    defence = parse_defence(used["defence"])
    model = open_model(run, device=device or ("cuda" if torch.cuda.is_available() else "cpu"))
    method = Defended(model.backbone, SupervisedConfig(), defence, used["scale"])
    bank, test = load_bank(model, data, train_count=train_count, count=count, batch=batch)
    known, _, classes = _features(method, bank)
    found, logits, labels = _features(method, test)
    now = defence
    if defence.kind == "noise":
        deviation = noise_scale(model.backbone, test.source, model.data, model.device)
        now = replace(defence, strength=defence.strength * used["scale"] / deviation)
    top1 = float((logits.argmax(dim=-1) == labels).double().mean())
    near = knn_accuracy(known, classes, found, labels, k)
    return DefendedScores(str(defence), str(now), top1, near, len(labels), len(classes))


def _features(method: Defended, batches: Iterable[Batch]) -> tuple[Tensor, Tensor, Tensor]:
    """What the head reads [n, D], logits [n, K] and labels [n]."""
    parts = []
    with evaluating(method):
        for batch in batches:
            features = method.defended(batch.inputs, method.draw(batch, When(seed=0, epoch=0)))
            parts.append((method.backbone.pooled(features), method.backbone.head(features), hard(labels_of(batch))))
    pooled, logits, labels = (torch.cat(each) for each in zip(*parts, strict=True))
    return pooled, logits, labels
