"""`audit_lock`: attacks a locked model as somebody without its key would, and says what is left of the lock."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from situs.backbones.base import Backbone
from situs.backbones.layout import Group
from situs.config import Checked
from situs.data.open import addressed
from situs.data.text import Columns
from situs.errors import SitusError, counted, unknown_name
from situs.findings import HONEST, Exposure, Finding, Metric, Remark, ThreatModel
from situs.gate import Ruling, judge
from situs.limits import Count, NotNegative
from situs.locks.attacks.adapter import AdapterConfig, Labelled, accuracy_of, recover_with_labels
from situs.locks.attacks.columns import recover_with_activations
from situs.locks.attacks.images import recover_with_samples
from situs.locks.attacks.match import State
from situs.locks.attacks.recovery import (
    KeyRecovery,
    Score,
    check_finite,
    drift,
    exact_truth,
    opened,
    recover_blind,
    recover_with_base,
    scored,
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
    """Number of images or texts, chosen at random with a fixed seed."""

    drift: tuple[NotNegative, ...] = (0.3,)
    """drifted-base: noise on the base, in standard deviations of each tensor."""

    k: Count = 100
    """Labelled samples that the attack `labels` has."""

    steps: Count = 200
    """Training steps of the attack `labels`."""

    test: Count = 1000
    """Samples on which accuracy is measured."""

    seed: int = 0
    """Random seed of the drift and of the attacker's training."""

    text: Columns = field(default_factory=Columns)
    """Columns of labelled sentences, where they are not those that the model remembers."""


SEED_BITS = 256
"""Length of the seed that every key is made of: no lock is stronger, however many permutations there are."""


class LockAttack(NamedTuple):
    """One attacker. about: who that is. needs: what it takes. given: a key of `GIVEN`, what must be given for it.

    run: what it got, once or once for each drift. scored: whether the accuracy after it is measured here.
    """

    about: str
    needs: str
    given: str
    run: Callable[[Target, LockAuditConfig], list[KeyRecovery]]
    scored: bool = True


GIVEN = {
    "base": ("the model that the attacker has", ("base",)),
    "data": ("labelled samples", ("data",)),
    "samples": ("unlabelled images or texts", ("images", "texts")),
}
"""What an attacker may need -> in words, and the arguments of `audit_lock` that give it."""


@dataclass(frozen=True)
class Target:
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


def _no_base(target: Target, config: LockAuditConfig) -> list[KeyRecovery]:  # noqa: ARG001
    had = target.samples
    inputs, of = (None, None) if had is None else (had.unpadded(), None if had.mask is None else len(had.inputs))
    return [recover_blind(target.backbone, target.groups, truth=target.truth, inputs=inputs, of=of)]


def _images(target: Target, config: LockAuditConfig) -> list[KeyRecovery]:
    seen, known = target.seen, {"truth": target.truth, "seed": config.seed}
    assert seen is not None
    doubt = seen.doubt(target.backbone, target.groups)
    if (stages := len(residual_only(target.groups))) > 1:
        doubt = doubt or f"of the keys of {stages} stages this attacker seeks the first alone"
    got = recover_with_samples(target.backbone, target.groups, seen.batches, had=seen.had, **known)
    return [replace(got, doubt=doubt)]


def _activations(target: Target, config: LockAuditConfig) -> list[KeyRecovery]:  # noqa: ARG001
    assert target.seen is not None
    return [recover_with_activations(target.backbone, target.groups, target.seen.each, truth=target.truth)]


def _public_base(target: Target, config: LockAuditConfig) -> list[KeyRecovery]:  # noqa: ARG001
    assert target.base is not None
    return [_with_base(target, target.base, "public-base")]


def _drifted_base(target: Target, config: LockAuditConfig) -> list[KeyRecovery]:
    assert target.base is not None
    relatives = ((amount, drift(target.base, amount, config.seed)) for amount in config.drift)
    return [_with_base(target, base, f"drifted-base, {amount:g} ×") for amount, base in relatives]


def _with_base(target: Target, base: State, label: str) -> KeyRecovery:
    got = recover_with_base(target.state, base, target.groups, truth=target.truth, attacker=label)
    return replace(got, doubt=WRONG_BASE) if "images" in target.idle else got


def _labels(target: Target, config: LockAuditConfig) -> list[KeyRecovery]:
    assert target.samples is not None
    assert target.test is not None
    how, known = AdapterConfig(steps=config.steps, seed=config.seed), {"truth": target.truth, "owner": target.owner}
    return [recover_with_labels(target.backbone, target.groups, target.samples, target.test, how, **known)]


