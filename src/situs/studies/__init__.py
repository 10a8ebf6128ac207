"""Tables and figures as studies: jobs, their order, seeds, and the paper's numbers beside ours.

    study_names   The studies that come with situs, one for each table or figure of the four papers.
    load_study    A study by its name or its TOML file, checked.
    run_study     Runs the unfinished jobs, resumes interrupted ones, and gives the table.
    read_study    The table of a study's folder; for a name or file, with the numbers measured earlier.

A study is one TOML file. Those of the papers are in `papers/`; a user's study has the same form: the fields of
`situs.studies.form.Study`. `examples/study_keys.toml` has every key.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from situs.studies.plan import load_study as load_study
    from situs.studies.plan import study_names as study_names
    from situs.studies.reading import read_study as read_study
    from situs.studies.run import run_study as run_study

_HOMES = {
    "load_study": "plan",
    "study_names": "plan",
    "read_study": "reading",
    "run_study": "run",
}

__all__ = [*_HOMES]  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
