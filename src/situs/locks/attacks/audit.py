"""`audit_lock`: attacks a locked model as somebody without its key would, and says what is left of the lock."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from situs.backbones.base import Backbone
from situs.backbones.layout import Group
from situs.config import Checked
from situs.data.open import addressed
from situs.data.text import Columns
from situs.errors import SitusError, unknown_name
from situs.limits import Count, NotNegative
from situs.locks.attacks.adapter import AdapterConfig, Labelled, accuracy_of, recover_with_labels
from situs.locks.attacks.columns import recover_with_activations
from situs.locks.attacks.images import recover_with_samples
from situs.locks.attacks.match import State
from situs.locks.attacks.recovery import (
    ATTACKERS,
    NEEDS,
    SEED_BITS,
    KeyRecovery,
    Score,
    check_finite,
    drift,
    exact_truth,
    opened,
    recover_blind,
    recover_with_base,
    scored,
    strength_bits,
    untried,
    verdict,
)
from situs.locks.attacks.samples import Samples, read_samples
from situs.locks.groups import residual_only, within
from situs.locks.key import AnyKey, Key, as_key
from situs.locks.locking import readable
from situs.locks.manifest import permutations_of, read_manifest
from situs.locks.owner import left_of, own_groups
from situs.locks.withhold import words
from situs.methods.base import Batch
from situs.models import open_model
from situs.models.data import AnyModel, check_classes, load_any
from situs.progress import tracked
from situs.results import Result, Summary, Table, Tone, percent, show
from situs.train import distributed

WRONG_BASE = (
    "with the embedding withheld a base is all that there is to attack with, and this one gave nothing away; is it the "
    "model that was locked, or was tuned and then locked"
)


@dataclass(frozen=True)
class LockAuditConfig(Checked):
    """How much the attackers have, and for how long they try."""

    count: Count = 24
    """So many of the images or texts, chosen at random and the same every time."""

    drift: tuple[NotNegative, ...] = (0.3,)
    """drifted-base: noise on the base, in standard deviations of each tensor."""

    k: Count = 100
    """Labelled samples that the attacker `labels` has."""

    steps: Count = 200
    """Updates that the attacker `labels` makes."""

    test: Count = 1000
    """Samples that accuracy is measured on."""

    seed: int = 0
    """Of the drift and of the attacker's training."""

    text: Columns = field(default_factory=Columns)
    """Columns of labelled sentences, where they are not those that the model remembers."""


@dataclass(frozen=True)
class LockAudit(Result):
    """What every attacker got, and what that leaves of the lock.

    idle: attackers that had nothing to start from -> a sentence that says why. lacking: attackers that decide and were
    not run, so that no strength is given. kept: what the owner kept back, in words. judged: whether accuracy was
    measured. published: the name under which weights of this architecture are public; empty where none is known.
    """

    file: ClassVar[str] = "audit"

    model: str
    sizes: tuple[int, ...]
    inner: int
    attacks: tuple[KeyRecovery, ...]
    idle: dict[str, str] = field(default_factory=dict)
    lacking: frozenset[str] = frozenset()
    kept: str = ""
    judged: bool = False
    published: str = ""

    @property
    def strength(self) -> float | None:
        """min(256, best attack) in bits, at most; None where nobody attacked or was judged, and where one who decides
        did not attack or had too little."""
        return strength_bits(self.attacks, self.lacking)

    @property
    def tone(self) -> Tone:
        """A lock is obfuscation: that an attack failed is never good, and one that leaves no bit to try is bad."""
        return "bad" if any(each.bits == 0 for each in self.attacks) else "unsure"

    @property
    def untried(self) -> tuple[str, ...]:
        """The attackers that were not run."""
        return tuple(untried(self.attacks))

    @property
    def verdict(self) -> str:
        """The strength in a line or two, what it means, and who was not tried."""
        said = [verdict(self.attacks, self.lacking, self.idle), *self.idle.values()]
        if self.published and {"public-base", "drifted-base"} <= {*self.untried}:
            said.append(
                f"Weights of {self.published} are public, and this lock was not held against them: "
                f"situs.audit_lock(LOCKED, key=FILE, base='{self.published}', weights=FILE), or the flags so named."
            )
        return " ".join(said)

    def summary(self) -> Summary:
        """The verdict, and a row an attacker; accuracies only where there is data."""
        scores = ("locked", "after attack", "with the key") if self.judged else ()
        header = ("attacker", "key recovered", "bits left, at most", *scores, "seconds", "what it took")
        cover = f", {self.inner} inner groups as cover" if self.inner else ""
        title = f"{self.model}: {' + '.join(map(str, self.sizes))} residual channels{cover}{self.kept}"
        sure = self.strength is not None
        rows = [_row(each, self.judged, sure or each.got_far) for each in self.attacks]
        for name in self.untried:
            why = "has nothing to start from" if name in self.idle else f"needs {NEEDS[name]}"
            rows.append([name, "not tried", *[None] * (len(header) - 3), why])
        return Summary(self.verdict, (Table(title, header, rows),))

    def numbers(self) -> dict[str, Any]:
        """The figures, without the keys that were found."""
        told = ("attacker", "size", "right", "share", "bits", "seconds", "cost", "agreement", "failed")
        fields = (*told, "before", "after", "owner", "control", "tested", "doubt")
        held = [{name: getattr(result, name) for name in fields} for result in self.attacks]
        said = {"model": self.model, "strength_bits": self.strength, "verdict": self.verdict, "attacks": held}
        return said | {"not_tried": {name: NEEDS[name] for name in self.untried}, "public_weights": self.published}


