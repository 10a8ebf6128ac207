"""Studies by their names: those that come with situs, and a user's files."""

from __future__ import annotations

from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from situs.config import from_dict
from situs.errors import SitusError
from situs.files import read_toml
from situs.studies.form import Study, renewed
from situs.studies.plan import check_configs, planned

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
        reason = f"unknown study {str(name)!r}, and no folder or file; there are {len(files)} ({LIST})"
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
