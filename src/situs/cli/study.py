"""The verbs about tables and figures of papers: `situs study …`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import uuid4

from cyclopts import Parameter

from situs.cli.parser.arguments import configured, words_of
from situs.cli.parser.flags import POSITIONAL, configured_of, flags_of
from situs.cli.result import present
from situs.cli.shell import answer, as_document
from situs.cli.tables import print_table
from situs.config import convert, from_dict
from situs.errors import SitusError
from situs.studies.plan import recipe_of
from situs.studies.run import How

if TYPE_CHECKING:
    from situs.studies.form import Job, Study


def check_words(study: Study, name: str | Path, scale: str) -> None:
    """Refuses a study in which a job has an option that its verb does not take, with the job's name."""
    from situs.studies.folder import StudyFolder
    from situs.studies.words import words_of as command_of

    nowhere = Path(f".study-{uuid4().hex}")  # where nothing was begun
    folder = StudyFolder(nowhere, study, str(name), scale, 1)
    seen: set[tuple[str, ...]] = set()
    for task in folder.tasks.values():
        if (kind := alike(task.job)) not in seen:
            seen.add(kind)
            try:
                check_command(task.job, command_of(folder, task, dict.fromkeys(study.data, "data")))
            except SitusError as error:
                raise error.prefixed(f"{name}: jobs.{task.of}.options") from None


def check_command(job: Job, words: Sequence[str]) -> None:
    """Refuses words and values that a job's verb does not take; its flags are those of the job's own method."""
    from situs.cli.main import verb_type

    args = verb_type(job.verb)
    held = configured_of(args)
    start = None if held is None else from_dict(held[1].cls, recipe_of(job, held[1].cls))
    for flag, value in words_of(flags_of(args, start), words[len(job.verb.split()) :], f"situs {job.verb}"):
        convert(flag.kind, value, flag.fields[0])


def alike(job: Job) -> tuple[str, ...]:
    """What decides whether its command is one: the options, and for those of a method which method it is."""
    inside = any(isinstance(value, Mapping) for value in job.options.values())
    return (job.verb, job.preset if inside else "", *map(str, job.options.items()))


@dataclass(frozen=True, kw_only=True)
class Run:
    """Run a table or figure of a paper, or a study of your own: the paper's numbers, ours and the difference on one
    page.

    For example: situs study run lock --scale quick --out runs/lock

    What is done is skipped and what was cut goes on, so that the same command is given again after a crash or a Ctrl-C.
    """

    study: Annotated[str, POSITIONAL, Parameter(metavar="NAME|FILE")]
    """A study that comes with situs (situs study show), or your own TOML file."""

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

    def run(self) -> int:
        """Runs the jobs, prints the table and writes the page; 1 where a job that was asked for was not finite or
        failed, or is left, or a cell's number was not found."""
        from situs.pages import publish
        from situs.studies import run_study
        from situs.studies.folder import StudyFolder
        from situs.studies.load import load_study

        check_words(load_study(self.study), self.study, self.scale)
        if self.dry_run:
            return _rehearse(self)
        found = run_study(
            self.study,
            _paths(self.data),
            take=_pairs(self.take, "take"),
            say=lambda line: print(line, file=sys.stderr, flush=True),
            keep=lambda result: publish(result, self.out) and None,
            out=self.out,
            seeds=self.seeds,
            scale=self.scale,
            how=self.config,
        )
        present(found, self.out)
        asked = StudyFolder.open(self.out).chosen(self.config.only, seeds=self.seeds)
        left = [task.name for task in found.tasks if task.name in asked and task.state not in ("done", "taken")]
        return int(bool(found.unread or left))


def _rehearse(args: Run) -> int:
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


@dataclass(frozen=True)
class Show:
    """A study's table as it stands; without a name every table and figure of the papers.

    Of a folder that `situs study run` writes, also while it runs, or by a study's name. The list says what each shows,
    the data and GPU hours it needs, the paper's numbers and ours.

    For example: situs study show runs/lock
    """

    folder: Annotated[str, POSITIONAL, Parameter(metavar="FOLDER|NAME|FILE")] = ""
    """The folder of a study; or a study by its name or file: the paper's numbers, and ours where they were measured."""

    ours: bool = False
    """Print ours of each row instead, as a study's file holds what was measured."""

    paper: Literal["mp3", "droppos", "mjp", "st"] | None = None
    """The list: studies of one paper alone."""

    numbers: bool = False
    """The list: every table with the paper's numbers and ours as well."""

    def run(self) -> None:
        """Prints the table; of a folder it writes the page anew."""
        from situs.pages import publish
        from situs.studies import read_study

        if not self.folder:
            self._list()
            return
        if self.paper or self.numbers:
            raise SitusError(f"{self.folder}: is one study; paper and numbers are for the list", field="paper")
        study = read_study(self.folder)
        if self.ours:
            print("\n".join(study.ours()))
            return
        present(study, None)
        if study.tasks:
            try:
                print(publish(study, self.folder))
            except SitusError as error:  # the folder may be another's, to read alone
                print(f"situs: the page was not written anew; {error}", file=sys.stderr)

    def _list(self) -> None:
        from situs.studies.listing import list_studies

        studies = list_studies(self.paper)
        tables = (studies.table(), *(studies.tables() if self.numbers else ()))
        answer([{"title": each.title, "rows": each.cells()} for each in tables])
        for table in () if as_document() else tables:
            print_table(table)
        print(studies.sentence())
