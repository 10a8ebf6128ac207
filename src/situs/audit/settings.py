"""The three settings of MJP's Table 5, by informed attackers, who know MJP, and by uninformed ones.

A shuffled image (x̃ in the paper) is the original (x) with the patches of a block mask shuffled. (a) attack a step on
original images and compare with them; (b) attack a step on shuffled images and compare with them; (c) attack a step on
shuffled images and compare with the originals. A plain model is given a shuffled image like any other; MJP is told the
mask and gives the hidden patches E_unk, as in its training. MJP's gradients do not hold the order inside the mask at
all, so (b) asks an attacker for something that nobody needs: it wants the original, which is (c).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from situs.audit.attacks.adaptive import AdaptiveMJP
from situs.audit.attacks.base import Attack
from situs.audit.cases import RECOGNISABLE, SETTINGS, Case, ImageFinding, TestSet
from situs.audit.deadline import Deadline
from situs.audit.defences import Defence, MaskedJigsaw, NoDefence, Step, method_of
from situs.audit.engine import SHOWN, Images, Leak
from situs.audit.gradients import (
    COLUMNS,
    PARTS,
    REFUSED,
    Cells,
    Show,
    alone,
    exact_of,
    image_numbers,
    interval,
    mean_cells,
    mean_numbers,
)
from situs.audit.run import run
from situs.audit.scores import Lpips, Scores, means_of, measure, measure_guesses
from situs.backbones.base import Backbone
from situs.core.jigsaw import draw_puzzle, move_patches, puzzle_noise_shape
from situs.core.random import uniform
from situs.errors import SitusError, counted, unknown_name
from situs.limits import check_value
from situs.methods.base import Batch, Method
from situs.methods.measured import HidesPlaces
from situs.results import Cell, Summary, Table

SCHEMA = "situs-audit-settings/2"
"""The form of settings.json."""

RATIO = 0.27
"""γ of the paper's Table 5."""


class Contestant(NamedTuple):
    """A model as it is trained. mjp: whether its step is MJP's; a backbone then gets E_unk and DAL from the seed."""

    trains: Backbone | Method
    mjp: bool = False

    @property
    def backbone(self) -> Backbone:
        return self.trains if isinstance(self.trains, Backbone) else self.trains.backbone

    def defence(self, ratio: float) -> Defence:
        return MaskedJigsaw(ratio) if self.mjp else NoDefence()


@dataclass(frozen=True)
class Comparison(Leak):
    """Models × settings × attackers. shuffled: the first shuffled images, like `images`. baselines: (setting, name) ->
    scores of blind guesses, and of the shuffled image itself. mjp: names of the models whose step is MJP's. hidden:
    patches in the mask, the mean over the images.
    """

    file: ClassVar[str] = "settings"

    shuffled: Tensor
    baselines: dict[tuple[str, str], Scores]
    ratio: float
    hidden: int
    patches: int
    mjp: tuple[str, ...]

    def without_pictures(self) -> Self:
        """The same without original, shuffled and recovered images."""
        return replace(super().without_pictures(), shuffled=self.shuffled[:0])

    def summary(self) -> Summary:
        """Whether an informed attacker refutes MJP's privacy claim, and the table."""
        columns = ("psnr", "ssim", "patch_psnr", "order_accuracy", "reidentified")
        title = f"{self.provenance.facts.get('model', 'model')}, {counted(len(self.names), 'images')}"
        return Summary(verdict(self), (Table(title, *settings_table(self, columns)),))

    def numbers(self) -> dict[str, Any]:
        """Each image's numbers, means and intervals."""
        rows = []
        for row in self.pairs:
            numbers: dict[str, Any] = {
                "model": row.case.name,
                "setting": row.case.setting,
                "attacker": row.case.attacker,
            }
            numbers |= row.to_json()
            if row.attacked:
                images = image_numbers(row.scores, self.names, row.facts)
                numbers |= {"exact": row.exact, "mean": mean_numbers(row.scores), "images": images}
            rows.append(numbers)
        return {
            "schema": SCHEMA,
            "ratio": self.ratio,
            "hidden": self.hidden,
            "patches": self.patches,
            "shuffled": f"γ = {self.ratio:g}, {self.hidden} of {self.patches} patches",
            "partial": self.stopped is not None,
            "stopped": self.stopped,
            "verdict": verdict(self),
            "rows": rows,
            "baselines": [
                {"setting": setting, "name": name, "mean": mean_numbers(scores)}
                for (setting, name), scores in self.baselines.items()
            ],
            "notes": dict(self.notes),
        }


def contestants(name: str, model: Backbone | Method) -> dict[str, Contestant]:
    """A run that hides patches as it is; any other model as it is, and once more with MJP's step on its weights."""
    if isinstance(model, HidesPlaces):
        return {name: Contestant(model, mjp=True)}
    return {name: Contestant(model), f"{name} with MJP's step": Contestant(model, mjp=True)}


