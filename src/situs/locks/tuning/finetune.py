"""Fine-tuning a locked model, with the key and without it: what the paper's Table 7 and Figures 4 to 6 compare.

Four ways to the same task, from one head, one order of the data and one recipe:

    normal         the open model
    authorised     the locked model, its owner permuting the stream before the blocks and back behind them
    unauthorised   the locked model as it was stolen
    from scratch   random weights: what the unauthorised have to beat for the theft to be of use

Normal and authorised are the same training in another order of the channels: equal but for rounding. Dropout is off in
all ways, for it would draw other channels under the key. Those without the key may try other rates
(`TuningConfig.thief_lr`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from situs.backbones.base import Backbone
from situs.backbones.layout import Group
from situs.data.loader import Loader, make_loader
from situs.errors import SitusError, counted
from situs.locks.groups import invert_keys, permute_state, random_keys, residual_only
from situs.locks.owner import AnyKey, unlocking, with_key
from situs.locks.tuning.paper import measure_rule
from situs.locks.tuning.result import WAYS, Curve, LockTuning, Score, TuningConfig
from situs.locks.tuning.start import Pretrained, Say, from_model, pretrain, train
from situs.methods import create_method
from situs.methods.base import Batch, Method
from situs.methods.language import word_losses
from situs.models.inference import evaluating
from situs.models.open import Unlock, is_locked
from situs.progress import tracked
from situs.results import percent
from situs.train.assemble import RunConfig, make_method
from situs.train.config import TrainConfig
from situs.train.contract import RunState
from situs.train.nan import NotFiniteError
from situs.train.optim import OptimConfig

TESTED = 500
"""Samples of the test set that are looked at together; of words a tenth of that, whose logits are large."""


def make_way(
    way: str,
    config: RunConfig,
    classes: tuple[str, ...] | None,
    pretrained: Mapping[str, Tensor],
    groups: tuple[Group, ...],
    keys: Mapping[str, Tensor],
    device: torch.device | str = "cpu",
) -> Method:
    """The method that one of `WAYS` trains: all begin with the same new head, where there is a new one."""
    method = make_method(config, classes).to(device)
    for each in method.modules():
        if isinstance(each, nn.Dropout):  # it draws by the order of the channels, which the key changes
            each.p = 0.0
    if way == "from scratch":
        return method
    model = method.backbone.model
    held = permute_state(pretrained, groups, keys) if way != "normal" else pretrained
    model.load_state_dict({**model.state_dict(), **held})
    if way == "authorised":
        return _over(with_key(method.backbone, groups, _on(keys, device)), config, classes)
    return method


def _on(keys: Mapping[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    """The keys where the stream is: a recorded step must not copy from the host."""
    return {name: key.to(device) for name, key in keys.items()}


def _over(backbone: Backbone, config: RunConfig, classes: tuple[str, ...] | None) -> Method:
    return create_method(config.method_name, backbone, config.method, len(classes or ()))


def audit_tuning(
    source: str | Path | None = None,
    data: str | None = None,
    config: TuningConfig | None = None,
    *,
    test_data: str | None = None,
    key: AnyKey | None = None,
    withheld: str | Path | None = None,
    device: str | None = None,
    say: Say = lambda _: None,
) -> LockTuning:
    """Fine-tunes a locked model with its key, without it, and from scratch: the paper's Table 7 and Figures 4 to 6.

    source: the model that is locked: a run, a model's folder, or NAME=FILE; None: a small ViT is pretrained on the
    embedded images. key, withheld: what opens a folder that is locked already, as for `open_model`: its model is locked
    anew here, by a random key. data: labelled images or sentences to fine-tune on, or plain text for a language model;
    None: those of the run. test_data: what the curves are measured on; None: the val split of the data. device: cpu,
    cuda or cuda:N; None: a GPU where there is one. say: is told how far it is.
    """
    if source is None and data is not None:
        raise SitusError(f"data={data}: give the model to start from as well", field="source")
    if source is None and (key is not None or withheld is not None):
        raise SitusError("what opens a locked folder is given, and no folder: name it as well", field="source")
    config, where = config or TuningConfig(), device or ("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as place:
        if source is None:
            start = pretrain(config, Path(place), say, where)
        else:
            start = from_model(source, data, test_data, config, _unlock(source, key, withheld))
        return run_ways(start, config, Path(place), say, where)


def _unlock(source: str | Path, key: AnyKey | None, withheld: str | Path | None) -> Unlock | None:
    for field, given in (("key", key), ("withheld", withheld)):
        if given is not None and not is_locked(source):
            raise SitusError(f"{source}: is not locked, and opens without a key", field=field)
    return None if key is None else unlocking(key, withheld)


def run_ways(
    pretrained: Pretrained, config: TuningConfig, folder: Path, say: Say = lambda _: None, device: str = "cpu"
) -> LockTuning:
    """Fine-tunes in all four ways, each in its own run under `folder`."""
    recipe = _recipe(pretrained.config, config)
    words = config.method == "language"
    loader = make_loader(recipe.data, recipe.augment, device, source=pretrained.train)
    judged = replace(recipe.data, batch=TESTED // 10 if words else TESTED)
    test = make_loader(judged, None, device, source=pretrained.test)
    if not words and (loader.classes is None or loader.classes != test.classes or loader.source.multi_label):
        raise SitusError(
            f"{recipe.data.path}: the study needs labels, one a sample, the same for training and validation",
            field="data",
        )
    recipe = _timed(recipe, config, loader)
    curves: dict[str, Curve] = {}
    tries: dict[str, list[Curve]] = {way: [] for way in WAYS}
    methods: dict[str, Method] = {}
    for note in pretrained.notes:
        say(note)
    with torch.random.fork_rng(devices=[]):
        first = make_method(recipe, loader.classes)
        loader.pipeline.check_model(first.backbone.input.words, first.backbone.name)
        groups = residual_only(first.backbone.groups())
        keys = random_keys(groups, torch.Generator().manual_seed(config.seed))
        for way in tracked(WAYS, "ways"):
            rates = list(dict.fromkeys([config.lr, *(config.thief_lr if way in WAYS[2:] else ())]))
            for rate in rates:
                own = replace(recipe, optim=replace(recipe.optim, lr=rate))
                method = make_way(way, own, loader.classes, pretrained.state, groups, keys, device)
                place = folder / f"{way.replace(' ', '-')}-{rate:g}"
                curve = Curve(lr=rate if len(rates) > 1 else None)
                tries[way].append(curve)
                at = "" if curve.lr is None else f" at a rate of {rate:g}"
                try:
                    _train(method, loader, test, own, config.looks, place, curve)
                except NotFiniteError:
                    if way not in curves and rate == rates[-1]:  # no run of this way came to its end
                        raise
                    say(f"{way}: broke off{at}, for its loss was not finite")
                    continue
                say(f"{way}: {percent(curve.accuracy[-1])} after {counted(curve.steps[-1], 'steps')}{at}")
                if way not in curves or curve.accuracy[-1] > curves[way].accuracy[-1]:
                    curves[way], methods[way] = curve, method
    served = _served(methods["normal"], recipe, loader.classes, groups, keys, test)
    states = [{n: v.cpu() for n, v in methods[way].backbone.model.state_dict().items()} for way in WAYS[:2]]
    back = permute_state(states[1], groups, invert_keys(keys))
    took = counted(config.epochs, "epochs") if config.steps is None else counted(curves["normal"].steps[-1], "updates")
    about = (
        f"{pretrained.about}; {len(pretrained.train):,} {'' if words else 'labelled '}{loader.source.things}, {took}"
    )
    return LockTuning(
        replace(config, count=len(pretrained.train), test=len(pretrained.test)),
        about,
        curves,
        1 / (len(loader.classes) if loader.classes else first.backbone.input.words),
        _gap(methods[WAYS[0]], methods[WAYS[1]], test),
        max(float((states[0][name] - back[name]).abs().max()) for name in back),
        tuple(measure_rule(methods["normal"].cpu().backbone, seed=config.seed)),
        served,
        loader.source.things,
        tries,
        pretrained.notes,
    )


def _served(
    normal: Method,
    recipe: RunConfig,
    classes: tuple[str, ...] | None,
    groups: tuple[Group, ...],
    keys: Mapping[str, Tensor],
    test: Loader,
) -> dict[str, Score]:
    """The scores of the tuned model, open and under a lock; its weights are what they were at the end."""
    model, state = normal.backbone.model, {n: v.clone() for n, v in normal.backbone.model.state_dict().items()}
    locked = permute_state(state, groups, keys)
    owner = _over(with_key(normal.backbone, groups, _on(keys, test.device)), recipe, classes)
    ways = {
        "open": (state, normal),
        "locked, opened with its key": (permute_state(locked, groups, invert_keys(keys)), normal),
        "locked, run by its owner": (locked, owner),
        "locked, without the key": (locked, normal),
    }
    found = {}
    for name, (weights, method) in ways.items():
        model.load_state_dict(weights)
        found[name] = Score.of(*_scores(method, test))
    model.load_state_dict(state)
    return found


def _train(
    method: Method, loader: Loader, test: Loader, recipe: RunConfig, looks: int, folder: Path, curve: Curve
) -> None:
    """One run, whose looks are added to `curve`."""
    _measure(method, test, 0, curve)
    total = recipe.train.total_steps(loader.steps_per_epoch)
    began = time.perf_counter()
    train(method, loader, recipe, folder, _Look(test, max(1, total // looks), curve))
    curve.seconds = time.perf_counter() - began
    method.eval()


@dataclass(frozen=True)
class _Look:
    """A hook that measures loss and accuracy every so many steps, and after the last."""

    test: Loader
    every: int
    curve: Curve

    def after_step(self, state: RunState) -> None:
        if state.step % self.every == 0 or state.step == state.total:
            _measure(state.method, self.test, state.step, self.curve)

    def after_epoch(self, state: RunState) -> None:
        """Nothing."""


def _measure(method: Method, test: Loader, step: int, curve: Curve) -> None:
    loss, accuracy = _scores(method, test)
    curve.steps.append(step)
    curve.loss.append(loss)
    curve.accuracy.append(accuracy)


def _scores(method: Method, test: Loader) -> tuple[float, float]:
    """Mean loss and accuracy over the labels, or the words, of the test set."""
    loss = right = count = 0.0
    for logits, batch in _outputs(method, test):
        if "words" in batch.targets:
            each, known = word_losses(logits, batch.targets["words"])
            hits = (logits[:, :-1].argmax(dim=-1) == batch.targets["words"][:, 1:]) & known
            number = int(known.sum())
        else:
            labels = batch.targets["label"]
            each = nn.functional.cross_entropy(logits.float(), labels, reduction="none")
            hits, number = logits.argmax(dim=-1) == labels, len(labels)
        loss += float(each.sum())
        right += float(hits.sum())
        count += number
    return loss / count, right / count


def _gap(one: Method, other: Method, test: Loader) -> float:
    """The largest difference of two models' logits over the test set."""
    with evaluating(one), evaluating(other):
        return max(float((_logits(one, batch) - _logits(other, batch)).abs().max()) for batch in test)


