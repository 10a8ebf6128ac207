"""What is installed here, what is missing and how to get it. Exits with 1 when something needed is broken."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import warnings
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

import tyro

from situs.cli.tables import print_table

IMPORTED = ("torch", "torchvision", "timm")
"""Packages whose import is tried: compiled parts of the wrong build fail only there, not in their version."""

GIB = 2**30
SMALL_SHARED_MEMORY = GIB
SMALL_DISK = 5 * GIB


@dataclass(frozen=True)
class Args:
    """What is installed here, what is missing and how to get it."""

    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print JSON instead of tables."""


@dataclass(frozen=True)
class Finding:
    """One line of the report. Only `broken` makes the command fail; `advice` says what to do."""

    section: Literal["Packages", "Devices", "Extras", "Machine"]
    name: str
    state: Literal["ok", "missing", "warning", "broken"]
    value: str
    advice: str = ""


def run(args: Args) -> int:
    """Gathers every finding and prints them."""
    findings = [*packages(), *devices(), *compiler(), *machine(), *extras()]
    broken = [finding.name for finding in findings if finding.state == "broken"]
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
        return int(bool(broken))
    for section in dict.fromkeys(finding.section for finding in findings):
        rows = [
            (f.name, f.state, "; ".join(filter(None, (f.value, f.advice)))) for f in findings if f.section == section
        ]
        print_table(section, rows)
    print(f"broken: {', '.join(broken)}" if broken else "Everything that situs needs is here.")
    return int(bool(broken))


# --- packages -----------------------------------------------------------------------------------------------


def packages() -> list[Finding]:
    """Python and every package situs cannot do without."""
    found = [Finding("Packages", "python", "ok", f"{platform.python_version()} at {sys.executable}")]
    if installed("situs") is None:
        return [
            *found,
            Finding("Packages", "situs", "broken", "not installed, only on the path", "pip install -e ."),
        ]
    return found + [package(name, lowest) for name, lowest, extra in requirements() if extra is None]


def requirements() -> list[tuple[str, str, str | None]]:
    """(package, lowest version, extra or None) as situs's own metadata lists them."""
    found = []
    for line in (requires("situs") if installed("situs") else None) or []:
        match = re.match(
            r"(?P<name>[\w.-]+)(?:\[[^]]*\])?(?:>=(?P<low>[\d.]+))?[^;]*(?:;.*extra == ['\"](?P<extra>\w+))?",
            line,
        )
        assert match is not None, line
        found.append((match["name"], match["low"] or "0", match["extra"]))
    return found


def package(name: str, lowest: str) -> Finding:
    """Whether a needed package is here, new enough and (for those with compiled parts) loads."""
    fix = f"pip install '{name}>={lowest}'"
    held = installed(name)
    if held is None:
        return Finding("Packages", name, "broken", "not installed", fix)
    if numbers(held) < numbers(lowest):
        return Finding("Packages", name, "broken", f"{held}, older than {lowest}", fix)
    if name in IMPORTED and (failure := import_failure(name)):
        advice = "install the torchvision release made for this torch" if name == "torchvision" else fix
        return Finding("Packages", name, "broken", f"{held} does not load: {failure}", advice)
    return Finding("Packages", name, "ok", held)


def installed(name: str) -> str | None:
    """The version of a package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.14.1+cu130" -> (2, 14, 1)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def import_failure(name: str) -> str:
    """Why a package does not import, in one line; empty where it does."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import_module(name)
    except Exception as error:  # noqa: BLE001  (whatever goes wrong in there is the finding)
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def extras() -> list[Finding]:
    """The optional parts: what each has, or the command that brings it."""
    wanted: dict[str, list[tuple[str, str]]] = {}
    for name, lowest, extra in requirements():
        if extra is not None:
            wanted.setdefault(extra, []).append((name, lowest))
    found = []
    for extra, members in sorted(wanted.items()):
        held = {name: installed(name) for name, _ in members}
        lacking = [name for name, low in members if numbers(held[name] or "") < numbers(low)]
        if lacking:
            finding = Finding("Extras", extra, "missing", ", ".join(lacking), f"pip install 'situs[{extra}]'")
        else:
            finding = Finding("Extras", extra, "ok", ", ".join(f"{name} {held[name]}" for name, _ in members))
        found.append(finding)
    return found


# --- devices ------------------------------------------------------------------------------------------------


def devices() -> list[Finding]:
    """The processors torch can use; nothing where torch itself does not load."""
    if import_failure("torch"):
        return []
    import torch

    found = [
        Finding(
            "Devices",
            "cpu",
            "ok",
            f"{cores()} cores, {torch.backends.cpu.get_cpu_capability()}; bf16 runs, slowly",
        )
    ]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    found += [cuda(torch, index) for index in range(torch.cuda.device_count() if usable else 0)]
    if not usable and torch.version.cuda is not None and (said or shutil.which("nvidia-smi")):
        reason = str(said[0].message).splitlines()[0] if said else "torch finds no device, though nvidia-smi is here"
        found.append(
            Finding(
                "Devices",
                "cuda",
                "warning",
                reason,
                f"check the driver: torch wants CUDA {torch.version.cuda}",
            )
        )
    elif not usable:
        found.append(Finding("Devices", "cuda", "missing", "no NVIDIA device; training runs on the CPU"))
    if torch.backends.mps.is_available():
        found.append(Finding("Devices", "mps", "ok", "Apple GPU"))
    return found


def cuda(torch: Any, index: int) -> Finding:
    """One NVIDIA device: memory and number formats."""
    properties = torch.cuda.get_device_properties(index)
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if index == 0 else properties.major >= 8
    formats = "bf16 yes" if bf16 else "bf16 no (use fp16)"
    text = f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, {formats}"
    return Finding("Devices", f"cuda:{index}", "ok", text)


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def compiler() -> list[Finding]:
    """Whether torch.compile can build its kernels: a C++ compiler, and Python's headers for its bindings."""
    found = next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++", "cl"))), None)
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if found is None:
        advice = "install one (Debian: apt install g++) or leave --compile off"
        return [Finding("Devices", "torch.compile", "warning", "no C++ compiler found", advice)]
    if not headers.is_file():
        advice = "install Python's headers (Debian: apt install python3-dev)"
        return [Finding("Devices", "torch.compile", "warning", f"{found}, but no {headers}", advice)]
    return [Finding("Devices", "torch.compile", "ok", found)]


# --- machine ------------------------------------------------------------------------------------------------


def machine() -> list[Finding]:
    """Memory and disk."""
    found = []
    if (memory := total_memory()) is not None:
        found.append(Finding("Machine", "memory", "ok", f"{memory / GIB:.1f} GiB"))
    free = shutil.disk_usage(Path.cwd()).free
    low = free < SMALL_DISK
    advice = "checkpoints may not fit; write runs elsewhere with --out" if low else ""
    found.append(Finding("Machine", "disk", "warning" if low else "ok", f"{free / GIB:.1f} GiB free here", advice))
    shared = Path("/dev/shm")  # noqa: S108  (where Linux keeps what loader processes share)
    if shared.is_dir() and (size := shutil.disk_usage(shared).total) < SMALL_SHARED_MEMORY:
        advice = "loader workers pass batches through it: docker run --shm-size 8g, or no workers"
        found.append(Finding("Machine", "shared memory", "warning", f"{size / GIB:.2f} GiB", advice))
    return found


def total_memory() -> int | None:
    """Bytes of memory this process may use: the container's limit where there is one."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(physical, int(text)) if text.isdigit() else physical
