"""Finds a figure in what a job wrote, by a path.

    top1                             a key
    together.top1                    a key of a table
    accuracy|top1                    the first of these keys that is there
    models.*.accuracy                the only entry of a table, whatever its name
    models.mp3-?.accuracy            the only one whose name fits
    cells[0].accuracy                an entry of a list; [-1] is the last
    rows[ratio=0.15].consistency     the entry of a list whose key has this value; several apart by commas, * in a text
                                     stands for anything
    rows[*].ratio                    of every entry: a list, for the lines of a figure

An evaluation or an audit wrote one JSON file of numbers. Of a training it is its log: `val_top1` is the last value of
that metric, `log.val_top1[epoch=40].value` the one after 40 epochs, `log.val_top1[*].value` all of them.
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
    """What a finished job wrote in its folder."""
    if VERBS[job.verb].trains:
        return _log_of(folder)
    found = figure_files(folder)
    if len(found) != 1:
        raise SitusError(f"{folder}: holds {len(found)} files of numbers and must hold one")
    return read_json(found[0])


def figure_files(folder: Path) -> list[Path]:
    """The files of numbers that a measurement left."""
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
    """The value at a path: a number, or a list where the path says [*]."""
    return _find(numbers, _steps(path), path)


def check_path(path: str) -> None:
    """Refuses what is no path, whatever a job writes."""
    for step in _steps(path):
        if step.startswith("[") and not re.fullmatch(r"\[(\*|-?\d+|[^=,]+=[^,]*(,[^=,]+=[^,]*)*)\]", step):
            raise SitusError(f"figure={path!r}: {step} is none of [*], [NUMBER], [KEY=VALUE]", field="figure")


def _steps(path: str) -> list[str]:
    """["rows", "[ratio=0.15]", "consistency"]."""
    steps: list[str] = []
    at = 0
    while at < len(path):
        match = _STEP.match(path, at)
        if match is None:
            raise SitusError(f"figure={path!r}: is no path to a number", field="figure")
        steps += [match[1], *re.findall(r"\[[^\]]*\]", match[2])]
        at = match.end()
    return steps


def _find(held: Any, steps: list[str], path: str) -> Any:
    for index, step in enumerate(steps):
        if step == "[*]":
            if not isinstance(held, list):
                raise _absent(path, step, held)
            return [_find(each, steps[index + 1 :], path) for each in held]
        held = _entry(held, step[1:-1], path) if step.startswith("[") else _key(held, step, path)
    return held


def _key(held: Any, key: str, path: str) -> Any:
    for one in key.split("|") if isinstance(held, Mapping) else ():
        if one in held:
            return held[one]
        if len(fits := [name for name in held if fnmatchcase(name, one)]) == 1:
            return held[fits[0]]
    raise _absent(path, key, held)


def _entry(held: Any, asked: str, path: str) -> Any:
    if not isinstance(held, list):
        raise _absent(path, f"[{asked}]", held)
    if re.fullmatch(r"-?\d+", asked):
        if -len(held) <= int(asked) < len(held):
            return held[int(asked)]
        raise _absent(path, f"[{asked}]", held)
    wanted = dict(part.split("=", 1) for part in asked.split(",") if "=" in part)
    tables = [each for each in held if isinstance(each, Mapping)]
    fits = [each for each in tables if all(_is(each.get(k.strip()), v.strip()) for k, v in wanted.items())]
    if len(fits) != 1:
        raise SitusError(f"figure={path!r}: [{asked}] fits {len(fits)} of {len(held)} entries, and must fit one")
    return fits[0]


def _is(value: Any, text: str) -> bool:
    if isinstance(value, str):
        return fnmatchcase(value, text)
    try:
        wanted = json.loads(text)
    except ValueError:
        return False
    if isinstance(value, bool) or isinstance(wanted, bool) or not isinstance(value, (int, float)):
        return value is wanted or value == wanted
    return isinstance(wanted, (int, float)) and isclose(value, wanted, rel_tol=1e-6, abs_tol=1e-9)


def _absent(path: str, step: str, held: Any) -> SitusError:
    if isinstance(held, Mapping):
        shown = [str(name) for name in sorted(held, key=lambda name: not _holds_number(held[name]))][:12]
        near = [name for name in get_close_matches(step, map(str, held), n=1) if name not in shown]
        there = f"there are {', '.join([*shown, *(['…'] if near else []), *near]) or 'none'}"
    else:
        there = f"there is a list of {len(held)}" if isinstance(held, list) else f"there is {held!r}"
    return SitusError(f"figure={path!r}: has no {step}; {there}", field="figure")


def _holds_number(value: Any) -> bool:
    """Whether a path may end there: what a result says of its model and data mostly holds none."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list):
        return any(map(_holds_number, value))
    return isinstance(value, (int, float)) and not isinstance(value, bool)
