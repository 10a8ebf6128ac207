"""`situs audit gradients --setting a,b,c`: one model in the settings of MJP's Table 5."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from situs.audit.settings import Comparison
    from situs.cli.audit_gradients import Task


def run_settings(task: Task, settings: list[str]) -> None:
    """Attacks, prints the table, writes settings.json and settings.html."""
    from situs.audit.settings import Plan, attackers, compare_settings, contestants, to_json, verdict
    from situs.audit.settings_tables import settings_table
    from situs.cli.audit_gradients import now_and_then
    from situs.cli.evidence import evidence
    from situs.cli.scores import write_scores
    from situs.cli.tables import print_table
    from situs.pages.settings import settings_page
    from situs.results import show

    args, victim = task.args, task.victim
    shares = [defence.hidden_share for defence in task.defences if defence.hidden_share is not None]
    ratio = shares[0] if shares else Plan().ratio
    made = evidence("audit gradients", args, victim.trains, args.weights)

    def facts_of(found: Comparison) -> dict[str, str | int | None]:
        return {
            "model": victim.model.name,
            "images": f"{len(task.test)} of {Path(args.images).name}",
            "shuffled": f"γ = {ratio:g}, {found.hidden} of {found.patches} patches",
            "seed": args.seed,
            **made,
        }

    def write(found: Comparison) -> None:
        write_scores(args.out / "settings.json", {**to_json(found), **facts_of(found), "notes": victim.notes})

    found = compare_settings(
        contestants(victim.model.name, victim.trains),
        task.test,
        attackers(task.attacks),
        plan=Plan(tuple(settings), ratio, args.seed, victim.epoch),
        lpips=task.lpips,
        deadline=task.deadline,
        keep=now_and_then(write),
    )
    task.deadline.close()
    write(found)  # first: what was found is not lost while the rest is made
    facts = facts_of(found)
    header, rows = settings_table(found, ("psnr", "ssim", "patch_psnr", "order_accuracy", "reidentified"))
    print_table(f"{victim.model.name}, {facts['images']}", [[show(cell) for cell in row] for row in (header, *rows)])
    print(verdict(found))
    drawn = settings_page(found, {name.replace("_", " "): fact for name, fact in facts.items()}, pictures=args.pictures)
    page = drawn.write(args.out / "settings.html", private=args.pictures)
    print(f"{page}: the page; {page.with_name('settings.json').name} has every image's numbers")
