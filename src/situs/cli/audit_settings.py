"""`situs audit gradients --setting a,b,c`: one model in the settings of MJP's Table 5."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from situs.audit.attack import Attack
    from situs.audit.settings import Attacker, Contestant
    from situs.audit.threat import Defence
    from situs.audit.victim import Victim
    from situs.cli.audit_gradients import Task


def run_settings(task: Task, settings: list[str]) -> None:
    """Attacks, prints the table, writes settings.json and settings.html."""
    from situs.audit.settings import Plan, compare_settings, to_json, verdict
    from situs.audit.settings_page import settings_page, settings_table
    from situs.audit.victim import labels_for
    from situs.cli.evidence import evidence
    from situs.cli.scores import write_scores
    from situs.cli.tables import print_table
    from situs.results import show

    args, victim, batch = task.args, task.victim, task.batch
    ratio = _ratio(task.defences)
    found = compare_settings(
        _contestants(victim),
        batch.inputs,
        labels_for(victim.model, batch.targets.get("label"), len(batch.inputs)),
        _attackers(task.attacks),
        normalisation=victim.model.data.normalisation,
        plan=Plan(tuple(settings), ratio, args.seed, victim.epoch),
        names=task.names,
        lpips=task.lpips,
        watch=task.watch,
    )
    facts = {
        "model": victim.model.name,
        "images": f"{len(batch.inputs)} of {Path(args.images).name}",
        "shuffled": f"γ = {ratio:g}, {found.hidden} of {found.patches} patches",
        "seed": args.seed,
        **evidence("audit gradients", args, victim.trains, args.weights),
    }
    header, rows = settings_table(found, ("psnr", "ssim", "patch_psnr", "order_accuracy", "reidentified"))
    print_table(f"{victim.model.name}, {facts['images']}", [[show(cell) for cell in row] for row in (header, *rows)])
    print(verdict(found))
    used = {name.replace("_", " "): fact for name, fact in facts.items()}
    drawn = settings_page(found, used, pictures=args.pictures)  # before anything is written
    write_scores(args.out / "settings.json", {**to_json(found), **facts, "notes": victim.notes})
    page = drawn.write(args.out / "settings.html", private=args.pictures)
    print(f"{page}: the page; {page.with_name('settings.json').name} has every image's numbers")


def _ratio(defences: list[Defence]) -> float:
    """γ of --defence mjp=γ, else the paper's in Table 5."""
    from situs.audit.settings import Plan
    from situs.audit.threat import MaskedJigsaw

    return next((defence.mask_ratio for defence in defences if isinstance(defence, MaskedJigsaw)), Plan().ratio)


def _contestants(victim: Victim) -> dict[str, Contestant]:
    """A run of MJP as it is; any other model as it is, and with MJP's step on its weights."""
    from situs.audit.settings import Contestant
    from situs.methods.mjp import MJP

    name = victim.model.name
    if isinstance(victim.trains, MJP):
        return {name: Contestant(victim.trains, mjp=True)}
    return {name: Contestant(victim.trains), f"{name} with MJP's step": Contestant(victim.trains, mjp=True)}


def _attackers(attacks: list[Attack]) -> list[Attacker]:
    """Those who know MJP are told of it; the others are as the paper has them. One who knows is always among them."""
    from situs.audit.adaptive import AdaptiveMJP
    from situs.audit.settings import Attacker

    listed = [Attacker(attack, attack.knows_mjp) for attack in attacks]
    return listed if any(attacker.informed for attacker in listed) else [*listed, Attacker(AdaptiveMJP(), True)]