def _row(result: KeyRecovery, judged: bool, sure: bool) -> list[str | None]:
    share = "not judged" if result.share is None else f"{percent(result.share)} ({result.right} of {result.size})"
    bits = "not judged" if result.right is None else "inconclusive"
    if sure and result.bits is not None:
        bits = f"{min(float(SEED_BITS), result.bits):.0f}"
    scores = [None if value is None else percent(value) for value in (result.before, result.after, result.owner)]
    if result.control is not None:
        scores[1] = f"{show(scores[1])} (random blocks {percent(result.control)})"
    return [result.attacker, share, bits, *(scores if judged else ()), f"{result.seconds:.2f}", result.cost]


def audit_lock(
    locked: str | os.PathLike[str],
    *,
    base: AnyModel | None = None,
    weights: str | None = None,
    key: AnyKey | None = None,
    images: str | Path | None = None,
    texts: str | Path | None = None,
    data: str | Path | None = None,
    attacker: str | Sequence[str] = (),
    config: LockAuditConfig | None = None,
    device: str | None = None,
) -> LockAudit:
    """Attacks a locked folder as somebody without its key would, and says what is left of the lock.

    base: the model that the attacker has; weights: of a base that is a timm name. key: the owner's, to judge the
    attacks by; not needed where `base` is the very model that was locked. images, texts: unlabelled samples. data:
    labelled samples, for the attacker `labels` and to measure accuracy before and after each attack. attacker: names of
    `ATTACKERS`; by default no-base, images where there are images or texts, and public-base where there is a base.
    device: cpu, cuda or cuda:N; None: a GPU where there is one.

    >>> print(situs.audit_lock("locked", base="exported", key="owner.key"))
    """
    from situs.backbones.timm.create import published_name  # timm takes a second to import

    config, key = config or LockAuditConfig(), None if key is None else as_key(key)
    samples = {name: Path(addressed(path)) for name, path in (("images", images), ("texts", texts)) if path is not None}
    names = _chosen(
        config, [attacker] if isinstance(attacker, str) else attacker, base is not None, data is not None, samples
    )
    labelled, where = None if data is None else str(addressed(data)), distributed.start(device).device
    target = _target(Path(locked), base, weights, key, samples, labelled, config, where)
    able = [name for name in names if name not in target.idle]
    results = [result for name in tracked(able, "attackers") for result in _attack(name, target, config)]
    deciding = {"images"}
    if "images" in target.idle:  # what is clear says next to nothing of the key: who has a base decides
        deciding = {"no-base"} if {"public-base", "drifted-base"} & {*names} else {"no-base", "public-base"}
    lacking = deciding - {*names} if results else set[str]()
    return LockAudit(
        model=target.backbone.name,
        sizes=tuple(group.size for group in target.groups if group.kind == "residual"),
        inner=sum(group.kind != "residual" for group in target.groups),
        attacks=tuple(results),
        idle={name: said for name, said in target.idle.items() if name in (*names, "images")},
        lacking=frozenset(lacking),
        kept=target.kept,
        judged=target.test is not None,
        published=published_name(target.backbone),
    )


