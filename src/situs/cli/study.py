"""Verbs about the tables and figures of papers: `situs study …`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import uuid4

from cyclopts import Parameter

from situs.cli.parser.arguments import configured, parse_flags
from situs.cli.parser.flags import POSITIONAL, configured_of, flags_of
from situs.cli.result import present
from situs.cli.shell import answer, as_document
from situs.cli.tables import print_table
from situs.config import convert, from_dict
from situs.errors import SitusError
from situs.studies.plan import recipe_of
from situs.studies.run import StudyOptions

if TYPE_CHECKING:
    from situs.studies.form import Job, Study


def check_study(study: Study, name: str | Path, scale: str) -> None:
    """Refuses a study with a job whose options its verb does not take."""
    from situs.studies.folder import StudyFolder
    from situs.studies.words import words_of as command_of

    new_path = Path(f".study-{uuid4().hex}")  # no study was begun there
    folder = StudyFolder(new_path, study, str(name), scale, 1)
    checked: set[tuple[str, ...]] = set()
    for task in folder.tasks.values():
        if (kind := command_kind(task.job)) not in checked:
            checked.add(kind)
            try:
                check_command(task.job, command_of(folder, task, dict.fromkeys(study.data, "data")))
            except SitusError as error:
                raise error.prefixed(f"{name}: jobs.{task.of}.options") from None


def check_command(job: Job, words: Sequence[str]) -> None:
    """Refuses flags and values that a job's verb does not take, given the job's method."""
    from situs.cli.main import verb_type

    args = verb_type(job.verb)
    configured_field = configured_of(args)
    start = None
    if configured_field is not None:
        cls = configured_field[1].cls
        start = from_dict(cls, recipe_of(job, cls))
    for flag, value in parse_flags(flags_of(args, start), words[len(job.verb.split()) :], f"situs {job.verb}"):
        convert(flag.kind, value, flag.fields[0])


def command_kind(job: Job) -> tuple[str, ...]:
    """Jobs of the same kind have equally valid commands: same verb and options, and same preset if a table is set."""
    has_table = any(isinstance(value, Mapping) for value in job.options.values())
    return (job.verb, job.preset if has_table else "", *map(str, job.options.items()))


@dataclass(frozen=True, kw_only=True)
class Run:
    """Reproduce a table or figure of a paper, or run your own study. The results page compares the numbers of the paper
    with the numbers that Situs measured.

    After a crash or Ctrl-C, repeat the same command. Finished jobs are skipped, and interrupted jobs continue.

    For example: situs study run lock --scale quick --out runs/lock
    """

    study: Annotated[str, POSITIONAL, Parameter(metavar="NAME|FILE")]
    """The name of an included study (situs study show lists the names), or your own TOML file."""

    out: Annotated[Path, Parameter(metavar="FOLDER")]
    """Output folder of the study: a new folder. To continue an earlier study, give its folder."""

    data: Annotated[str, Parameter(metavar="PATH|NAME=PATH,…")] = ""
    """Path of the data. If the study has several data sets, give NAME=PATH for each data set. Jobs without data are
    skipped."""

    seeds: Annotated[int | None, Parameter(metavar="N")] = None
    """Number of seeds: every job runs with the seeds 0 to N - 1. By default, the study defines N."""

    scale: Annotated[str, Parameter(metavar="quick|paper")] = "paper"
    """Size of the study: paper (the setup of the paper) or quick (a small setup that only tests whether the study
    runs)."""

    take: Annotated[str, Parameter(metavar="JOB=FOLDER,…")] = ""
    """Instead of training JOB, use the training run or the export that is in FOLDER. JOB names the job with seed 0, and
    JOB-1 names the job with seed 1."""

    dry_run: bool = False
    """Print the commands of the remaining jobs without running them."""

    config: StudyOptions = configured(StudyOptions)

    def run(self) -> int:
        """Runs the jobs, prints the table and writes the page. The exit status is 1 if a job failed, diverged or
        remains, or if a number of the table is missing."""
        from situs.pages import publish
        from situs.studies import run_study
        from situs.studies.folder import StudyFolder
        from situs.studies.plan import load_study

        check_study(load_study(self.study), self.study, self.scale)
        if self.dry_run:
            return _dry_run(self)
        result = run_study(
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
        present(result, self.out)
        chosen = StudyFolder.open(self.out).chosen(self.config.only, seeds=self.seeds)
        unfinished = [task for task in result.tasks if task.name in chosen and task.state not in ("done", "taken")]
        return int(bool(result.unread or unfinished))


def _dry_run(args: Run) -> int:
    """Prints the command of each job that remains, and the state of the others."""
    from situs.studies.folder import StudyFolder
    from situs.studies.plan import data_of, load_study, study_file
    from situs.studies.words import paths_of, words_of

    study, file = load_study(args.study), study_file(args.study)
    paths = paths_of(study, file.stem, _paths(args.data))
    folder = StudyFolder.begun(args.out, study, file, args.scale, args.seeds)
    jobs: dict[str, str] = {}
    for name, task in folder.chosen(args.config.only, seeds=args.seeds).items():
        lacking = [data for data in data_of(study, task.job) if data not in paths]
        state = folder.ended(task)
        if state in ("done", "taken"):
            jobs[name] = state
        elif state == "not finite":
            jobs[name] = "the loss was not finite; the job is not run again"
        elif lacking:
            jobs[name] = f"skipped: give the path of its data ({', '.join(lacking)})"
        else:
            jobs[name] = shlex.join(["situs", *words_of(folder, task, paths)])
    answer(jobs, *(f"{name}: {line}" for name, line in jobs.items()))
    return 0


def _paths(text: str) -> Any:
    """The path of the only data set, or NAME -> PATH of several."""
    if text and (Path(text).exists() or not {*"=,"} & {*text}):
        return text
    return _pairs(text, "data")


def _pairs(text: str, field: str) -> dict[str, str]:
    """NAME=PATH,… as a dict; a path that exists may itself contain commas."""
    pairs: dict[str, str] = {}
    parts = [part for part in text.split(",") if part.strip()]
    while parts:
        name, _, value = parts[0].partition("=")
        if not name.strip() or not value.strip():
            raise SitusError(field=field, value=parts[0].strip(), allowed="NAME=PATH")
        with_commas = {count: ",".join([value, *parts[1:count]]) for count in range(len(parts), 1, -1)}
        used = next((count for count, path in with_commas.items() if Path(path).exists()), 1)
        pairs[name.strip()] = with_commas.get(used, value.strip())
        del parts[:used]
    return pairs


@dataclass(frozen=True)
class Show:
    """Show the table of a study. Without an argument, list all studies.

    The argument is the output folder of situs study run, or the name of a study. The table of an unfinished study shows
    the results so far. The list of all studies shows, for each study, the title, the data, the GPU hours, the numbers
    of the paper and the measured numbers.

    For example: situs study show runs/lock
    """

    folder: Annotated[str, POSITIONAL, Parameter(metavar="FOLDER|NAME|FILE")] = ""
    """The output folder of situs study run, or the name or TOML file of a study. The table compares the numbers of the
    paper with the measured numbers."""

    ours: bool = False
    """Print the measured numbers in the form that the TOML file of a study uses: ours = […]."""

    paper: Literal["mp3", "droppos", "mjp", "st"] | None = None
    """List only the studies of this paper."""

    numbers: bool = False
    """Also print the table of every listed study, with the numbers of the paper and the measured numbers."""

    def run(self) -> None:
        """Prints the table, and writes the page of a folder again."""
        from situs.pages import publish
        from situs.studies import read_study

        if not self.folder:
            self._list()
            return
        if self.paper or self.numbers:
            raise SitusError(
                f"{self.folder}: is one study; --paper and --numbers apply only to the list of all studies",
                field="paper",
            )
        study = read_study(self.folder)
        if self.ours:
            print("\n".join(study.ours()))
            return
        present(study, None)
        if study.tasks:
            try:
                print(publish(study, self.folder))
            except SitusError as error:  # the folder may be read-only
                print(f"situs: the page was not updated: {error}", file=sys.stderr)

    def _list(self) -> None:
        from situs.studies.reading import list_studies

        studies = list_studies(self.paper)
        tables = (studies.table(), *(studies.tables() if self.numbers else ()))
        answer([{"title": table.title, "rows": table.cells()} for table in tables])
        for table in () if as_document() else tables:
            print_table(table)
        print(studies.sentence())
