"""A study by its name or file, and its jobs: variables replaced, a scale applied, every name and config checked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

from situs.config import choices_of, from_dict, merge
from situs.errors import SitusError, unknown_name
from situs.files import read_toml
from situs.presets import load_preset
from situs.studies.find import check_path
from situs.studies.form import PAPER, VERBS, Column, Job, Line, Row, Study, Table, renewed

Jobs = dict[str, Job]
_NAME = re.compile(r"\w[\w.+=-]*")


def planned(study: Study, scale: str = PAPER) -> Jobs:
    """The jobs of a study at a scale, by name and in the file's order; inconsistent ones are refused."""
    if scale not in study.scale_names():
        raise unknown_name("scale", scale, study.scale_names(), field="scale")
    jobs = _all(study)
    _check_names(study, jobs)
    _check_order(jobs)
    for index, change in enumerate(study.scales.get(scale, ())):
        meant = {name: job for name, job in jobs.items() if change.verb in ("", job.verb)}
        names = [name for name in meant if any(fnmatchcase(name, pattern) for pattern in change.jobs)]
        if not names:
            raise SitusError(f"scales.{scale}[{index}]: matches no job", field=f"scales.{scale}[{index}].jobs")
        for name in names:
            job = jobs.pop(name) if change.leave_out else jobs[name]
            if not change.leave_out:
                laid, options = merge(job.change, change.change), {**job.options, **change.options}
                try:
                    jobs[name] = replace(job, preset=change.preset or job.preset, change=laid, options=options)
                except SitusError as error:
                    raise error.prefixed(f"scales.{scale}[{index}] for jobs.{name}") from None
    while dropped := [n for n, job in jobs.items() if not set(needs(job)) <= jobs.keys()]:  # needs a job left out
        for name in dropped:
            del jobs[name]
    return jobs


def _all(study: Study) -> Jobs:
    """Every job of the file, by its name with the variables replaced."""
    jobs: Jobs = {}
    for name, job in study.jobs.items():
        for job_name, expanded in _expanded(name, job):
            if not _NAME.fullmatch(job_name):
                raise SitusError(
                    f"jobs.{name}: {job_name!r} must contain only letters, digits and . _ + = -", field=f"jobs.{name}"
                )
            if job_name in jobs:
                raise SitusError(f"jobs.{name}: two jobs have the name {job_name!r}", field=f"jobs.{name}")
            jobs[job_name] = expanded
    return jobs


def _expanded(name: str, job: Job) -> Iterator[tuple[str, Job]]:
    """A job for every combination of its variables."""
    for variable in job.each:
        if f"{{{variable}}}" not in name:
            raise SitusError(f"jobs.{name}.each.{variable}: the job's name must contain {{{variable}}}", field="each")
    for values in product(*job.each.values()):
        variables = dict(zip(job.each, values, strict=True))
        fields = {
            key: put(getattr(job, key), variables) for key in ("after", "model", "preset", "change", "options", "data")
        }
        try:
            yield put(name, variables), replace(job, **fields, each={})
        except SitusError as error:
            raise error.under(f"jobs.{name}") from None


