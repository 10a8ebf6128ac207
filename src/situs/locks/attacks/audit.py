"""`audit_lock`: attacks a locked model without its key, and reports what is left of the lock."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from situs.backbones.base import Backbone
from situs.backbones.layout import Group
from situs.config import Checked, checks_arguments
from situs.data.sources.memory import addressed
from situs.data.text import Columns
from situs.errors import SitusError, counted, unknown_name
from situs.findings import HONEST, Exposure, Finding, Metric, Remark, ThreatModel
from situs.gate import Ruling, judge
from situs.limits import Count, NotNegative
from situs.locks.attacks.adapter import Labelled, accuracy_of, recover_with_labels
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
from situs.locks.owner import model_groups, open_without_key
from situs.locks.withhold import described
from situs.methods.base import Batch
from situs.models import open_model
from situs.models.data import AnyModel, check_classes, load_any
from situs.progress import tracked
from situs.results import Figure, Result, Summary, Table, Tone, percent, show
from situs.train import distributed

WRONG_BASE = (
    "the embedding is withheld, so only a base model helps an attacker. This base revealed nothing. Check that this "
    "base is the original (unlocked) model, or the model from which the original was fine-tuned"
)


@dataclass(frozen=True)
class LockAuditConfig(Checked):
    """How much data the attackers have, and how long they train."""

    count: Count = 24
    """Number of images or texts that the attacker has, chosen at random with a fixed seed."""

    drift: tuple[NotNegative, ...] = (0.3,)
    """For the attack "drifted-base": noise on the weights of --base, in standard deviations of each tensor."""

    k: Count = 100
    """For the attack "labels": number of labelled samples."""

    steps: Count = 200
    """For the attack "labels": number of training steps."""

    test: Count = 1000
    """Number of samples on which accuracy is measured."""

    seed: int = 0
    """Random seed of the noise on --base and of the attacker's training."""

    text: Columns = field(default_factory=Columns)
    """Columns with labelled sentences. Default: the columns that the model records."""


SEED_BITS = 256
"""Length of a key's seed: no lock is stronger, however many permutations there are."""


class LockAttack(NamedTuple):
    """One attacker. about, needs: in words. requires: a key of `REQUIREMENTS`, or empty.

    run: gives one result, or one for each drift. scored: whether `attack` measures the accuracy afterwards.
    """

    about: str
    needs: str
    requires: str
    run: Callable[[Target, LockAuditConfig], list[KeyRecovery]]
    scored: bool = True


REQUIREMENTS = {
    "base": ("the base model that the attacker is assumed to have", ("base",)),
    "data": ("labelled samples", ("data",)),
    "samples": ("unlabelled images or texts", ("images", "texts")),
}
"""What an attacker may need -> (in words, the arguments of `audit_lock` for it)."""


@dataclass(frozen=True)
class Target:
    """What is attacked, and what the auditor knows. samples, test: labelled; unlabelled: without labels.

    backbone: on the device; state, base, truth: on the CPU. impossible: attacker -> why it cannot attack this lock.
    withheld: which parts are withheld, in words. score: the accuracy of given weights on `test`; owner: with the key.
    """

    backbone: Backbone
    groups: tuple[Group, ...]
    state: dict[str, Tensor]
    base: dict[str, Tensor] | None
    truth: dict[str, Tensor] | None
    samples: Labelled | None
    test: Labelled | None
    unlabelled: Samples | None
    impossible: dict[str, str]
    withheld: str
    score: Score | None
    owner: float | None


def _no_base(target: Target, config: LockAuditConfig) -> list[KeyRecovery]:  # noqa: ARG001
    samples, inputs, total = target.samples, None, None
    if samples is not None:
        inputs, total = samples.unpadded(), None if samples.mask is None else len(samples.inputs)
    return [recover_blind(target.backbone, target.groups, truth=target.truth, inputs=inputs, of=total)]


