"""Training with a feature defence on one machine: the results of split training without a server.

Permutations of rows and columns change a training only by rounding, so only the defence of the patch tokens matters;
rows may be permuted as well, to verify that. Both are applied between the embedding and the blocks of a model that is
trained as usual: random numbers are drawn before the step, by sample and epoch, so the step may be compiled and
recorded. Nothing is sent and no key is needed. This measures the cost of a defence; an audit measures its protection.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from situs.backbones.base import Backbone
from situs.backbones.halves import enter, leave, through
from situs.core.random import bits
from situs.core.when import When
from situs.data.batch import Batch
from situs.errors import SitusError
from situs.files import read_json, write_text
from situs.locks.key import SEED_BYTES, Key
from situs.locks.veil import Veil, Words, check_veil, parse_veil, set_entrance
from situs.measure.accuracy import ClassAccuracy, LabelAccuracy, evaluate_accuracy
from situs.methods.base import Draws, Method, Output
from situs.methods.supervised import Supervised, SupervisedConfig, label_loss
from situs.models import Model, open_model
from situs.models.model import DEFENCE_FILE as FACTS
from situs.split.hiding import make_cut, noise_scale
from situs.train.assemble import RunConfig, Setup, Start, cannot_start, resolve_config
from situs.train.checkpoint import run_and_step
from situs.train.contract import RunState, TrainResult
from situs.train.run import train_run


class Defended(Supervised):
    """Supervised training whose blocks get veiled tokens. scale: the unit of σ."""

    def __init__(self, backbone: Backbone, config: SupervisedConfig, veil: Veil, scale: float) -> None:
        super().__init__(backbone, config)
        self.veil, self.scale = veil, scale

    def draw(self, batch: Batch, when: When) -> Draws:
        backbone = self.backbone
        count = batch.inputs.shape[-1] if backbone.input.words else backbone.num_tokens
        shape = len(batch.ids), backbone.num_prefix + count, backbone.dim
        drawn = self.veil.draw(self.words(batch, when.seed, when.epoch), shape, backbone.num_prefix, backbone.grid)
        return {name: value.to(batch.ids.device) for name, value in drawn.items()}

    def words(self, batch: Batch, seed: int, epoch: int) -> Words:
        """Words for a batch's samples, new in every epoch."""
        size = len(batch.ids)
        return lambda purpose, count: bits(seed, epoch, batch.ids, f"split.{purpose}", (count // size,)).flatten()

    def forward(self, batch: Batch, draws: Draws) -> Output:
        backbone = self.backbone
        z, mask = enter(backbone, batch.inputs, batch.mask)
        z, mask, back = self.veil.apply(z, mask, draws, prefix=backbone.num_prefix, scale=self.scale)
        logits = leave(backbone, back(through(backbone, z, mask)), batch.mask)
        loss, metrics = label_loss(logits, batch, self.config.label_smoothing)
        return Output(loss, metrics, {"logits": logits.detach()})


def train_defended(
    config: RunConfig, defence: str | None, out: str | Path, *, permute: tuple[str, ...] = (), resume: bool = False,
    start: Start = cannot_start, device: str | None = None, quiet: bool = False,
) -> TrainResult:  # fmt: skip
    """Trains a classifier under a feature defence; `out` is an ordinary run that also records the defence.

    defence: None: of the run that is resumed. permute: ("rows",) for rows in a new order in every epoch. resume:
    continues the run in `out`. The unit of σ is measured before the first step. start: see `Setup`.
    """
    if config.method_name != "supervised":
        raise SitusError(
            f"method={config.method_name}: split training without a server supports only the method supervised",
            field="method",
        )
    config, facts = resolve_config(config), Path(out) / FACTS
    before = _used(Path(out)) if resume and facts.exists() else None
    if defence is None and before is not None:
        defence, permute = before["defence"], (*before["permute"],)
    veil = _without_columns(defence or "none", permute)
    used: dict[str, Any] = {"defence": str(veil.defence), "scale": 1.0, "permute": list(permute)}
    for name in ("defence", "permute"):
        if before is not None and before[name] != used[name]:
            allowed = f"{before[name]}, as in the training of {out} so far"
            raise SitusError(field=name, value=used[name], allowed=allowed)

    def adapt(method: Method, loader: Any) -> Method:
        device = next(method.parameters()).device
        check_veil(veil, method.backbone)
        if before is not None:
            used["scale"] = before["scale"]
        elif veil.kind == "noise":
            used["scale"] = noise_scale(method.backbone, loader.source, config.data, device)
        return Defended(method.backbone, method.config, veil, used["scale"])

    place: dict[str, Any] = {"resume" if resume else "out": out}
    noting = _Noting(facts, used)
    return train_run(config, Setup(start, adapt, lambda *_: [noting]), **place, device=device, quiet=quiet)


def _without_columns(defence: str, permute: tuple[str, ...]) -> Veil:
    if "columns" in permute:
        raise SitusError("permute=columns: has no effect without a server", field="permute")
    return parse_veil(defence, permute)


def _used(run: Path) -> dict[str, Any]:
    """The defence of a run or of one of its checkpoints; "none" for a run of another training."""
    nothing, facts = {"defence": "none", "scale": 1.0, "permute": []}, run_and_step(run)[0] / FACTS
    return {**nothing, **(read_json(facts) if facts.is_file() else {})}


@dataclass(frozen=True)
class _Noting:
    """Records the defence after the first step, so a resumed run has it."""

    path: Path
    used: Mapping[str, Any]

    def after_step(self, state: RunState) -> None:  # noqa: ARG002
        if not self.path.exists():
            write_text(self.path, json.dumps(self.used))

    def after_epoch(self, state: RunState) -> None:
        """Nothing more."""


def open_defended(run: str | Path, *, permute: tuple[str, ...] | None = None, device: str | None = None) -> Model:
    """A run as a model whose blocks get what a server would get: tokens under the run's defence, with rows permuted as
    in its training or as `permute` says."""
    used, numbers = _used(Path(run)), itertools.count()
    veil = _without_columns(used["defence"], (*used["permute"],) if permute is None else permute)
    model = open_model(run, device=device or ("cuda" if torch.cuda.is_available() else "cpu"))
    cut = make_cut(model.backbone, veil, Key(bytes(SEED_BYTES)), scale=used["scale"])
    set_entrance(model.backbone, replace(cut, at=lambda: ("infer", str(next(numbers)))))
    return model


def infer_defended(
    run: str | Path, data: str | Path | None = None, *, permute: tuple[str, ...] | None = None,
    count: int | None = None, device: str | None = None,
) -> ClassAccuracy | LabelAccuracy:  # fmt: skip
    """Accuracy of a run under its feature defence (`open_defended`)."""
    return evaluate_accuracy(open_defended(run, permute=permute, device=device), data, count=count)
