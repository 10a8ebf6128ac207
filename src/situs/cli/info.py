"""What a model is made of, and which methods and locks apply to it (or why not)."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from situs.cli.model_args import ModelArgs, open_from
from situs.cli.tables import print_table
from situs.errors import SitusError

if TYPE_CHECKING:
    from situs.backbones.base import Backbone

LOCKS = {
    "rows": "the order of the tokens as key: private split learning",
    "columns": "the order of the channels as key: locked models",
}
"""capability -> the lock that stands on it."""


@dataclass(frozen=True, kw_only=True)
class Args(ModelArgs):
    """What a model is made of."""

    json: bool = False
    """Print JSON instead of tables."""


@dataclass(frozen=True)
class Verdict:
    """Whether something applies, and why not."""

    name: str
    about: str
    holds: bool
    reason: str = ""


@dataclass(frozen=True)
class Info:
    """What `situs info` shows."""

    model: str
    facts: dict[str, Any]
    capabilities: list[Verdict]
    methods: list[Verdict]
    locks: list[Verdict]


def run(args: Args) -> None:
    """Opens the model, of a name or a folder its shapes alone, describes it and prints that."""
    info = describe(open_from(args, any_weights=True, device="meta").backbone)
    if args.json:
        print(json.dumps(asdict(info), indent=2))
        return
    print_table(info.model, [(name.replace("_", " "), _text(value)) for name, value in info.facts.items()])
    for title, verdicts in (
        ("It can do", info.capabilities),
        ("Methods that apply", info.methods),
        ("Locks that apply", info.locks),
    ):
        if verdicts:
            print_table(title, [(v.name, "yes" if v.holds else "no", v.reason or v.about) for v in verdicts])


def describe(backbone: Backbone) -> Info:
    """Facts and verdicts of a backbone; reads shapes and refusals, makes methods without values, runs nothing."""
    from situs.backbones.base import CAPABILITIES

    return Info(
        model=backbone.name,
        facts=_facts(backbone),
        capabilities=[_verdict(backbone, name, about, [name]) for name, about in CAPABILITIES.items()],
        methods=[_method(backbone, name) for name in _methods()],
        locks=[_verdict(backbone, name, about, ["tokens", name]) for name, about in LOCKS.items()],
    )


def _facts(backbone: Backbone) -> dict[str, Any]:
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
    """The verdict on a method with its defaults: whether it can be made over this backbone.

    One of another package that cannot be imported says so, and harms no other.
    """
    import torch

    try:
        kind = _methods()[name]
    except SitusError as error:
        return Verdict(name, "", holds=False, reason=str(error))
    # Whatever a method can do, `pretrain` and `finetune` read images alone.
    verdict = _verdict(backbone, name, _first_line(kind), ("images", *kind.needs))
    if not verdict.holds:
        return verdict
    try:
        with torch.device("meta"):
            kind(copy.deepcopy(backbone), kind.Config())  # a copy: a method may prepare its backbone
    except SitusError as error:
        return replace(verdict, holds=False, reason=str(error))
    except RuntimeError:  # it computes while it is made, and here nothing has values: what it needs is all we know
        return verdict
    return verdict


def _methods() -> Mapping[str, Any]:
    """The visible dict of methods, where this installation has that room."""
    spec = find_spec("situs.methods")
    return {} if spec is None or spec.origin is None else import_module("situs.methods").METHODS


def _first_line(method: Any) -> str:
    """A method's file opens with its name and paper."""
    return (import_module(method.__module__).__doc__ or "").strip().partition("\n")[0]


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return " × ".join(map(str, value))
    if isinstance(value, list):
        return " + ".join(value) or "none added"
    return f"{value:,}" if isinstance(value, int) else str(value)