def _images(target: Target, config: LockAuditConfig) -> list[KeyRecovery]:
    samples = target.unlabelled
    assert samples is not None
    doubt = samples.doubt(target.backbone, target.groups)
    if (stages := len(residual_only(target.groups))) > 1:
        doubt = doubt or f"the model has {stages} stages, but this attacker tries only the key of the first stage"
    more = {"description": samples.description, "truth": target.truth, "seed": config.seed}
    return [replace(recover_with_samples(target.backbone, target.groups, samples.batches, **more), doubt=doubt)]


def _activations(target: Target, config: LockAuditConfig) -> list[KeyRecovery]:  # noqa: ARG001
    assert target.unlabelled is not None
    return [recover_with_activations(target.backbone, target.groups, target.unlabelled.inputs, truth=target.truth)]


def _public_base(target: Target, config: LockAuditConfig) -> list[KeyRecovery]:  # noqa: ARG001
    assert target.base is not None
    return [_with_base(target, target.base, "public-base")]


def _drifted_base(target: Target, config: LockAuditConfig) -> list[KeyRecovery]:
    assert target.base is not None
    relatives = ((amount, drift(target.base, amount, config.seed)) for amount in config.drift)
    return [_with_base(target, base, f"drifted-base, {amount:g} ×") for amount, base in relatives]


def _with_base(target: Target, base: State, label: str) -> KeyRecovery:
    recovery = recover_with_base(target.state, base, target.groups, truth=target.truth, attacker=label)
    return replace(recovery, doubt=WRONG_BASE) if "images" in target.impossible else recovery


def _labels(target: Target, config: LockAuditConfig) -> list[KeyRecovery]:
    assert target.samples is not None
    assert target.test is not None
    more = {"steps": config.steps, "seed": config.seed, "truth": target.truth, "owner": target.owner}
    return [recover_with_labels(target.backbone, target.groups, target.samples, target.test, **more)]


ATTACKS: dict[str, LockAttack] = {
    "no-base": LockAttack(
        "has the locked file, and compares the unlocked parts of the file with the locked parts",
        "the locked file alone",
        "",
        _no_base,
    ),
    "images": LockAttack(
        "has the locked file and unlabelled samples, and compares the correlations of unlocked and locked channels",
        "a few unlabelled images or texts",
        "samples",
        _images,
    ),
    "activations": LockAttack(
        "runs the locked blocks, sees their inputs, and has the unlocked embedding and its own samples",
        "the activations of the blocks",
        "samples",
        _activations,
    ),
    "public-base": LockAttack(
        "has the original model, and matches its channels with the locked channels",
        "the model that was locked",
        "base",
        _public_base,
    ),
    "drifted-base": LockAttack(
        "has a fine-tuned version of the original model, simulated by noise on every weight",
        "a fine-tuned version of the original model",
        "base",
        _drifted_base,
    ),
    "labels": LockAttack(
        "has labelled samples, and trains a linear map before and after the frozen locked blocks",
        "labelled samples",
        "data",
        _labels,
        scored=False,
    ),
}
"""attacker -> who it is, what it needs and what it does."""


def attack(name: str, target: Target, config: LockAuditConfig) -> list[KeyRecovery]:
    """The results of one attacker, with the accuracy after it if there is data."""
    chosen = ATTACKS[name]
    results = chosen.run(target, config)
    if target.score is None or target.test is None or not chosen.scored:
        return results
    more = (target.score, target.owner, len(target.test.labels))
    return [scored(result, target.state, target.groups, *more) for result in results]


MEANING = """
Bits left is the log2 of the number of keys that the attacker must still try. It is at most 256, the length of the key
in bits. We assume that the attacker knows which channels its key puts in the wrong place. The attacker must then try
the possible orders of these channels. If most channels are right, the attacker need not try all orders: it swaps two
wrong channels at a time, and keeps each swap that improves the model. Bits left is 0 if the attack restored the
accuracy without the key. The accuracy is judged only if the unlocked model is better than the locked model on the test
set, by more than two standard errors. The attacker `images` does not know the true key. It searches for the key with
the highest score J. J measures how well the channel correlations of the locked blocks agree with the channel
correlations of the embedding, which is not locked. For comparison, the J of searches from random starts is shown. If
the attack fails, the J of its best key is about as low as theirs. Inner groups (MLP units, heads and their
channels) count neither in the number of unknown bits nor in the recovered share of the key, because permuting inner
groups does not change what the model computes.
""" + "".join(f"\n`{name}` {attacker.about}.\n" for name, attacker in ATTACKS.items())

