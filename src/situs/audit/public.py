"""Audits of gradients, from a model and a folder of images: what Python users and the command line call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from situs.audit.attacks import create_attack
from situs.audit.attacks.adaptive import AdaptiveConfig
from situs.audit.attacks.base import Attack, check_server
from situs.audit.attacks.matching import MatchingConfig, find_classifier
from situs.audit.attacks.tokens.attack import TokensConfig
from situs.audit.captured import Sent, open_uploads
from situs.audit.cases import SETTINGS, TestSet
from situs.audit.client import StepConfig, parameter_names, split_options
from situs.audit.deadline import Deadline
from situs.audit.defences import Defence, NoDefence, Step, create_defence
from situs.audit.gradients import Audit, attack_gradients
from situs.audit.scores import METRICS, Lpips
from situs.audit.settings import RATIO, Comparison, compare_settings, contestants, with_informed
from situs.audit.uploads import attack_uploads, blank_set, matched
from situs.audit.victim import Victim, evidence, load_test_set, open_predictor, open_victim
from situs.backbones.lora import low_rank_names
from situs.config import checks_arguments
from situs.data.sources.base import Source
from situs.data.sources.memory import addressed, display_path
from situs.errors import SitusError, counted, verb
from situs.findings import SERVERS
from situs.gate import Limit, parse_limit
from situs.limits import Count, Positive
from situs.methods.base import Method
from situs.models.data import AnyData, AnyModel
from situs.progress import latest, shown
from situs.results import Provenance

ATTACKED = ("patchembed", "tokens", "patchembed-prior")
"""The default attacks: closed forms, which take seconds unless a search is needed, and the one with priors, which takes
seconds an image where there is noise."""

CHOSEN = ("crafted", "crafted-lora", "crafted-adapters", "crafted-biases", "crafted-head")
"""The default attacks of a server that chooses the weights."""

TABLE_ATTACKED = ("patchembed", "april", "tokens", "patchembed-prior")
"""The default attacks in the settings of MJP's Table 5, whose own attacker is APRIL."""

AUTO, DEFENDED, AS_IT_IS = ("auto",), ("none", "noise", "clip", "no-pe-gradient"), ("none",)
"""The default defences: for a page, and for a gate, which judges what would be sent."""

COUNT = 12
"""The default number of images."""

NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class AuditConfig(StepConfig):
    """Settings of an audit on images: the data, the training step and the attacks."""

    split: str | None = None
    """Split of the data: train, val or test. Default: train."""

    labels: Literal["known", "inferred"] = "inferred"
    """For --attacks matching: the attacker knows the labels (known), or infers them from the gradients (inferred)."""

    distance: Literal["l2", "cosine"] = "l2"
    """For --attacks matching: distance between two gradients."""

    iterations: Count = 1000
    """For --attacks matching: number of steps of the optimiser."""

    search_seconds: Positive = TokensConfig.seconds
    """For --attacks tokens: seconds of search per upload. With a defence the search takes at most twice this time."""

    predictor: str | None = None
    """For --attacks adaptive-mjp or tokens: an MP3 run that predicts the order of patches."""

    lpips: Path | None = None
    """Weight file of LPIPS (AlexNet). Without this file LPIPS is not measured."""

    loss: str | None = None
    """Your own loss instead of cross entropy: file.py:name, a function of (logits, labels)."""