def _outputs(method: Method, test: Loader) -> Iterator[tuple[Tensor, Batch]]:
    """Logits of every batch, and the batch."""
    with evaluating(method):
        for batch in test:
            yield _logits(method, batch), batch


def _logits(method: Method, batch: Batch) -> Tensor:
    """Those of padding, which mean nothing, are 0 where each word has some."""
    logits = method.backbone(batch.inputs, batch.mask)
    return logits * batch.mask[..., None] if logits.dim() == 3 and batch.mask is not None else logits


def _recipe(config: RunConfig, study: TuningConfig) -> RunConfig:
    return replace(
        config,
        init=None,
        backbone=replace(config.backbone, weights=None),
        data=replace(config.data, batch=study.batch, seed=study.seed),
        # Another seed than the pretraining's: its first head would not be new, the trained blocks grew around it.
        train=TrainConfig(
            epochs=study.epochs,
            max_steps=study.steps,
            log_every=100,
            save_every=10**9,
            precision="fp32",
            seed=config.train.seed + study.seed + 1,
        ),
        probe_every=0,
    )


def _timed(recipe: RunConfig, study: TuningConfig, loader: Loader) -> RunConfig:
    """With the rate that rises over a tenth of the run."""
    rise = max(1, recipe.train.total_steps(loader.steps_per_epoch) // 10)
    return replace(recipe, optim=OptimConfig(lr=study.lr, warmup_epochs=0, warmup_steps=rise, clip=1.0))