def _chosen(
    config: LockAuditConfig, given: Sequence[str], base: bool, data: bool, samples: Mapping[str, Path]
) -> list[str]:
    """The attackers asked for, each once, in order; what one of them lacks is said before anything is loaded."""
    usual = {"no-base": True, "images": bool(samples), "public-base": base}
    names = list(dict.fromkeys(given)) or [name for name, able in usual.items() if able]
    for name in names:
        if name not in ATTACKERS:
            raise unknown_name("attacker", name, ATTACKERS, field="attacker")
        if name in ("public-base", "drifted-base") and not base:
            raise SitusError(f"attacker={name}: needs the model that the attacker has", field="base")
        if name == "labels" and not data:
            raise SitusError("attacker=labels: needs labelled samples", field="data")
        if name in ("images", "activations") and not samples:
            raise SitusError(f"attacker={name}: needs unlabelled images or texts", field=("images", "texts"))
    for flag, name in (("drift", "drifted-base"), ("steps", "labels")):
        if (value := getattr(config, flag)) != getattr(LockAuditConfig, flag) and name not in names:
            raise SitusError(f"{flag}={value}: is for the attacker {name}, who is not asked", field=(flag, "attacker"))
    if len(samples) > 1:
        said = ", ".join(f"{name}={path}" for name, path in samples.items())
        raise SitusError(f"{said}: a model takes one or the other", field=tuple(samples))
    return names


@dataclass(frozen=True)
class _Target:
    """What is attacked, and what the auditor knows beside it. samples, test: labelled; seen: without labels.

    backbone: on the device; state, base, truth: on the CPU. score: the accuracy of other weights on `test`; owner: of
    the model with its key.
    """

    backbone: Backbone
    groups: tuple[Group, ...]
    state: dict[str, Tensor]
    base: dict[str, Tensor] | None
    truth: dict[str, Tensor] | None
    samples: Labelled | None
    test: Labelled | None
    seen: Samples | None
    idle: dict[str, str]
    kept: str
    score: Score | None
    owner: float | None


def _target(
    locked: Path,
    base: AnyModel | None,
    weights: str | None,
    key: Key | None,
    samples: Mapping[str, Path],
    data: str | None,
    config: LockAuditConfig,
    device: torch.device,
) -> _Target:
    manifest = read_manifest(locked, key)
    try:
        theirs = None if base is None else open_model(base, weights=weights).backbone.model.state_dict()
    except SitusError as error:
        raise SitusError(f"base={base}: {error}", field="base") from error
    if manifest.sealed and key is None:  # with it, what is under the seal is attacked, as all who run the model have it
        raise SitusError(
            f"{locked}: is sealed, so the file is encrypted and nothing was attacked; with the owner's key the audit "
            "opens the seal and attacks the locked weights under it, which who runs the model has",
            field="key",
        )
    with readable(locked, manifest, key) as folder:
        backbone, gone = left_of(folder, replace(manifest, sealed=False))
        learned, test = _labelled(folder, data, config, gone, device)
        embedded = manifest.withheld is None or "embedding" not in manifest.withheld.parts
        seen = read_samples(folder, backbone, samples, config.count) if embedded and samples else None
    if theirs is not None:  # a bare encoder's, under a classifier's names
        theirs = backbone.renamed({name: value.cpu() for name, value in theirs.items()})
    groups = within(own_groups(backbone, manifest), backbone.model.state_dict().keys() - gone)
    state = {name: value.clone() for name, value in backbone.model.state_dict().items()}
    for name in gone:  # not there, and so neither right nor wrong
        state[name].zero_()
    backbone.eval().model.load_state_dict(state)  # in training mode an embedding may drop out
    for tensors, what in ((state, str(locked)), (theirs or {}, f"base={base}")):
        check_finite(tensors, what)
    truth = permutations_of(manifest, key) if key is not None else None
    if truth is None and theirs is not None:
        truth = exact_truth(state, theirs, groups)
    said = "The attacker `{}` has nothing to start from: the embedding is withheld."
    idle = {} if embedded else {name: said.format(name) for name in ("images", "activations")}
    kept = "" if manifest.withheld is None else f"; {words(manifest.withheld.parts)} withheld"
    backbone.to(device)  # weights are compared on the CPU, as `state`; what is run or trained is run there
    score = None if test is None else partial(_score, copy.deepcopy(backbone), test)
    owner = None if score is None or truth is None else score(opened(state, groups, truth))
    return _Target(backbone, groups, state, theirs, truth, learned, test, seen, idle, kept, score, owner)


