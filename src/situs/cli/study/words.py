"""A study's commands held to the command line before the first of them is run."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from uuid import uuid4

from situs.cli.parser.arguments import words_of
from situs.cli.parser.flags import configured_of, flags_of
from situs.errors import SitusError


def check_words(study: str | Path, scale: str) -> None:
    """Refuses a study in which a job has an option that its verb does not take, with the job's name."""
    from situs.cli.main import VERBS
    from situs.studies.folder import StudyFolder
    from situs.studies.load import load_study
    from situs.studies.words import words_of as command_of

    loaded = load_study(study)
    nowhere = Path(f".study-{uuid4().hex}")  # where nothing was begun
    folder = StudyFolder(nowhere, loaded, str(study), scale, 1)
    seen: set[tuple[str, ...]] = set()
    for task in folder.tasks.values():
        verb, words = task.job.verb, command_of(folder, task, dict.fromkeys(loaded.data, "data"))
        alike = (verb, *map(str, task.job.options.items()))
        if alike in seen:
            continue
        seen.add(alike)
        args = import_module(VERBS[verb][0]).Args
        held = configured_of(args)
        flags = flags_of(args, None if held is None else held[1].cls())
        try:
            words_of(flags, words[len(verb.split()) :], f"situs {verb}")
        except SitusError as error:
            raise error.said_of(f"{study}: jobs.{task.of}.options") from None
