"""What a model's gradients give away: attacks against defences on your images, with a page and a gate for CI."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from cyclopts import Parameter

from situs.cli.model_args import ModelArgs, asked_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from situs.audit.attacks.base import Attack
    from situs.audit.attacks.matching.search import MatchingConfig
    from situs.audit.cases import TestSet
    from situs.audit.deadline import Deadline
    from situs.audit.defences import Defence
    from situs.audit.gradients import Audit
    from situs.audit.judge.gate import Limit, Ruling
    from situs.audit.scores.lpips import Lpips
    from situs.audit.victim import Victim

Result = TypeVar("Result")

INTERRUPTED = 130
"""Exit status after Ctrl-C, unless an image was above the gate's limit; what was found until then is written."""

DEFENCES, AS_IT_IS = "none,noise,clip,no-pe-gradient", "none"
"""The defences where none are named: for a page, and for a gate, which judges what would be sent."""


@dataclass(frozen=True, kw_only=True)
class Args(ModelArgs):
    """What a model's gradients give away; a timm name without weights gets random ones."""

    images: Annotated[str, Parameter(metavar="FOLDER")]
    """Images to attack; any layout that training reads."""

    split: str | None = None
    """train, val or test, where the images are split; by default train."""

    classes: int = 1000
    """Classes of the new classifier that a model without one gets; labels are the images' own, or count through."""

    count: int = 12
    """How many images, from the first on; one that cannot be read is named, and the next is taken."""

    attack: str = "patchembed,april"
    """Attacks by name, apart by commas; matching, april-optimisation and adaptive-mjp search, which takes minutes."""

    defence: Annotated[str | None, Parameter(metavar="NAMES")] = None
    """Defences by name, apart by commas, settings behind "=": noise=1e-4, clip=0.5, mjp=0.27. For a run of MJP, none is
    the run's own method. By default none,noise,clip,no-pe-gradient; with --fail-above none alone."""

    setting: Annotated[str, Parameter(metavar="a,b,c")] = ""
    """The settings of MJP's Table 5 instead of the defences: attack x and compare with x (a), attack shuffled images
    and compare with them (b) or with x (c), by attackers who know MJP and who do not; γ by --defence mjp=γ."""

    batch: int = 1
    """Images in the audited step."""

    local_steps: int = 1
    """Steps of plain SGD behind one upload (FedAvg)."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The type gradients are sent in."""

    labels: Literal["known", "inferred"] = "inferred"
    """matching: whether the attacker is given the labels, or reads them off the classifier's gradient."""

    distance: Literal["l2", "cosine"] = "l2"
    """matching: how two gradients are compared."""

    iterations: int = 1000
    """matching: steps of the optimiser."""

    restarts: int = 1
    """matching: starts; the one whose gradients match best is kept."""

    predictor: Annotated[str | None, Parameter(metavar="RUN")] = None
    """adaptive-mjp: a run of MP3 at this size, asked where hidden patches belong."""

    time_limit: Annotated[float | None, Parameter(metavar="SECONDS")] = None
    """For the whole audit, shared evenly by the attacks still to come."""

    lpips: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """LPIPS weights (AlexNet, checked by sha256); without them there is no LPIPS."""

    fail_above: Annotated[str | None, Parameter(metavar="METRIC=NUMBER")] = None
    """A gate, as psnr=20. Exit status 0: a closed form solved all images and none is above; 3: some image is above; 4:
    not judged (stopped, nothing applied, equations that do not fit), which is no pass."""

    junit: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """What the gate says as JUnit XML: a test a defence; not judged is an error."""

    pictures: bool = True
    """Whether the page shows the images; it is then for its owner alone."""

    seed: int = 0
    """Seed of random weights and of the defences' noise."""

    out: Annotated[Path, Parameter(metavar="FOLDER")] = Path("audit")
    """Where gradients.json and report.html go."""


@dataclass(frozen=True)
class Task:
    """What both kinds of audit are given: attacks × defences, and the settings of Table 5."""

    args: Args
    victim: Victim
    test: TestSet
    attacks: list[Attack]
    by_itself: MatchingConfig | None
    defences: list[Defence]
    lpips: Lpips | None
    deadline: Deadline


