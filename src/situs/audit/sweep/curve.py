"""Curves: what comes back over ever stronger settings of a defence, from attackers who know it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from situs.audit.attacks.base import Attack
from situs.audit.cases import EXACT, ImageFinding, TestSet
from situs.audit.client import StepConfig, honest_only, split_options
from situs.audit.deadline import Deadline
from situs.audit.defences import Defence, NoDefence, Step, Together, create_defence
from situs.audit.gradients import REFUSED, Audit, attack_gradients
from situs.audit.public import NOTHING, AuditConfig, open_audit
from situs.audit.scores import mean_of, mse, patch_size_of
from situs.audit.sweep.ladder import Ladder, Scale, curve_ladder, scale_of, with_old_keys
from situs.audit.text.audit import CLASSES, SENT, WITHHELD, audit_texts, label_of
from situs.audit.text.result import TextAudit
from situs.audit.text.victim import open_text_victim, text_gradients
from situs.backbones.base import Backbone
from situs.core.tokens import patchify
from situs.errors import SitusError, unknown_name
from situs.files import read_lines
from situs.methods.base import Method
from situs.models.data import AnyData
from situs.results import Cell, Result, Summary, Table, percent

BESIDE = ("none", "no-pe-gradient")
"""The default defences beside the swept one, a line each."""

UNREACHED = "not attacked, because the audit was stopped first"

FAILED = 20.0
"""PSNR in dB of the most exposed image below which an attack counts as failed."""


@dataclass(frozen=True)
class Point:
    """What came back at one strength. by: the best attack. values: its figures by metric; empty where none applied.

    ends: of the 95 % interval of the first metric. reason: why the attack gets no more, or does not apply; never a
    proof of privacy. whole: whether every attack that applies ran to its end on every sample."""

    strength: str
    defence: str
    by: str
    values: Mapping[str, float]
    ends: tuple[float, float] | None = None
    reason: str = ""
    whole: bool = True


@dataclass(frozen=True)
class Line:
    """A curve with another defence beside it. axis: what its strengths are."""

    curve: str
    beside: str
    axis: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Curves(Result):
    """All lines. metrics: name -> description; the first has intervals."""

    file: ClassVar[str] = "curve"

    model: str
    lines: Sequence[Line]
    metrics: Mapping[str, str]
    count: int
    about: Mapping[str, str] = field(default_factory=dict)
    stopped: str | None = field(default=None, kw_only=True)
    notes: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    def summary(self) -> Summary:
        """Where each line ends, and a table of all points."""
        return Summary(verdict(self), (Table(f"{self.model}, by strength", *curve_table(self)),))

    def numbers(self) -> dict[str, Any]:
        """Every point."""
        return {
            "schema": "situs-audit-curve/1",
            "model": self.model,
            "count": self.count,
            "metrics": dict(self.metrics),
            "lines": [asdict(line, dict_factory=with_old_keys) for line in self.lines],
            "stopped": self.stopped,
            "verdict": verdict(self),
            "notes": dict(self.notes),
        }


IMAGES = {
    "psnr": "PSNR, dB",
    "worst": "PSNR of the most exposed image, dB",
    "exact": "fraction of images recovered exactly",
    "patches": "fraction of patches recovered exactly",
}


def curve_table(curves: Curves) -> tuple[list[str], list[list[Cell]]]:
    """A row for each point."""
    rows: list[list[Cell]] = []
    for line in curves.lines:
        for point in line.points:
            values: list[Cell] = [point.values.get(name) for name in curves.metrics]
            if point.ends is not None and values[0] is not None:
                values[0] = f"{values[0]:.3g} [{point.ends[0]:.3g}, {point.ends[1]:.3g}]"
            shown = [f"{value:.3g}" if isinstance(value, float) else value for value in values]
            rows.append([line.curve, line.beside, point.strength, point.by or REFUSED, *shown, point.reason or None])
    return ["curve", "beside it", "strength", "attack", *curves.metrics.values(), "why no more was recovered"], rows


def verdict(curves: Curves) -> str:
    """For each line the strengths at which everything comes back, and at which little does."""
    sentences = [] if curves.stopped is None else [f"A partial result: stopped by {curves.stopped}."]
    sentences += [_ended(line, curves) for line in curves.lines]
    return " ".join([*sentences, "If these attacks fail, another attack may still succeed."])


def _ended(line: Line, curves: Curves) -> str:
    name = f"{line.curve}, {line.beside}:"
    attacked = [point for point in line.points if point.values]
    if not attacked:
        cut = curves.stopped is not None and any(not p.reason or UNREACHED in p.reason for p in line.points)
        return f"{name} {UNREACHED if cut else REFUSED}."
    key, bound = ("exact", 1.0) if "exact" in curves.metrics else ("sentences", 1.0)
    ended = [point for point in attacked if point.whole]
    whole = [point.strength for point in ended if point.values[key] >= bound]
    thing = "image" if key == "exact" else "sentence"
    kept = f"no finished attack recovered all {thing}s exactly"
    kept = f"all {thing}s were recovered exactly at {', '.join(whole)}" if whole else kept
    left = [point.strength for point in line.points if not (point.values and point.whole)]
    why = "an attack was stopped, was not run or does not apply"
    cut = f"; inconclusive at {', '.join(left)} ({why})" if left else ""
    if "worst" not in curves.metrics:
        words = [f"{percent(p.values['words'], 0)} at {p.strength}" for p in attacked if p.values[key] < bound]
        return f"{name} {kept}{'; words recovered: ' * bool(words)}{', '.join(words)}{cut}."
    low = [point.strength for point in ended if point.values["worst"] < FAILED]
    below = f"the PSNR of the most exposed image is below {FAILED:g} dB at {', '.join(low)}"
    if not low:
        below = (
            "there is no strength at which the attacks finished and the PSNR of the most exposed image is below "
            f"{FAILED:g} dB"
        )
    return f"{name} {kept}; {below}{cut}."


# --- images -----------------------------------------------------------------------------------------------------------


def trace_defences(
    model: Any,
    data: AnyData = None,
    over: Sequence[str] = ("noise",),
    *,
    beside: Sequence[str | Defence] = BESIDE,
    attacks: Sequence[str | Attack] = ("patchembed", "tokens", "patchembed-prior"),
    deadline: Deadline | None = None,
    keep: Callable[[Curves], Any] | None = None,
    facts: Mapping[str, Any] = NOTHING,
    **options: Any,
) -> Curves:
    """What comes back of images over the strength of defences, by attackers who know each setting.

        found = trace_defences("runs/ft", "photos/", ["noise", "fedavg"], count=4)
        situs.pages.publish(found, "curve")

    over: noise, clip (with noise, as DP-SGD), precision, fedavg, dropout. beside: what else the client does, a line
    each. All else as of `audit_gradients`.
    """
    config, open_args = split_options(AuditConfig, options)
    honest_only(config)
    if not over:
        raise SitusError(field="curve", value="", allowed="one or more of clip, dropout, fedavg, noise, precision")
    others = [create_defence(defence) for defence in dict.fromkeys(beside)]
    for name in over:
        curve_ladder(name, Scale(1.0, 1.0), Step())
    opened = open_audit(model, data, attacks, config, open_args)
    victim, test = opened.victim, opened.test
    step = opened.step
    scale = scale_of(victim.trains, test, step)
    axes = {name: curve_ladder(name, scale, step) for name in dict.fromkeys(over)}
    pairs = {
        (name, rung.label, other.label): _with(rung.defence, other)
        for name, axis in axes.items() for other in others for rung in axis.rungs
    }  # fmt: skip

    def curves_of(audit: Audit) -> Curves:
        lines = [
            Line(name, other.label, axis.about, [
                point_of(audit, rung.label, pairs[name, rung.label, other.label].label, victim.trains, test)
                for rung in axis.rungs
            ])
            for name, axis in axes.items() for other in others
        ]  # fmt: skip
        about = {
            defence.label: defence.described
            for defence in (*(axis.rungs[-1].defence for axis in axes.values()), *others)
        }
        provenance = opened.provenance({"gradients": f"batch {config.batch}", **facts})
        fields = {"stopped": audit.stopped, "notes": opened.notes, "provenance": provenance}
        return Curves(victim.model.backbone.name, lines, IMAGES, len(test), about, **fields)

    kept = None if keep is None else lambda audit: keep(curves_of(audit))
    fields = {"step": step, "deadline": deadline, "keep": kept}
    return curves_of(
        attack_gradients(victim.trains, test, opened.attacks, list(dict.fromkeys(pairs.values())), **fields)
    )


def _with(strength: Defence, other: Defence) -> Defence:
    """Both at once; one alone where the other is no defence."""
    parts = tuple(part for part in (strength, other) if not isinstance(part, NoDefence))
    return Together(parts) if len(parts) > 1 else parts[0] if parts else NoDefence()


def point_of(audit: Audit, name: str, defence: str, model: Backbone | Method, test: TestSet) -> Point:
    """What the strongest attack recovered at one strength, and why the attack stopped there."""
    pairs = [pair for pair in audit.pairs if pair.defence == defence]
    tried = [pair for pair in pairs if pair.attacked]
    if not tried:
        reasons = dict.fromkeys(f"{pair.attack}: {pair.why('refused')}" for pair in pairs)
        left = [UNREACHED] if not pairs or any(other == defence for _, other in audit.undone) else []
        return Point(name, defence, "", {}, reason="; ".join([*reasons, *left]))
    best = max(tried, key=lambda pair: (pair.mean_psnr, pair.exact))
    psnr = mean_of(best.scores["psnr"] or [0.0])
    # The most exposed image may be another attack's.
    values = {"psnr": psnr.mean, "worst": max(pair.worst_psnr for pair in tried), "exact": best.exact / best.count}
    backbone = model if isinstance(model, Backbone) else model.backbone
    if best.shown is not None and len(audit.images):
        values["patches"] = exact_patches(best.shown, test.real()[: len(best.shown)], backbone)
    ends = None if psnr.low is None or psnr.high is None else (psnr.low, psnr.high)
    whole = not any(pair.status == "stopped" for pair in tried) and not any(
        other == defence for _, other in audit.undone
    )
    return Point(name, defence, best.attack, values, ends, _why(best), whole)


def exact_patches(recovered: Tensor, real: Tensor, backbone: Backbone) -> float:
    """The share of the patches of images [n, C, H, W] in [0, 1] that were recovered at their place with an error below
    half a grey level."""
    height, width = real.shape[2:]
    parts = [
        patchify(images.double(), patch_size_of(backbone, (height, width))).flatten(0, 1)
        for images in (recovered, real)
    ]
    return float((mse(*parts) <= 10 ** (-EXACT / 10)).double().mean())


def _why(pair: ImageFinding) -> str:
    """Why an attack recovered no more; "" where it has every image exactly."""
    if pair.exact == pair.count:
        return ""
    verdicts = dict.fromkeys(str(fact["verdict"]) for fact in pair.facts if fact.get("verdict"))
    doubt = None if verdicts or pair.caveat else pair.why("doubt")
    cut = pair.why("stopped")
    stopped = cut and f"stopped after {cut}"
    return "; ".join(dict.fromkeys(filter(None, (stopped, pair.caveat, *verdicts, doubt))))


# --- texts ------------------------------------------------------------------------------------------------------------

SHARES = {
    "tokens": "fraction of tokens recovered at their position",
    "sentences": "fraction of sentences recovered completely",
    "words": "fraction of tokens whose word was recovered",
    "picked": "fraction of sentences recovered completely or identified among candidates",
}

OVER = ("clip", "noise", "precision")
"""The curves that a client of a model of words may have."""


def trace_texts(
    model: Any,
    texts: str | Path,
    over: Sequence[str] = ("noise", "precision"),
    *,
    deadline: Deadline | None = None,
    keep: Callable[[Curves], Any] | None = None,
    facts: Mapping[str, Any] = NOTHING,
    **options: Any,
) -> Curves:
    """What comes back of sentences over the strength of defences, the word embedding's gradient sent and withheld.

    over: noise, clip, precision. All else as of `audit_texts`.
    """
    for name in over:
        if name not in OVER:
            raise unknown_name("curve", name, OVER, field="curve")
    if not over:
        raise SitusError(field="curve", value="", allowed=f"one or more of {', '.join(OVER)}")
    scale = _text_scale(model, texts, options)
    axes = {name: _sendable(curve_ladder(name, scale, Step())) for name in dict.fromkeys(over)}
    defences = list(dict.fromkeys(rung.defence for axis in axes.values() for rung in axis.rungs))

    def curves_of(audit: TextAudit) -> Curves:
        rows = {finding.defence: finding for finding in audit.findings}
        lines = []
        for name, axis in axes.items():
            for beside in (SENT, WITHHELD):
                points = []
                for rung in axis.rungs:
                    label = label_of(rung.defence, beside == SENT, None)
                    if label not in rows:  # of MJP, the attacker who knows it
                        label = label_of(rung.defence, beside == SENT, True)
                    row = rows[label]
                    stop = row.why("stopped")
                    reason = "; ".join([*([] if stop is None else [f"stopped after {stop}"]), *row.reasons])
                    values = row.shares if row.reads else {}
                    by, whole = "sentences" if row.reads else "", stop is None
                    points.append(Point(rung.label, label, by, values, reason=reason, whole=whole))
                lines.append(Line(name, beside, axis.about, points))
        fields = {"stopped": audit.stopped, "notes": audit.notes, "provenance": audit.provenance}
        return Curves(audit.model, lines, SHARES, len(audit.names), **fields)

    kept = None if keep is None else lambda audit: keep(curves_of(audit))
    fields = {"defences": defences, "deadline": deadline, "keep": kept, "facts": facts}
    return curves_of(audit_texts(model, texts, **fields, **options))


def _sendable(axis: Ladder) -> Ladder:
    """The ladder without autocast, which audits of texts do not have."""
    return Ladder(axis.about, [rung for rung in axis.rungs if rung.label != "autocast"])


def _text_scale(model: Any, texts: str | Path, options: Mapping[str, Any]) -> Scale:
    """Of the gradient of the file's first sentence."""
    config, open_args = split_options(StepConfig, options)
    honest_only(config)
    victim = open_text_victim(model, classes=config.classes or CLASSES, seed=config.seed, **open_args)
    sent = text_gradients(victim, victim.coded(read_lines(Path(texts), "texts")[:1]), labels=[0], seed=config.seed)
    flat = torch.cat([g.double().flatten() for g in sent.values()])
    return Scale(float(flat.square().mean().sqrt()), float(flat.norm()))