@checks_arguments("data")
def audit_gradients(
    model: AnyModel,
    data: AnyData = None,
    *,
    attacks: Sequence[str | Attack] | None = None,
    defences: Sequence[str | Defence] = AUTO,
    time_limit: float | None = None,
    deadline: Deadline | None = None,
    keep: Callable[[Audit], Any] | None = None,
    facts: Mapping[str, Any] = NOTHING,
    upload: Any = None,
    sent: Sent | None = None,
    **options: Any,
) -> Audit:
    """Measures what training gradients give away about images: every attack against every defence.

    model: whatever `situs.open_model` takes: a name, a run, an export, a locked folder, your own module, an open model.
    data: a folder of images, or any layout that training reads, or images in memory; by default a run's own. attacks,
    defences: names in `situs.audit.ATTACKS` and `situs.audit.DEFENCES` ("noise=1e-3"); the default depends on `server`:
    "honest", or "active" for one that crafts the weights it sends. options: fields of `situs.audit.AuditConfig` (count,
    batch, server, loss, which may be a function …), and arguments of `open_model` (img_size, weights, …). The option
    fail_above is a gate ("psnr=20" or "blind"), whose verdict is `audit.ruling`: passed, above, or inconclusive, which
    is no pass.

    time_limit: seconds for all attacks. After that, or on Ctrl-C, the audit so far is returned and says so
    (`audit.stopped`); it never passes the gate. deadline: a `situs.audit.Deadline(seconds=60)` instead. keep: called
    with the audit now and then while it grows, and at its end. facts: further facts, by name, for its files.

    upload: attack captured uploads instead of computing gradients here: a file (.safetensors, .pt, .npz), tensors by
    name or a list of arrays in the model's order, or several of these. sent: what they are, gradient, difference
    (weights before - after) or weights; worked out where that is certain. defences: then what the client did, as far as
    it is known ("noise=1e-3", "fedavg=1:0.05"). data: the images behind them, in their order. Without data an image
    counts as above if an attack proves that it recovered it, and nothing ever passes (`UploadAudit`).

    >>> audit = situs.audit_gradients("runs/ft", "samples", count=1, attacks=["patchembed"], defences=["none"])
    >>> page = situs.publish(audit, "audit")
    """
    config, open_args = split_options(AuditConfig, options)
    deadline = Deadline(latest, time_limit) if deadline is None else deadline
    if upload is not None:
        chosen = AS_IT_IS if tuple(defences) == AUTO else _distinct("defences", defences)
        captured = Upload(upload, sent, [create_defence(defence) for defence in chosen])
        return _audit_uploads(model, data, captured, attacks or ATTACKED, config, open_args, deadline, keep, facts)
    if sent is not None:
        raise SitusError(
            f"sent={sent}: applies only to a captured upload, but none is given; give it with `upload`, or do not "
            "set `sent`",
            field=("sent", "upload"),
        )
    auto, gated = tuple(defences) == AUTO, config.fail_above is not None
    if auto:
        defences = AS_IT_IS if gated else DEFENDED
    defended = [create_defence(defence) for defence in _distinct("defences", defences)]
    if attacks is None:
        attacks = CHOSEN if config.server == "active" else ATTACKED
    opened = open_audit(model, data, attacks, config, open_args)
    victim, test, threat = opened.victim, opened.test, SERVERS[config.server]
    if auto and (of_run := victim.own_defence) is not None:  # a gate judges what would be sent
        defended = [of_run] if gated else [of_run, *defended]
    if opened.limit is not None and opened.limit.metric == "reidentified" and len(test) < 2:
        reason = f"fail_above={opened.limit}: a single image is always re-identified; give two or more"
        raise SitusError(reason, field=("fail_above", "count"))
    search = f"distance {config.distance}, {config.iterations:,} iterations"
    about = {"gradients": f"batch {config.batch}", "labels": config.labels, "search": search, **facts}
    with shown():
        return attack_gradients(
            victim.trains,
            test,
            opened.attacks,
            defended,
            step=opened.step,
            search=None if threat.unproved else opened.fallback,
            lpips=opened.lpips,
            deadline=deadline,
            keep=keep,
            bounded=gated and not threat.unproved,
            threat=threat,
            limit=opened.limit,
            notes=opened.notes,
            provenance=opened.provenance(about),
        )