ATTACKS: dict[str, LockAttack] = {
    "no-base": LockAttack(
        "has the locked file, and compares its clear parts with its locked ones", "the locked file alone", "", _no_base
    ),
    "images": LockAttack(
        "has the locked file and unlabelled samples, and compares how channels go together on its two sides",
        "a few unlabelled images or texts",
        "samples",
        _images,
    ),
    "activations": LockAttack(
        "runs the locked blocks, sees what enters them, and has the clear embedding and samples of its own",
        "what passes through the blocks",
        "samples",
        _activations,
    ),
    "public-base": LockAttack(
        "has the very model that was locked, and matches its channels with the locked ones",
        "the model that it was made from",
        "base",
        _public_base,
    ),
    "drifted-base": LockAttack(
        "has a fine-tuned relative of it: the same, with noise on every weight",
        "a relative of that model",
        "base",
        _drifted_base,
    ),
    "labels": LockAttack(
        "has some labelled samples, and trains a linear map before and behind the frozen locked blocks",
        "labelled samples",
        "data",
        _labels,
        scored=False,
    ),
}
"""attacker -> who that is, what it needs and what it does."""


def attack(name: str, target: Target, config: LockAuditConfig) -> list[KeyRecovery]:
    """The results of one attacker, with the accuracy after it where there is data."""
    chosen = ATTACKS[name]
    results = chosen.run(target, config)
    if target.score is None or target.test is None or not chosen.scored:
        return results
    more = (target.score, target.owner, len(target.test.labels))
    return [scored(result, target.state, target.groups, *more) for result in results]


def strength_bits(results: Sequence[KeyRecovery], lacking: Collection[str] = ()) -> float | None:
    """min(256, the best attack that was judged): the strength of a lock in bits, the only figure ever printed as such.

    None where no attack was run, where none could be compared with the true key, and where attackers that decide were
    not run (`lacking`) or had too little (`KeyRecovery.doubt`), unless an attack got far anyway: what nobody tried
    proves nothing. It is an upper bound, for better attacks may exist.
    """
    known = [bits for result in results if (bits := result.bits) is not None]
    untested = bool(lacking) or any(result.doubt for result in results)
    if not known or (untested and not any(result.got_far for result in results)):
        return None
    return min(float(SEED_BITS), *known)


def untried(results: Sequence[KeyRecovery]) -> list[str]:
    """The attackers that were not run."""
    ran = {result.attacker.partition(",")[0] for result in results}
    return [name for name in ATTACKS if name not in ran]


def verdict(results: Sequence[KeyRecovery], lacking: Collection[str] = (), idle: Collection[str] = ()) -> str:
    """The strength in a line or two, by whom, and who was not tried; bits only where those who decide did and were
    judged. idle: attackers that have nothing to start from, which others say."""
    strength, said = strength_bits(results, lacking), list[str]()
    elsewhere = {*idle, *(lacking if strength is None else ())}
    left = "; ".join(f"{name} ({ATTACKS[name].needs})" for name in untried(results) if name not in elsewhere)
    not_tried = [f"Attackers not tried: {left}."] if left else []
    if not results:
        return " ".join(["Not attacked: no strength can be given.", *not_tried])
    if strength is not None:
        tried = "; ".join(result.attacker for result in results if result.bits is not None)
        said.append(f"Strength at most, by the attackers tried ({tried}): min(256, best attack) = {strength:.0f} bits.")
        if strength == 0:
            said.append("The lock is open to them: it hides a model only from those who lack what they had.")
        else:
            said.append("An upper bound: a better attack may exist. A lock is obfuscation, not encryption.")
    if unjudged := ", ".join(result.attacker for result in results if result.right is None and result.bits is None):
        said.append(f"Not judged, because the true key was not given: {unjudged}.")
    said += [f"Inconclusive, {each.attacker}: {each.doubt}." for each in results if each.doubt and not each.got_far]
    said += [
        f"With more it may get further, {each.attacker}: {each.doubt}."
        for each in results
        if each.doubt and each.got_far and each.bits
    ]
    based = [each for each in results if each.attacker.startswith(("public-base", "drifted-base"))]
    if based and strength is not None and not any(each.got_far or each.doubt for each in based):
        said.append("The base that was tried gave nothing away: this says nothing of another one.")
    if blurred := [each for each in results if each.tested and each.owner is not None and not each.told]:
        owner, locked = (percent(value or 0.0) for value in (blurred[0].owner, blurred[0].before))
        few = counted(blurred[0].tested or 0, "samples")
        said.append(f"Accuracy is {owner} with the key and {locked} without it: {few} cannot tell the two apart, so")
        said.append("that only the channels were judged.")
    if lacking and strength is None:
        named = ", ".join(f"{name} ({ATTACKS[name].needs})" for name in sorted(lacking))
        why = "a strength without it says nothing" if "public-base" in lacking else "anybody could"
        said.append(f"Not run, though {why}: {named}.")
    if strength is None:
        said.insert(0, "No strength can be given. That is inconclusive, and no pass.")
    return " ".join([*said, *not_tried])


