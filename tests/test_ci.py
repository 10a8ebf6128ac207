"""The gate in other people's CI: its script's status is the gate's, its log has no sample; our own calls make."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent


def read(name: str) -> dict[str, object] | list[dict[str, object]]:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_our_workflow_calls_targets_of_make_on_every_python() -> None:
    workflow = read(".github/workflows/ci.yml")
    assert isinstance(workflow, dict)
    jobs = workflow["jobs"]
    assert isinstance(jobs, dict)
    matrix = jobs["make"]["strategy"]["matrix"]["include"]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert {row["target"] for row in matrix} == {"test", "test-oldest", "lint", "docs", "wheel"} <= targets
    runs = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert runs == ["make ${{ matrix.target }} PYTHON=python${{ matrix.python }}", "make test-slow"]
    assert "test-slow" in targets
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    promised = re.findall(r"Python :: (3\.\d+)", " ".join(classifiers))
    assert [row["python"] for row in matrix if row["target"] == "test"] == promised
    assert {row["python"] for row in matrix} <= {*promised}


def test_the_action_hands_its_inputs_on_by_the_environment_alone() -> None:
    action = read("action.yml")
    assert isinstance(action, dict)
    steps, inputs = action["runs"]["steps"], action["inputs"]  # pyright: ignore[reportIndexIssue]
    assert not any("inputs." in step.get("run", "") for step in steps)
    gate = next(step for step in steps if step.get("id") == "gate")
    assert gate["run"] == 'bash "$GITHUB_ACTION_PATH/scripts/gate.sh"'
    script = (ROOT / "scripts" / "gate.sh").read_text()
    assert all(re.search(rf"\$\{{?{name}\b", script) for name in gate["env"])
    used = {name for step in steps for name in re.findall(r"inputs\.([\w-]+)", str(step))}
    assert used == set(inputs)


def test_the_hook_takes_a_limit_first_so_that_it_is_never_without_one(tmp_path: Path) -> None:
    [hook] = read(".pre-commit-hooks.yaml")
    assert isinstance(hook, dict)
    words = str(hook["entry"]).split()
    assert words[0] == "situs" and words[-1] == "--fail-above" and "--no-pictures" in words
    from situs.cli.main import main

    assert main([*words[1:], "my_model.py:build", "--data", str(tmp_path)]) == 2  # MODEL where the limit stands
    assert main(words[1:]) == 2


MODEL = """
import timm, torch

def build():
    torch.manual_seed(0)
    small = dict(img_size=28, patch_size=7, in_chans=1, embed_dim=64, depth=1, num_heads=2)
    return timm.create_model("vit_tiny_patch16_224", num_classes=10, **small)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "limit", "status", "outcome"),
    [
        ("--count 5", "psnr=20", 3, "above"),
        ("--count 5 --defences noise=1", "psnr=20", 0, "passed"),
        ("--count 1 --defences noise=1", "blind", 4, "inconclusive"),
        ("--count 5 --nosuch 3", "blind", 2, "error"),
    ],
)
def test_the_script_of_the_action(flags: str, limit: str, status: int, outcome: str, tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text(MODEL)
    (tmp_path / "situs").write_text(f'#!/bin/bash\nexec {sys.executable} -m situs "$@"\n')
    (tmp_path / "situs").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "MODEL": "my_model.py:build",
        "DATA": "samples",
        "FAIL_ABOVE": limit,
        "FLAGS": f"--attacks patchembed {flags}",
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
    }
    words = ["bash", str(ROOT / "scripts" / "gate.sh")]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    assert (tmp_path / "output").read_text() == f"outcome={outcome}\n"
    summary = (tmp_path / "summary.md").read_text()
    assert summary.startswith(f"### situs gate: {outcome}\n")
    written = {path.name for path in (tmp_path / "situs-gate").iterdir()}
    assert written <= {"gate.txt", "gate.xml", "gradients.json", "gradients.html"}
    assert written == {"gate.txt"} if outcome == "error" else len(written) == 4
    texts = [done.stdout, done.stderr, summary, *(path.read_text() for path in (tmp_path / "situs-gate").iterdir())]
    assert not any("data:image/" in text or "tensor(" in text for text in texts)
    if outcome == "above":
        assert "5 of 5 images exceed" in done.stdout