def _audit_uploads(
    model: Any,
    data: AnyData,
    upload: Upload,
    attacks: Sequence[str | Attack],
    config: AuditConfig,
    open_args: Mapping[str, Any],
    deadline: Deadline,
    keep: Callable[[Any], Any] | None,
    facts: Mapping[str, Any],
) -> Audit:
    """`audit_gradients` on captured uploads."""
    stated = upload.stated
    if config.server != AuditConfig.server:
        reason = (
            f"server={config.server}: does not apply to captured uploads, which come from the weights of the given "
            "model; remove this option"
        )
        raise SitusError(reason, field=("server", "upload"))
    if any(defence.step(Step(config.batch)).batch != config.batch for defence in stated):
        raise SitusError(
            "defences: `accumulate` does not apply to captured uploads; set `batch` to the number of images in an "
            "upload",
            field=("defences", "batch"),
        )
    if config.labels == "known" and data is None:
        reason = "labels=known: needs the images and labels of the upload; give them with `data`"
        raise SitusError(reason, field=("labels", "data"))
    opened = open_audit(model, data, attacks, config, open_args, upload=upload)
    victim, test = opened.victim, opened.test
    files = f"{len(test.captured)}: {', '.join(one.name for one in test.captured[:4])}"
    about = {
        "uploads": files + " …" * (len(test.captured) > 4),
        "taken as": ", ".join(dict.fromkeys(one.sent for one in test.captured)),
        "gradients": f"batch {config.batch}",
        "labels": config.labels,
        **facts,
    }
    fields: dict[str, Any] = {"step": opened.step, "deadline": deadline, "keep": keep, "limit": opened.limit}
    fields |= {"notes": opened.notes, "provenance": opened.provenance(about)}
    with shown():
        if not test.referenced:
            rows = list(dict.fromkeys([*stated, NoDefence()]))  # what is stated need not be true
            return attack_uploads(victim.trains, test, opened.attacks, rows, **fields)
        test, rows = matched(victim.model.backbone, test, stated, config.batch)
        fields |= {"search": opened.fallback, "lpips": opened.lpips, "bounded": opened.limit is not None}
        return attack_gradients(victim.trains, test, opened.attacks, rows, **fields)


def audit_settings(
    model: Any,
    data: AnyData = None,
    settings: Sequence[str] = tuple(SETTINGS),
    *,
    attacks: Sequence[str | Attack] = TABLE_ATTACKED,
    defences: Sequence[str | Defence] = AUTO,
    deadline: Deadline | None = None,
    keep: Callable[[Comparison], Any] | None = None,
    facts: Mapping[str, Any] = NOTHING,
    **options: Any,
) -> Comparison:
    """One model in the settings a, b, c of MJP's Table 5, by informed and uninformed attackers.

    defences: "mjp=γ" alone, the share of the patches that is shuffled. All else as in `audit_gradients`, but for
    the step, which is one on one image in float32.
    """
    for name in ("batch", "labels", "fail_above", "server"):
        if options.get(name, getattr(AuditConfig, name)) != getattr(AuditConfig, name):
            reason = f"{name}={options[name]}: does not apply to the settings of MJP's Table 5"
            reason += " (one step on one image in fp32, with an honest server); remove this option"
            raise SitusError(reason, field=(name, "settings"))
    defended = (
        [] if tuple(defences) == AUTO else [create_defence(defence) for defence in _distinct("defences", defences)]
    )
    shares = [defence.hidden_share for defence in defended if defence.hidden_share is not None]
    if len(defended) > 1 or len(shares) < len(defended):
        labels = ", ".join(defence.label for defence in defended)
        raise SitusError(
            field=("defences", "settings"),
            value=labels,
            allowed="mjp=γ, without another defence, in the settings of MJP's Table 5",
        )
    config, open_args = split_options(AuditConfig, options)
    opened = open_audit(model, data, attacks, config, open_args)
    name = opened.victim.model.name
    return compare_settings(
        contestants(name, opened.victim.trains),
        opened.test,
        with_informed(opened.attacks),
        settings=settings,
        ratio=shares[0] if shares else RATIO,
        step=Step(seed=config.seed, when=opened.victim.when),
        lpips=opened.lpips,
        deadline=deadline,
        keep=keep,
        notes=opened.notes,
        provenance=opened.provenance({"model": name, **facts}),
    )


class Upload(NamedTuple):
    """Captured uploads as they were given: see `audit_gradients`. stated: what the client did."""

    source: Any
    sent: Sent | None
    stated: Sequence[Defence]


