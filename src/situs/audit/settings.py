"""The three settings of MJP's Table 5, with attackers that know the defence beside those that do not.

x is an image, x̃ the same with the patches of a block mask shuffled. (a) attack a step on x and compare with x; (b)
attack a step on x̃ and compare with x̃; (c) attack a step on x̃ and compare with x. A plain model is given x̃ as any
image; MJP is told the mask and gives the hidden patches E_unk, as in its training. The order inside the mask is not in
MJP's gradients at all, so (b) asks an attacker for something that nobody needs: what he wants is x, which is (c).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from situs.audit.attacks.adaptive.attack import AdaptiveMJP
from situs.audit.attacks.base import Attack
from situs.audit.cases import Case, Outcome, Step, TestSet, Which
from situs.audit.deadline import Deadline
from situs.audit.defences import Defence, MaskedJigsaw, NoDefence, method_of
from situs.audit.engine import SHOWN, run
from situs.audit.gradients import summary
from situs.audit.scores.metrics import mean_of
from situs.audit.scores.scoring import Lpips, Scores, measure, measure_guesses
from situs.backbones.base import Backbone
from situs.config import check_range
from situs.core.jigsaw import draw_puzzle, move_patches, puzzle_noise_shape
from situs.core.random import uniform
from situs.errors import SitusError, unknown_name
from situs.methods.base import Batch, Method

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


STEPS: dict[str, tuple[Which, Which]] = {"a": ("x", "x"), "b": ("x̃", "x̃"), "c": ("x̃", "x")}
"""Of each setting what the step is made on, and what is compared with."""


@dataclass(frozen=True)
class Attacker:
    """attack: how. informed: whether he knows that MJP was at work, and with which weights."""

    attack: Attack
    informed: bool


@dataclass(frozen=True)
class Comparison:
    """outcomes: models × settings × attackers. guesses: (setting, name) -> scores of who saw no gradient, and of x̃
    itself.

    images, shuffled: the first of x and x̃, [m, C, H, W] in [0, 1]; names: of all. mjp: names of the models whose step
    is MJP's. hidden: patches in the mask. stopped: what made it stop, None where it is whole.
    """

    outcomes: Sequence[Outcome]
    guesses: dict[tuple[str, str], Scores]
    names: Sequence[str]
    images: Tensor
    shuffled: Tensor
    ratio: float
    hidden: int
    patches: int
    mjp: tuple[str, ...]
    stopped: str | None = None

    @property
    def rows(self) -> list[Outcome]:
        """What was begun, or refused."""
        return [outcome for outcome in self.outcomes if outcome.status != "not_run"]


def contestants(name: str, model: Backbone | Method) -> dict[str, Contestant]:
    """A run that hides patches as it is; any other model as it is, and with MJP's step on its weights."""
    if isinstance(model, Method) and model.hidden_share is not None:
        return {name: Contestant(model, mjp=True)}
    return {name: Contestant(model), f"{name} with MJP's step": Contestant(model, mjp=True)}


def attackers(attacks: Sequence[Attack]) -> list[Attacker]:
    """Those who know MJP are told of it; the others are as the paper has them. One who knows is always among them."""
    listed = [Attacker(attack, attack.separates_hidden) for attack in attacks]
    return listed if any(attacker.informed for attacker in listed) else [*listed, Attacker(AdaptiveMJP(), True)]


def setting_of(row: Outcome) -> str:
    """a, b or c."""
    return next(name for name, step in STEPS.items() if step == (row.case.trained_on, row.case.compared_with))


def attacker_of(row: Outcome) -> str:
    """ "patchembed, static"."""
    return f"{row.attack}, {'knows MJP' if row.case.informed else 'static'}"


