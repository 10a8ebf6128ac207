"""The notebooks are those that the script makes of the examples; slow: each of them runs, with pages in its cells."""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAKE = runpy.run_path(str(ROOT / "scripts" / "make_notebooks.py"))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_they_are_as_the_script_makes_them_without_outputs() -> None:
    assert sorted(path.stem for path in MAKE["NOTEBOOKS"].glob("*.ipynb")) == sorted(MAKE["TUTORIALS"])
    for name in MAKE["TUTORIALS"]:
        text = (MAKE["NOTEBOOKS"] / f"{name}.ipynb").read_text(encoding="utf-8")
        assert text == MAKE["notebook"](ROOT / "examples" / f"{name}.py"), name
        cells = code_cells(json.loads(text))
        assert all(cell["outputs"] == [] for cell in cells)
        code = "\n".join("".join(cell["source"]) for cell in cells)
        compile(code, name, "exec")
        assert "argparse" not in code and "parser" not in code


def test_no_line_of_an_example_is_lost() -> None:
    """All that a script does beside its flags and its printing of results stands in the notebook."""
    for name in MAKE["TUTORIALS"]:
        text = "\n".join("".join(cell["source"]) for cell in json.loads(MAKE["notebook"](example(name)))["cells"])
        lines = example(name).read_text(encoding="utf-8").splitlines()[1:]
        flags = ("parser", "args = parser", "import argparse", "print(", "# ")
        lost = [line for line in lines if not line.startswith(flags) and line.strip() and line not in text.splitlines()]
        assert lost == [], name


def example(name: str) -> Path:
    return ROOT / "examples" / f"{name}.py"


SHOWS = {"pretrain_on_my_images": 1, "audit_my_model": 1, "lock_my_model": 1, "use_the_features": 0, "add_a_method": 0}
"""How many results each notebook shows as a page."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Jupyter's own
@pytest.mark.parametrize("name", MAKE["TUTORIALS"])
def test_a_notebook_runs_and_shows_its_results(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    notebook = nbformat.read(MAKE["NOTEBOOKS"] / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    began = time.monotonic()
    client = nbclient.NotebookClient(
        notebook, timeout=600, startup_timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    )
    with tempfile.TemporaryDirectory() as sockets:  # a port that is free now may be another process's a second later
        client.create_kernel_manager()
        client.km.transport, client.km.ip = "ipc", f"{sockets}/kernel"
        client.execute()
    with capsys.disabled():
        print(f"{name}: {time.monotonic() - began:.0f} s")
    outputs = [output for cell in code_cells(notebook) for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" for output in outputs)
    pages = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert len(pages) == SHOWS[name]
    assert all(page.startswith("<iframe srcdoc=") for page in pages)
    texts = [output["data"]["text/plain"] for output in outputs if "text/html" in output.get("data", {})]
    assert not any("tensor(" in text for text in texts)
    if name == "audit_my_model":
        assert "data:image/" in pages[0] and "A saved notebook contains this output" in pages[0]
