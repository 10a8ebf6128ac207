"""Finds a number in the output of a job, by a path.

    top1                             a key
    together.top1                    a key of a table
    accuracy|top1                    the first of these keys that exists
    models.*.accuracy                the only entry of a table, whatever its name
    models.mp3-?.accuracy            the only entry whose name matches
    cells[0].accuracy                an entry of a list; [-1] is the last
    rows[ratio=0.15].consistency     the entry of a list whose key has this value; several conditions are separated by
                                     commas, and * in a text matches anything
    rows[*].ratio                    of every entry: a list, for the lines of a figure

An evaluation or an audit writes one JSON file of numbers. A training has a log: `val_top1` is the last value of that
metric, `log.val_top1[epoch=40].value` the value after 40 epochs, `log.val_top1[*].value` all values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import isclose
from pathlib import Path
from typing import Any

from situs.errors import SitusError
from situs.files import read_json
from situs.studies.form import VERBS, Job

_STEP = re.compile(r"([^.\[\]]+)((?:\[[^\]]*\])*)(?:\.|$)")
_ABOUT = ("step", "epoch", "seconds")


def numbers_of(job: Job, folder: Path) -> dict[str, Any]:
    """The numbers that a finished job wrote in its folder."""
    if VERBS[job.verb].trains:
        return _log_of(folder)
    files = figure_files(folder)
    if len(files) != 1:
        raise SitusError(f"{folder}: must contain one JSON file with results, but contains {len(files)}")
    return read_json(files[0])


def figure_files(folder: Path) -> list[Path]:
    """The files of numbers that a measurement wrote."""
    return sorted(folder.glob("*.json"))


def _log_of(folder: Path) -> dict[str, Any]:
    """The log of a run: the last value of each metric, and under `log` all of them."""
    from situs.train.checkpoint.folder import read_metrics

    log: dict[str, list[dict[str, Any]]] = {}
    for record in read_metrics(folder / "metrics.jsonl"):
        place = {name: record[name] for name in _ABOUT if name in record}
        for name, value in record.items():
            if name not in _ABOUT:
                log.setdefault(name, []).append({**place, "value": value})
    last = {name: entries[-1]["value"] for name, entries in log.items()}
    return {**last, "log": log}


def find(numbers: Mapping[str, Any], path: str) -> Any:
    """The value at a path: a number, or a list where the path has [*]."""
    return _find(numbers, _steps(path), path)


def check_path(path: str) -> None:
    """Refuses a text that is no path."""
    for step in _steps(path):
        if step.startswith("[") and not re.fullmatch(r"\[(\*|-?\d+|[^=,]+=[^,]*(,[^=,]+=[^,]*)*)\]", step):
            raise SitusError(f"figure={path!r}: {step} must be [*], [NUMBER] or [KEY=VALUE]", field="figure")


def _steps(path: str) -> list[str]:
    """["rows", "[ratio=0.15]", "consistency"]."""
    steps: list[str] = []
    at = 0
    while at < len(path):
        match = _STEP.match(path, at)
        if match is None:
            raise SitusError(
                f"figure={path!r}: must be a path in the job's results, such as rows[ratio=0].top1", field="figure"
            )
        steps += [match[1], *re.findall(r"\[[^\]]*\]", match[2])]
        at = match.end()
    return steps


def _find(value: Any, steps: list[str], path: str) -> Any:
    for index, step in enumerate(steps):
        if step == "[*]":
            if not isinstance(value, list):
                raise _absent(path, step, value)
            return [_find(entry, steps[index + 1 :], path) for entry in value]
        value = _entry(value, step[1:-1], path) if step.startswith("[") else _key(value, step, path)
    return value


def _key(table: Any, key: str, path: str) -> Any:
    for name in key.split("|") if isinstance(table, Mapping) else ():
        if name in table:
            return table[name]
        if len(fits := [key for key in table if fnmatchcase(key, name)]) == 1:
            return table[fits[0]]
    raise _absent(path, key, table)


def _entry(entries: Any, selector: str, path: str) -> Any:
    if not isinstance(entries, list):
        raise _absent(path, f"[{selector}]", entries)
    if re.fullmatch(r"-?\d+", selector):
        if -len(entries) <= int(selector) < len(entries):
            return entries[int(selector)]
        raise _absent(path, f"[{selector}]", entries)
    wanted = dict(part.split("=", 1) for part in selector.split(",") if "=" in part)
    tables = [table for table in entries if isinstance(table, Mapping)]
    fits = [table for table in tables if all(_is(table.get(k.strip()), v.strip()) for k, v in wanted.items())]
    if len(fits) != 1:
        count = f"{len(fits)} of {len(entries)} entries"
        raise SitusError(f"figure={path!r}: [{selector}] must match one entry, but matches {count}")
    return fits[0]


def _is(value: Any, text: str) -> bool:
    if isinstance(value, str):
        return fnmatchcase(value, text)
    try:
        wanted = json.loads(text)
    except ValueError:
        return False
    if not isinstance(value, (int, float)):
        return value == wanted
    return isinstance(wanted, (int, float)) and isclose(value, wanted, rel_tol=1e-6, abs_tol=1e-9)


def _absent(path: str, step: str, value: Any) -> SitusError:
    if isinstance(value, Mapping):
        shown = [str(name) for name in sorted(value, key=lambda name: not _holds_number(value[name]))][:12]
        near = [name for name in get_close_matches(step, map(str, value), n=1) if name not in shown]
        keys = ", ".join([*shown, *(["…"] if near else []), *near])
        present = f"among the keys {keys}" if keys else "in an empty table"
    else:
        present = f"in a list of {len(value)}" if isinstance(value, list) else f"in the value {value!r}"
    return SitusError(f"figure={path!r}: there is no {step} {present}", field="figure")


def _holds_number(value: Any) -> bool:
    """Whether a path may end at or below this value."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list):
        return any(map(_holds_number, value))
    return isinstance(value, (int, float)) and not isinstance(value, bool)