def run(args: Args) -> int:
    """Audits, prints the table, writes the files, and says by its status whether the gate is passed."""
    from situs.audit import AdaptiveConfig, MatchingConfig, create_attack, create_defence
    from situs.audit.deadline import first_ctrl_c
    from situs.audit.judge.gate import ABOVE, parse_limit
    from situs.audit.scores.lpips import Lpips
    from situs.audit.victim import load_test_set, open_predictor, open_victim
    from situs.cli.result import tell_left_out
    from situs.errors import SitusError

    _check(args)
    limit = None if args.fail_above is None else parse_limit(args.fail_above)
    search = MatchingConfig(distance=args.distance, iterations=args.iterations, restarts=args.restarts)
    names = _names("attack", args.attack)
    attacks = {name: create_attack(name, search) for name in names}
    defences = [
        create_defence(name) for name in _names("defence", _default(limit) if args.defence is None else args.defence)
    ]
    lpips = None if args.lpips is None else Lpips(args.lpips)
    deadline = _deadline(args, list(attacks.values()))
    with first_ctrl_c(deadline):
        victim = open_victim(args.model, classes=args.classes, **asked_of(args.model, args))
        device = victim.model.device
        if args.predictor is not None:
            predictor = AdaptiveConfig(predictor=open_predictor(args.predictor, victim.model.backbone, device))
            attacks = {name: create_attack(name, search, predictor) for name in names}
        try:
            test = load_test_set(victim, args.images, args.count, args.split, device)
        except SitusError as error:  # training calls the flag by another name
            fields = ["images" if field == "data" else field for field in error.fields]
            raise SitusError(str(error), field=fields, value=error.value, allowed=error.allowed) from None
        tell_left_out(test.left_out)
        _check_gate(limit, len(test))
        by_itself = search if limit is not None and "matching" not in attacks else None
        task = Task(args, victim, test, list(attacks.values()), by_itself, defences, lpips, deadline)
        ruling = None
        if args.setting:
            from situs.cli.audit_settings import run_settings

            run_settings(task, _names("setting", args.setting))
        else:
            ruling = _run_pairs(task, limit)
    if deadline.interrupted and (ruling is None or ruling.status != ABOVE):
        return INTERRUPTED
    return 0 if ruling is None else ruling.status


def _default(limit: Limit | None) -> str:
    """The defences where none are named."""
    return DEFENCES if limit is None else AS_IT_IS


def _run_pairs(task: Task, limit: Limit | None) -> Ruling | None:
    """Attacks × defences, printed and written; what the gate says, None without one."""
    from situs.audit.cases import Step
    from situs.audit.client import DTYPES
    from situs.audit.gradients import audit_gradients
    from situs.audit.judge.gate import judge

    args, victim = task.args, task.victim
    known = args.labels == "known"
    facts = _facts(task)

    def write(audit: Audit) -> None:
        _write_numbers(args, audit, facts, victim, None if limit is None else judge(audit, limit))

    audit = audit_gradients(
        victim,
        task.test,
        task.attacks,
        task.defences,
        step=Step(args.batch, args.local_steps, DTYPES[args.precision], args.seed, known),
        search=task.by_itself,
        lpips=task.lpips,
        deadline=task.deadline,
        keep=now_and_then(write),
    )
    task.deadline.close()
    ruling = None if limit is None else judge(audit, limit)
    _report(args, audit, facts, victim, ruling)
    return ruling


def now_and_then(write: Callable[[Result], None], seconds: float = 5.0) -> Callable[[Result], None]:
    """Writes what is there of a result, but not again within so many seconds."""
    last = time.monotonic()

    def keep(result: Result) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            write(result)
            last = time.monotonic()

    return keep


