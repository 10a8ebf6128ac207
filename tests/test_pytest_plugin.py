"""`leak_gate` passes what the gate passes and nothing else, in one sentence, with counts and no pixels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from outcomes import outcome, passing

from situs import pytest_plugin
from situs.gate import BLIND, Limit, Report
from situs.pytest_plugin import RULING, leak_gate


class Properties(dict[str, str]):
    def record(self, name: str, value: Any) -> None:
        self[name] = value


def gate(*given: Any, **options: Any) -> tuple[Report | None, str, str]:
    """What the fixture returns, the reason of the failure, and the recorded sentence."""
    properties = Properties()
    check = leak_gate.__wrapped__(properties.record)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return check(*given, **options), "", properties.get(RULING, "")
    except pytest.fail.Exception as failure:
        reason = str(failure.msg) if failure.pytrace is False else "a traceback, whose arguments would show the samples"
        return None, reason, properties.get(RULING, "")


def test_only_a_pass_passes() -> None:
    good = passing(limit=BLIND)
    report, failure, recorded = gate(good)
    assert report is good and failure == "" and recorded.startswith("The gate blind is passed")
    for name, broken in {
        "not passed": replace(good, limit=Limit("psnr", 1.0), findings=[*good.findings[:1], leaking()]),
        "inconclusive": replace(good, findings=good.findings[:1]),  # without the bound
        "not a pass": replace(good, about={**good.about, "clip": "never attacked"}),
    }.items():
        report, failure, recorded = gate(broken)
        assert report is None and name in failure and failure.startswith(recorded) and recorded, name
    report, failure, _ = gate(replace(good, stopped="after 3 s"))
    assert report is None and "stopped: after 3 s" in failure


def leaking() -> Any:
    audit = passing()
    return outcome("patchembed", "noise", None, None, {"psnr": [200.0] * 5}, [{}] * 5).against(audit.baselines, "abcde")


def test_an_audit_without_a_gate_is_judged_by_blind_guesses() -> None:
    assert gate(passing())[2].startswith("The gate blind is")


@pytest.mark.parametrize(
    ("given", "options", "reason"),
    [
        (("nosuch_model", "samples"), {}, "leak_gate: 'nosuch_model' is neither a timm model nor a folder"),
        (("vit_tiny_patch16_224", "nosuch"), {"weights": "random"}, "leak_gate: .*nosuch"),
        (("bert", "texts.txt"), {}, "leak_gate: fail_above: an audit of sentences needs a limit"),
        (("m", "samples"), {"fail_above": "mse=3"}, "leak_gate: fail_above=mse=3"),
    ],
)
def test_a_mistake_fails_in_one_sentence(given: Any, options: Any, reason: str) -> None:
    report, failure, recorded = gate(*given, **options)
    assert report is None and recorded == "" and re.match(reason, failure)
    assert len(failure.splitlines()) == 1
    assert (
        gate(passing(), "samples")[1]
        == "leak_gate: this audit is already finished; give it as the only argument, without data or options"
    )


def test_the_plugin_is_declared_and_loads_no_torch(root: Path) -> None:
    code = (
        "import sys, situs.pytest_plugin; print([name for name in ('torch', 'numpy', 'timm') if name in sys.modules])"
    )
    environment = {"PYTHONPATH": str(root / "src"), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"
    assert f'situs = "{pytest_plugin.__name__}"' in (root / "pyproject.toml").read_text(encoding="utf-8")


PROJECT = """
import timm, torch

def build():
    torch.manual_seed(0)
    small = dict(img_size=28, patch_size=7, in_chans=1, embed_dim=64, depth=1, num_heads=2)
    return timm.create_model("vit_tiny_patch16_224", num_classes=10, **small)

def test_as_it_is(leak_gate):
    leak_gate(build(), "samples", count=5, attacks=["patchembed"])

def test_with_noise(leak_gate):
    audit = leak_gate(build(), "samples", count=5, attacks=["patchembed"], defences=["noise=1"], fail_above="psnr=20")
    assert audit.ruling.passed

def test_too_few(leak_gate):
    leak_gate(build(), "samples", count=1, attacks=["patchembed"], defences=["noise=1"])

def test_without_an_audit():
    assert True
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_toy_project_is_red_and_green(tmp_path: Path, root: Path, workers: int) -> None:
    """Also over several processes: the lines of the gate come back to the one that writes the log."""
    (tmp_path / "test_privacy.py").write_text(PROJECT)
    loaded = any(point.name == "situs" for point in entry_points(group="pytest11"))
    words = [sys.executable, "-m", "pytest", "-q", "-l", "-n", str(workers), "--junitxml", "gate.xml"]
    words += [] if loaded else ["-p", "situs.pytest_plugin"]
    path = os.pathsep.join([str(root / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 2 passed" in done.stdout
    summary = done.stdout.partition("situs: what gradients reveal")[2]
    assert "test_as_it_is: The gate blind is not passed" in summary and "5 of 5 images exceed" in summary
    assert "test_with_noise: The gate psnr=20 is passed" in summary
    assert "test_too_few: The gate blind is inconclusive (not a pass)" in summary
    for log in (done.stdout, done.stderr, (tmp_path / "gate.xml").read_text()):
        assert "tensor(" not in log and "array(" not in log and "base64" not in log
    written = [path.name for path in tmp_path.iterdir() if not path.name.startswith((".", "_"))]
    assert sorted(written) == ["gate.xml", "test_privacy.py"]
