"""The three settings of MJP's Table 5, with attackers that know the defence beside those that do not.

x is an image, x̃ the same with the patches of a block mask shuffled. (a) attack a step on x and compare with x; (b)
attack a step on x̃ and compare with x̃; (c) attack a step on x̃ and compare with x. A plain model is given x̃ as any
image; MJP is told the mask and gives the hidden patches E_unk, as in its training. The order inside the mask is not in
MJP's gradients at all, so (b) asks an attacker for something that nobody needs: what he wants is x, which is (c).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from situs.audit.attack import Attack, Fact, Knowledge
from situs.audit.gradients import EXACT, summary
from situs.audit.metrics import baselines, denormalise, mean_of, psnr
from situs.audit.scoring import Lpips, Normalisation, Scores, measure
from situs.audit.threat import Defence, Gradients, MaskedJigsaw, NoDefence, method_of, victim_gradients
from situs.audit.watch import Watch
from situs.backbones.base import Backbone
from situs.config import check_range
from situs.core.jigsaw import draw_puzzle, move_patches, patch_size_of, puzzle_noise_shape
from situs.core.random import uniform
from situs.core.tokens import patchify
from situs.errors import SitusError, unknown_name
from situs.methods.base import Batch, Method
from situs.methods.mjp import MJP

SETTINGS = {
    "a": "attack a step on x, compare with x",
    "b": "attack a step on x̃, compare with x̃",
    "c": "attack a step on x̃, compare with x",
}
"""Table 5's settings by name."""

RECOGNISABLE = 30.0
"""PSNR in dB from which a reader cannot tell a patch from the original at a glance."""


SCHEMA = "situs-audit-settings/1"  # of settings.json


@dataclass(frozen=True)
class Plan:
    """settings: of `SETTINGS`. ratio: γ of x̃. seed and epoch: of the puzzles and the steps."""

    settings: tuple[str, ...] = tuple(SETTINGS)
    ratio: float = 0.27
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        check_range("ratio", self.ratio, 0, 1, flag="--defence mjp=γ", high_open=True)
        for setting in self.settings:
            if setting not in SETTINGS:
                raise unknown_name("setting (--setting)", setting, SETTINGS)


@dataclass(frozen=True)
class Contestant:
    """A model as it is trained. mjp: whether its step is MJP's; a backbone then gets E_unk and DAL from the seed."""

    trains: Backbone | Method
    mjp: bool = False

    @property
    def backbone(self) -> Backbone:
        return self.trains if isinstance(self.trains, Backbone) else self.trains.backbone

    def defence(self, ratio: float) -> Defence:
        return MaskedJigsaw(ratio) if self.mjp else NoDefence()


@dataclass(frozen=True)
class Attacker:
    """attack: how. informed: whether he knows that MJP was at work, and with which weights."""

    attack: Attack
    informed: bool

    @property
    def label(self) -> str:
        return f"{self.attack.name}, {'knows MJP' if self.informed else 'static'}"


@dataclass(frozen=True)
class Row:
    """One attacker on one model in one setting. reason: why he cannot. scores: per image, every metric.

    parts: in (b) and (c) per image: `shown_psnr` over the shown patches, `hidden_psnr` over the hidden ones matched to
    the recovered ones whatever their order, `hidden_order` the share of them at its place. images: [n, C, H, W].
    partial: how far he came where he was stopped; n may then be less than the images compared, and they are the first.
    """

    model: str
    setting: str
    attacker: str
    informed: bool
    reason: str | None = None
    scores: Scores = field(default_factory=dict)
    parts: dict[str, list[float]] = field(default_factory=dict)
    facts: list[dict[str, Fact]] = field(default_factory=list)
    images: Tensor | None = None
    partial: str | None = None

    @property
    def exact(self) -> int:
        """How many images were recovered exactly."""
        return sum(value >= EXACT for value in self.scores.get("psnr") or ())


@dataclass(frozen=True)
class Comparison:
    """rows: models × settings × attackers. guesses: (setting, name) -> scores of who saw no gradient, and of x̃ itself.

    images, shuffled: x and x̃, [n, C, H, W] in [0, 1]. mjp: names of the models whose step is MJP's. hidden: patches
    in the mask. stopped: what made it stop, None where it is whole.
    """

    rows: list[Row]
    guesses: dict[tuple[str, str], Scores]
    names: list[str]
    images: Tensor
    shuffled: Tensor
    ratio: float
    hidden: int
    patches: int
    mjp: tuple[str, ...]
    stopped: str | None = None


