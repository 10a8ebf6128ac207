"""What looks on: validation and probes at the right moments, with the right weights, on every rank's part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from situs.config import from_dict, merge
from situs.data.loader import Loader
from situs.errors import SitusError
from situs.measure.accuracy import measure_accuracy
from situs.measure.hooks import PROBED, OnlineProbe, Validation, probe_hooks, validation_hooks
from situs.progress import notes_to
from situs.train.assemble import make_eval_loader, make_training_loader
from situs.train.contract import RunState
from situs.train.distributed import Ranks
from situs.train.run import RunConfig, make_method
from situs.train.step import Ema

CPU = torch.device("cpu")
CLASSES = tuple(map(str, range(10)))
BASE: dict[str, Any] = {
    "method": {"name": "supervised"},
    "backbone": {
        "name": "vit_tiny_patch16_224",
        "patch_size": 14,
        "model_args": {"depth": 1, "embed_dim": 8, "num_heads": 1},
    },
    "data": {"path": "samples", "img_size": 28, "channels": 1, "batch": 500},
    "train": {"epochs": 1},
}


def config(**tables: Any) -> RunConfig:
    return from_dict(RunConfig, merge(BASE, tables, {"method"}))


def loader(own: RunConfig, rank: int = 0, world: int = 1) -> Loader:
    return make_training_loader(own, Ranks(rank, world, CPU))


def looks(hook: Any, total: int, per_epoch: int) -> list[int]:
    """The steps after which the hook logs, driven as the loop drives it."""
    found = []
    for step in range(1, total + 1):
        state = RunState(SimpleNamespace(), None, step, (step - 1) // per_epoch, total, per_epoch,  # pyright: ignore[reportArgumentType]
                         lambda _, step=step: found.append(step))  # fmt: skip
        hook.after_step(state)
        if step % per_epoch == 0:
            hook.after_epoch(state)
    return found


@pytest.mark.parametrize(
    ("every", "total", "expected"),
    [(1, 12, [4, 8, 12]), (2, 12, [8, 12]), (2, 16, [8, 16]), (5, 12, [12]), (1, 6, [4, 6]), (9, 3, [3])],
)
def test_validation_looks_every_so_many_epochs_and_at_the_end(
    every: int, total: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counting(Validation):
        def _log(self, state: RunState) -> None:
            state.log({})

    assert looks(Counting(loader(config()), every, "fp32"), total, per_epoch=4) == expected


def test_validation_gives_the_accuracy_of_the_mean_and_puts_the_weights_back() -> None:
    own = config()
    method = make_method(own, CLASSES)
    ema = Ema(method, 0.5)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(torch.randn_like(parameter))
    [hook] = validation_hooks(1)(own, loader(own), CPU)
    logged: dict[str, float] = {}
    hook.after_epoch(RunState(method, ema, 18, 0, 18, 18, logged.update))
    held = make_eval_loader(own)
    now = measure_accuracy(method.backbone, held)
    with ema.applied():
        expected = measure_accuracy(method.backbone, held)
    beside = {"val_balanced": expected.balanced, "val_majority": expected.majority}
    assert logged == {"val_top1": expected.top1, **beside, "val_loss": expected.loss}  # ten classes: no top-5
    assert expected.count == 2000
    assert expected.loss != now.loss
    assert method.training


def test_each_rank_validates_its_own_part() -> None:
    own = config()
    parts = []
    for rank in range(2):
        [hook] = validation_hooks(1)(own, loader(own, rank, 2), CPU)
        assert isinstance(hook, Validation)
        parts.append([id_ for batch in hook.loader for id_ in batch.ids.tolist()])
    assert len(parts[0]) == len(parts[1]) == 1000
    assert sorted(parts[0] + parts[1]) == list(range(2000))


@pytest.mark.parametrize(("keep_best", "splits"), [(True, 2), (True, 1), (False, 1)])
def test_it_is_said_once_where_the_best_is_chosen_by_what_it_is_judged_on(
    monkeypatch: pytest.MonkeyPatch, keep_best: bool, splits: int
) -> None:
    if splits == 2:
        monkeypatch.setattr("situs.measure.hooks.splits_at", lambda *_, **__: {"train", "val", "test"})
    own = config(train={"keep_best": keep_best})
    told: list[str] = []
    [hook] = validation_hooks(1)(own, loader(own), CPU)
    monkeypatch.setattr(type(hook), "measure", lambda *_: {})
    method = make_method(own, CLASSES)
    for step in (1, 2):
        with notes_to(told.append):
            hook.after_epoch(RunState(method, None, step, step - 1, 2, 1, lambda _: None))
    assert [line.startswith("the data has only one split besides training") for line in told] == [True] * (
        keep_best and splits == 1
    )


def test_other_classes_in_validation_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = config()
    train = loader(own)
    train.classes = ("a", "b")
    with pytest.raises(SitusError, match="samples: the training split and the validation split have different classes"):
        validation_hooks(1)(own, train, CPU)
    with pytest.raises(SitusError, match=r"validate_every=-1: must be >= 0"):
        validation_hooks(-1)


def test_a_set_without_a_validation_split_can_be_trained_on_without_one(tmp_path: Path) -> None:
    own = config()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (28, 28)).save(tmp_path / name / "1.png")
    alone = replace(own, data=replace(own.data, path=str(tmp_path)))
    with pytest.raises(SitusError, match=r"has no split 'val'.*; to train without validation, set validate_every=0"):
        validation_hooks(1)(alone, loader(own), CPU)
    with pytest.raises(SitusError, match="to train without validation, set probe_every=0"):
        probe_hooks(replace(alone, probe_every=1), loader(own), CPU)
    assert validation_hooks(0)(alone, loader(own), CPU) == []


def test_probes_only_where_asked_for_and_of_the_right_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe_hooks(config(), loader(config()), CPU) == []
    labelled = config(probe_every=2)
    [hook] = probe_hooks(labelled, loader(labelled), CPU)
    assert isinstance(hook, Validation)
    assert hook.every == 2

    monkeypatch.setitem(PROBED, "train", 300)
    monkeypatch.setitem(PROBED, "val", 100)
    mp3 = config(method={"name": "mp3"}, probe_every=3)
    [probe] = probe_hooks(mp3, loader(mp3), CPU)
    assert isinstance(probe, OnlineProbe)
    assert probe.every == 3

    def count(batches: Iterable[Any]) -> int:
        return sum(len(batch.ids) for batch in batches)

    assert (count(probe.train), count(probe.test)) == (300, 100)
    found = probe.measure(make_method(mp3, CLASSES))
    assert found.keys() == {"knn_accuracy", "position_accuracy_test"}
    # Even an untrained embedding of grey pixels tells clothes apart: far above the tenth that chance gives.
    assert found["knn_accuracy"] > 0.3


def test_precision_follows_the_run() -> None:
    [hook] = validation_hooks(1)(config(train={"precision": "bf16"}), loader(config()), CPU)
    assert isinstance(hook, Validation)
    assert hook.precision == "bf16"


def test_what_validation_skips_is_told_once() -> None:
    own = config()
    held, said = make_eval_loader(own, CPU), list[str]()
    hook = Validation(held, 1, "fp32")
    hook.measure = lambda _method: held.source.skip(3, "broken") or {}  # pyright: ignore[reportAttributeAccessIssue]
    method = make_method(own, CLASSES)
    for step in (1, 2):
        with notes_to(said.append):
            hook.after_epoch(RunState(method, None, step, step - 1, 2, 1, lambda _: None))
    assert len(said) == 1 and said[0].endswith("could not be read and was skipped; the first: broken")