def _labelled(
    folder: Path, data: str | None, config: LockAuditConfig, gone: frozenset[str], device: torch.device
) -> tuple[Labelled | None, Labelled | None]:
    """The labelled samples to learn from and to be judged on, as the model takes them, where there are some."""
    if data is None:
        return None, None
    if gone:
        said = f"data={data}: parts of the model are withheld, so it cannot be run"
        raise SitusError(said, field="data")
    model, sets = open_model(str(folder), device=device), []
    for split, count in (("train", config.k), ("val", config.test)):
        loader = load_any(model, data, split=split, count=count, text=config.text)
        check_classes(model, loader)
        sets.append(_joined(list(loader)))
    return sets[0], sets[1]


def _joined(batches: list[Batch]) -> Labelled:
    """All batches as one; sentences of several lengths are filled up to the longest."""
    labels = torch.cat([batch.targets["label"] for batch in batches])
    if batches[0].mask is None:
        return Labelled(torch.cat([batch.inputs for batch in batches]), labels)
    width = max(batch.inputs.shape[-1] for batch in batches)
    rows = [
        [nn.functional.pad(part, (0, width - part.shape[-1])) for part in (batch.inputs, batch.mask)]
        for batch in batches
        if batch.mask is not None
    ]
    return Labelled(torch.cat([ids for ids, _ in rows]), labels, torch.cat([mask for _, mask in rows]))


def _attack(name: str, target: _Target, config: LockAuditConfig) -> list[KeyRecovery]:
    """The results of one attacker: one, or one for each drift."""
    truth, score, owner = target.truth, target.score, target.owner
    if name == "labels":
        assert target.samples is not None
        assert target.test is not None
        settings = AdapterConfig(steps=config.steps, seed=config.seed)
        sets = (target.samples, target.test)
        return [recover_with_labels(target.backbone, target.groups, *sets, settings, truth=truth, owner=owner)]
    if name == "no-base":
        had = target.samples
        inputs, of = (None, None) if had is None else (had.unpadded(), None if had.mask is None else len(had.inputs))
        found = [recover_blind(target.backbone, target.groups, truth=truth, inputs=inputs, of=of)]
    elif name == "images":
        assert target.seen is not None
        seen, known = target.seen, {"truth": truth, "seed": config.seed}
        doubt = seen.doubt(target.backbone, target.groups)
        if (stages := len(residual_only(target.groups))) > 1:
            doubt = doubt or f"of the keys of {stages} stages this attacker seeks the first alone"
        got = recover_with_samples(target.backbone, target.groups, seen.batches, had=seen.had, **known)
        found = [replace(got, doubt=doubt)]
    elif name == "activations":
        assert target.seen is not None
        found = [recover_with_activations(target.backbone, target.groups, target.seen.each, truth=truth)]
    else:
        assert target.base is not None
        found = []
        for amount in config.drift if name == "drifted-base" else (None,):
            base = target.base if amount is None else drift(target.base, amount, config.seed)
            label = name if amount is None else f"{name}, {amount:g} ×"
            got = recover_with_base(target.state, base, target.groups, truth=truth, attacker=label)
            found.append(replace(got, doubt=WRONG_BASE) if "images" in target.idle else got)
    if score is None or target.test is None:
        return found
    more = (score, owner, len(target.test.labels))
    return [scored(each, target.state, target.groups, *more) for each in found]


def _score(trial: Backbone, test: Labelled, state: State) -> float:
    trial.model.load_state_dict(dict(state))
    return accuracy_of(trial, test)
