"""The command line of a job, and the paths of a study's data."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from situs.data.open import SAMPLES
from situs.errors import SitusError, unknown_name
from situs.studies.folder import StudyFolder, Task
from situs.studies.form import VERBS, Study
from situs.studies.plan import data_of, put


def paths_of(study: Study, name: str, data: str | Mapping[str, str] | None) -> dict[str, str]:
    """The paths of the data sets that the user named, which must exist."""
    known_sets = study.data
    if isinstance(data, str):
        if len(known_sets) != 1:
            listed = ", ".join(f"{name_given} ({what})" for name_given, what in known_sets.items()) or "none"
            sets = f"the data sets of this study are: {listed}"
            raise SitusError(f"data={data}: must have the form NAME=PATH; {sets}", field="data")
        data = {next(iter(known_sets)): data}
    for name_given, path in (data or {}).items():
        if name_given not in known_sets:
            raise unknown_name("data set", name_given, known_sets, field="data")
        if not elsewhere(path) and not Path(path).exists():
            raise SitusError(f"{path}: does not exist; {name_given} must be {known_sets[name_given]}", field="data")
    if known_sets and not data:
        listed = "; ".join(f"{name_given}: {what}" for name_given, what in known_sets.items())
        raise SitusError(f"{name} needs data: {listed}", field="data")
    return {e: p if elsewhere(p) else os.path.abspath(p) for e, p in (data or {}).items()}  # noqa: PTH100  (links stay)


def elsewhere(path: str) -> bool:
    """Whether it is not a local path: the embedded images, or a remote address."""
    return path == SAMPLES or "://" in path


def words_of(folder: StudyFolder, task: Task, data: Mapping[str, str]) -> list[str]:
    """The words of a task's command, without `situs`; a training's changes are in a file beside its folder."""
    job, how = task.job, VERBS[task.job.verb]
    data_names = data_of(folder.study, job)[:1] if how.reads(job.options) else ()
    data_option = {"data": data[data_names[0]]} if data_names else {}
    if task.begun:
        kept = {name: job.options[name] for name in how.again if name in job.options}
        return [*job.verb.split(), *flags({"resume": str(task.folder), **kept, **data_option})]
    models = {name: str(folder.tasks[needed].folder) for name, needed in task.needs.items()}
    known = {**models, **{f"data.{name}": path for name, path in data.items()}, "seed": task.seed}
    options = {**put(job.options, known), **data_option, **({"seed": task.seed} if how.trains else {})}
    start = [models[name] for name in job.models] or ([put(job.model, known)] if job.model else [])
    if start and how.model != "word":
        options[how.model] = start.pop()
    if job.preset:
        options["preset"] = job.preset
    if job.change:
        options["config"] = str(task.file("toml"))
    words = options.pop(how.word, []) if how.word else []
    return [*job.verb.split(), *start, *map(str, words), *flags({**options, "out": str(task.folder)})]


def flags(options: Mapping[str, Any], above: str = "") -> list[str]:
    """Options as words: --name value, --no-name for false, a list comma-separated."""
    words: list[str] = []
    for name, value in options.items():
        flag = f"{above}{name}".replace("_", "-")
        if isinstance(value, Mapping):
            words += flags(value, f"{flag}.")
        elif isinstance(value, bool):
            head, _, last = flag.rpartition(".")
            words.append("--" + (flag if value else f"{head}{'.' if head else ''}no-{last}"))
        else:
            text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            words += ["--" + flag, text]
    return words


def nameless(text: str, places: Mapping[str, str]) -> str:
    """The text with paths replaced by names; only whole paths: a folder `st` is not in "step", and a folder `a` is not
    a word of a sentence."""
    for shown, path in places.items():
        behind = r"(?![\w.-])" if "/" in path else "(?=/)"
        text = re.sub(rf"(?<![\w./-]){re.escape(path)}{behind}", lambda _, shown=shown: shown, text)
    return text
