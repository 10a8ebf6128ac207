"""`situs doctor` reads what is installed, and fails only where something needed is broken."""

from __future__ import annotations

import json
import platform
import re
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from situs.cli import install as doctor
from situs.cli.main import main

Report = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Report:
    def run() -> tuple[int, dict[str, Any]]:
        status = main(["doctor", "--json"])
        return status, {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}

    return run


def test_a_sound_machine(report: Report) -> None:
    status, found = report()
    assert status == 0
    assert found["python"]["value"].startswith(platform.python_version())
    for name in ("torch", "torchvision", "timm", "cyclopts", "rich", "numpy"):
        assert (found[name]["state"], found[name]["value"]) == ("ok", version(name))
    assert re.match(r"\d+ cores, ", found["cpu"]["value"])
    assert found["dev"]["state"] == "ok"
    assert {"cuda", "cuda:0"} & found.keys()
    assert {"disk", "torch.compile", "hf", "split", "umap"} <= found.keys()


def test_text_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line and not line.startswith(" ")] == [
        "Packages",
        "Extras",
        "Devices",
        "Machine",
        "Everything that situs needs is installed.",
    ]


def test_torchvision_that_does_not_load_is_broken(monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    def fails(name: str) -> Any:
        if name == "torchvision":
            raise RuntimeError("operator torchvision::nms\n does not exist")
        return sys.modules.get(name)

    monkeypatch.setattr(doctor, "import_module", fails)
    status, found = report()
    assert status == 1
    assert found["torchvision"]["state"] == "broken"
    assert "RuntimeError: operator torchvision::nms does not exist" in found["torchvision"]["value"]
    assert "made for this torch" in found["torchvision"]["advice"]


def test_missing_and_old_packages_come_with_the_command(monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    held, real = {"scipy": "", "numpy": "1.26.4", "transformers": ""}, doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: held[name] if name in held else real(name))
    status, found = report()
    assert status == 1
    assert (found["scipy"]["state"], found["scipy"]["value"]) == ("broken", "not installed")
    assert found["scipy"]["advice"].startswith("pip install 'scipy>=")
    assert found["numpy"]["state"] == "broken"
    assert found["numpy"]["value"].startswith("1.26.4, not >=2")
    # An extra that is missing is no failure by itself.
    assert (found["hf"]["state"], found["hf"]["value"]) == ("missing", "transformers")
    assert found["hf"]["advice"] == "pip install 'situs[hf]'"


def test_requirements_are_read_with_their_extras(monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    lines = ["torch>=2.9", "pyright[nodejs]>=1.1.400; extra == 'dev'", 'nosuch>=0.5 ; extra == "umap"', "rich"]
    monkeypatch.setattr(doctor, "requires", lambda _: lines)
    status, found = report()
    assert status == 0
    assert [name for name, each in found.items() if each["section"] == "Packages"] == ["python", "torch", "rich"]
    assert found["dev"]["value"] == f"pyright {version('pyright')}"
    assert (found["umap"]["state"], found["umap"]["value"]) == ("missing", "nosuch")


def test_no_compiler_and_no_headers_are_warnings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    finding = doctor.check_compiler()
    assert (finding.state, finding.value) == ("warning", "no C++ compiler found")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda _: str(tmp_path))
    finding = doctor.check_compiler()
    assert finding.state == "warning"
    assert "python3-dev" in finding.advice
    (tmp_path / "Python.h").touch()
    assert doctor.check_compiler().state == "ok"


def test_little_disk_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=doctor.GIB, total=doctor.GIB // 16))
    found = {finding.name: finding for finding in doctor.machine()}
    assert (found["disk"].state, found["disk"].value) == ("warning", "1.0 GiB free here")
    if Path("/dev/shm").is_dir():
        assert found["shared memory"].state == "warning"


def test_a_cuda_device_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="H200", total_memory=139 * doctor.GIB, major=9)
    cuda = {"is_available": lambda: True, "device_count": lambda: 2, "get_device_properties": lambda _: properties}
    for name, made in cuda.items():
        monkeypatch.setattr(f"torch.cuda.{name}", made)
    found = {finding.name: finding for finding in doctor.devices()}
    assert found["cuda:0"].value == "H200, 139 GiB, bf16 yes"
    assert "cuda:1" in found