def compare_settings(
    models: Mapping[str, Contestant],
    images: Tensor,
    labels: Tensor,
    attackers: Sequence[Attacker],
    *,
    normalisation: Normalisation,
    plan: Plan | None = None,
    names: Sequence[str] = (),
    lpips: Lpips | None = None,
    watch: Watch | None = None,
) -> Comparison:
    """Every attacker on every model in every setting, on the same images [n, C, H, W] and the same shuffles."""
    plan, watch = plan or Plan(), watch or Watch()
    settings = plan.settings
    backbone = next(iter(models.values())).backbone
    if "tokens" in backbone.refusals:
        raise SitusError(f"{backbone.name}: its patches cannot be shuffled: {backbone.refusals['tokens']} (--setting)")
    mask, index = (part.to(images.device) for part in _puzzle(models, len(images), plan))
    shuffled = move_patches(images, backbone.grid, index)
    trial = _Trial(images, shuffled, labels, mask, normalisation, plan, lpips)
    rows: list[Row] = []
    groups = [[setting for setting in steps if setting in settings] for steps in (("a",), ("b", "c"))]
    steps = [(name, asked) for name in models for asked in groups if asked]
    try:
        for done, (name, asked) in enumerate(steps):
            if not watch.spent():
                left = (len(steps) - done) * len(attackers)
                _attack_model(trial, name, models[name], attackers, asked, watch, rows, left)
    except KeyboardInterrupt:
        watch.interrupt()
    whole = len(rows) == len(models) * len(attackers) * len(settings) and all(_is_whole(row, trial) for row in rows)
    real, moved = (denormalise(part, *normalisation) for part in (images, shuffled))
    return Comparison(
        rows,
        _guesses(settings, real, moved, backbone, lpips),
        list(names) or [str(i) for i in range(len(images))],
        real,
        moved,
        plan.ratio,
        int(mask[0].sum()),
        backbone.num_tokens,
        tuple(name for name, model in models.items() if model.mjp),
        None if whole else watch.reason,
    )


@dataclass(frozen=True)
class _Trial:
    """What is the same for all rows: x and x̃ normalised, labels, the puzzle, and how to measure."""

    images: Tensor
    shuffled: Tensor
    labels: Tensor
    mask: Tensor
    normalisation: Normalisation
    plan: Plan
    lpips: Lpips | None


def _is_whole(row: Row, trial: _Trial) -> bool:
    """Whether a row is whole: refused, or all images attacked to the end."""
    return row.reason is not None or (row.partial is None and len(row.facts) == len(trial.images))


def _attack_model(
    trial: _Trial,
    name: str,
    model: Contestant,
    attackers: Sequence[Attacker],
    settings: Sequence[str],
    watch: Watch,
    rows: list[Row],
    left: int,
) -> None:
    """Adds to `rows` those of one model on x (a), or on x̃ (b and c share its gradients and the attacks).

    left: turns still to come in the whole comparison.
    """
    moved = settings[0] != "a"
    defence = model.defence(trial.plan.ratio if moved else 0.0)
    method = method_of(defence, model.trains, trial.plan.seed)
    backbone = model.backbone
    refused = {id(a): a.attack.applies(backbone) for a in attackers}
    able = [a for a in attackers if refused[id(a)] is None]
    wanted = None if any(a.attack.reads_all for a in able) else {n for a in able for n in a.attack.reads(backbone)}
    watch.say(f"{name}: gradients on {'x̃' if moved else 'x'}")
    uploads = _uploads(trial, model, defence, moved, wanted) if able else []
    for number, attacker in enumerate(attackers):
        if watch.spent():
            return
        watch.begin(left - number)
        reason = refused[id(attacker)]
        known = Knowledge(normalisation=trial.normalisation)
        if attacker.informed:
            fields = {"method": method, "epoch": trial.plan.epoch, "normalisation": trial.normalisation}
            known = Knowledge(defence, seed=trial.plan.seed, **fields)
        reason = reason or attacker.attack.missing(backbone, uploads[0], known)
        if reason is not None:
            rows += [Row(name, setting, attacker.label, attacker.informed, reason) for setting in settings]
            continue
        watch.say(f"{name}: {attacker.label} on {'x̃' if moved else 'x'}")
        found = attacker.attack.recover(backbone, uploads, known, watch)
        for setting in settings:
            truth = trial.shuffled if setting == "b" else trial.images
            pictures, real = (denormalise(part, *trial.normalisation) for part in (found.images, truth))
            scores = measure(pictures, real, backbone, trial.lpips)
            parts = _parts(pictures, real, trial, backbone) if moved else {}
            made = (scores, parts, found.facts, pictures, found.partial)
            rows.append(Row(name, setting, attacker.label, attacker.informed, None, *made))