def _check(args: Args) -> None:
    """Refuses what would only show when the audit is over, and flags that another flag leaves without effect."""
    from situs.config import check_range
    from situs.errors import SitusError

    for name in ("count", "batch", "local_steps", "classes"):
        check_range(name, getattr(args, name), 1, flag=f"--{name.replace('_', '-')}")
    if args.out.exists() and not args.out.is_dir():
        raise SitusError(f"out={args.out}: is a file and must be a folder (--out)")
    if args.junit is not None and args.fail_above is None:
        raise SitusError(f"junit={args.junit}: holds what a gate says, and there is none (--junit, --fail-above)")
    if args.junit is not None and (args.junit.is_dir() or args.junit.parent.is_file()):
        raise SitusError(f"junit={args.junit}: must be a file that can be written (--junit)")
    if args.predictor is not None and "adaptive-mjp" not in args.attack:
        raise SitusError(f"predictor={args.predictor}: only adaptive-mjp asks it (--predictor, --attack)")
    if args.setting:
        fixed = {"batch": 1, "local_steps": 1, "precision": "fp32", "labels": "inferred", "fail_above": None}
        for name, value in fixed.items():
            if getattr(args, name) != value:
                flag = f"--{name.replace('_', '-')}"
                said = f"{name}={getattr(args, name)}: has no part in the settings of Table 5"
                raise SitusError(f"{said}, which are one step on one image in fp32; leave it out ({flag}, --setting)")


def _check_gate(limit: Limit | None, images: int) -> None:
    """Refuses a limit on a metric that so few images do not have."""
    from situs.errors import SitusError

    if limit is not None and limit.metric == "reidentified" and images < 2:
        raise SitusError(
            f"fail_above={limit}: one image is always the nearest; give two or more (--fail-above, --count)"
        )


def _names(what: str, text: str) -> list[str]:
    """The names between the commas, each once."""
    from situs.errors import SitusError

    found = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not found:
        raise SitusError(f"{what}={text!r}: must name at least one (--{what})")
    return found


def _deadline(args: Args, attacks: list[Attack]) -> Deadline:
    """The clock; it speaks where an attack takes long."""
    from situs.audit.deadline import Deadline

    def say(line: str) -> None:
        if args.setting or args.fail_above or any(attack.slow for attack in attacks):
            print(line, file=sys.stderr, flush=True)

    return Deadline(say, args.time_limit)


def _facts(task: Task) -> dict[str, Any]:
    """Where the model and the images come from, and how it was made."""
    from situs.cli.evidence import evidence

    args, victim, (height, width) = task.args, task.victim, task.test.pixels.shape[2:]
    found = victim.model.facts
    return {
        "model": victim.model.backbone.name,
        "weights": str(found.get("weights", found["kind"])),
        "images": f"{len(task.test)} of {Path(args.images).name}, {height} × {width} pixels",
        "gradients": f"{args.precision}, batch {args.batch}, local steps {args.local_steps}",
        "labels": args.labels,
        "search": f"{args.distance}, {args.iterations:,} iterations, starts: {args.restarts}",
        "seed": args.seed,
        **evidence("audit gradients", args, victim.trains, args.weights),
    }


def _write_numbers(args: Args, audit: Audit, facts: dict[str, Any], victim: Victim, ruling: Ruling | None) -> None:
    from situs.audit.judge.record import to_json
    from situs.cli.scores import write_scores

    gate = None if ruling is None else ruling.to_json()
    write_scores(args.out / "gradients.json", {**to_json(audit), **facts, "notes": victim.notes, "gate": gate})


def _report(args: Args, audit: Audit, facts: dict[str, Any], victim: Victim, ruling: Ruling | None) -> None:
    from situs.audit.gradients import verdict
    from situs.audit.judge.junit import junit
    from situs.audit.tables import reasons, table
    from situs.cli.scores import write_file
    from situs.cli.tables import print_table
    from situs.pages.gradients import make_page
    from situs.results import show

    _write_numbers(args, audit, facts, victim, ruling)  # first: what was found is not lost while the rest is made
    if audit.attacked:
        header, rows = table(audit, ("psnr", "ssim", "order_accuracy", "reidentified"))
        rows = [[show(cell) for cell in row] for row in (header, *rows)]
        print_table(f"{audit.model}, {facts['images']}", rows)
    if said := reasons(audit):
        print_table("Does not apply, or is not exact", said)
    print(verdict(audit))
    searched = any("distance" in fact for pair in audit.pairs for fact in pair.facts)
    used = {
        name.replace("_", " "): fact for name, fact in facts.items() if searched or name not in ("labels", "search")
    }
    page = make_page(audit, used, ruling, victim.notes, pictures=args.pictures)
    path = page.write(args.out / "report.html", private=args.pictures)
    print(f"{path}: the page; {path.with_name('gradients.json').name} has every image's numbers")
    if ruling is not None:
        if args.junit is not None:
            write_file(args.junit, junit(audit, ruling, facts), "--junit")
        print(ruling.sentence)