@pytest.mark.parametrize(
    ("built", "complaint", "driver", "state", "value"),
    [
        ("12.8", "", False, "missing", "no NVIDIA device, so training runs on the CPU"),
        (None, "", True, "missing", "no NVIDIA device, so training runs on the CPU"),
        ("12.8", "", True, "warning", "torch finds no device, but nvidia-smi is installed"),
        ("12.8", "The driver is too old\nUpdate it", False, "warning", "The driver is too old"),
    ],
)
def test_a_driver_that_does_not_fit_torch_is_a_warning(
    built: str | None, complaint: str, driver: bool, state: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_available() -> bool:
        if complaint:
            warnings.warn(complaint, stacklevel=1)
        return False

    monkeypatch.setattr("torch.cuda.is_available", is_available)
    monkeypatch.setattr("torch.version.cuda", built)
    monkeypatch.setattr("shutil.which", lambda name: name if driver and name == "nvidia-smi" else None)
    (check,) = [check for check in doctor.devices() if check.name == "cuda"]
    assert (check.state, check.value) == (state, value)
    assert check.advice == ("check the driver: torch needs CUDA 12.8" if state == "warning" else "")


@pytest.mark.parametrize("there", [True, False])
def test_an_apple_gpu_is_told_where_there_is_one(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: there)
    found = {check.name: check for check in doctor.devices()}
    assert ("mps" in found) == there and "torch.compile" in found
    assert not there or (found["mps"].state, found["mps"].value) == ("ok", "Apple GPU")


@pytest.mark.parametrize(("major", "words"), [(7, "bf16 no (use fp16)"), (8, "bf16 yes"), (9, "bf16 yes")])
def test_bf16_comes_with_ampere(major: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="GPU", total_memory=int(15.6 * doctor.GIB), major=major)
    for name, made in (("is_available", lambda: True), ("device_count", lambda: 1),
                       ("get_device_properties", lambda _: properties)):  # fmt: skip
        monkeypatch.setattr(f"torch.cuda.{name}", made)
    found = {check.name: check for check in doctor.devices()}
    assert found["cuda:0"].value == f"GPU, 16 GiB, {words}" and "cuda" not in found


@pytest.mark.parametrize(
    ("free", "shared", "disk", "memory"),
    [(5.0, 1.0, "ok", False), (4.99, 0.99, "warning", True), (100.0, 0.0625, "ok", True)],
)
def test_five_gib_of_disk_and_one_of_shared_memory_are_enough(
    free: float, shared: float, disk: str, memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = SimpleNamespace(free=int(free * doctor.GIB), total=int(shared * doctor.GIB))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: sizes)
    monkeypatch.setattr(doctor.Path, "is_dir", lambda _: True)
    found = {check.name: check for check in doctor.machine()}
    assert (found["disk"].state, bool(found["disk"].advice)) == (disk, disk == "warning")
    assert ("shared memory" in found) == memory
    assert not memory or found["shared memory"].value == f"{int(shared * doctor.GIB) / doctor.GIB:.2f} GiB"


def test_a_package_that_is_not_installed_is_told_as_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed", lambda name: "")
    python, situs_ = doctor.packages()
    assert (python.state, situs_.state, situs_.advice) == ("ok", "broken", "pip install -e .")
    assert [*doctor.extras()] == [] and doctor.needs() == []


def test_what_a_package_complains_of_while_it_loads_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "import_module", lambda name: warnings.warn(f"{name} is old", stacklevel=1))
    assert doctor.failure(Requirement("torch")) == ("", "")
    asked: list[str] = []
    monkeypatch.setattr(doctor, "import_module", asked.append)
    assert doctor.failure(Requirement("torch")) == doctor.failure(Requirement("numpy")) == ("", "")
    assert asked == ["torch"]  # only compiled packages of which builds may not fit are loaded
    release = version("numpy")
    assert doctor.failure(Requirement(f"numpy>{release}")) == (
        f"{release}, not >{release}",
        f"pip install 'numpy>{release}'",
    )
    assert doctor.failure(Requirement("nosuch")) == ("not installed", "pip install 'nosuch'")
