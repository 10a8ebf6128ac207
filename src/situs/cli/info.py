"""What a model is made of, and which methods and locks apply to it (or why not)."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from situs.cli.tables import print_table
from situs.errors import SitusError

if TYPE_CHECKING:
    from situs.backbones.base import Backbone

LOCKS = {
    "rows": "the order of the tokens as key: private split learning",
    "columns": "the order of the channels as key: locked models",
}
"""capability -> the lock that stands on it."""


@dataclass(frozen=True)
class Args:
    """What a model is made of."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A timm name (vit_small_patch16_224) or the folder of a Hugging Face model."""

    img_size: Annotated[int | tuple[int, int] | None, tyro.conf.arg(metavar="SIDE|HEIGHT WIDTH")] = None
    """Image size in pixels, where it differs from the model's own."""

    patch_size: Annotated[int | None, tyro.conf.arg(metavar="PIXELS")] = None
    """Patch size in pixels, where it differs from the model's own."""

    in_chans: int = 3
    """Channels of an image."""

    json: tyro.conf.FlagCreatePairsOff[bool] = False
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
    """Builds the model without its values, describes it and prints that."""
    info = describe(_build(args))
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


def _build(args: Args) -> Backbone:
    """The backbone on the meta device, which holds shapes and no values: no model is too large."""
    import torch

    from situs.backbones import create_backbone

    sizes = {"img_size": args.img_size, "patch_size": args.patch_size, "in_chans": args.in_chans}
    try:
        with torch.device("meta"):
            return create_backbone(args.model, **sizes)
    except (SitusError, RuntimeError):  # the mistake is the user's, or this family computes while it is built
        return create_backbone(args.model, **sizes)


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
    verdict = _verdict(backbone, name, _first_line(kind), kind.needs)
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