@dataclass(frozen=True)
class LockAudit(Result):
    """What every attacker got, and what that leaves of the lock.

    idle: attackers that had nothing to start from -> a sentence that says why. lacking: attackers that decide and were
    not run, so that no strength is given. kept: what the owner kept back, in words. judged: whether accuracy was
    measured. published: the name under which weights of this architecture are public; empty where none is known.
    """

    file: ClassVar[str] = "audit"
    threat: ClassVar[ThreatModel] = HONEST

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
        return "bad" if any(one.above for finding in self.findings for one in finding.exposures) else "unsure"

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the gate reads: the key is the one sample, and above where an attack leaves no bit to try."""
        rest = [Finding(name, LOCK, "refused" if name in self.idle else "not_run", asked=1) for name in self.untried]
        return (*(_finding(result) for result in self.attacks), *rest)

    def judge(self) -> Ruling:
        """What the one gate says: above, or inconclusive; a lock never passes."""
        return judge(self.findings, things="keys", threat=self.threat)

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
            why = "has nothing to start from" if name in self.idle else f"needs {ATTACKS[name].needs}"
            rows.append([name, "not tried", *[None] * (len(header) - 3), why])
        return Summary(self.verdict, (Table(title, header, rows),))

    def numbers(self) -> dict[str, Any]:
        """The figures, without the keys that were found."""
        told = ("attacker", "size", "right", "share", "bits", "seconds", "cost", "agreement", "failed")
        fields = (*told, "before", "after", "owner", "control", "tested", "doubt")
        held = [{name: getattr(result, name) for name in fields} for result in self.attacks]
        said = {
            "threat": self.threat.name,
            "model": self.model,
            "strength_bits": self.strength,
            "verdict": self.verdict,
            "attacks": held,
        }
        return said | {
            "not_tried": {name: ATTACKS[name].needs for name in self.untried},
            "public_weights": self.published,
        }


LOCK, SHARE = "lock", Metric("share of the key")


def _finding(result: KeyRecovery) -> Finding:
    """One attack as the gate reads it."""
    remarks = [Remark("doubt", result.doubt)] if result.doubt else []
    share = result.share if result.share is not None else 0.0
    exposures = [Exposure("the key", SHARE, share, above=result.bits == 0)]
    return Finding(
        result.attacker, LOCK, samples=["the key"], asked=1, exposures=exposures, remarks=remarks, shown=result
    )


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
    """Attacks a locked folder without its key, and measures what is left of the lock.

    base: the model that the attacker has; weights: of a base that is a timm name. key: the owner's, to judge the
    attacks by; not needed where `base` is the very model that was locked. images, texts: unlabelled samples. data:
    labelled samples, for the attacker `labels` and to measure accuracy before and after each attack. attacker: names of
    `ATTACKS`; by default no-base, images where there are images or texts, and public-base where there is a base.
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
    results = [result for name in tracked(able, "attackers") for result in attack(name, target, config)]
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
    there = {"base": base, "data": data, "samples": bool(samples)}
    usual = {"no-base": True, "images": bool(samples), "public-base": base}
    names = list(dict.fromkeys(given)) or [name for name, able in usual.items() if able]
    for name in names:
        if name not in ATTACKS:
            raise unknown_name("attacker", name, ATTACKS, field="attacker")
        if (needed := ATTACKS[name].given) and not there[needed]:
            said, fields = GIVEN[needed]
            raise SitusError(f"attacker={name}: needs {said}", field=fields)
    for flag, name in (("drift", "drifted-base"), ("steps", "labels")):
        if (value := getattr(config, flag)) != getattr(LockAuditConfig, flag) and name not in names:
            raise SitusError(f"{flag}={value}: is for the attack {name}, which is not chosen", field=(flag, "attacker"))
    if len(samples) > 1:
        said = ", ".join(f"{name}={path}" for name, path in samples.items())
        raise SitusError(f"{said}: a model takes one or the other", field=tuple(samples))
    return names


def _target(
    locked: Path,
    base: AnyModel | None,
    weights: str | None,
    key: Key | None,
    samples: Mapping[str, Path],
    data: str | None,
    config: LockAuditConfig,
    device: torch.device,
) -> Target:
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
    return Target(backbone, groups, state, theirs, truth, learned, test, seen, idle, kept, score, owner)


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


def _score(trial: Backbone, test: Labelled, state: State) -> float:
    trial.model.load_state_dict(dict(state))
    return accuracy_of(trial, test)
