"""The audit as a file: every image's numbers, means and intervals, and by what its form is known.

`docs/methods/gradients.schema.json` describes the file. A change that breaks a reader raises `SCHEMA`'s number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from situs.audit.cases import Outcome
from situs.audit.gradients import Audit, summary, verdict
from situs.audit.scores.metrics import LOWER_IS_CLOSER
from situs.audit.scores.scoring import Scores

SCHEMA = "situs-audit-gradients/1"
"""The form of gradients.json."""


def weights_digest(module: nn.Module) -> str:
    """SHA-256 of all parameters and buffers: of each, by name, its name, type, shape and bytes (little-endian)."""
    found = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        plain = tensor.detach().cpu().contiguous()
        found.update(f"{name} {str(plain.dtype).removeprefix('torch.')} {list(plain.shape)}\n".encode())
        found.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def to_json(audit: Audit) -> dict[str, Any]:
    """Everything but the pictures: per image, then means and intervals."""
    return {
        "schema": SCHEMA,
        "model": audit.model,
        "step": {**asdict(audit.step), "dtype": str(audit.step.dtype).removeprefix("torch.")},
        "partial": audit.stopped is not None,
        "stopped": audit.stopped,
        "not_attacked": [{"attack": attack, "defence": defence} for attack, defence in audit.undone],
        "verdict": verdict(audit),
        "pairs": [_pair_json(pair, audit.names) for pair in audit.pairs],
        "baselines": {
            name: {"mean": _means(s), "images": _rows(s, audit.names)} for name, s in audit.baselines.items()
        },
    }


def _pair_json(pair: Outcome, names: Sequence[str]) -> dict[str, Any]:
    shown: dict[str, Any] = {"attack": pair.attack, "defence": pair.defence}
    if pair.reason is not None:
        return {**shown, "applies": False, "closed_form": pair.closed, "reason": pair.reason}
    rows = [{**row, **fact} for row, fact in zip(_rows(pair.scores, names[: pair.count]), pair.facts, strict=True)]
    return {
        **shown,
        "applies": True,
        "closed_form": pair.closed,
        "by_itself": bool(pair.case.by_itself),
        "caveat": pair.caveat,
        "doubt": pair.doubt,
        "lower_bound": pair.lower_bound,
        "partial": pair.partial,
        "exact": pair.exact,
        "worst": {name: _worst(name, values) for name, values in pair.scores.items()},
        "mean": _means(pair.scores),
        "images": rows,
    }


def _worst(name: str, values: list[float] | None) -> float | None:
    """The value of the image that came back best, which is the worst for its owner and what a gate takes."""
    if values is None:
        return None
    return min(values) if name in LOWER_IS_CLOSER else max(values)


def _means(scores: Scores) -> dict[str, Any]:
    return {name: None if mean is None else mean._asdict() for name, mean in summary(scores).items()}


def _rows(scores: Scores, names: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"image": image, **{name: None if values is None else values[i] for name, values in scores.items()}}
        for i, image in enumerate(names)
    ]
