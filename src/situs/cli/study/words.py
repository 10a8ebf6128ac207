"""A study's commands held to the command line before the first of them is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from situs.cli.parser.arguments import words_of
from situs.cli.parser.flags import configured_of, flags_of
from situs.config import convert, from_dict
from situs.errors import SitusError
from situs.studies.plan import recipe_of

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
                raise error.said_of(f"{name}: jobs.{task.of}.options") from None


def check_command(job: Job, words: Sequence[str]) -> None:
    """Refuses words and values that a job's verb does not take; its flags are those of the job's own method."""
    from situs.cli.main import VERBS

    args = import_module(VERBS[job.verb][0]).Args
    held = configured_of(args)
    start = None if held is None else from_dict(held[1].cls, recipe_of(job, held[1].cls))
    for flag, value in words_of(flags_of(args, start), words[len(job.verb.split()) :], f"situs {job.verb}"):
        convert(flag.kind, value, flag.fields[0])


def alike(job: Job) -> tuple[str, ...]:
    """What decides whether its command is one: the options, and for those of a method which method it is."""
    inside = any(isinstance(value, Mapping) for value in job.options.values())
    return (job.verb, job.preset if inside else "", *map(str, job.options.items()))
