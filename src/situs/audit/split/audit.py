"""What an untrusted server of split learning learns: every setting of the client against every attacker of SPEC §7."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from situs.audit.scores.metrics import denormalise
from situs.audit.split.attackers import ATTACKS, Reading, Scene
from situs.audit.split.borders import Borders
from situs.audit.split.labels import labels_with_head, labels_without_head, share_up_to_names
from situs.audit.split.order import PublicSide, public_side
from situs.audit.split.view import PIECE, Setting, View, counted_words, send, streams
from situs.backbones.base import Backbone, Stream
from situs.core.tokens import patchify
from situs.errors import SitusError
from situs.limits import check_value
from situs.locks.features import Defence, defend, parse_defence
from situs.models import Model
from situs.models.data import AnyData, AnyModel, Images, load_set, made_with, opened
from situs.results import Cell, Result, Summary, Table, percent

PUBLIC = 300
"""Images that the attacker has of its own, from the same source, none of them attacked."""

RECOGNISED = 20.0
"""dB from which the page calls a picture recognisable; the numbers stand beside it."""

THREAT = (
    "The server runs the blocks as it should and looks at all it is sent. It has public images of the same kind, and what "
    "each attacker is said to know beside them. TLS keeps others out, not the server. Nothing here is a cryptographic or "
    "differential-privacy claim, and an attack that was not tried is no protection."
)

PAPER = ("none", "noise=0.2", "lowpass=0.3", "batch-shuffle=8")


@dataclass(frozen=True)
class SettingFound:
    """One setting: what the client's task keeps, and what each attacker found.

    cosine: mean similarity of the pooled features with the undefended ones. accuracy: top-1 with it, or None.
    """

    setting: Setting
    cosine: float
    accuracy: float | None
    readings: tuple[Reading, ...]

    def best(self, score: str) -> float | None:
        """The highest value of a score over the attackers; None where no attack gave it."""
        values = [reading.scores[score] for reading in self.readings if score in reading.scores]
        return max(values, default=None)


@dataclass(frozen=True)
class SplitAudit(Result):
    """All settings. labels: shares of labels read off the gradients that come back, by what is known, or why not."""

    file: ClassVar[str] = "split-audit"

    name: str
    samples: int
    public: int
    settings: tuple[SettingFound, ...]
    labels: Mapping[str, float]
    no_labels: str
    pictures: Tensor | None = None

    @property
    def private(self) -> bool:
        """Its page shows the images and what was made of them."""
        return self.pictures is not None

    def summary(self) -> Summary:
        """The verdict, the table, and what was not tried."""
        skipped: dict[str, list[str]] = {}
        for found in self.settings:
            for reading in found.readings:
                if reading.status == "not tried":
                    skipped.setdefault(f"{reading.attack}: {reading.reason}", []).append(str(found.setting))
        notes = [f"not tried: {why} ({', '.join(where)})" for why, where in skipped.items()]
        if self.no_labels:
            notes.append(f"not tried: labels: {self.no_labels}")
        return Summary(verdict(self), (table(self),), tuple(notes))

    def numbers(self) -> dict[str, Any]:
        """Every score of every attacker."""
        return {
            "name": self.name,
            "threat_model": THREAT,
            "verdict": verdict(self),
            "samples": self.samples,
            "public_images": self.public,
            "labels": dict(self.labels),
            "settings": [
                {
                    "setting": str(found.setting),
                    "feature_cosine": found.cosine,
                    "accuracy": found.accuracy,
                    "attacks": [
                        {"attack": r.attack, "knows": r.knows, "status": r.status, "reason": r.reason or None, **r.scores}
                        for r in found.readings
                    ],
                }
                for found in self.settings
            ],
        }


HEADER = ("setting", "accuracy", "features", "attacker", "knows", "places", "channels", "samples", "linked", "PSNR", "best", "SSIM")


def table(audit: SplitAudit) -> Table:
    """A row an attacker, below its setting."""
    rows: list[list[Cell]] = []
    for found in audit.settings:
        accuracy = None if found.accuracy is None else percent(found.accuracy)
        start: list[Cell] = [str(found.setting), accuracy, f"{found.cosine:.3f}"]
        for reading in found.readings:
            if reading.status == "done":
                rows.append([*start, reading.attack, reading.knows, *_cells(reading.scores)])
                start = ["", "", ""]
    return Table(f"{audit.name}: what a server learns of {audit.samples} samples", HEADER, rows)


def _cells(scores: Mapping[str, float]) -> list[Cell]:
    shares: list[Cell] = [percent(scores[key]) if key in scores else None for key in ("places", "channels", "samples", "linked")]
    decibels: list[Cell] = [f"{scores[key]:.1f} dB" if key in scores else None for key in ("psnr", "worst psnr")]
    return [*shares, *decibels, f"{scores['ssim']:.3f}" if "ssim" in scores else None]


def verdict(audit: SplitAudit) -> str:
    """What the permutations and each defence leave to the server, in sentences."""
    said = []
    for found in audit.settings:
        quality, places = found.best("psnr"), found.best("places")
        if quality is None:
            said.append(f"Under {found.setting} no attack gave pictures, which is no protection.")
            continue
        order = "" if places is None or not found.setting.rows else f", {percent(places)} of the patches in their places"
        said.append(
            f"Under {found.setting} the server sees the samples: {quality:.1f} dB{order}."
            if quality >= RECOGNISED
            else f"Under {found.setting} the attacks that were tried come to {quality:.1f} dB at best{order}."
        )
    for what, share in audit.labels.items():
        said.append(f"Labels from what comes back, {what}: {percent(share)}.")
    return " ".join(said)


def settings_of(defences: Sequence[str], permute: Sequence[str]) -> tuple[Setting, ...]:
    """Each defence without and with the permutations named, and the permutations alone."""
    for each in permute:
        if each not in ("rows", "columns"):
            raise SitusError(field="permute", value=each, allowed="rows, columns")
    parsed = [parse_defence(each) for each in defences]
    combined = [(False, False), *dict.fromkeys((("rows" in part), ("columns" in part)) for part in _parts(permute))]
    return tuple(Setting(defence, rows, columns) for defence in parsed for rows, columns in combined)


def _parts(permute: Sequence[str]) -> Iterator[tuple[str, ...]]:
    yield from ((each,) for each in permute)
    if len(permute) > 1:
        yield tuple(permute)


def audit_split(
    model: AnyModel,
    data: AnyData = None,
    *,
    defences: Sequence[str] = PAPER,
    permute: Sequence[str] = ("rows", "columns"),
    attacks: Sequence[str] = tuple(ATTACKS),
    base: AnyModel | None = None,
    public: int = PUBLIC,
    pictures: bool = False,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
    **images: Unpack[Images],
) -> SplitAudit:
    """What a server that runs a model's blocks learns of the samples, for each defence without and with permutations.

    model: whatever `open_model` takes, `situs split merge`'s run among it. data: a path or a source; None for the images
    that a run was trained on. base: the model before fine-tuning, whose embedding is public. public: images of the set
    that the attacker has; they are none of those attacked. pictures: keep the images and what was made of them, which
    makes the page private. images: see `load_set`; count is the samples attacked.
    """
    for name in attacks:
        if name not in ATTACKS:
            raise SitusError(field="attacks", value=name, allowed=", ".join(ATTACKS))
    check_value("public", public, ">= 2")
    model = opened(model, seed)
    model.backbone.require("tokens")
    old = None if base is None else opened(base, seed)
    images["count"] = (images.get("count") or 64) + public
    loader = load_set(model, data, **images)
    given = [(batch.inputs, batch.targets.get("label")) for batch in loader]
    inputs = torch.cat([each for each, _ in given])
    labels = None if given[0][1] is None else torch.cat([label for _, label in given if label is not None])
    if len(inputs) < public + 1:
        raise SitusError(
            f"{loader.source.name}: {len(inputs)} images are too few: the attacker's own are {public} of them",
            field=("public", "count"),
        )
    stage = _Stage(model, old, inputs, public, loader.mean, loader.std, labels, seed)
    found = []
    for setting in settings_of(defences, permute):
        progress(str(setting))
        found.append(stage.attack(setting, attacks))
    known, why = stage.labels()
    shown = stage.pictures.float() if pictures else None
    if not pictures:
        found = [replace(each, readings=tuple(replace(r, images=None) for r in each.readings)) for each in found]
    made = made_with(model, loader, seed, more={"public images": str(public)})
    return SplitAudit(model.name, len(stage.z), public, tuple(found), known, why, shown, provenance=made)


class _Stage:
    """Private and public images, and what is computed of them once."""

    def __init__(
        self, model: Model, old: Model | None, inputs: Tensor, public: int, mean: Tensor, std: Tensor,
        labels: Tensor | None, seed: int,
    ) -> None:  # fmt: skip
        self.model, self.seed = model, seed
        self.backbone: Backbone = model.backbone.eval()
        self.old = None if old is None else old.backbone.eval()
        height, width = self.backbone.grid  # a grid of two sides: images
        self.patch = inputs.shape[2] // height, inputs.shape[3] // width
        pixels = denormalise(inputs.cpu(), mean.flatten().tolist(), std.flatten().tolist())
        self.public, self.private = inputs[:public], inputs[public:]
        self.patches, self.pictures = patchify(pixels[:public], self.patch), pixels[public:]
        self.truth = None if labels is None else labels[public:].cpu()
        self.z = streams(self.backbone, self.private.split(PIECE))
        self.borders = Borders.of(self.patches, (*self.patch, pixels.shape[1]), (height, width))
        self.clean = self._through(self.z, Defence(), 1.0)
        self.sides: dict[tuple[str, bool], PublicSide] = {}
        self.channels = counted_words(seed, 9)("columns", self.z.shape[2]).argsort(stable=True)

    def side(self, defence: Defence, old: bool = False) -> PublicSide:
        """What the attacker knows under a defence; fitted once."""
        key = str(defence), old
        if key not in self.sides:
            backbone = self.old if old else self.backbone
            assert backbone is not None
            self.sides[key] = public_side(backbone, self.public.split(PIECE), self.patches, defence)
        return self.sides[key]

    def attack(self, setting: Setting, attacks: Sequence[str]) -> SettingFound:
        """Every attack on one setting, and what the defence leaves of the model's answers."""
        side = self.side(setting.defence)
        prefix, grid = len(side.prefix), (self.backbone.grid[0], self.backbone.grid[1])

        def sent(z: Tensor, number: int) -> View:
            words = counted_words(self.seed, number)
            return send(z, setting, words, prefix=prefix, grid=grid, scale=side.scale, channels=self.channels)

        scene = Scene(
            setting=setting, view=sent(self.z, 0), z=self.z, pictures=self.pictures, side=side,
            old=None if self.old is None else self.side(setting.defence, old=True), borders=self.borders,
            patches=self.patches, grid=grid, patch=self.patch, send=lambda z, number: sent(z, number).seen, seed=self.seed,
        )  # fmt: skip
        readings = tuple(ATTACKS[name](scene) for name in attacks)
        out = self._through(self.z, setting.defence, side.scale)
        cosine = float(cosine_similarity(self._pooled(out), self._pooled(self.clean)).mean())
        return SettingFound(setting, cosine, self._accuracy(out), readings)

    @torch.no_grad()
    def _through(self, z: Tensor, defence: Defence, scale: float) -> Tensor:
        """What the blocks give for defended tokens, rows where they belong; permutations change nothing of it."""
        prefix, device = self.backbone.num_prefix, self.model.device
        moved, back = defend(z, defence, counted_words(self.seed, 0), prefix=prefix, grid=self.backbone.grid, scale=scale)
        dtype = next(self.backbone.parameters()).dtype
        parts = [self.backbone.blocks(Stream(part.to(device, dtype), prefix)).z for part in moved.split(PIECE)]
        return back(torch.cat(parts).cpu())

    @torch.no_grad()
    def _pooled(self, out: Tensor) -> Tensor:
        features = self.backbone.finish(Stream(out.to(self.model.device), self.backbone.num_prefix))
        return self.backbone.pooled(features).cpu()

    @torch.no_grad()
    def _accuracy(self, out: Tensor) -> float | None:
        if self.truth is None or not self.model.classifier or int(self.truth.max()) >= self.backbone.num_classes:
            return None
        features = self.backbone.finish(Stream(out.to(self.model.device), self.backbone.num_prefix))
        return float((self.backbone.head(features).argmax(dim=-1).cpu() == self.truth).double().mean())

    def labels(self) -> tuple[dict[str, float], str]:
        """Shares of the labels that the gradient of the features gives away; or why it was not tried."""
        if self.truth is None:
            return {}, "the images have none"
        if not self.model.classifier or int(self.truth.max()) >= self.backbone.num_classes:
            return {}, f"{self.model.name} has no trained classifier for them"
        out = self.clean.to(self.model.device).requires_grad_()
        logits = self.backbone.head(self.backbone.finish(Stream(out, self.backbone.num_prefix)))
        loss = torch.nn.functional.cross_entropy(logits, self.truth.to(out.device))
        [gradient] = torch.autograd.grad(loss, out)
        known = labels_with_head(self.backbone, out, gradient).cpu()
        found = {"the head known": float((known == self.truth).double().mean())}
        classes = len(self.truth.unique())
        if 1 < classes < len(self.truth):
            unnamed = labels_without_head(gradient, classes, self.seed)
            found["the head unknown, up to names"] = share_up_to_names(unnamed, self.truth)
        return found, ""
