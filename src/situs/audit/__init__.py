"""Audits: what a model's gradients give away, measured by attackers that know the defence."""

from __future__ import annotations

from dataclasses import fields

from situs.audit.adapter import adapt
from situs.audit.adaptive import AdaptiveConfig, AdaptiveMJP
from situs.audit.april import April
from situs.audit.april_optimise import AprilOptimisation
from situs.audit.attack import Attack, Knowledge, Recovery
from situs.audit.matching import Matching
from situs.audit.patchembed import PatchEmbedding
from situs.audit.search import MatchingConfig
from situs.audit.threat import (
    Clip,
    Defence,
    Gradients,
    MaskedJigsaw,
    NoDefence,
    Noise,
    NoPositionGradient,
    victim_gradients,
)
from situs.errors import SitusError, unknown_name

ATTACKS: dict[str, type[Attack]] = {
    "adaptive-mjp": AdaptiveMJP,
    "april": April,
    "april-optimisation": AprilOptimisation,
    "matching": Matching,
    "patchembed": PatchEmbedding,
}
"""Every attack by name. The command line and the contract tests read this dict."""

DEFENCES: dict[str, type[Defence]] = {
    "clip": Clip,
    "mjp": MaskedJigsaw,
    "no-pe-gradient": NoPositionGradient,
    "noise": Noise,
    "none": NoDefence,
}
"""Every defence by name; `create_defence("noise=1e-4")` sets its first setting."""


def create_attack(name: str, *configs: object) -> Attack:
    """An attack by name, with that of the configs which is its own; without one as it is by default."""
    if name not in ATTACKS:
        raise unknown_name("attack (--attack)", name, ATTACKS)
    kind = ATTACKS[name]
    return kind(next((config for config in configs if type(config) is kind.Config), None))


def create_defence(text: str) -> Defence:
    """A defence by name, with its first setting behind "=": "noise=1e-4", "clip=0.5", "mjp=0.27"."""
    name, equals, value = text.partition("=")
    if name not in DEFENCES:
        raise unknown_name("defence (--defence)", name, DEFENCES)
    kind = DEFENCES[name]
    if not equals:
        return kind()
    if not fields(kind):
        raise SitusError(f"{text}: {name} has no setting (--defence)")
    try:
        number = float(value)
    except ValueError:
        raise SitusError(f"{text}: {value!r} is no number (--defence)") from None
    return kind(*[number])


__all__ = [
    "ATTACKS",
    "DEFENCES",
    "AdaptiveConfig",
    "AdaptiveMJP",
    "AprilOptimisation",
    "Attack",
    "Clip",
    "Defence",
    "Gradients",
    "Knowledge",
    "MaskedJigsaw",
    "Matching",
    "MatchingConfig",
    "NoDefence",
    "NoPositionGradient",
    "Noise",
    "PatchEmbedding",
    "Recovery",
    "adapt",
    "create_attack",
    "create_defence",
    "victim_gradients",
]