def _puzzle(models: Mapping[str, Contestant], count: int, plan: Plan) -> tuple[Tensor, Tensor]:
    """Mask and index [n, N] of each image's shuffle: as MJP draws them in its own steps, the same for all models."""
    ratio, seed, epoch = plan.ratio, plan.seed, plan.epoch
    grid = next(iter(models.values())).backbone.grid
    ids = torch.arange(count)
    mask, index = draw_puzzle(uniform(seed, epoch, ids, "mjp.puzzle", puzzle_noise_shape(grid, ratio)), grid, ratio)
    drawn = None
    for name, model in models.items():
        method = method_of(model.defence(ratio), model.trains, seed)
        if not isinstance(method, MJP):
            continue
        # One by one, as the victim's steps are: a run with one puzzle a batch then has one for each image.
        draws = [method.draw(Batch(one, one), seed=seed, epoch=epoch) for one in ids.split(1)]
        if method.grid != grid or any("index" not in draw or "mask" not in draw for draw in draws):
            raise SitusError(f"{name}: shuffles no patches of the grid {grid}, so it has no x̃ (--method.shuffle)")
        mine = tuple(torch.cat([draw[part] for draw in draws]) for part in ("mask", "index"))
        if drawn is not None and not torch.equal(mine[1], drawn[1]):
            raise SitusError(f"{name}: draws other puzzles than the first MJP model; compare them in two audits")
        drawn = mine
    return (mask, index) if drawn is None else (drawn[0], drawn[1])


def _uploads(
    trial: _Trial, model: Contestant, defence: Defence, moved: bool, wanted: set[str] | None
) -> list[Gradients]:
    """What is sent for each image alone, of it what is wanted (None: all). MJP shuffles by itself, so it is given x."""
    images = trial.shuffled if moved and not model.mjp else trial.images
    sent = []
    for number in range(len(images)):
        one = slice(number, number + 1)
        fields = {"seed": trial.plan.seed, "epoch": trial.plan.epoch, "ids": torch.tensor([number])}
        upload = victim_gradients(model.trains, images[one], trial.labels[one], defence=defence, **fields)
        sent.append({name: g for name, g in upload.items() if wanted is None or name in wanted})
    return sent


def _parts(pictures: Tensor, real: Tensor, trial: _Trial, backbone: Backbone) -> dict[str, list[float]]:
    """Shown and hidden patches apart."""
    from scipy.optimize import linear_sum_assignment

    size = patch_size_of(real, backbone.grid)
    found, truth = (patchify(part.double(), size) for part in (pictures, real[: len(pictures)]))
    shown, hidden, order = [], [], []
    for f, t, mask in zip(found, truth, trial.mask, strict=False):
        shown.append(float(psnr(f[~mask].unsqueeze(0), t[~mask].unsqueeze(0))))
        if not mask.any():
            continue
        f, t = f[mask], t[mask]
        error = torch.cdist(t, f, compute_mode="donot_use_mm_for_euclid_dist").square() / t.shape[-1]
        rows, columns = (torch.from_numpy(part) for part in linear_sum_assignment(error.cpu().numpy()))
        best = error[rows.to(error.device), columns.to(error.device)]
        hidden.append(float(psnr(f[columns].unsqueeze(0), t.unsqueeze(0))))
        order.append(float((error.diagonal() <= best + 1e-12).double().mean()))
    return {"shown_psnr": shown, "hidden_psnr": hidden, "hidden_order": order}


def _guesses(
    settings: Sequence[str], real: Tensor, moved: Tensor, backbone: Backbone, lpips: Lpips | None
) -> dict[tuple[str, str], Scores]:
    """Baselines of each setting: who saw nothing; and for (c) all patches exactly, their order as it was shuffled."""
    found = {}
    for setting in settings:
        truth = moved if setting == "b" else real
        for name, guess in baselines(truth).items():
            found[setting, name] = measure(guess, truth, backbone, lpips)
    if "c" in settings:
        found["c", "x̃ itself, order not solved"] = measure(moved, real, backbone, lpips)
    return found