def with_informed(attacks: Sequence[Attack]) -> list[Attack]:
    """The attacks, with adaptive-mjp added where none of them is by an informed attacker."""
    return [*attacks, *([] if any(attack.separates_hidden for attack in attacks) else [AdaptiveMJP()])]


def compare_settings(
    models: Mapping[str, Contestant],
    test: TestSet,
    attacks: Sequence[Attack],
    *,
    settings: Sequence[str] = tuple(SETTINGS),
    ratio: float = RATIO,
    step: Step | None = None,
    lpips: Lpips | None = None,
    deadline: Deadline | None = None,
    keep: Callable[[Comparison], None] | None = None,
    **fields: Any,
) -> Comparison:
    """Every attacker on every model in every setting, on the same images and the same shuffles; see `run`.

    attacks: those that separate hidden patches know MJP and its weights, the others are uninformed, as in the paper.
    ratio: γ, the share of shuffled patches. step: its seed and epoch are also those of the shuffles. fields: of the
    `Comparison`.
    """
    step = step or Step()
    check_value("ratio", ratio, "[0, 1)")
    for setting in settings:
        if setting not in SETTINGS:
            raise unknown_name("setting", setting, SETTINGS, field="settings")
    backbone = next(iter(models.values())).backbone
    if "tokens" in backbone.refusals:
        reason = f"{backbone.name}: its patches cannot be shuffled: {backbone.refusals['tokens']}"
        raise SitusError(reason, field="settings")
    mask, index = (part.to(test.pixels.device) for part in _puzzle(models, len(test), ratio, step))
    test = replace(test, shuffled=move_patches(test.pixels, backbone.grid, index), mask=mask)
    mjp = tuple(name for name, model in models.items() if model.mjp)
    guesses: dict[tuple[str, str], Scores] = {}

    def make(findings: list[ImageFinding], stopped: str | None) -> Comparison:
        if not guesses:
            guesses.update(_guesses(settings, test, backbone, lpips))
        originals, shuffled = test.real("original")[:SHOWN].clone(), test.real("shuffled")[:SHOWN].clone()
        puzzle = (ratio, round(float(mask.sum(dim=1).double().mean())), backbone.num_tokens)
        return Comparison(findings, test.names, originals, shuffled, guesses, *puzzle, mjp, stopped=stopped, **fields)

    cases = [case for name, model in models.items() for case in _cases(name, model, attacks, settings, ratio)]
    return run(Images(cases, test, make, step, lpips), deadline, keep)


def _cases(
    name: str, model: Contestant, attacks: Sequence[Attack], settings: Sequence[str], ratio: float
) -> list[Case]:
    """One model's: on originals first, then on shuffled images, whose gradients and attacks (b) and (c) share."""
    cases = []
    for trained_on in ("original", "shuffled"):
        here = [step for setting, step in SETTINGS.items() if step.trained_on == trained_on and setting in settings]
        defence = model.defence(0.0 if trained_on == "original" else ratio)
        for attack in attacks:
            for step in here:
                fields = (attack, trained_on, step.compared_with, attack.separates_hidden)
                cases.append(Case(name, model.trains, defence, *fields))
    return cases


def _puzzle(models: Mapping[str, Contestant], count: int, ratio: float, step: Step) -> tuple[Tensor, Tensor]:
    """Mask and index [n, N] of each image's shuffle: as the model with MJP's step draws them in its own steps."""
    when = step.when._replace(seed=step.seed)
    grid, ids = next(iter(models.values())).backbone.grid, torch.arange(count)
    noise = uniform(when.seed, when.epoch, ids, "mjp.puzzle", puzzle_noise_shape(grid, ratio))
    mask, index = draw_puzzle(noise, grid, ratio)
    for name, model in models.items():
        method = method_of(model.defence(ratio), model.trains, when.seed)
        if not isinstance(method, HidesPlaces):
            continue
        # One by one, as the victim's steps are: a run with one puzzle a batch then has one for each image.
        draws = [method.draw(Batch(one, one), when) for one in ids.split(1)]
        if method.backbone.grid != grid or any("index" not in draw or "mask" not in draw for draw in draws):
            raise SitusError(
                f"{name}: must shuffle the patches of the grid {grid}, because the audit shuffles the original images "
                "in the same way",
                field="method.shuffle",
            )
        mask, index = (torch.cat([draw[part] for draw in draws]) for part in ("mask", "index"))
    return mask, index


def _guesses(
    settings: Sequence[str], test: TestSet, backbone: Backbone, lpips: Lpips | None
) -> dict[tuple[str, str], Scores]:
    """Baselines of each setting: blind guesses; for (c) also the shuffled image, whose patches are exact."""
    guesses = {}
    for setting in settings:
        for name, scores in measure_guesses(test.real(SETTINGS[setting].compared_with), backbone, lpips).items():
            guesses[setting, name] = scores
    if "c" in settings:
        guesses["c", "the shuffled image itself"] = measure(test.real("shuffled"), test.real(), backbone, lpips)
    return guesses


# --- what follows -------------------------------------------------------------------------------------------------


