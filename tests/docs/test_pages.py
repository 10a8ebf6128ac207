"""Every python block of every documentation page runs, and what the reference lists is there."""

from __future__ import annotations

import re
import runpy
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tiny_texts import write_folder

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(
    page.relative_to(DOCS).as_posix()
    for page in DOCS.rglob("*.md")
    if "_build" not in page.parts and "```python" in page.read_text(encoding="utf-8")
)


def test_the_tour_is_among_the_pages() -> None:
    assert "tour.md" in PAGES


LONG = ("methods/gradients.md", "methods/sentences.md", "data.md", "bench.md", "analysis.md")
"""Pages whose code takes seconds."""


@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.slow] * (page in LONG)) for page in PAGES])
@pytest.mark.usefixtures("undrawn")
def test_code_runs(
    page: str, run_python_blocks: Callable[[Path], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # what a page writes stays there
    if page == "split.md":
        write_folder(tmp_path / "model", "llama", max_position_embeddings=64)
    monkeypatch.setattr("situs.audit.oracle.IMAGES", 1)  # the oracle is asked about one image, and not four
    monkeypatch.setattr("situs.audit.attacks.prior.GRADIENTS", 4)
    names = run_python_blocks(DOCS / page)
    assert set(names) - {"__name__", "__builtins__"}, f"{page}: no block ran"


def test_what_the_reference_lists_is_there() -> None:
    listed = tomllib.loads((DOCS / "api.toml").read_text(encoding="utf-8"))
    modules = [name for names in listed["modules"].values() for name in names]
    assert len(listed["functions"]) > 10 and len(modules) > 30
    for name in modules:
        assert import_module(f"situs.{name.removeprefix('-')}").__doc__, name
    for name in listed["functions"]:
        module, _, function = name.removeprefix("-").rpartition(".")
        assert getattr(import_module(f"situs.{module}"), function).__doc__, name


def test_what_was_run_is_what_is_pinned_and_the_metadata_claim_no_more() -> None:
    told = (DOCS / "tested.md").read_text(encoding="utf-8")
    rows = {cells[1].strip(): cells for line in told.splitlines() if len(cells := line.split("|")) > 4}
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (DOCS.parent / "constraints.txt").read_text(), flags=re.MULTILINE))
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [one for each in project["optional-dependencies"].values() for one in each]
    bounds = dict(re.findall(r"(?:^|\n)([\w-]+)>=([\d.]+)", "\n".join([*project["dependencies"], *extras])))
    for name in ("torch", "timm", "transformers"):
        assert rows[name][2].strip() == pins[name]
        assert re.search(rf"\b{re.escape(bounds[name])}\b", rows[name][3]), name  # the oldest that is allowed was run
    ours = {each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r"Python :: \d\.\d", each)}
    assert ours == {".".join(each.split(".")[:2]) for each in re.findall(r"3\.\d+\.\d+", "".join(rows["Python"][2:4]))}
    assert [each for each in project["classifiers"] if each.startswith("Operating")] == [
        "Operating System :: POSIX :: Linux"
    ]


def test_curves_of_the_results_can_be_drawn_from_their_tables() -> None:
    made = runpy.run_path(str(DOCS / "make_pictures.py"))
    for name, most, count, strongest in (
        ("noise_series", 200.0, 8, "1"), ("noise_series_texts", 100.0, 8, "1"), ("noise_series_prompts", 100.0, 7, "8"),
    ):  # fmt: skip
        strengths, lines = made[name]()
        assert strengths[0] == "0" and strengths[-1] == strongest and len({*strengths}) == len(strengths) >= count
        for values in lines.values():
            assert len(values) == len(strengths) and most >= values[0] > values[-1] >= 0
            assert values == sorted(values, reverse=True)  # more noise, less found


def test_all_pages_and_the_readme_have_at_most_40_000_words() -> None:
    pages = [DOCS.parent / "README.md", *(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 40_000
    assert len((DOCS / "methods" / "gradients.md").read_text(encoding="utf-8").splitlines()) <= 200
