"""Audits: what a model's gradients give away, measured by attackers that know the defence."""

from __future__ import annotations

from situs.audit.adapter import adapt
from situs.audit.attacks import ATTACKS, create_attack
from situs.audit.attacks.adaptive import AdaptiveConfig, AdaptiveMJP
from situs.audit.attacks.april import April, AprilOptimisation
from situs.audit.attacks.base import Attack, Knowledge, Recovery
from situs.audit.attacks.matching import Matching, MatchingConfig
from situs.audit.attacks.patchembed import PatchEmbedding
from situs.audit.chosen import ChosenWeightsError, check_weights
from situs.audit.client import StepConfig, victim_gradients
from situs.audit.deadline import Deadline
from situs.audit.defences import (
    DEFENCES,
    Clip,
    Defence,
    Gradients,
    MaskedJigsaw,
    NoDefence,
    Noise,
    NoPositionGradient,
    create_defence,
)
from situs.audit.public import AuditConfig, audit_gradients, audit_settings
from situs.audit.sweep.curve import trace_defences, trace_texts
from situs.audit.sweep.weakest import find_defences
from situs.audit.text.audit import audit_texts
from situs.audit.watch import Guard, LeakError, guard

__all__ = [
    "ATTACKS",
    "DEFENCES",
    "AdaptiveConfig",
    "AdaptiveMJP",
    "April",
    "AprilOptimisation",
    "Attack",
    "AuditConfig",
    "ChosenWeightsError",
    "Clip",
    "Deadline",
    "Defence",
    "Gradients",
    "Guard",
    "Knowledge",
    "LeakError",
    "MaskedJigsaw",
    "Matching",
    "MatchingConfig",
    "NoDefence",
    "NoPositionGradient",
    "Noise",
    "PatchEmbedding",
    "Recovery",
    "StepConfig",
    "adapt",
    "audit_gradients",
    "audit_settings",
    "audit_texts",
    "check_weights",
    "create_attack",
    "create_defence",
    "find_defences",
    "guard",
    "trace_defences",
    "trace_texts",
    "victim_gradients",
]