class Opened(NamedTuple):
    """All that an audit needs. step: the audited one. limit: of the gate. search: of matching. origin: where the model
    and the images come from, as facts for the report."""

    victim: Victim
    test: TestSet
    attacks: list[Attack]
    step: Step
    limit: Limit | None
    search: MatchingConfig
    lpips: Lpips | None
    origin: dict[str, Any]

    @property
    def fallback(self) -> MatchingConfig | None:
        """How a gate searches where no closed form applies; None without a gate, or where matching is run anyway."""
        searched = any(attack.name == "matching" for attack in self.attacks)
        return None if self.limit is None or searched else self.search

    @property
    def notes(self) -> dict[str, str]:
        return {**self.victim.notes, **self.test.notes}

    def provenance(self, facts: Mapping[str, Any]) -> Provenance:
        """Where the result comes from, with further facts."""
        about = {**self.origin, "model": self.victim.model.backbone.name, **facts}
        return Provenance(about, left_out=self.test.left_out, things=self.test.things)


def open_audit(
    model: Any,
    data: AnyData,
    attacks: Sequence[str | Attack],
    config: AuditConfig,
    open_args: Mapping[str, Any],
    count: int | None = None,
    upload: Upload | None = None,
) -> Opened:
    """Opens the model and the images and creates the attacks, unknown names first. count: of images, in place of the
    config's. upload: captured ones, whose images need not be known."""
    data = addressed(data)
    limit = None if config.fail_above is None else parse_limit(config.fail_above, METRICS)
    search = MatchingConfig(distance=config.distance, iterations=config.iterations)
    configs = [search, TokensConfig(seconds=config.search_seconds)]
    created = [create_attack(attack, *configs) for attack in _distinct("attacks", attacks)]
    check_server(created, SERVERS[config.server])
    _check_used(config, {attack.Config for attack in created})
    lpips = None if config.lpips is None else Lpips(config.lpips)
    options = {"loss": config.loss, **open_args, "seed": config.seed}
    options |= {} if config.classes is None else {"classes": config.classes}
    victim = open_victim(model, **options)
    opened = victim.model
    captured = [] if upload is None else open_uploads(upload.source, victim.trains, upload.stated, upload.sent)
    data = opened.data.path or None if data is None and upload is None else data
    if data is None and upload is None:
        raise SitusError(
            f"{opened.name}: does not say on which data it was trained; give the images for the audit", field="data"
        )
    if config.predictor is not None:
        predictor = open_predictor(config.predictor, opened.backbone, opened.device)
        configs = [search, replace(configs[1], predictor=predictor), AdaptiveConfig(predictor=predictor)]
        created = [create_attack(attack, *configs) for attack in _distinct("attacks", attacks)]
    if data is None:
        side = (opened.data.channels, *opened.data.size)
        like = (opened.data.normalisation, opened.data.modality.pixels, opened.device)
        test = blank_set(captured, side, config.batch, *like)
    else:
        count = len(captured) * config.batch or count or config.count or COUNT
        test = load_test_set(victim, data, count, config.split, opened.device)
    if captured and len(test) < len(captured) * config.batch:
        uploads = f"{counted(len(captured), 'uploads')} of {counted(config.batch, test.things)} each"
        need = len(captured) * config.batch
        needs = f"{need} {verb(need, 'are')} needed for {uploads}"
        raise SitusError(f"data: has only {counted(len(test), test.things)}, but {needs}", field="data")
    test = replace(test, captured=captured)
    if opened.tuning.parts != "all" and isinstance(victim.trains, Method) and test.referenced:
        victim = replace(victim, notes={**victim.notes, **describe_upload(victim.trains, test)})
    if lpips is not None:
        lpips.check(test.pixels)
    height, width = test.pixels.shape[2:]
    named = data.name if isinstance(data, Source) else Path(display_path(str(data))).name
    images = f"{len(test)} of {named}" if test.referenced else f"{len(test)}, originals not given"
    kind = "pixels" if test.stored else "numbers"
    origin = {
        "weights": str(opened.facts.get("weights", opened.facts["kind"])),
        "images": f"{images}, {height} × {width} {kind}",
        "seed": config.seed,
        **evidence(victim.trains, open_args.get("weights")),
    }
    known = config.labels == "known"
    step = Step(config.batch, seed=config.seed, labels_known=known, when=victim.when)
    return Opened(victim, test, created, step, limit, search, lpips, origin)