def compare_settings(
    models: Mapping[str, Contestant],
    test: TestSet,
    attackers: Sequence[Attacker],
    *,
    plan: Plan | None = None,
    lpips: Lpips | None = None,
    deadline: Deadline | None = None,
    keep: Callable[[Comparison], None] | None = None,
) -> Comparison:
    """Every attacker on every model in every setting, on the same images and the same shuffles.

    keep: is given the comparison as it stands whenever there is more of it.
    """
    plan, deadline = plan or Plan(), deadline or Deadline()
    backbone = next(iter(models.values())).backbone
    if "tokens" in backbone.refusals:
        raise SitusError(f"{backbone.name}: its patches cannot be shuffled: {backbone.refusals['tokens']} (--setting)")
    mask, index = (part.to(test.pixels.device) for part in _puzzle(models, len(test), plan))
    test = replace(test, shuffled=move_patches(test.pixels, backbone.grid, index), mask=mask)
    cases = [case for name, model in models.items() for case in _cases(name, model, attackers, plan)]
    found = {case: Outcome(case, "not_run") for case in cases}
    guesses: dict[tuple[str, str], Scores] = {}

    def so_far(reason: str) -> Comparison:
        outcomes = [found[case] for case in cases]
        if not guesses:
            guesses.update(_guesses(plan.settings, test, backbone, lpips))
        whole = all(outcome.status in ("done", "refused") for outcome in outcomes)
        return Comparison(
            outcomes,
            guesses,
            test.names,
            test.real("x")[:SHOWN].clone(),
            test.real("x̃")[:SHOWN].clone(),
            plan.ratio,
            int(mask[0].sum()),
            backbone.num_tokens,
            tuple(name for name, model in models.items() if model.mjp),
            None if whole else reason,
        )

    try:
        for outcome in run(cases, test, Step(seed=plan.seed, epoch=plan.epoch), deadline, lpips):
            found[outcome.case] = outcome
            if keep is not None and outcome.attacked:
                keep(so_far("the end of its process"))
    except KeyboardInterrupt:
        deadline.interrupt()
    return so_far(deadline.reason)


def _cases(name: str, model: Contestant, attackers: Sequence[Attacker], plan: Plan) -> list[Case]:
    """One model's: on x first, then on x̃, whose gradients and attacks (b) and (c) share."""
    cases = []
    for trained_on in ("x", "x̃"):
        settings = [setting for setting, step in STEPS.items() if step[0] == trained_on and setting in plan.settings]
        defence = model.defence(0.0 if trained_on == "x" else plan.ratio)
        for attacker in attackers:
            for setting in settings:
                fields = (attacker.attack, *STEPS[setting], attacker.informed)
                cases.append(Case(name, model.trains, defence, *fields))
    return cases


def _puzzle(models: Mapping[str, Contestant], count: int, plan: Plan) -> tuple[Tensor, Tensor]:
    """Mask and index [n, N] of each image's shuffle: as MJP draws them in its own steps, the same for all models."""
    ratio, seed, epoch = plan.ratio, plan.seed, plan.epoch
    grid = next(iter(models.values())).backbone.grid
    ids = torch.arange(count)
    mask, index = draw_puzzle(uniform(seed, epoch, ids, "mjp.puzzle", puzzle_noise_shape(grid, ratio)), grid, ratio)
    drawn = None
    for name, model in models.items():
        method = method_of(model.defence(ratio), model.trains, seed)
        if method.hidden_share is None:
            continue
        # One by one, as the victim's steps are: a run with one puzzle a batch then has one for each image.
        draws = [method.draw(Batch(one, one), seed=seed, epoch=epoch) for one in ids.split(1)]
        if method.backbone.grid != grid or any("index" not in draw or "mask" not in draw for draw in draws):
            raise SitusError(f"{name}: shuffles no patches of the grid {grid}, so it has no x̃ (--method.shuffle)")
        mine = tuple(torch.cat([draw[part] for draw in draws]) for part in ("mask", "index"))
        if drawn is not None and not torch.equal(mine[1], drawn[1]):
            raise SitusError(f"{name}: draws other puzzles than the first MJP model; compare them in two audits")
        drawn = mine
    return (mask, index) if drawn is None else (drawn[0], drawn[1])


