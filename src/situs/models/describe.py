"""What a model is made of, and which methods and locks apply to it, or why not."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from situs.backbones.base import CAPABILITIES, Backbone
from situs.backbones.shapes import shapes_alone
from situs.errors import SitusError
from situs.methods import METHODS, classifies
from situs.results import Table, show

LOCKS = {
    "rows": "the order of the tokens is the key (private split learning)",
    "columns": "the order of the channels is the key (locked models)",
}
"""capability -> the lock that needs it."""


@dataclass(frozen=True)
class Verdict:
    """Whether something applies, and why not."""

    name: str
    about: str
    holds: bool
    reason: str = ""


@dataclass(frozen=True)
class Info:
    """Facts and verdicts of a model."""

    model: str
    facts: dict[str, Any]
    capabilities: list[Verdict]
    methods: list[Verdict]
    locks: list[Verdict]

    def tables(self) -> list[Table]:
        """The same as tables."""
        facts = [(name.replace("_", " "), fact_text(value)) for name, value in self.facts.items()]
        named = {"It can do": self.capabilities, "Methods that apply": self.methods, "Locks that apply": self.locks}
        judged = [
            Table(title, (), [(verdict.name, verdict.holds, verdict.reason or verdict.about) for verdict in verdicts])
            for title, verdicts in named.items()
        ]
        return [Table(self.model, (), facts), *judged]


def describe(backbone: Backbone) -> Info:
    """Facts and verdicts of a backbone, from shapes and refusals; methods are made without values, nothing is run."""
    return Info(
        model=backbone.name,
        facts=facts_of(backbone),
        capabilities=[_verdict(backbone, name, about, [name]) for name, about in CAPABILITIES.items()],
        methods=[_method(backbone, name) for name in METHODS],
        locks=[_verdict(backbone, name, about, ["tokens", name]) for name, about in LOCKS.items()],
    )


def facts_of(backbone: Backbone) -> dict[str, Any]:
    """Class, tokens and size of a model."""
    model = backbone.model
    facts: dict[str, Any] = {"class": f"{type(model).__module__}.{type(model).__qualname__}"}
    if "tokens" in backbone.refusals:
        facts |= {"tokens": 0, "width": backbone.dim, "depth": backbone.depth, "position": []}
    else:
        facts |= {"tokens": backbone.num_tokens, "grid": backbone.grid, "width": backbone.dim}
        if (backbone.out_grid, backbone.out_dim) != (backbone.grid, backbone.dim):
            facts |= {"output_grid": backbone.out_grid, "output_width": backbone.out_dim}
        facts |= {"depth": backbone.depth, "prefix_tokens": backbone.num_prefix}
        facts |= {"position": list(backbone.positions().kinds)}
    return facts | {"parameters": sum(p.numel() for p in model.parameters())}


def _verdict(backbone: Backbone, name: str, about: str, needs: Iterable[str]) -> Verdict:
    reasons = dict.fromkeys(backbone.refusals[need] for need in needs if need in backbone.refusals)
    return Verdict(name, about, not reasons, "; ".join(reasons))


def _method(backbone: Backbone, name: str) -> Verdict:
    """Whether a method with its defaults can be made over this backbone.

    For a plugin that cannot be imported the verdict says so.
    """
    try:
        kind: Any = METHODS[name]
    except SitusError as error:
        return Verdict(name, "", holds=False, reason=str(error))
    about = (import_module(kind.__module__).__doc__ or "").strip().partition("\n")[0]  # its name and paper
    on_text = backbone.input.words and kind.reads_text
    verdict = _verdict(backbone, name, about, kind.needs if on_text else ("images", *kind.needs))
    if not verdict.holds:
        return verdict
    try:
        with shapes_alone():
            classes = (2,) if classifies(kind) else ()
            kind(copy.deepcopy(backbone), kind.Config(), *classes)  # a copy: a method may prepare its backbone
    except SitusError as error:
        return replace(verdict, holds=False, reason=str(error))
    except RuntimeError:  # it computes while it is made, and here nothing has values: only its needs are known
        return verdict
    return verdict


def fact_text(value: Any) -> str:
    """A fact for people: 14 × 14, table + rotary, 86,567,656."""
    if isinstance(value, tuple):
        return " × ".join(map(str, value))
    return (" + ".join(value) or "none added") if isinstance(value, list) else show(value)