def put(value: Any, variables: Mapping[str, Any]) -> Any:
    """`value` with its {variables} replaced, in tables and lists too; a text that is one variable becomes its value."""
    if isinstance(value, Mapping):
        return {key: put(entry, variables) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(put(entry, variables) for entry in value)
    if not isinstance(value, str):
        return value
    for name, entry in variables.items():
        if value == f"{{{name}}}":
            return entry
        value = value.replace(f"{{{name}}}", word(entry))
    return value


def word(value: Any) -> str:
    """A value as in a job's name: 0.5, 2, learned."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def needs(job: Job) -> tuple[str, ...]:
    """The jobs that must be done first: the jobs in `after`, and the jobs that its options or its model name as
    {JOB}."""
    named = [name for text in texts_of([job.options, job.model]) for name in re.findall(r"\{([^{}]+)\}", text)]
    return (*job.models, *(name for name in named if name != "seed" and not name.startswith("data.")))


def texts_of(value: Any) -> Iterator[str]:
    """Every text in tables and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from texts_of(entry)


def _check_names(study: Study, jobs: Jobs) -> None:
    for name, job in jobs.items():
        for needed in needs(job):
            if needed not in jobs:
                raise unknown_name("job", needed, jobs, field=f"jobs.{name}.after").prefixed(f"jobs.{name}.after")
        for data in data_of(study, job):
            if data not in study.data:
                raise unknown_name("data set", data, study.data, field="data").prefixed(f"jobs.{name}.data")
    for where, cell in _cells(study):
        job, figure = cell
        if job and job not in jobs:
            raise unknown_name("job", job, jobs, field=where).prefixed(where)
        if job and not figure:
            raise SitusError(
                f"{where}: names the job {job!r}, but not which value in its results to use; set the key 'figure' to "
                "the path of this value, such as rows[ratio=0].top1",
                field=where,
            )
        try:
            check_path(figure)
        except SitusError as error:
            raise error.prefixed(where) from None
    for index, picture in enumerate(study.pictures):
        if picture.job not in jobs:
            raise unknown_name("job", picture.job, jobs, field="pictures").prefixed(f"pictures[{index}].job")


def _cells(study: Study) -> Iterator[tuple[str, tuple[str, str]]]:
    """The place of each cell in the file, its job and its figure."""
    for number, table in enumerate(study.tables):
        for r, row in enumerate(table.rows):
            for c in range(len(table.columns)):
                yield f"tables[{number}].rows[{r}], {table.columns[c].name}", cell_of(table, row, c)
    for number, curves in enumerate(study.curves):
        for i, line in enumerate(curves.lines):
            for p in range(len(line.at) or 1):
                yield f"curves[{number}].lines[{i}]", point_of(line, p)
            yield f"curves[{number}].lines[{i}].over", ("", line.over)


def cell_of(table: Table, row: Row, index: int) -> tuple[str, str]:
    """Job and figure of a cell: the row's, or the column's. A "" in a row's list is an empty cell."""
    column: Column = table.columns[index]
    job = row.job[index] if isinstance(row.job, tuple) and row.job else row.job or column.job
    figure = row.figure[index] if isinstance(row.figure, tuple) and row.figure else row.figure or column.figure
    return str(job), str(figure)


def point_of(line: Line, index: int) -> tuple[str, str]:
    """Job and figure of a line's point."""
    job = line.job[index] if isinstance(line.job, tuple) and line.job else line.job
    figure = line.figure[index] if isinstance(line.figure, tuple) and line.figure else line.figure
    variables = {"x": line.at[index]} if line.at else {}
    return tuple(word(put(text or "", variables)) for text in (job, figure))  # pyright: ignore[reportReturnType]


def times_of(unit: str, times: float | None) -> float:
    """The factor of our numbers."""
    return times if times is not None else 100.0 if unit == "%" else 1.0


def data_of(study: Study, job: Job) -> tuple[str, ...]:
    """The data sets of a job: its own first, then those that its options, changes and model name as {data.NAME}."""
    first = job.data or next(iter(study.data), "")
    texts = texts_of([job.options, job.change, job.model])
    named = [name for text in texts for name in re.findall(r"\{data\.([^{}]+)\}", text)]
    return (*([first] if first and VERBS[job.verb].reads(job.options) else []), *named)


def _check_order(jobs: Jobs) -> None:
    """Refuses jobs that wait for each other."""
    done: set[str] = set()
    while ready := [name for name, job in jobs.items() if name not in done and set(needs(job)) <= done]:
        done |= {*ready}
    if left := [name for name in jobs if name not in done]:
        way = [left[0]]
        while way.count(way[-1]) == 1:
            way.append(next(name for name in needs(jobs[way[-1]]) if name not in done))
        circle = " -> ".join(way[way.index(way[-1]) :])
        raise SitusError(f"jobs.{left[0]}.after: these jobs wait for each other: {circle}", field="after")


def check_configs(jobs: Jobs) -> None:
    """Refuses a training whose preset is unknown or whose config is invalid; imports torch."""
    from situs.measure.finetune import FinetuneConfig
    from situs.train.assemble import RunConfig

    for name, job in jobs.items():
        if not VERBS[job.verb].trains:
            continue
        cls = FinetuneConfig if job.verb in ("finetune", "split train") else RunConfig
        try:
            tables = recipe_of(job, cls)
        except SitusError as error:
            raise error.prefixed(f"jobs.{name}.preset") from None
        from_dict(cls, tables, where=f"jobs.{name}.change")


def recipe_of(job: Job, cls: type[Any]) -> dict[str, Any]:
    """A job's changes over its preset, as tables of a config `cls`."""
    return merge(load_preset(job.preset) if job.preset else {}, job.change, choices_of(cls))


# --- studies by their names -------------------------------------------------------------------------------------------


LIST = "`situs study show`"


def study_names() -> list[str]:
    """The studies that come with situs, sorted by paper, tables before figures."""
    return sorted(_files(), key=_order)


def _order(name: str) -> tuple[str, str, int, str]:
    paper, _, place = name.partition("-")
    kind = place.rstrip("0123456789")
    return paper, {"table": "0", "figure": "1"}.get(kind, kind), int(place[len(kind) :] or 0), name


def study_file(name: str | Path) -> Path:
    """The file of a study that comes with situs, or the path itself."""
    if Path(name).suffix == ".toml" or Path(name).is_file():
        return Path(name)
    files = _files()
    if str(name) not in files:
        near = ", ".join(get_close_matches(str(name), files, n=3, cutoff=0.4))
        reason = f"unknown study {str(name)!r}, and no such folder or file; Situs has {len(files)} studies ({LIST})"
        reason += f", the nearest: {near}" if near else ""
        raise SitusError(reason, field="study", value=str(name), allowed="a study's name or its file")
    return files[str(name)]


def load_study(name: str | Path, *, configs: bool = True) -> Study:
    """A study by its name or its file, checked at all its scales; a mistake is one sentence with file and key.

    configs: whether the configs of its trainings are checked too, which imports torch.
    """
    tables = _renewed(read_toml(study_file(name)))
    try:
        study = from_dict(Study, tables)
        for scale in study.scale_names():
            jobs = planned(study, scale)
            if configs:
                check_configs(jobs)
    except SitusError as error:
        at = (error.field or "").rpartition(".")[0]  # the job, where the sentence does not name it
        raise error.prefixed(f"{name}: {at}" if at and at not in str(error) else str(name)) from None
    return study


def _renewed(tables: dict[str, Any]) -> dict[str, Any]:
    """A study's tables with the verbs and options of this version; what is no table is refused later."""
    jobs, scales = tables.get("jobs"), tables.get("scales")
    if isinstance(jobs, dict):
        tables["jobs"] = {n: renewed(job) if isinstance(job, dict) else job for n, job in jobs.items()}
    if isinstance(scales, dict):
        for name, changes in scales.items():
            if isinstance(changes, list):
                scales[name] = [renewed(change) if isinstance(change, dict) else change for change in changes]
    return tables


def _files() -> dict[str, Path]:
    folder: Any = files("situs.studies") / "papers"
    return {entry.name.removesuffix(".toml"): Path(entry) for entry in folder.iterdir() if entry.name.endswith(".toml")}
