"""Attacks of a server on the gradients that a client sends, by name."""

from __future__ import annotations

from situs.audit.attacks.adaptive import AdaptiveMJP
from situs.audit.attacks.april import April, AprilOptimisation
from situs.audit.attacks.base import Attack
from situs.audit.attacks.crafted import ChosenWeights
from situs.audit.attacks.crafted_adapters import ChosenAdapters
from situs.audit.attacks.crafted_biases import ChosenBiases
from situs.audit.attacks.crafted_head import ChosenHead
from situs.audit.attacks.crafted_lora import ChosenLora
from situs.audit.attacks.matching import Matching
from situs.audit.attacks.patchembed import PatchEmbedding
from situs.audit.attacks.prior import PatchEmbeddingPrior
from situs.audit.attacks.tokens.attack import TokenSpans
from situs.errors import unknown_name
from situs.plugins import Plugins

_KINDS = (
    AdaptiveMJP,
    April,
    AprilOptimisation,
    ChosenAdapters,
    ChosenBiases,
    ChosenHead,
    ChosenLora,
    ChosenWeights,
    Matching,
    PatchEmbedding,
    PatchEmbeddingPrior,
    TokenSpans,
)

ATTACKS: Plugins[type[Attack]] = Plugins(
    {kind.name: kind for kind in _KINDS}, "situs.attacks", ("name", "about", "prepare", "recover")
)
"""Every attack by name. The command line and the contract tests read it."""


def create_attack(name: str | Attack, *configs: object) -> Attack:
    """An attack by name, with the config of its type among `configs`, else with its defaults."""
    if isinstance(name, Attack):
        return name
    if name not in ATTACKS:
        raise unknown_name("attack", name, ATTACKS, field="attacks")
    kind = ATTACKS[name]
    return kind(next((config for config in configs if type(config) is kind.Config), None))
