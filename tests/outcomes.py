"""Outcomes and preparations made by hand, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from situs.audit import ATTACKS
from situs.audit.attacks.base import Attack, Knowledge, Ready, Refused
from situs.audit.cases import Case, Outcome
from situs.audit.defences import Defence


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
    by_itself: str = "",
    hardest: bool = False,
    **fields: Any,
) -> Outcome:
    """What came of an attack against a defence; its status follows from the rest."""
    model: Any = SimpleNamespace(backbone=SimpleNamespace(num_tokens=16))
    made = ATTACKS[attack]() if isinstance(attack, str) else attack
    case = Case("m", model, Named(defence), made, by_itself=by_itself, hardest=hardest)
    partial = fields.get("partial")
    status = status or ("refused" if reason is not None else "done" if partial is None else "stopped")
    return Outcome(case, status, scores or {}, list(facts), pictures, reason, caveat, **fields)


def undone(attack: str, defence: str) -> Outcome:
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
