"""Run a table or figure of a paper, or a study of your own: the paper's numbers, ours and the difference on one page.

For example: situs study run lock --scale quick --out runs/lock

What is done is skipped and what was cut goes on, so that the same command is given again after a crash or a Ctrl-C.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from situs.cli.parser.arguments import configured
from situs.cli.parser.flags import POSITIONAL
from situs.cli.result import present
from situs.cli.shell import answer
from situs.errors import SitusError
from situs.studies.run import How


@dataclass(frozen=True, kw_only=True)
class Args:
    """A study, run or gone on with."""

    study: Annotated[str, POSITIONAL, Parameter(metavar="NAME|FILE")]
    """A study that comes with situs (situs study list), or your own TOML file."""

    out: Annotated[Path, Parameter(metavar="FOLDER")]
    """Its folder: new, or one of the same study to go on with."""

    data: Annotated[str, Parameter(metavar="PATH|NAME=PATH,…")] = ""
    """Where its data lies; by name where it has several sets. Jobs whose data is not given are left out."""

    seeds: Annotated[int | None, Parameter(metavar="N")] = None
    """How often every job is run, with the seeds 0 to N - 1; by default as the study says."""

    scale: Annotated[str, Parameter(metavar="quick|paper")] = "paper"
    """paper: as the paper did; quick: smaller, to see that it works."""

    take: Annotated[str, Parameter(metavar="JOB=FOLDER,…")] = ""
    """A run or an export in the place of a training, which counts as done; JOB-1=FOLDER for seed 1."""

    dry_run: bool = False
    """Print the command of every job that is left, and write nothing."""

    config: How = configured(How)


def run(args: Args) -> int:
    """Runs the jobs, prints the table and writes the page; 1 where a job that was asked for was not finite or failed,
    or is left, or a cell's number was not found."""
    from situs.cli.study.words import check_words
    from situs.pages import publish
    from situs.studies import run_study
    from situs.studies.folder import StudyFolder
    from situs.studies.load import load_study

    check_words(load_study(args.study), args.study, args.scale)
    if args.dry_run:
        return _rehearse(args)
    found = run_study(
        args.study,
        _paths(args.data),
        take=_pairs(args.take, "take"),
        say=lambda line: print(line, file=sys.stderr, flush=True),
        keep=lambda result: publish(result, args.out) and None,
        out=args.out,
        seeds=args.seeds,
        scale=args.scale,
        how=args.config,
    )
    present(found, args.out)
    asked = StudyFolder.open(args.out).chosen(args.config.only, seeds=args.seeds)
    left = [task.name for task in found.tasks if task.name in asked and task.state not in ("done", "taken")]
    return int(bool(found.unread or left))


def _rehearse(args: Args) -> int:
    """Says what each job would be."""
    from situs.studies.folder import StudyFolder
    from situs.studies.load import load_study, study_file
    from situs.studies.plan import data_of
    from situs.studies.words import paths_of, words_of

    study, file = load_study(args.study), study_file(args.study)
    given = paths_of(study, file.stem, _paths(args.data))
    folder = StudyFolder.begun(args.out, study, file, args.scale, args.seeds)
    jobs: dict[str, str] = {}
    for name, task in folder.chosen(args.config.only, seeds=args.seeds).items():
        lacking = [each for each in data_of(study, task.job) if each not in given]
        state = folder.ended(task)
        if state in ("done", "taken"):
            jobs[name] = state
        elif state == "not finite":
            jobs[name] = "not finite, and not tried again"
        elif lacking:
            jobs[name] = f"left out: where its data lies is not given ({', '.join(lacking)})"
        else:
            jobs[name] = shlex.join(["situs", *words_of(folder, task, given)])
    answer(jobs, *(f"{name}: {said}" for name, said in jobs.items()))
    return 0


def _paths(text: str) -> Any:
    """The path of the only set, or that of each by its name."""
    if text and (Path(text).exists() or not {*"=,"} & {*text}):
        return text
    return _pairs(text, "data")


def _pairs(text: str, field: str) -> dict[str, str]:
    """NAME=PATH apart by commas; a path that is there may hold some itself."""
    pairs: dict[str, str] = {}
    parts = [part for part in text.split(",") if part.strip()]
    while parts:
        name, _, value = parts[0].partition("=")
        if not name.strip() or not value.strip():
            raise SitusError(field=field, value=parts[0].strip(), allowed="NAME=PATH")
        longer = {count: ",".join([value, *parts[1:count]]) for count in range(len(parts), 1, -1)}
        taken = next((count for count, path in longer.items() if Path(path).exists()), 1)
        pairs[name.strip()] = longer.get(taken, value.strip())
        del parts[:taken]
    return pairs
