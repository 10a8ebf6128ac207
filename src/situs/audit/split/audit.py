"""Audits of split learning: every veil of a client against every attacker on its server."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch

from situs.audit.deadline import Deadline
from situs.audit.run import FINDS, Card, run
from situs.audit.scores import baselines
from situs.audit.split.attackers import ATTACKS, SplitFinding, attack
from situs.audit.split.result import SplitAudit, exposures_of
from situs.audit.split.stage import NONE, Kept, Scene, Stage, check_places, open_base
from situs.audit.sweep.ladder import TOKEN_LADDERS
from situs.backbones.base import Backbone
from situs.config import checks_arguments
from situs.data.loader import Loader
from situs.data.sampler import epoch_order
from situs.errors import SitusError, counted, unknown_name
from situs.findings import Finding
from situs.limits import check_value
from situs.locks.veil import PERMUTED, Veil, parse_veil, parse_veils
from situs.models import Model
from situs.models.data import AnyData, AnyModel, Chosen, load_set, made_with, opened, top1_reason
from situs.results import Provenance
from situs.train.run import is_run

SAMPLES, PUBLIC = 64, 300
"""The default numbers of attacked images, and of public images that the attacker has, from the same source."""

DEFENCES = ("none", "noise=0.2", "lowpass=0.3", "batch-shuffle=8")
CURVE = ("none", *(setting for ladder in TOKEN_LADDERS.values() for setting in ladder))
"""What `curve` among the defences stands for: strengths enough to draw what each hides against what it costs."""


class Watched(Chosen, total=False):
    """How the images are read. keep: called with the result now and then, so that a crash loses little."""

    keep: Callable[[SplitAudit], None]


@checks_arguments("data")
def audit_split(
    model: AnyModel,
    data: AnyData = None,
    *,
    defences: Sequence[str] = DEFENCES,
    permute: Sequence[str] = PERMUTED,
    attacks: Sequence[str] = tuple(ATTACKS),
    base: AnyModel | None = None,
    public: int = PUBLIC,
    pictures: bool = False,
    seed: int = 0,
    deadline: Deadline | None = None,
    **chosen: Unpack[Watched],
) -> SplitAudit:
    """Measures what the server of split learning can learn about samples, for each defence.

    model: whatever `open_model` takes. data: a path or a source; None for the images that a run was trained on.
    defences: what the client does to the features that it sends, "none" or as in `situs audit split --help`. permute:
    what it shuffles, "rows" (tokens) and "columns" (channels), each also alone. attacks: all by default. base: the
    model before fine-tuning, whose embedding is public. public: images of the set that the attacker has, chosen at
    random beside those that are attacked. pictures: keep the images and their reconstructions, which makes the page
    private. deadline: `situs.audit.Deadline(seconds=60)`, checked between attackers; when its time is over, or on
    Ctrl-C, the result so far is returned and says so; it cannot be resumed. chosen: split, held_out, count (of attacked
    samples) and batch, as in `situs.extract_features`.

    >>> audit = situs.audit_split("runs/ft", defences=["none"], attacks=["linkage"], count=8, public=8)
    >>> page = situs.publish(audit, "audit")
    """
    veils = parse_veils(defences, permute, CURVE)
    for name in attacks:
        if name not in ATTACKS:
            raise unknown_name("attack", name, ATTACKS, field="attacks")
    check_value("public", public, ">= 2")
    count = SAMPLES if (limit := chosen.get("count")) is None else limit
    check_value("count", count, ">= 2")
    keep = chosen.pop("keep", None)
    stage, provenance = _stage(model, data, base, count, public, seed, chosen)
    scenario = Split(stage, veils, tuple(attacks), public, provenance, pictures=pictures)
    return run(scenario, deadline, keep)


@dataclass
class Split:
    """The scenario of split learning: every veil of a client against every attacker of its server.

    pictures: whether findings keep the recovered pictures. kept: the utility under each veil that was started.
    """

    name: ClassVar[str] = "split"

    stage: Stage
    veils: Sequence[Veil]
    attacks: Sequence[str]
    public: int
    provenance: Provenance
    pictures: bool = False
    kept: dict[str, Kept] = field(default_factory=dict)
    scene: Scene | None = None

    @cached_property
    def blind(self) -> dict[str, dict[str, float]]:
        """Scores of blind guesses, which saw no token."""
        guesses = {name: self.stage.scores(guess) for name, guess in baselines(self.stage.pictures).items()}
        common = self.stage.commonest()
        return guesses | ({"commonest labels": common} if common else {})

    @staticmethod
    def cards() -> Iterator[Card]:
        paper = "Permutation equivariance of transformers and its applications (Xu et al., CVPR 2024)"
        for name, (function, knows) in ATTACKS.items():
            plain = name == "decoder"
            about = (function.__doc__ or "").partition("\n")[0].rstrip(".")
            about = (
                "predicts pixels from features, first with a regression, then with a small transformer"
                if plain
                else about
            )
            needs = f"the features at the cut, and public images; the attacker knows {knows}"
            yield Card(name, Split.name, needs, FINDS, paper if plain else "ours", about, "benchmarks/split.py")

    def planned(self) -> Iterator[SplitFinding]:
        asked = len(self.stage.z)
        for veil in self.veils:
            yield from (SplitFinding(name, str(veil), "not_run", asked=asked, veil=veil) for name in self.attacks)

    def trials(self) -> Iterator[_Trial]:
        return (_Trial(self, veil, name) for veil in self.veils for name in self.attacks)

    def attack(self, veil: Veil, name: str, deadline: Deadline) -> SplitFinding:
        """One attacker on one veil; what all attackers on a veil share is computed once."""
        if self.scene is None or self.scene.veil != veil:
            deadline.say(str(veil))
            self.kept[str(veil)] = self.stage.keeps(veil.defence)
            self.scene = Scene.of(self.stage, veil)
        finding = attack(name, self.scene)
        exposures = exposures_of(finding.figures, self.blind, len(self.stage.z))
        return replace(finding, exposures=exposures, shown=finding.shown if self.pictures else None)

    def report(self, findings: Mapping[Hashable, Finding], stopped: str | None) -> SplitAudit:
        stage, shown = self.stage, self.stage.pictures.float() if self.pictures else None
        facts = stage.model.name, len(stage.z), self.public, dict(self.kept), self.blind, shown
        more: dict[str, Any] = {"trained": _trained_under(stage), "thin": stage.thin}
        return SplitAudit([*findings.values()], *facts, stopped=stopped, provenance=self.provenance, **more)


@dataclass
class _Trial:
    """One attacker on one veil: one turn."""

    scenario: Split
    veil: Veil
    name: str
    at: int = 0
    total: int = 1
    ended: bool = False

    def turn(self, deadline: Deadline, left: int) -> Iterator[SplitFinding]:  # noqa: ARG002
        finding = self.scenario.attack(self.veil, self.name, deadline)
        self.at = 1
        yield finding


def _stage(
    model: AnyModel, data: AnyData, base: AnyModel | None, count: int, public: int, seed: int, chosen: Chosen
) -> tuple[Stage, Provenance]:
    """The models and the images, read once and divided at random; and their provenance."""
    model = opened(model, seed)
    model.backbone.require("tokens")
    check_places(model.backbone)
    if not model.positions:
        raise SitusError(f"{model.name}: was trained without positions, so the attacks have no positions to find")
    if len(model.backbone.grid) != 2:
        texts = "; for a language model give a .txt file" * bool(model.backbone.input.words)
        raise SitusError(f"{model.name}: takes no images, but these attacks recover only images{texts}", field="data")
    loader = load_set(model, data, **{**chosen, "count": count + public})
    batches = [(batch.inputs, batch.targets.get(loader.source.target)) for batch in loader]
    inputs, mixed = (
        torch.cat([images for images, _ in batches]),
        epoch_order(seed, 0, sum(len(images) for images, _ in batches)),
    )
    if len(inputs) < public + 2:
        raise SitusError(
            f"{loader.source.name}: has {counted(len(inputs), 'images')}, but at least {public + 2} are needed: "
            f"{public} public images for the attacker, and two or more images to attack",
            field=("public", "count"),
        )
    labels = [label for _, label in batches if label is not None]
    named = torch.cat(labels)[mixed] if labels else None
    reason = None if loader.classes is None else _unnamed(model, loader)
    sized = {} if base is None or not isinstance(base, str | Path) or is_run(base) else {"img_size": model.data.size}
    old = None if base is None else open_base(base, model, seed, _shape, **sized)
    stage = Stage(
        model, inputs[mixed], public, loader.mean, loader.std, old=old, labels=named, unnamed=reason, seed=seed
    )
    attacked = {"samples attacked": str(len(stage.z)), "public images": str(public)}
    return stage, made_with(model, loader, seed, more=attacked)


def _shape(backbone: Backbone) -> str:
    return f"has a grid of {backbone.grid}, {backbone.num_prefix} prefix tokens and {backbone.dim} channels"


def _unnamed(model: Model, loader: Loader) -> str | None:
    """Why the data's labels are not the classifier's classes; None where they are."""
    if loader.source.multi_label and (model.classes is None or model.multi_label):
        return (
            None
            if model.classes in (None, loader.classes)
            else "the classes of the model differ from the classes of the data"
        )
    if model.multi_label:
        return "the model predicts several classes per image, but the data has one class per image"
    return top1_reason(model, loader)


def _trained_under(stage: Stage) -> Veil | None:
    """The defence of a run's training, its σ relative to the tokens as they are now: they grow, the noise does not."""
    facts = stage.model.facts
    if (defence := parse_veil(facts.get("defence", "none"))).kind != "noise":
        return None if defence.kind == "none" else defence
    return replace(defence, strength=defence.strength * facts["defence_scale"] / stage.side(NONE).scale)