def _guesses(
    settings: Sequence[str], test: TestSet, backbone: Backbone, lpips: Lpips | None
) -> dict[tuple[str, str], Scores]:
    """Baselines of each setting: who saw nothing; and for (c) all patches exactly, their order as it was shuffled."""
    found = {}
    for setting in settings:
        for name, scores in measure_guesses(test.real(STEPS[setting][1]), backbone, lpips).items():
            found[setting, name] = scores
    if "c" in settings:
        found["c", "x̃ itself, order not solved"] = measure(test.real("x̃"), test.real(), backbone, lpips)
    return found


# --- what follows -------------------------------------------------------------------------------------------------


def best_row(comparison: Comparison, model: str, setting: str, informed: bool) -> Outcome | None:
    """The row of the attacker who got most by PSNR."""
    wanted = (model, setting, informed)
    rows = [r for r in comparison.rows if (r.case.name, setting_of(r), r.case.informed) == wanted and r.scores]
    return max(rows, key=lambda row: mean_of(row.scores["psnr"] or [0.0]).mean, default=None)


def verdict(comparison: Comparison) -> str:
    """Whether MJP's privacy survives one who knows it, with the figures."""
    lines = [] if comparison.stopped is None else [f"A partial result: stopped by {comparison.stopped}."]
    for model in comparison.mjp:
        rows = [row for row in comparison.rows if row.case.name == model and row.case.informed and row.scores]
        rows = sorted((row for row in rows if setting_of(row) != "a"), key=lambda row: setting_of(row) != "c")
        if not rows:
            continue
        known, shown = rows[0], rows[0].scores["shown_psnr"] or [0.0]
        share = sum(value >= RECOGNISABLE for value in shown) / len(shown)
        lines.append(_sentence(comparison, model, known, share))
    return " ".join(lines) or "No model here is trained with MJP, or no attacker who knows it applies."


def _sentence(comparison: Comparison, model: str, known: Outcome, share: float) -> str:
    parts = {name: None if mean is None else mean.mean for name, mean in summary(known.scores).items()}
    survives = "does not survive" if share >= 0.5 else "survives in part" if share > 0 else "survives"
    figures = f"The patches shown come back at {parts['shown_psnr']:.1f} dB"
    if parts["hidden_psnr"] is not None:
        figures += (
            f", the hidden ones at {parts['hidden_psnr']:.1f} dB, and {100 * (parts['hidden_order'] or 0):.0f} % of "
            "the hidden are put at their place"
        )
    static = best_row(comparison, model, setting_of(known), False)
    blind = "" if static is None else f" The best attack that does not know MJP gets {_counted(static)}."
    return (
        f"{'' if model == 'MJP' else f'{model}: '}MJP's privacy claim {survives} an attacker who knows MJP. From one "
        f"step with {comparison.hidden} of {comparison.patches} patches hidden (γ = {comparison.ratio:g}) he recovers "
        f"{_counted(known)}, compared with {'x' if setting_of(known) == 'c' else 'x̃'}.{blind} {figures}."
    )


def _counted(row: Outcome) -> str:
    """ "59 of 64 images exactly (mean PSNR 126.9 dB)"."""
    psnr = row.scores["psnr"] or [0.0]
    return f"{row.exact} of {len(psnr)} images exactly (mean PSNR {mean_of(psnr).mean:.1f} dB)"


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Everything but the pictures: per image, then means and intervals."""
    rows = []
    for row in comparison.rows:
        shown: dict[str, Any] = {"model": row.case.name, "setting": setting_of(row), "attacker": attacker_of(row)}
        shown["applies"] = row.reason is None
        if row.reason is not None:
            rows.append({**shown, "reason": row.reason})
            continue
        means = {name: None if mean is None else mean._asdict() for name, mean in summary(row.scores).items()}
        images = [
            {"image": name, **{k: None if v is None else v[i] for k, v in row.scores.items()}, **fact}
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
