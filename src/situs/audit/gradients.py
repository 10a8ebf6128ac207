"""The gradient audit: every attack against every defence on the same images, with what can be said of each pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from situs.audit.attack import Attack, Fact, Knowledge
from situs.audit.metrics import HIGHER_IS_CLOSER, Mean, baselines, denormalise, mean_of, measure_all
from situs.audit.threat import Defence, Gradients, victim_gradients
from situs.backbones.base import Backbone
from situs.errors import SitusError, unknown_name

EXACT = 54.15
"""PSNR in dB from which an image counts as recovered exactly: a mean error below half a grey level of 255."""

Scores = dict[str, list[float] | None]


@dataclass(frozen=True)
class Step:
    """How the audited step is made: images in it, local steps, the type of what is sent, and the seed."""

    batch: int = 1
    local_steps: int = 1
    dtype: torch.dtype = torch.float32
    seed: int = 0


@dataclass(frozen=True)
class Pair:
    """One attack against one defence. reason: why it does not apply (then nothing else is there).

    caveat: why it is not exact here. lower_bound: whether one who knows the defence could get more. scores and facts:
    per image. images: recovered, [n, C, H, W] in [0, 1].
    """

    attack: str
    defence: str
    reason: str | None = None
    caveat: str | None = None
    scores: Scores = field(default_factory=dict)
    facts: list[dict[str, Fact]] = field(default_factory=list)
    images: Tensor | None = None
    lower_bound: bool = False

    @property
    def exact(self) -> int:
        """How many images were recovered exactly."""
        return sum(value >= EXACT for value in self.scores.get("psnr") or ())


@dataclass(frozen=True)
class Audit:
    """pairs: attacks × defences. baselines: scores of who saw nothing. images: originals, [n, C, H, W] in [0, 1]."""

    model: str
    step: Step
    names: list[str]
    images: Tensor
    pairs: list[Pair]
    baselines: dict[str, Scores]
    about: dict[str, str]


def audit_gradients(
    backbone: Backbone,
    images: Tensor,
    labels: Tensor,
    attacks: Sequence[Attack],
    defences: Sequence[Defence],
    *,
    normalisation: tuple[Sequence[float], Sequence[float]],
    step: Step | None = None,
    names: Sequence[str] = (),
    lpips: Callable[[Tensor, Tensor], Tensor] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Audit:
    """Runs the victim's step on `images` [n, C, H, W] (normalised) in batches, and every attack on what it sends."""
    step = Step() if step is None else step
    real = denormalise(images, *normalisation)
    refused = {attack.name: attack.applies(backbone) for attack in attacks}
    pairs = []
    for defence in defences:
        wanted = {name for a in attacks if refused[a.name] is None for name in a.reads(backbone)}
        uploads = _uploads(backbone, images, labels, defence, step, wanted, say) if wanted else []
        for attack in attacks:
            reason = refused[attack.name] or attack.missing(backbone, uploads[0])
            if reason is not None:
                pairs.append(Pair(attack.name, defence.label, reason))
                continue
            say(f"{attack.name} against {defence.label}")
            found = attack.recover(backbone, uploads, Knowledge(defence, step.batch, step.seed))
            # An upload of several images has one solution, which stands for each of them.
            share = torch.arange(images.shape[0], device=images.device) // step.batch
            pictures = denormalise(found.images, *normalisation)[share]
            scores = measure_all(pictures, real, _patch_size(backbone), lpips)
            facts = [found.facts[i] for i in share.tolist()]
            caveat = "; ".join(filter(None, (attack.caveat(backbone, step.batch), defence.lower_bound))) or None
            bounded = bool(defence.lower_bound)
            pairs.append(Pair(attack.name, defence.label, None, caveat, scores, facts, pictures, bounded))
    return Audit(
        backbone.name,
        step,
        list(names) or [str(i) for i in range(len(images))],
        real,
        pairs,
        _measure_baselines(backbone, real, lpips) if any(pair.reason is None for pair in pairs) else {},
        {defence.label: f"{defence.about}. The attacker knows: {defence.known}" for defence in defences},
    )


def _patch_size(backbone: Backbone) -> tuple[int, int]:
    """The patches that order and best matches are measured on: the model's own."""
    assert backbone.img_size is not None
    return backbone.img_size[0] // backbone.grid[0], backbone.img_size[1] // backbone.grid[1]


def _measure_baselines(
    backbone: Backbone, real: Tensor, lpips: Callable[[Tensor, Tensor], Tensor] | None
) -> dict[str, Scores]:
    size = _patch_size(backbone)
    return {name: measure_all(guess, real, size, lpips) for name, guess in baselines(real).items()}