# --- what follows -------------------------------------------------------------------------------------------------


def best_row(comparison: Comparison, model: str, setting: str, informed: bool) -> Row | None:
    """The row of the attacker who got most by PSNR."""
    rows = [r for r in comparison.rows if (r.model, r.setting, r.informed) == (model, setting, informed) and r.scores]
    return max(rows, key=lambda row: mean_of(row.scores["psnr"] or [0.0]).mean, default=None)


def verdict(comparison: Comparison) -> str:
    """Whether MJP's privacy survives one who knows it, with the figures."""
    lines = [] if comparison.stopped is None else [f"A partial result: stopped by {comparison.stopped}."]
    for model in comparison.mjp:
        rows = [row for row in comparison.rows if row.model == model and row.informed and row.setting != "a"]
        known = next((row for row in rows if row.setting == "c" and row.scores), None)
        if known is None:
            known = next((row for row in rows if row.scores), None)
        if known is None:
            continue
        share = sum(value >= RECOGNISABLE for value in known.parts["shown_psnr"]) / len(known.parts["shown_psnr"])
        lines.append(_sentence(comparison, model, known, share))
    return " ".join(lines) or "No model here is trained with MJP, or no attacker who knows it applies."


def _sentence(comparison: Comparison, model: str, known: Row, share: float) -> str:
    parts = {name: mean_of(values).mean if values else None for name, values in known.parts.items()}
    survives = "does not survive" if share >= 0.5 else "survives in part" if share > 0 else "survives"
    figures = f"The patches shown come back at {parts['shown_psnr']:.1f} dB"
    if parts["hidden_psnr"] is not None:
        figures += (
            f", the hidden ones at {parts['hidden_psnr']:.1f} dB, and {100 * (parts['hidden_order'] or 0):.0f} % of "
            "the hidden are put at their place"
        )
    static = best_row(comparison, model, known.setting, False)
    blind = "" if static is None else f" The best attack that does not know MJP gets {_counted(static)}."
    return (
        f"{'' if model == 'MJP' else f'{model}: '}MJP's privacy claim {survives} an attacker who knows MJP. From one "
        f"step with {comparison.hidden} of {comparison.patches} patches hidden (γ = {comparison.ratio:g}) he recovers "
        f"{_counted(known)}, compared with {'x' if known.setting == 'c' else 'x̃'}.{blind} {figures}."
    )


def _counted(row: Row) -> str:
    """ "59 of 64 images exactly (mean PSNR 126.9 dB)"."""
    psnr = row.scores["psnr"] or [0.0]
    return f"{row.exact} of {len(psnr)} images exactly (mean PSNR {mean_of(psnr).mean:.1f} dB)"


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Everything but the pictures: per image, then means and intervals."""
    rows = []
    for row in comparison.rows:
        shown: dict[str, Any] = {"model": row.model, "setting": row.setting, "attacker": row.attacker}
        shown["applies"] = row.reason is None
        if row.reason is not None:
            rows.append({**shown, "reason": row.reason})
            continue
        every = {**row.scores, **row.parts}
        means = {name: None if mean is None else mean._asdict() for name, mean in means_of(row).items()}
        images = [
            {"image": name, **{k: v[i] if v is not None and i < len(v) else None for k, v in every.items()}, **fact}
            for i, (name, fact) in enumerate(zip(comparison.names, row.facts, strict=False))
        ]
        rows.append({**shown, "partial": row.partial, "exact": row.exact, "mean": means, "images": images})
    return {
        "schema": SCHEMA,
        "ratio": comparison.ratio,
        "hidden": comparison.hidden,
        "patches": comparison.patches,
        "partial": comparison.stopped is not None,
        "stopped": comparison.stopped,
        "verdict": verdict(comparison),
        "rows": rows,
        "baselines": [
            {"setting": setting, "name": name, "mean": {k: m and m._asdict() for k, m in summary(scores).items()}}
            for (setting, name), scores in comparison.guesses.items()
        ],
    }


def means_of(row: Row) -> dict[str, Any]:
    """Means with 95 % intervals of all metrics of a row, those of its parts among them."""
    return {**summary(row.scores), **{name: mean_of(v) if v else None for name, v in row.parts.items()}}
