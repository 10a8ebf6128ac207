"""The settings of each defence, from weak to strong, for curves and for searches; and what a setting costs.

Of gradients: `curve_ladder` (a few settings, far apart) and `ladders` (many, for a search). Of the tokens that split
learning sends: `TOKEN_LADDERS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from situs.audit.cases import TestSet
from situs.audit.client import names_sent, parameter_names, victim_gradients
from situs.audit.defences import (
    Clip,
    Defence,
    NoDefence,
    Noise,
    NoPositionGradient,
    Step,
    Withhold,
    create_defence,
    method_of,
)
from situs.backbones.base import Backbone
from situs.config import Checked
from situs.errors import SitusError, counted, unknown_name
from situs.gate import Limit
from situs.limits import Count
from situs.locks.veil import Veil
from situs.methods.base import Method
from situs.results import Cell, Result, Summary, Table
from situs.train.private import epsilon_of

A_DECADE = 4
"""Rungs for a factor of ten in the noise."""

WEAK, STRONG = -8, 5
"""The decades of noise that are searched, in units of the gradient's own size."""

LEAST_NOISE = 0.3
"""Noise multiplier below which ε is meaningless, and takes its accountant forever."""


PRECISIONS = ("fp32", "fp16", "bf16", "int8")

NOISES = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Deviations of noise on a curve, in units of the gradient's root mean square."""

MULTIPLIERS = (0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-2, 1.0)
"""DP-SGD's noise multipliers on a curve, at a bound that is the gradients' median norm."""


TOKEN_LADDERS = {
    "noise": ("noise=0.05", "noise=0.1", "noise=0.2", "noise=0.3", "noise=0.5", "noise=1"),
    "lowpass": ("lowpass=0.8", "lowpass=0.6", "lowpass=0.4", "lowpass=0.3", "lowpass=0.2", "lowpass=0.1"),
    "batch-shuffle": ("batch-shuffle=2", "batch-shuffle=4", "batch-shuffle=8", "batch-shuffle=16"),
}
"""Settings of what a client of split learning does to its tokens, as `parse_veil` reads them, the weakest first."""


def with_old_keys(fields: Iterable[tuple[str, object]]) -> dict[str, object]:
    """The fields of a point or trial as JSON files name them: what is `reason` here is "said" there."""
    return {"said" if name == "reason" else name: value for name, value in fields}


def by_strength(veil: Veil) -> tuple[bool, float]:
    """The key by which settings of one kind sort as on a ladder, no defence first: a low pass hides more the less it
    lets through."""
    return veil.kind != "none", -veil.strength if veil.kind == "lowpass" else veil.strength


class Rung(NamedTuple):
    """One setting: the defence and the step. label: its name on the ladder."""

    label: str
    defence: Defence
    step: Step


class Ladder(NamedTuple):
    """Settings, the weakest first. about: what they are."""

    about: str
    rungs: list[Rung]


class Scale(NamedTuple):
    """The size of the samples' gradients: root mean square of a number, and median norm of a sample's gradient."""

    rms: float
    norm: float