_MEANS = {
    True: "These attackers open the lock. The lock protects the model only against attackers who know less.",
    False: "A better attack may exist, so the strength may be lower. A lock is obfuscation, not encryption.",
}
"""Whether no bit is left -> what the strength means."""


@dataclass(frozen=True)
class LockAudit(Result):
    """The results of all attackers, and what is left of the lock.

    sizes, inner: residual channels of each stage, and the number of inner groups. impossible: attackers that cannot
    attack this lock -> the sentence that says why. missing: required attackers that were not run, so no strength is
    given. withheld: which parts are withheld, in words. judged: whether accuracy was measured. published: the name of
    public weights of this architecture; empty if none is known.
    """

    file: ClassVar[str] = "audit"
    meaning: ClassVar[str] = MEANING
    threat: ClassVar[ThreatModel] = HONEST

    model: str
    sizes: tuple[int, ...]
    inner: int
    attacks: tuple[KeyRecovery, ...]
    impossible: dict[str, str] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    withheld: str = ""
    judged: bool = False
    published: str = ""

    @property
    def strength(self) -> float | None:
        """The strength in bits: min(256, the best attack). An upper bound, since better attacks may exist.

        None if no attack was run or compared with the true key, and if a required attacker was not run (`missing`) or
        had too little data (`KeyRecovery.doubt`), unless another attack was successful: an attack that was not tried
        proves nothing.
        """
        bits = [attack.bits for attack in self.attacks if attack.bits is not None]
        untested = bool(self.missing) or any(attack.doubt for attack in self.attacks)
        if not bits or (untested and not any(attack.successful for attack in self.attacks)):
            return None
        return min(float(SEED_BITS), *bits)

    @property
    def tone(self) -> Tone:
        """Bad if an attack leaves no bit to try, otherwise unsure: failed attacks are no proof."""
        return "bad" if any(exposure.above for finding in self.findings for exposure in finding.exposures) else "unsure"

    @property
    def mark(self) -> str:
        """The tone in words."""
        if self.tone == "bad":
            return "Opened by these attackers"
        return "No strength can be given" if self.strength is None else "Not opened by these attackers"

    @property
    def title(self) -> str:
        """Of the page."""
        return f"Attacks on a lock: {self.model}, locked{self.withheld}"

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the gate reads: the key is the only sample, above the threshold if an attack leaves no bit to try."""
        untried = [
            Finding(name, LOCK, "refused" if name in self.impossible else "not_run", asked=1) for name in self.untried
        ]
        return (*(_finding(result) for result in self.attacks), *untried)

    def judge(self) -> Ruling:
        """The gate's ruling: above, or inconclusive; a lock never passes."""
        return judge(self.findings, things="keys", threat=self.threat)

    @property
    def untried(self) -> tuple[str, ...]:
        """The attackers that were not run."""
        ran = {attack.attacker.partition(",")[0] for attack in self.attacks}
        return tuple(name for name in ATTACKS if name not in ran)

    @property
    def verdict(self) -> str:
        """The strength, what it means, and which attackers were not tried; bits only if the required attackers were
        judged."""
        strength, results = self.strength, self.attacks
        elsewhere = {*self.impossible, *(self.missing if strength is None else ())}  # said in other sentences
        others = "; ".join(f"{name} ({ATTACKS[name].needs})" for name in self.untried if name not in elsewhere)
        sentences = ["No attack was run, so no strength can be given."] if not results else self._judgement(strength)
        sentences += [f"Attackers not tried: {others}."] if others else []
        sentences += self.impossible.values()
        if self.published and {"public-base", "drifted-base"} <= {*self.untried}:
            sentences.append(
                f"Weights of {self.published} are public, but this audit did not use them to attack the lock. To use "
                f"them, call situs.audit_lock(LOCKED, key=FILE, base='{self.published}', weights=FILE), or set the "
                "flags of the same names."
            )
        return " ".join(sentences)

    def _judgement(self, strength: float | None) -> list[str]:
        """What the attacks that were run show."""
        results, sentences = self.attacks, list[str]()
        if strength is None:
            sentences.append("No strength can be given, so the audit is inconclusive (not a pass).")
        else:
            tried = "; ".join(result.attacker for result in results if result.bits is not None)
            most = f"The strength is at most {strength:.0f} bits (of 256)"
            sentences += [
                f"{most}. This many bits of the key remain unknown to the most successful of these attackers: {tried}.",
                _MEANS[strength == 0],
            ]
        if unjudged := ", ".join(result.attacker for result in results if result.right is None and result.bits is None):
            sentences.append(f"The true key was not given, so this audit does not judge the results of: {unjudged}.")
        doubtful = [result for result in results if result.doubt]
        sentences += [
            f"Inconclusive for the attacker `{result.attacker}`: {result.doubt}."
            for result in doubtful
            if not result.successful
        ]
        sentences += [
            f"The attacker `{result.attacker}` may recover more with more data: {result.doubt}."
            for result in doubtful
            if result.successful and result.bits
        ]
        based = [result for result in results if result.attacker.startswith(("public-base", "drifted-base"))]
        if based and strength is not None and not any(result.successful or result.doubt for result in based):
            sentences.append("The tested base model revealed nothing. Another base model may reveal the key.")
        if blurred := [each for each in results if each.tested and each.owner is not None and not each.separable]:
            owner, locked = (percent(value or 0.0) for value in (blurred[0].owner, blurred[0].before))
            sentences.append(
                f"The accuracy is {owner} with the key and {locked} without the key. "
                f"{counted(blurred[0].tested or 0, 'samples')} are too few to separate the two accuracies, so only the "
                "recovered channels were judged."
            )
        if self.missing and strength is None:
            names = ", ".join(f"{name} ({ATTACKS[name].needs})" for name in sorted(self.missing))
            reason = "the strength depends on them" if "public-base" in self.missing else "anybody could run them"
            sentences.append(f"Attacks that were not run, although {reason}: {names}.")
        return sentences

    def summary(self) -> Summary:
        """The verdict, and a row for each attacker; accuracies only if there is data."""
        scores = ("locked", "after attack", "with the key") if self.judged else ()
        header = ("attacker", "key recovered", "bits left, at most", *scores, "seconds", "what the attack used")
        cover = f", {self.inner} permuted groups inside the blocks" if self.inner else ""
        title = f"{self.model}: {' + '.join(map(str, self.sizes))} residual channels{cover}{self.withheld}"
        sure = self.strength is not None
        rows = [_row(result, self.judged, sure or result.successful) for result in self.attacks]
        for name in self.untried:
            reason = "cannot start" if name in self.impossible else f"needs {ATTACKS[name].needs}"
            rows.append([name, "not tried", *[None] * (len(header) - 3), reason])
        bits, of = "no strength", "inconclusive (not a pass)"
        if self.strength is not None:
            judged = "; ".join(result.attacker for result in self.attacks if result.bits is not None)
            bits, of = f"{self.strength:.0f} of {SEED_BITS}", f"bits left at most, after the attacks {judged}"
        numbers = (bits, of), (", ".join(self.untried) or "none", "attackers not tried")
        return Summary(self.verdict, (Table(title, header, rows),), numbers=numbers)

    def figures(self) -> list[Figure]:
        """Accuracies, or the shares of the key that were recovered; a curve over the drift of the base."""
        if self.judged:
            caption, bars = "Accuracy with the key, without the key, and after each attack.", self._accuracies()
        else:
            caption = "Percentage of the key that each attacker recovered."
            shares = {result.attacker: result.share for result in self.attacks if result.share is not None}
            bars = {name: (100 * share, "bad") for name, share in sorted(shares.items(), key=lambda bar: -bar[1])}
        figures = [Figure("", caption, "bars", (bars, "%"))]
        drifted = [each for each in self.attacks if each.attacker.startswith("drifted") and each.share is not None]
        if len(drifted) > 1:
            amounts = [float(each.attacker.split(", ")[1].removesuffix(" ×")) for each in drifted]
            line = {"key recovered": (amounts, [100 * (each.share or 0.0) for each in drifted])}
            values = (line, "noise on the base, in standard deviations", "residual channels recovered, %")
            caption = (
                "Fraction of the key that an attacker recovers by linear assignment if noise is added to the weights "
                "of the base model."
            )
            title = "The drift of the base"
            figures.append(Figure("", caption, "figures.curves", values, {"y_limits": (0, 100)}, title))
        return figures

    def _accuracies(self) -> dict[str, tuple[float, Tone | Literal[""]]]:
        bars: dict[str, tuple[float, Tone | Literal[""]]] = {}
        for result in self.attacks[:1]:
            bars |= {} if result.owner is None else {"with the key": (100 * result.owner, "good")}
            bars |= {} if result.before is None else {"locked": (100 * result.before, "")}
        for result in sorted(self.attacks, key=lambda result: -(result.after or 0.0)):
            if result.after is not None:
                bars[f"attacker {result.attacker}"] = (100 * result.after, "bad" if result.broken else "")
        return bars

    def numbers(self) -> dict[str, Any]:
        """The figures, without the recovered keys."""
        fields = (
            "attacker", "size", "right", "share", "bits", "seconds", "cost", "agreement", "failed", "before", "after",
            "owner", "control", "tested", "doubt",
        )  # fmt: skip
        return {
            "threat": self.threat.name,
            "model": self.model,
            "strength_bits": self.strength,
            "verdict": self.verdict,
            "attacks": [{name: getattr(result, name) for name in fields} for result in self.attacks],
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


@checks_arguments()
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
    attacks; not needed if `base` is the model that was locked. images, texts: unlabelled samples. data: labelled
    samples, for the attacker `labels` and to measure accuracy before and after each attack. attacker: names of
    `ATTACKS`; default: no-base, images if there are images or texts, and public-base if there is a base. device: cpu,
    cuda or cuda:N; None: a GPU if there is one.

    >>> audit = situs.audit_lock("locked", base="exported", key="owner.key")  # print(audit) shows what is left
    >>> [attack.attacker for attack in audit.attacks]
    ['no-base', 'public-base']
    """
    from situs.backbones.timm.create import published_name  # timm takes a second to import

    config, key = config or LockAuditConfig(), None if key is None else as_key(key)
    samples = {name: Path(addressed(path)) for name, path in (("images", images), ("texts", texts)) if path is not None}
    names = _chosen(
        config, [attacker] if isinstance(attacker, str) else attacker, base is not None, data is not None, samples
    )
    labelled, where = None if data is None else str(addressed(data)), distributed.start(device).device
    target = _target(Path(locked), base, weights, key, samples, labelled, config, where)
    able = [name for name in names if name not in target.impossible]
    results = [result for name in tracked(able, "attackers") for result in attack(name, target, config)]
    required = {"images"}
    if "images" in target.impossible:  # the clear parts reveal next to nothing, so an attacker with a base is required
        required = {"no-base"} if {"public-base", "drifted-base"} & {*names} else {"no-base", "public-base"}
    missing = required - {*names} if results else set[str]()
    return LockAudit(
        model=target.backbone.name,
        sizes=tuple(group.size for group in target.groups if group.kind == "residual"),
        inner=sum(group.kind != "residual" for group in target.groups),
        attacks=tuple(results),
        impossible={name: reason for name, reason in target.impossible.items() if name in (*names, "images")},
        missing=frozenset(missing),
        withheld=target.withheld,
        judged=target.test is not None,
        published=published_name(target.backbone),
    )


def _chosen(
    config: LockAuditConfig, attackers: Sequence[str], base: bool, data: bool, samples: Mapping[str, Path]
) -> list[str]:
    """The attackers to run, each once, in order; refuses one that lacks its data before anything is loaded."""
    available = {"base": base, "data": data, "samples": bool(samples)}
    default = {"no-base": True, "images": bool(samples), "public-base": base}
    names = list(dict.fromkeys(attackers)) or [name for name, able in default.items() if able]
    for name in names:
        if name not in ATTACKS:
            raise unknown_name("attacker", name, ATTACKS, field="attacker")
        if (needed := ATTACKS[name].requires) and not available[needed]:
            what, fields = REQUIREMENTS[needed]
            raise SitusError(f"attacker={name}: needs {what}", field=fields)
    for flag, name in (("drift", "drifted-base"), ("steps", "labels")):
        if (value := getattr(config, flag)) != getattr(LockAuditConfig, flag) and name not in names:
            raise SitusError(
                (f"{flag}={value}: applies only to the attacker {name}, which is not chosen"), field=(flag, "attacker")
            )
    if len(samples) > 1:
        both = ", ".join(f"{name}={path}" for name, path in samples.items())
        names_of = " or ".join(samples)
        raise SitusError(f"{both}: a model has only one kind of input; give {names_of}", field=tuple(samples))
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
    if manifest.sealed and key is None:
        raise SitusError(
            f"{locked}: is sealed (encrypted), but the attacks need its locked weights; give the owner's key to "
            "decrypt them. The audit assumes that the attacker runs the model and thus has these weights",
            field="key",
        )
    with readable(locked, manifest, key) as folder:
        backbone, absent = open_without_key(folder, replace(manifest, sealed=False))
        learned, test = _labelled(folder, data, config, absent, device)
        embedded = manifest.withheld is None or "embedding" not in manifest.withheld.parts
        unlabelled = read_samples(folder, backbone, samples, config.count) if embedded and samples else None
    if theirs is not None:  # an encoder's names -> a classifier's
        theirs = backbone.renamed({name: value.cpu() for name, value in theirs.items()})
    groups = within(model_groups(backbone, manifest), backbone.model.state_dict().keys() - absent)
    state = {name: value.clone() for name, value in backbone.model.state_dict().items()}
    for name in absent:
        state[name].zero_()
    backbone.eval().model.load_state_dict(state)  # in training mode an embedding may drop out
    for tensors, what in ((state, str(locked)), (theirs or {}, f"base={base}")):
        check_finite(tensors, what)
    truth = permutations_of(manifest, key) if key is not None else None
    if truth is None and theirs is not None:
        truth = exact_truth(state, theirs, groups)
    reason = "The attacker `{}` cannot start, because the embedding is withheld."
    impossible = {} if embedded else {name: reason.format(name) for name in ("images", "activations")}
    withheld = "" if manifest.withheld is None else f"; {described(manifest.withheld.parts)} withheld"
    backbone.to(device)  # weights are compared on the CPU (`state`); the model runs and trains on the device
    score = None if test is None else partial(_score, copy.deepcopy(backbone), test)
    owner = None if score is None or truth is None else score(opened(state, groups, truth))
    return Target(backbone, groups, state, theirs, truth, learned, test, unlabelled, impossible, withheld, score, owner)


def _labelled(
    folder: Path, data: str | None, config: LockAuditConfig, absent: frozenset[str], device: torch.device
) -> tuple[Labelled | None, Labelled | None]:
    """The labelled samples to train and to test on, prepared for the model; None without data."""
    if data is None:
        return None, None
    if absent:
        raise SitusError(
            f"data={data}: parts of the model are withheld, so the model cannot be run; leave data out", field="data"
        )
    model, sets = open_model(str(folder), device=device), []
    for split, count in (("train", config.k), ("val", config.test)):
        loader = load_any(model, data, split=split, count=count, text=config.text)
        check_classes(model, loader)
        sets.append(_joined(list(loader)))
    return sets[0], sets[1]


def _joined(batches: list[Batch]) -> Labelled:
    """All batches as one; sentences are padded to the longest."""
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
