"""What comes back of sentences over the strength of defences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from situs.audit.client import StepConfig
from situs.audit.curve import Axis, Curves, Line, Point, axis_of
from situs.audit.deadline import Deadline
from situs.audit.public import NOTHING
from situs.audit.text.audit import CLASSES, SENT, WITHHELD, audit_texts, label_of
from situs.audit.text.result import TextAudit
from situs.audit.text.victim import open_text_victim, text_gradients
from situs.errors import SitusError, unknown_name
from situs.files import read_lines

SHARES = {
    "tokens": "share of the tokens known with their place",
    "sentences": "share of the sentences known whole",
    "words": "share of the tokens whose word is known",
    "picked": "share of the sentences told from candidates",
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
    rms, norm = _size(model, texts, options)
    axes = {name: _sendable(axis_of(name, rms, norm)) for name in dict.fromkeys(over)}
    defences = list(dict.fromkeys(rung.defence for axis in axes.values() for rung in axis.rungs))

    def made(audit: TextAudit) -> Curves:
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
                    said = "; ".join([*([] if stop is None else [f"stopped after {stop}"]), *row.reasons])
                    values = row.shares if row.reads else {}
                    by, whole = "sentences" if row.reads else "", stop is None
                    points.append(Point(rung.name, label, by, values, said=said, whole=whole))
                lines.append(Line(name, beside, axis.label, points))
        more = {"stopped": audit.stopped, "notes": audit.notes, "provenance": audit.provenance}
        return Curves(audit.model, lines, SHARES, len(audit.names), **more)

    kept = None if keep is None else lambda audit: keep(made(audit))
    given = {"defences": defences, "deadline": deadline, "keep": kept, "facts": facts}
    return made(audit_texts(model, texts, **given, **options))


def _sendable(axis: Axis) -> Axis:
    """Without what changes how the step is computed: sentences are sent in other types alone."""
    return Axis(axis.label, [rung for rung in axis.rungs if rung.name != "autocast"])


def _size(model: Any, texts: str | Path, options: Mapping[str, Any]) -> tuple[float, float]:
    """Root mean square and norm of the gradient of the file's first sentence."""
    names = {field.name for field in fields(StepConfig)}
    config = StepConfig(**{name: value for name, value in options.items() if name in names})
    asked = {name: value for name, value in options.items() if name not in names}
    victim = open_text_victim(model, classes=config.classes or CLASSES, seed=config.seed, **asked)
    sent = text_gradients(victim, victim.coded(read_lines(Path(texts), "texts")[:1]), labels=[0], seed=config.seed)
    flat = torch.cat([g.double().flatten() for g in sent.values()])
    return float(flat.square().mean().sqrt()), float(flat.norm())