def scale_of(victim: Backbone | Method, test: TestSet, step: Step) -> Scale:
    """From a few images, without a defence."""
    norms, size, plain = [], 1, Step(seed=step.seed, when=step.when)
    for i in range(min(4, len(test))):
        sent = victim_gradients(victim, test.pixels[i : i + 1], test.labels[i : i + 1], step=plain)
        flat = torch.cat([g.double().flatten() for g in sent.values()])
        norms.append(float(flat.norm()))
        size = flat.numel()
    middle = sorted(norms)[len(norms) // 2]
    return Scale(middle / math.sqrt(size), middle)


def curve_ladder(name: str, scale: Scale, step: Step) -> Ladder:
    """The settings of a curve for gradients of this size: a few, far apart."""
    if name == "noise":
        noises = [(f"{share:g}", Noise(_round(share * scale.rms)) if share else NoDefence()) for share in NOISES]
        return _ladder(
            f"standard deviation of the noise, divided by the gradient's rms ({scale.rms:.2g})", noises, step
        )
    if name == "clip":
        bound = _round(scale.norm)
        clips = [(f"{multiplier:g}", Clip(bound, multiplier)) for multiplier in MULTIPLIERS]
        return _ladder(f"noise multiplier; each gradient is clipped to C = {bound:g}", clips, step)
    spelled = {
        "dropout": ("dropout rate", ["dropout=0", "dropout=0.01", "dropout=0.1", "dropout=0.3"]),
        "fedavg": ("local steps of SGD with learning rate 0.01", [f"fedavg={2**k}" for k in range(6)]),
        "precision": (
            "number format of the upload or of the computation",
            ["none", "fp16", "autocast", "bf16", "int8"],
        ),
    }
    if name not in spelled:
        raise unknown_name("curve", name, ("clip", "noise", *spelled), field="curve")
    about, texts = spelled[name]
    labels = ["fp32" if text == "none" else text.partition("=")[2] or text for text in texts]
    return _ladder(about, zip(labels, map(create_defence, texts), strict=True), step)


def _ladder(about: str, settings: Iterable[tuple[str, Defence]], step: Step) -> Ladder:
    return Ladder(about, [Rung(label, defence, step) for label, defence in settings])


def ladders(victim: Backbone | Method, test: TestSet, step: Step) -> dict[str, list[Rung]]:
    """Every ladder of a search by its defence's name: many settings, close together, the weakest first."""
    scale = scale_of(victim, test, step)
    powers = [10 ** (k / A_DECADE) for k in range(WEAK * A_DECADE, STRONG * A_DECADE + 1)]
    noises = [Noise(_round(scale.rms * power)) for power in powers]
    # Of m · C on the sum each number gets m · C / batch: the same range of noise on a number.
    norm = _round(scale.norm)
    clips = [Clip(norm, _round(scale.rms * power * step.batch / norm)) for power in powers]
    backbone = victim if isinstance(victim, Backbone) else victim.backbone
    by_name = {
        "noise": [Rung(defence.label, defence, step) for defence in noises],
        "clip": [Rung(defence.label, defence, step) for defence in clips],
        "batch": [
            Rung(f"batch {size}", NoDefence(), replace(step, batch=size))
            for size in (2**k for k in range(len(test).bit_length()))
            if step.batch <= size <= len(test)
        ],
        "withhold": [
            Rung(defence.label, defence, step)
            for defence in (NoPositionGradient(), *(Withhold(depth) for depth in range(len(_blocks(backbone)) + 1)))
            if defence.refuses(backbone) is None
        ],
        "precision": [Rung(name, NoDefence() if name == "fp32" else create_defence(name), step) for name in PRECISIONS],
    }
    return {name: rungs for name, rungs in by_name.items() if rungs}


def _blocks(backbone: Backbone) -> Sequence[object]:
    return () if "tokens" in backbone.refusals else backbone.block_modules()


def _round(value: float) -> float:
    """Three digits, so that what is printed is what was tried."""
    return float(f"{value:.3g}")


# --- what it costs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CostConfig(Checked):
    """The length of the training for which ε is computed."""

    private_images: Count = 50_000
    """Number of training images, to compute ε."""

    private_epochs: Count = 10
    """Number of epochs, to compute ε."""


@dataclass(frozen=True)
class Cost:
    """cosine: of what is sent with the gradient itself, the mean over some images. share: of numbers that are sent.
    epsilon: of DP-SGD with this noise, where the defence is that; promise: the same in words."""

    cosine: float
    share: float
    epsilon: float | None
    promise: str


def cost_of(victim: Backbone | Method, rung: Rung, test: TestSet, config: CostConfig) -> Cost:
    """What a setting costs, and the guarantee it gives."""
    step, defence, batch = rung.step, rung.defence, rung.step.batch
    method = method_of(defence, victim, step.seed)
    sizes, whole = names_sent(method, defence), parameter_names(method)
    cosines = []
    for number in range(min(4, len(test) // batch)):
        span = slice(number * batch, (number + 1) * batch)
        ids = torch.arange(span.start, span.stop)
        x, y = test.pixels[span], test.labels[span]
        sent = victim_gradients(victim, x, y, defence=defence, step=step, ids=ids)
        plain = victim_gradients(victim, x, y, step=replace(step, dtype=torch.float32), ids=ids)
        sent_numbers = torch.cat(
            [(sent[name] if name in sent else torch.zeros_like(g)).double().flatten() for name, g in plain.items()]
        )
        plain_numbers = torch.cat([g.double().flatten() for g in plain.values()])
        cosines.append(float(torch.nn.functional.cosine_similarity(sent_numbers, plain_numbers, dim=0)))
    share = sum(sizes.values()) / sum(p.numel() for p in whole.values())
    epsilon, promise = _promised(defence, step, config.private_images, config.private_epochs)
    return Cost(sum(cosines) / len(cosines), share, epsilon, promise)


def _promised(defence: Defence, step: Step, images: int, epochs: int, delta: float = 1e-5) -> tuple[float | None, str]:
    """ε at δ for a training on so many images, by steps as this one."""
    batch = step.batch
    if not isinstance(defence, Clip):
        return None, "no ε: gradients are not bounded" if isinstance(defence, Noise) else "none"
    if step.local_steps > 1:  # a sample also moves the weights at which those beside it are asked
        return None, f"no ε: after {step.local_steps} local steps, C does not bound the effect of a sample"
    if defence.multiplier < LEAST_NOISE:
        return None, f"no useful ε: the noise is only {defence.multiplier:.3g} · C"
    steps = max(1, epochs * images // batch)
    training = f"n = {images:,}, batch {batch}, {counted(epochs, 'epochs')}, δ = {delta:g}"
    try:
        epsilon = epsilon_of(defence.multiplier, batch / images, steps, delta)
    except SitusError as error:
        return None, f"not computed: {error}"
    return epsilon, f"ε = {epsilon:.3g} ({training})"


# ---------------------------------------------------------------------------------------------------------------------
# The result of a search for defences: for each the setting that it names, what was tried, and its cost.


Answer = Literal["above", "inconclusive", "passed"]
"""What a gate says of a setting. inconclusive (not a pass): no attack applied, or none proved anything."""


@dataclass(frozen=True)
class Trial:
    """One setting against the attackers. worst: of the most exposed image, by `metric`; None where nothing was tried.
    by: the attack. reason: the gate's. unseen: whether the search had not seen these images."""

    setting: str
    answer: Answer
    worst: float | None
    by: str
    reason: str
    images: int
    unseen: bool = False
    metric: str = ""

    @property
    def exposed(self) -> str:
        """ "psnr 14.2" of the most exposed image."""
        return "not attacked" if self.worst is None else f"{self.metric} {self.worst:.3g}".strip()

    @property
    def cell(self) -> str:
        value = "" if self.worst is None else f", {self.exposed} by {self.by}"
        return f"{self.answer}{value}"


@dataclass(frozen=True)
class Remedy:
    """One defence. named: its weakest setting that passed, also on images that the search had not seen; None where
    there is none, and `reason` says why. seen, unseen: the gate's answers to it; weaker: to the next weaker one. cut:
    whether the search was stopped before its end. untried_from: the strongest setting tried on unseen images, where
    these ran out before the settings did."""

    defence: str
    named: str | None
    reason: str
    seen: Trial | None = None
    unseen: Trial | None = None
    weaker: Trial | None = None
    cost: Cost | None = None
    tried: Sequence[Trial] = ()
    cut: bool = False
    untried_from: str | None = None


@dataclass(frozen=True)
class Remedies(Result):
    """The search for every defence. searched, held_out: how many images the search saw, and how many it did not."""

    file: ClassVar[str] = "defences"

    model: str
    limit: Limit
    remedies: Sequence[Remedy]
    searched: int
    held_out: int
    attacks: Sequence[str]
    stopped: str | None = field(default=None, kw_only=True)
    notes: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    @property
    def with_setting(self) -> list[Remedy]:
        """Those that name a setting."""
        return [remedy for remedy in self.remedies if remedy.named is not None]

    def summary(self) -> Summary:
        """The table of settings, and the sentence."""
        title = (
            f"{self.model}: weakest settings under which the attacks {', '.join(self.attacks)} stay within the limit "
            f"{self.limit}"
        )
        tables = [Table(title, *remedy_table(self))] if self.remedies else []
        if self.with_setting:
            tables.append(Table("What they cost", *cost_table(self)))
        notes = (
            [] if self.stopped is None or not self.with_setting else [f"Stopped by {self.stopped}."]
        )  # else said first
        return Summary(verdict(self), tuple(tables), (*notes, *([UNTUNED] if self.with_setting else [])))

    def numbers(self) -> dict[str, Any]:
        """Every trial."""
        return {
            "schema": "situs-audit-defences/1",
            "model": self.model,
            "limit": str(self.limit),
            "attacks": list(self.attacks),
            "searched": self.searched,
            "held_out": self.held_out,
            "stopped": self.stopped,
            "verdict": verdict(self),
            "accuracy": UNTUNED,
            "defences": [asdict(remedy, dict_factory=with_old_keys) for remedy in self.remedies],
            "notes": dict(self.notes),
        }


UNTUNED = (
    "This search did not measure how much accuracy the defence costs. The cosine compares the upload with the "
    "gradient that is computed without a defence. The cosine covers single steps only, not a whole training run. To "
    "measure the cost in accuracy, train a model with this setting of the defence."
)


def exposures_by_metric(search: Remedies) -> dict[str, dict[str, tuple[float, bool]]]:
    """metric -> setting -> (the most exposed image, whether the setting is named), the most exposed setting first.

    Of each defence the setting that it names, else the last that was tried; by the metric in which its most exposed
    image is nearest to a limit or farthest above one.
    """
    values: dict[str, dict[str, tuple[float, bool]]] = {}
    for remedy in search.remedies:
        trial = remedy.unseen or remedy.seen or (remedy.tried[-1] if remedy.tried else None)
        if trial is not None and trial.worst is not None:
            setting = remedy.named or f"{remedy.defence}, {trial.setting}"
            values.setdefault(trial.metric, {})[setting] = trial.worst, remedy.named is not None
    return {metric: dict(sorted(bars.items(), key=lambda bar: -bar[1][0])) for metric, bars in values.items()}


def remedy_table(search: Remedies) -> tuple[list[str], list[list[Cell]]]:
    """A row for each defence: what keeps the limit."""
    rows: list[list[Cell]] = []
    for remedy in search.remedies:
        cells = (None if trial is None else trial.cell for trial in (remedy.unseen, remedy.weaker))
        rows.append([remedy.defence, remedy.named, *cells, remedy.reason])
    return ["defence", "weakest setting that passes", "on unseen images", "next weaker", "remark"], rows


def cost_table(search: Remedies) -> tuple[list[str], list[list[Cell]]]:
    """A row for each setting that was found."""
    rows: list[list[Cell]] = []
    for remedy in search.with_setting:
        cost = remedy.cost
        paid = [None] * 3 if cost is None else [f"{cost.cosine:.3f}", f"{100 * cost.share:.3g} %", cost.promise]
        rows.append([remedy.named, *paid])
    return ["setting", "cosine with the gradient", "sent", "promise"], rows


def verdict(search: Remedies) -> str:
    """What a reader needs first."""
    if not search.with_setting:
        if search.stopped is not None:
            return (
                f"The search was stopped by {search.stopped} before a setting was found, so there is no result for any "
                "defence."
            )
        return (
            f"No tested setting passes the gate {search.limit} against attackers that know the defence. A setting to "
            f"which no attack applies is inconclusive (not a pass)."
        )
    named = "; ".join(str(remedy.named) for remedy in search.with_setting)
    counts = {
        search.held_out if remedy.unseen is None else remedy.unseen.images for remedy in search.with_setting
    }  # whole batches
    unseen = f"{counted(min(counts), 'images')}{' or more' * (len(counts) > 1)}"
    others = [remedy.defence for remedy in search.remedies if remedy.named is None and not remedy.cut]
    left = f" Defences for which the search found no setting that passes: {', '.join(others)}." if others else ""
    return (
        f"These settings pass the gate {search.limit}: {named}. Each setting was tested on {unseen} that the search "
        f"did not use. The attacks were {', '.join(search.attacks)}; another attack may recover more.{left}"
    )
