"""What is installed is whole; slow: the wheel in an empty environment runs the README, the demo and the tutorials."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_extra_all_has_every_extra_that_fits_the_others() -> None:
    extras = PROJECT["optional-dependencies"]
    [union] = extras["all"]
    named = union.removeprefix("situs[").removesuffix("]").split(",")
    apart = {"all", "dev", "docs", "flower", "mlflow", "nvflare", "trackio"}
    assert named == sorted(extras.keys() - apart)


QUICK = {
    "pretrain_on_my_images": "--steps 1 --labels 64 --count 16",
    "audit_my_model": "--count 1",
    "lock_my_model": "--steps 1 --count 16",
    "use_the_features": "--steps 1 --count 40",
    "add_a_method": "--steps 2",
    "extra_loss": "",
    "own_attack": "",
}


@pytest.mark.slow
def test_the_wheel_alone_runs_the_readme_the_demo_and_the_tutorials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the newest versions of everything, without constraints.txt, from an empty folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*words: str, within: Path = tmp_path) -> str:
        began = time.monotonic()
        done = subprocess.run(words, cwd=within, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        with capsys.disabled():
            print(f"{' '.join(words)}: {time.monotonic() - began:.0f} s")
        return done.stdout

    run(sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path / "dist"), str(ROOT), within=ROOT)
    [wheel] = (tmp_path / "dist").glob("*.whl")
    files = {name.partition("/")[2] for name in zipfile.ZipFile(wheel).namelist() if name.startswith("situs/")}
    tracked = subprocess.run(["git", "ls-files", "examples"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert {*tracked.stdout.split()} <= files
    install = [sys.executable, "-m", "uv", "pip", "install", "--system-certs", "--quiet", "--python", "venv/bin/python"]
    run(sys.executable, "-m", "venv", "venv")
    run(*install, f"{wheel}[hf,locks,split]", "pytest")
    python, command = (str(tmp_path / "venv" / "bin" / name) for name in ("python", "situs"))
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in ("README.md", "tests/readme.py"):
        shutil.copy(ROOT / name, empty)
    page = run(python, "readme.py", "README.md", within=empty)
    assert f"situs of {tmp_path / 'venv'}" in page and "gate passed: False" in page
    assert "Everything that situs needs is installed." in run(command, "doctor", within=empty)
    assert "8 of 8 images recovered byte for byte" in run(command, "demo", "--quick", within=empty)
    run(command, "demo", "--examples", "examples", within=empty)
    for name, flags in QUICK.items():
        run(python, f"examples/{name}.py", *flags.split(), within=empty)
    assert "leak_gate" in run(python, "-m", "pytest", "--fixtures", "-q", within=empty)
