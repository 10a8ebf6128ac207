"""What a model's gradients give away of your images or texts: attacks against defences, a page, a gate for CI.

For example: situs audit gradients runs/ft --data samples --count 2 --out leak
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from cyclopts import Parameter

from situs.audit import (
    ATTACKS,
    AuditConfig,
    Deadline,
    audit_gradients,
    audit_settings,
    create_attack,
    find_defences,
)
from situs.audit.client import StepConfig
from situs.audit.deadline import first_ctrl_c
from situs.audit.scores.exposure import METRICS
from situs.audit.settings import Comparison
from situs.audit.sweep.ladder import CostConfig
from situs.audit.text.audit import audit_texts
from situs.cli.audit.evidence import command_of
from situs.cli.parser.model_args import ModelArgs, asked_of, check_folder
from situs.cli.progress import remark
from situs.cli.result import INTERRUPTED, present
from situs.errors import SitusError
from situs.files import write_result
from situs.gate import ABOVE, NOT_JUDGED, junit, parse_limit
from situs.models.open import is_run
from situs.pages import publish, write_numbers


@dataclass(frozen=True, kw_only=True)
class Args(ModelArgs, CostConfig, AuditConfig):
    """What a model's gradients give away; a timm name without weights gets random ones."""

    topics: ClassVar[dict[str, tuple[str, ...]]] = {
        "matching": ("labels", "distance", "iterations", "restarts"),
        "remedies": tuple(each.name for each in fields(CostConfig)),
        "seldom": ("loss", "lpips"),
    }

    data: Annotated[str | None, Parameter(metavar="PATH")] = None
    """Images to attack, as training reads them; else a run's own."""

    texts: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Instead, for a model of words: sentences, one a line; its gates: words, tokens, sentences, picked (shares)."""

    attacks: Annotated[tuple[str, ...], Parameter(name="--attack", metavar="NAMES")] = (
        "patchembed",
        "april",
        "tokens",
        "patchembed-prior",
    )
    """Apart by commas; matching, april-optimisation, adaptive-mjp take minutes, tokens where it must search."""

    defences: Annotated[tuple[str, ...], Parameter(name="--defence", metavar="NAMES")] = ("auto",)
    """Apart by commas: noise=1e-4, clip=0.5, mjp=0.27 …; for a run of MJP none is its own method. auto:
    none,noise,clip,no-pe-gradient, for a gate none; of a DP run its own."""

    settings: Annotated[tuple[str, ...], Parameter(name="--setting", metavar="a,b,c")] = ()
    """Table 5 of MJP, by who knows MJP and who does not: attack x, compare with x (a); attack shuffled x̃,
    compare with x̃ (b), with x (c); γ by --defence mjp=γ."""

    find_defence: Annotated[str | None, Parameter(metavar="METRIC=NUMBER")] = None
    """Also: the weakest setting of each defence that keeps this, as psnr=20, against attackers who know it."""

    time_limit: Annotated[float | None, Parameter(metavar="SECONDS")] = None
    """For all attacks together, in even shares, from the first on."""

    junit: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """What the gate says as JUnit XML; inconclusive is an error."""

    pictures: bool = True
    """Show the images; the page is then private."""

    out: Annotated[Path, Parameter(metavar="FOLDER")] = Path("audit")
    """Where gradients.json and gradients.html go."""


def run(args: Args) -> int:
    """Audits, prints the table, writes the files, and says by its status whether the gate is passed."""
    data = _check(args)

    def say(line: str) -> None:
        loud = args.texts or args.settings or args.fail_above or args.find_defence
        if loud or sys.stderr.isatty() or any(ATTACKS[name].slow for name in args.attacks):
            remark(line)

    deadline = Deadline(say, args.time_limit)
    given: dict[str, Any] = {
        **{field.name: getattr(args, field.name) for field in fields(AuditConfig)},
        **asked_of(args.model, args),
        "attacks": args.attacks,
        "facts": {"command": command_of("audit gradients", args)},
        "deadline": deadline,
        "keep": lambda result: write_numbers(result, args.out),
    }
    if args.find_defence is not None:
        return _find(args, data, given, deadline)
    with first_ctrl_c(deadline):
        if args.texts is not None:
            found = audit_texts(args.model, args.texts, **texts_given(args, given))
            ruling = found.ruling
        elif args.settings:
            found = audit_settings(args.model, data, args.settings, defences=args.defences, **given)
            ruling = None
        else:
            found = audit_gradients(args.model, data, defences=args.defences, **given)
            ruling = found.ruling
        if args.junit is not None and ruling is not None and not isinstance(found, Comparison):
            suite = f"situs audit gradients {found.model}"
            file = junit(suite, ruling, found.provenance.facts, found.lines)
            write_result(args.junit, file, field="junit")
        present(found if args.pictures else found.without_pictures(), args.out)
    status = 0 if ruling is None else ruling.status
    return INTERRUPTED if deadline.interrupted and status != ABOVE else status


def _find(args: Args, data: str | None, given: dict[str, Any], deadline: Deadline) -> int:
    """Audits what is sent today, within a tenth of the time, then looks for remedies: both on the audit's page.

    The status is 0 where some setting is named, and that of "inconclusive" where none is.
    """
    assert args.find_defence is not None
    parse_limit(args.find_defence, METRICS, "find_defence")  # the audit would call it --fail-above
    costs = {each.name: getattr(args, each.name) for each in fields(CostConfig)}
    first = Deadline(deadline.say, None if args.time_limit is None else args.time_limit / 10, whole=deadline)
    with first_ctrl_c(deadline):
        today = audit_gradients(args.model, data, **given | {"deadline": first, "fail_above": args.find_defence})
        today, deadline.closed = today if args.pictures else today.without_pictures(), True
        publish(today, args.out)  # whatever comes of the search
        deadline.closed = False
        try:
            found = find_defences(args.model, data, args.find_defence, **costs, **given)
        except KeyboardInterrupt:  # before its first trial: it keeps what it has tried
            deadline.closed = True
            remark("stopped by Ctrl-C before any defence was tried: this is what is sent today")
            present(today, args.out)
            return INTERRUPTED
        deadline.closed = True
        page = publish(replace(today, remedies=found), args.out)
        present(found, args.out)
    print(page)
    return INTERRUPTED if deadline.interrupted else 0 if found.found else NOT_JUDGED


def texts_given(args: Args, given: dict[str, Any]) -> dict[str, Any]:
    """What of the flags is for sentences; what is for images alone is refused."""
    mine = {each.name for each in fields(StepConfig)}
    for flag in (*(each for each in fields(AuditConfig) if each.name not in mine), *_IMAGES):
        value = getattr(args, flag.name)
        if value != flag.default:
            said = f"{flag.name}={value}: has no part in an audit of texts; leave it out"
            raise SitusError(said, field=(flag.name, "texts"))
    kept = {name: value for name, value in given.items() if name in mine and value is not None}
    others = {name: given[name] for name in ("unlock", "device", "facts", "deadline", "keep")}
    return {**kept, **others, "defences": ("none",) if args.defences == ("auto",) else args.defences}


_IMAGES = [each for each in fields(Args) if each.name in ("attacks", "settings", "weights", "img_size", "patch_size")]
"""Flags that say something of images, beside those of `AuditConfig`."""


def _check(args: Args) -> str | None:
    """Refuses what would only show when the audit is over; where the images are, None for a run's own and texts."""
    if (args.data is None) == (args.texts is None) and not (args.data is None and is_run(args.model)):
        said = "give images" if args.data is None else f"texts={args.texts}: and images are given; give images"
        raise SitusError(f"{said} or a file of sentences to attack, one of them", field=("data", "texts"))
    for name in args.attacks:
        create_attack(name)  # refused if nobody knows it
    others = {"texts": args.texts, "settings": args.settings, "fail_above": args.fail_above, "junit": args.junit}
    for name, value in (others | {"defences": args.defences != ("auto",)}).items() if args.find_defence else ():
        if value:
            raise SitusError(
                f"find_defence={args.find_defence}: tries every defence by itself; leave {name} out",
                field=("find_defence", name),
            )
    for each in fields(CostConfig) if args.find_defence is None else ():
        if (value := getattr(args, each.name)) != each.default:
            said = f"{each.name}={value}: is for what a defence costs, and none is looked for"
            raise SitusError(said, field=(each.name, "find_defence"))
    if args.junit is not None and args.fail_above is None:
        raise SitusError(
            f"junit={args.junit}: holds what a gate says, and there is none", field=("junit", "fail_above")
        )
    if args.junit is not None and (args.junit.is_dir() or args.junit.parent.is_file()):
        raise SitusError(field="junit", value=args.junit, allowed="a file that can be written")
    result = "texts" if args.texts is not None else "settings" if args.settings else "gradients"
    check_folder(args.out, result, *(["defences"] if args.find_defence is not None else []))
    return args.data