def _check_used(config: AuditConfig, kinds: AbstractSet[type[Any]]) -> None:
    """Refuses settings of attacks that are not run. kinds: the configs of those that are.

    With a gate, matching may run as a fallback, whose number of iterations is fixed.
    """
    searches = {"iterations": "matching and april-optimisation"}
    if config.fail_above is None:
        searches |= dict.fromkeys(("labels", "distance"), searches["iterations"])
    owners = (
        ({MatchingConfig}, searches),
        ({AdaptiveConfig, TokensConfig}, {"predictor": "adaptive-mjp and tokens"}),
        ({TokensConfig}, {"search_seconds": "tokens"}),
    )
    for configs, names in owners:
        for name, attacks in names.items() if kinds.isdisjoint(configs) else ():
            if (value := getattr(config, name)) != getattr(AuditConfig, name):
                reason = (
                    f"{name}={value}: applies only to the attack{'s' * (' and ' in attacks)} {attacks}, which this "
                    "audit does not run"
                )
                raise SitusError(reason, field=(name, "attacks"))


def _distinct(field: str, names: Sequence[Any]) -> list[Any]:
    """The names without repetition; none at all is refused."""
    if not names:
        raise SitusError(field=field, value="", allowed="one or more names")
    return list(dict.fromkeys(names))


# ---------------------------------------------------------------------------------------------------------------------
# What a client still gives away that trains the classifier alone, or LoRA's products beside frozen matrices.
#
# The classifier's gradient is the product of p - y with its input, the features h: ∂W = (p - y) hᵀ, ∂b = p - y. For one
# image each row of ∂W over its entry of ∂b is h itself, and the one negative entry of ∂b is the label. For a product up
# @ down beside a matrix with input X (tokens), ∂down = scale · upᵀ Gᵀ X: as many directions of the tokens as the rank.
# This is no verdict on privacy: it says what is sent, and what can be read off it for certain.


CLASSIFIER = (
    "for one image, the classifier's gradient is (p - y) times the features (p: probabilities, y: one-hot label). "
    "At batch 1 and without a defence, this gradient therefore reveals the features and the label exactly. To recover "
    "the image itself, an attacker needs a search (the attack `matching`)"
)


def describe_upload(method: Method, test: TestSet) -> dict[str, str]:
    """For a reader: what such a client sends, and what can be read off it for certain, without a defence."""
    sent = parameter_names(method)
    every = sum(1 for name in dict(method.named_parameters()) if name.startswith("backbone."))
    numbers = sum(p.numel() for p in sent.values())
    notes = {
        "sent": f"{len(sent)} of {every} tensors ({numbers:,} numbers), "
        f"{', '.join([*sent][:4])}{' …' * (len(sent) > 4)}. Frozen parameters have no gradient, so an attack "
        "that needs the gradient of a frozen parameter does not apply. Other attacks may apply"
    }
    height, width = test.pixels.shape[2:]
    head = find_classifier(method.backbone, (height, width))
    if head.weight is not None and {*head} <= sent.keys():
        notes["left by the classifier"] = CLASSIFIER
    factors = [part for part in low_rank_names(method.backbone) if part.endswith("down")]
    if factors:
        rank, tokens = sent[factors[0]].shape[0], method.backbone.num_tokens + method.backbone.num_prefix
        shown = "all" if rank >= tokens else f"at most {rank}"
        notes["left by LoRA"] = (
            f"{len(factors)} frozen matrices have a LoRA product of rank {rank}. The tokens of an image span {tokens} "
            f"directions, and the gradient of each product reveals {shown} of these directions. No attack of this "
            "audit solves for these tokens, and it is not known what a search can recover"
        )
    return notes