def _uploads(
    backbone: Backbone,
    images: Tensor,
    labels: Tensor,
    defence: Defence,
    step: Step,
    wanted: set[str],
    say: Callable[[str], None],
) -> list[Gradients]:
    """What is sent for each batch, of it only what some attack reads: whole gradients of many images fill memory."""
    sent = []
    ids = torch.arange(images.shape[0])
    parts = [part.split(step.batch) for part in (images, labels, ids)]
    for number, (x, y, i) in enumerate(zip(*parts, strict=True)):
        say(f"gradients under {defence.label}: batch {number + 1} of {len(parts[0])}")
        upload = victim_gradients(
            backbone, x, y, defence=defence, dtype=step.dtype, local_steps=step.local_steps, seed=step.seed, ids=i
        )
        sent.append({name: g for name, g in upload.items() if name in wanted})
    return sent


# --- what follows from an audit ------------------------------------------------------------------------------


def summary(scores: Scores) -> dict[str, Mean | None]:
    """Each metric's mean over the images with its 95 % interval."""
    shares = ("reidentified",)
    return {name: None if v is None else mean_of(v, share=name in shares) for name, v in scores.items()}


def verdict(audit: Audit) -> str:
    """What a manager can read: for each defence what the strongest attack got, and what a mere guess gets."""
    count = len(audit.images)
    worked = [pair for pair in audit.pairs if pair.reason is None]
    if not worked:
        return (
            "No attack of this audit applies to what this model sends: see the reasons below. That is not a proof of "
            "privacy, only of the absence of a closed form."
        )
    lines = []
    for defence in audit.about:
        tried = [pair for pair in worked if pair.defence == defence]
        if not tried:
            lines.append(f"{defence}: no attack of this audit applies.")
            continue
        best = max(tried, key=lambda pair: sum(pair.scores["psnr"] or ()))
        mean = mean_of(best.scores["psnr"] or [0.0]).mean
        steps = "one step" if audit.step.local_steps == 1 else f"{audit.step.local_steps} local steps"
        found = "at least " * best.lower_bound + f"{best.exact} of {count} images recovered exactly from {steps}"
        open_end = "; a lower bound, see below" * best.lower_bound
        lines.append(f"{defence}: {found} (best attack {best.attack}, mean PSNR {mean:.1f} dB{open_end}).")
    guesses = [f"{name} {mean_of(s['psnr'] or [0.0]).mean:.1f} dB" for name, s in audit.baselines.items()]
    return " ".join([*lines, f"Without any gradient: {', '.join(guesses)}."])


def gate(audit: Audit, limit: str) -> list[str]:
    """Leaks above a limit such as "psnr=20", one sentence each; the worst image decides, not the mean."""
    name, _, text = limit.partition("=")
    if name not in HIGHER_IS_CLOSER:
        raise unknown_name("metric of a gate (--fail-above)", name, HIGHER_IS_CLOSER)
    try:
        bound = float(text)
    except ValueError:
        raise SitusError(f"fail_above={limit}: must be METRIC=NUMBER, as psnr=20 (--fail-above)") from None
    found = []
    for pair in audit.pairs:
        values = pair.scores.get(name) or []
        over = [value for value in values if value > bound]
        if over:
            said = f"{len(over)} of {len(values)} images have {name} above {bound:g}, the worst {max(over):.4g}"
            found.append(f"{pair.attack} against {pair.defence}: {said}")
    return found


def to_json(audit: Audit) -> dict[str, Any]:
    """Everything but the pictures: per image, then means and intervals."""
    return {
        "model": audit.model,
        "step": {**asdict(audit.step), "dtype": str(audit.step.dtype).removeprefix("torch.")},
        "verdict": verdict(audit),
        "pairs": [_pair_json(pair, audit.names) for pair in audit.pairs],
        "baselines": {
            name: {"mean": _means(s), "images": _rows(s, audit.names)} for name, s in audit.baselines.items()
        },
    }


def _pair_json(pair: Pair, names: Sequence[str]) -> dict[str, Any]:
    shown: dict[str, Any] = {"attack": pair.attack, "defence": pair.defence}
    if pair.reason is not None:
        return {**shown, "applies": False, "reason": pair.reason}
    rows = [{**row, **fact} for row, fact in zip(_rows(pair.scores, names), pair.facts, strict=True)]
    return {
        **shown,
        "applies": True,
        "caveat": pair.caveat,
        "lower_bound": pair.lower_bound,
        "exact": pair.exact,
        "mean": _means(pair.scores),
        "images": rows,
    }


def _means(scores: Scores) -> dict[str, Any]:
    return {name: None if mean is None else mean._asdict() for name, mean in summary(scores).items()}


def _rows(scores: Scores, names: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"image": image, **{name: None if values is None else values[i] for name, values in scores.items()}}
        for i, image in enumerate(names)
    ]
