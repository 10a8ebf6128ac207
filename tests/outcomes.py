"""Outcomes and preparations made by hand, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from situs.audit import ATTACKS
from situs.audit.attacks.base import Attack, Knowledge, Ready, Refused
from situs.audit.cases import Case, ImageFinding
from situs.audit.defences import Defence, Step
from situs.audit.gradients import Audit
from situs.audit.oracle import Oracle
from situs.audit.scores import measure_all
from situs.findings import Certificate, Remark


@dataclass(frozen=True)
class Named(Defence):
    """A defence of any label."""

    said: str = "none"

    @property
    def label(self) -> str:
        return self.said


def outcome(
    attack: str | Attack = "patchembed",
    defence: str = "none",
    reason: str | None = None,
    caveat: str | None = None,
    scores: Any = None,
    facts: Any = (),
    pictures: Any = None,
    *,
    status: Any = None,
    fallback: str = "",
    hardest: bool = False,
    partial: str | None = None,
    doubt: str | None = None,
    lower_bound: bool = False,
    numbers: Any = None,
) -> ImageFinding:
    """What came of an attack against a defence; its status follows from the rest."""
    model: Any = SimpleNamespace(backbone=SimpleNamespace(num_tokens=16))
    made = ATTACKS[attack]() if isinstance(attack, str) else attack
    case = Case("m", model, Named(defence), made, fallback=fallback, hardest=hardest)
    status = status or ("refused" if reason is not None else "done" if partial is None else "stopped")
    texts: dict[Any, str | None] = {"refused": reason, "stopped": partial, "fallback": fallback, "inexact": caveat}
    texts |= {"doubt": doubt, "lower_bound": "a lower bound" if lower_bound else None}
    count = len((scores or {}).get("psnr") or ())
    return case.finding(
        status,
        range(count) if numbers is None else numbers,
        scores=scores or {},
        facts=list(facts),
        shown=pictures,
        remarks=[Remark(kind, text) for kind, text in texts.items() if text],
        certificates=[Certificate(True, unique=True, order_known=True)] * count if made.closed_form else [],
    )


def held(findings: Sequence[ImageFinding], blind: Any, names: Sequence[str]) -> list[ImageFinding]:
    """The findings as a gate reads them."""
    return [finding.against(blind, names) for finding in findings]


def passing(**fields: Any) -> Audit:
    """Five images, of which a closed form and the oracle have no more than blind guesses."""
    real = torch.rand(5, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grey = torch.full_like(real, 0.5)
    blind = {"mean image": measure_all(real.mean(dim=0).expand_as(real), real, 8), "grey": measure_all(grey, real, 8)}
    closed = outcome("patchembed", "noise", None, None, measure_all(real.roll(1, 0), real, 8), [{}] * 5)
    bounds = [
        outcome(Oracle(), "noise", None, None, measure_all(grey[:1], real[:1], 8), numbers=(0,), hardest=hardest)
        for hardest in (False, True)
    ]
    findings = held([closed, *bounds], blind, [*"abcde"])
    fields = {"about": {"noise": "noise is added"}} | fields
    return Audit(findings, [*"abcde"], real, "a-model", Step(), blind, **fields)


def undone(attack: str, defence: str) -> ImageFinding:
    return outcome(attack, defence, status="not_run")


def prepared(attack: Attack, backbone: Any, sent: Collection[str] | None = None, **known: Any) -> Ready | Refused:
    """What an attack says to gradients of these names; without them to all that a client has."""
    names = [name for name, _ in backbone.named_parameters()] if sent is None else sent
    return attack.prepare(backbone, names, Knowledge(**known))


def reason(attack: Attack, backbone: Any, sent: Collection[str] | None = None, **known: Any) -> str | None:
    found = prepared(attack, backbone, sent, **known)
    return found.reason if isinstance(found, Refused) else None


def caveat(attack: Attack, backbone: Any, **known: Any) -> str | None:
    found = prepared(attack, backbone, None, **known)
    assert isinstance(found, Ready), found
    return found.caveat
