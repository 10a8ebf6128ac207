"""Studies by their names: the files that come with situs, and a user's own."""

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
    """The studies that come with situs, paper by paper, tables before figures and each in order."""
    return sorted(_files(), key=_order)


def _order(name: str) -> tuple[str, str, int, str]:
    paper, _, place = name.partition("-")
    kind = place.rstrip("0123456789")
    return paper, {"table": "0", "figure": "1"}.get(kind, kind), int(place[len(kind) :] or 0), name


def study_file(name: str | Path) -> Path:
    """The file of a study that comes with situs, or a path as it is."""
    if Path(name).suffix == ".toml" or Path(name).is_file():
        return Path(name)
    found = _files()
    if str(name) not in found:
        near = ", ".join(get_close_matches(str(name), found, n=3, cutoff=0.4))
        said = f"unknown study {str(name)!r}, and no folder or file; there are {len(found)} ({LIST})"
        said += f", the nearest: {near}" if near else ""
        raise SitusError(said, field="study", value=str(name), allowed="a study's name or its file")
    return found[str(name)]


def load_study(name: str | Path, *, configs: bool = True) -> Study:
    """A study by its name or its file, checked at every scale it has; a mistake is one sentence with file and key.

    configs: whether the recipes of its trainings are made too, which imports torch.
    """
    tables = _renewed(read_toml(study_file(name)))
    try:
        study = from_dict(Study, tables)
        for scale in study.scale_names():
            jobs = planned(study, scale)
            if configs:
                check_configs(jobs)
    except SitusError as error:
        at = (error.field or "").rpartition(".")[0]  # the job of a sentence that does not name it
        raise error.prefixed(f"{name}: {at}" if at and at not in str(error) else str(name)) from None
    return study


def _renewed(tables: dict[str, Any]) -> dict[str, Any]:
    """A study's tables in the words of this version; what is no table is left to be refused."""
    jobs, scales = tables.get("jobs"), tables.get("scales")
    if isinstance(jobs, dict):
        tables["jobs"] = {n: renewed(job) if isinstance(job, dict) else job for n, job in jobs.items()}
    if isinstance(scales, dict):
        for name, changes in scales.items():
            if isinstance(changes, list):
                scales[name] = [renewed(each) if isinstance(each, dict) else each for each in changes]
    return tables


def _files() -> dict[str, Path]:
    folder: Any = files("situs.studies") / "papers"
    return {each.name.removesuffix(".toml"): Path(each) for each in folder.iterdir() if each.name.endswith(".toml")}