def best_row(comparison: Comparison, model: str, setting: str, informed: bool) -> ImageFinding | None:
    """The row with the highest mean PSNR of the informed or the uninformed attackers."""
    wanted = (model, setting, informed)
    rows = [r for r in comparison.pairs if (r.case.name, r.case.setting, r.case.informed) == wanted and r.scores]
    return max(rows, key=lambda row: row.mean_psnr, default=None)


def verdict(comparison: Comparison) -> str:
    """Whether an informed attacker refutes MJP's privacy claim, with the figures; one that fails proves nothing."""
    lines = [] if comparison.stopped is None else [f"A partial result: stopped by {comparison.stopped}."]
    for model in comparison.mjp:
        rows = [best_row(comparison, model, setting, True) for setting in "cb"]
        lines += [_sentence(comparison, model, row) for row in rows if row is not None][:1]
    return " ".join(lines) or (
        "There is no verdict on MJP (masked jigsaw puzzles). Either no audited model was trained with MJP, or a "
        "model trained with MJP has no result of an attack that takes MJP into account."
    )


def _sentence(comparison: Comparison, model: str, best: ImageFinding) -> str:
    """For one model; best: the row of its best informed attacker."""
    parts = {name: None if mean is None else mean.mean for name, mean in means_of(best.scores).items()}
    shown = best.scores["shown_psnr"] or [0.0]
    share = sum(value >= RECOGNISABLE for value in shown) / len(shown)
    claim = "does not hold against" if share >= 0.5 else "is refuted in part by" if share > 0 else "is not refuted by"
    figures = f"Patches that are not hidden are recovered with a PSNR of {parts['shown_psnr']:.1f} dB"
    if parts["hidden_psnr"] is not None:
        figures += (
            f", hidden patches with {parts['hidden_psnr']:.1f} dB; {100 * (parts['hidden_order'] or 0):.0f} % of the "
            f"hidden patches are assigned to their position"
        )
    uninformed = best_row(comparison, model, best.case.setting, False)
    beside = "" if uninformed is None else f" The best uninformed attack recovers {_counted(uninformed)}."
    why = f"{best.attack} was stopped after {best.why('stopped')}" if best.why("stopped") else best.why("doubt")
    nothing = "" if share > 0 else f" That does not prove privacy{f': {why}' if why else ''}."
    return (
        f"{'' if model == 'MJP' else f'{model}: '}MJP's privacy claim {claim} an attacker who knows that MJP is used."
        f"{nothing} From one step with {comparison.hidden} of {comparison.patches} patches hidden (γ = "
        f"{comparison.ratio:g}), this attacker recovers {_counted(best)}, compared with the "
        f"{best.case.compared_with} images.{beside} {figures}."
    )


def _counted(row: ImageFinding) -> str:
    """ "59 of 64 images exactly (mean PSNR 126.9 dB)"."""
    psnr = row.scores["psnr"] or [0.0]
    return f"{row.exact} of {counted(len(psnr), 'images')} exactly (mean PSNR {row.mean_psnr:.1f} dB)"


# --- tables and the file --------------------------------------------------------------------------------------------


def settings_table(comparison: Comparison, columns: Sequence[str] = (*COLUMNS, *PARTS), show: Show = interval) -> Cells:
    """A row for each setting, model and attacker: exact, metrics; then blind guesses."""
    rows: list[list[Cell]] = []
    for setting in SETTINGS:
        for row in comparison.pairs:
            if row.case.setting == setting:
                cells = [REFUSED, *[None] * len(columns)]
                if row.attacked:
                    cells = [exact_of(row), *mean_cells(row.scores, columns, show)]
                rows.append([setting, row.case.name, row.case.attacker, *cells])
        for (where, guess), scores in comparison.baselines.items():
            if where == setting:
                rows.append([setting, "no gradient", guess, None, *mean_cells(scores, columns, show)])
    heads = COLUMNS | PARTS
    return ["setting", "model", "attacker", "exact", *(heads[column] for column in columns)], rows


def glance(comparison: Comparison) -> Cells:
    """Models and attackers down, settings across: mean PSNR and how many images were recovered exactly."""
    settings = [name for name in SETTINGS if any(row.case.setting == name for row in comparison.pairs)]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in comparison.pairs:
        psnr = means_of(row.scores).get("psnr")
        cell = REFUSED if not row.attacked else f"{alone(psnr)} dB, {row.exact} of {row.count}"
        cells.setdefault((row.case.name, row.case.attacker), {})[row.case.setting] = cell
    for (setting, guess), scores in comparison.baselines.items():
        cells.setdefault(("no gradient", guess), {})[setting] = f"{alone(means_of(scores)['psnr'])} dB"
    heads = (
        f"({name}) step on the {SETTINGS[name].trained_on} images, compared with the {SETTINGS[name].compared_with} "
        "images"
        for name in settings
    )
    return ["model", "attacker", *heads], [[*who, *map(row.get, settings)] for who, row in cells.items()]
