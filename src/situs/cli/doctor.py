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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

from situs.cli.tables import print_table

IMPORTED = ("torch", "torchvision", "timm")
"""Packages whose import is tried: compiled parts of the wrong build fail only there, not in their version."""

GIB = 2**30
REQUIREMENT = r"(?P<name>[\w.-]+)(?:\[[^]]*\])?(?:>=(?P<low>[\d.]+))?[^;]*(?:;.*extra == ['\"](?P<extra>\w+))?"


@dataclass(frozen=True)
class Args:
    """What is installed here, what is missing and how to get it."""

    json: bool = False
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
    for section in dict.fromkeys(f.section for f in findings):
        own = [f for f in findings if f.section == section]
        print_table(section, [(f.name, f.state, "; ".join(filter(None, (f.value, f.advice)))) for f in own])
    print(f"broken: {', '.join(broken)}" if broken else "Everything that situs needs is here.")
    return int(bool(broken))


def packages() -> Iterator[Finding]:
    """Python and every package situs cannot do without."""
    yield Finding("Packages", "python", "ok", f"{platform.python_version()} at {sys.executable}")
    if installed("situs") is None:
        yield Finding("Packages", "situs", "broken", "not installed, only on the path", "pip install -e .")
    for name, lowest, extra in requirements():
        if extra is None:
            held, fix = installed(name), f"pip install '{name}>={lowest}'"
            wrong = "not installed" if held is None else f"{held}, older than {lowest}"
            if held is not None and numbers(held) >= numbers(lowest):
                failure = import_failure(name) if name in IMPORTED else ""
                wrong = failure and f"{held} does not load: {failure}"
                fix = "install the torchvision release made for this torch" if name == "torchvision" else fix
            yield Finding("Packages", name, "broken" if wrong else "ok", wrong or str(held), fix if wrong else "")


def requirements() -> list[tuple[str, str, str | None]]:
    """(package, lowest version, extra or None) as situs's own metadata lists them."""
    lines = (requires("situs") if installed("situs") else None) or []
    found = [match for line in lines if (match := re.match(REQUIREMENT, line))]
    return [(match["name"], match["low"] or "0", match["extra"]) for match in found]


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


def extras() -> Iterator[Finding]:
    """The optional parts: what each has, or the command that brings it."""
    for extra in sorted({extra for *_, extra in requirements() if extra}):
        held = {name: (installed(name) or "", low) for name, low, own in requirements() if own == extra}
        lacking = [name for name, (got, low) in held.items() if numbers(got) < numbers(low)]
        if lacking:
            yield Finding("Extras", extra, "missing", ", ".join(lacking), f"pip install 'situs[{extra}]'")
        else:
            yield Finding("Extras", extra, "ok", ", ".join(f"{name} {got}" for name, (got, _) in held.items()))


def devices() -> Iterator[Finding]:
    """The processors torch can use; nothing where torch itself does not load."""
    if import_failure("torch"):
        return
    import torch

    yield Finding(
        "Devices", "cpu", "ok", f"{cores()} cores, {torch.backends.cpu.get_cpu_capability()}; bf16 runs, slowly"
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if usable:
        yield from (cuda(torch, index) for index in range(torch.cuda.device_count()))
    elif torch.version.cuda is not None and (said or shutil.which("nvidia-smi")):
        reason = str(said[0].message).splitlines()[0] if said else "torch finds no device, though nvidia-smi is here"
        yield Finding("Devices", "cuda", "warning", reason, f"check the driver: torch wants CUDA {torch.version.cuda}")
    else:
        yield Finding("Devices", "cuda", "missing", "no NVIDIA device; training runs on the CPU")
    if torch.backends.mps.is_available():
        yield Finding("Devices", "mps", "ok", "Apple GPU")


def cuda(torch: Any, index: int) -> Finding:
    """One NVIDIA device: memory and number formats."""
    has = torch.cuda.get_device_properties(index)
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if index == 0 else has.major >= 8
    text = f"{has.name}, {has.total_memory / GIB:.0f} GiB, {'bf16 yes' if bf16 else 'bf16 no (use fp16)'}"
    return Finding("Devices", f"cuda:{index}", "ok", text)


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def compiler() -> Iterator[Finding]:
    """Whether torch.compile can build its kernels: a C++ compiler, and Python's headers for its bindings."""
    found = next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++", "cl"))), None)
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    state, value, advice = "ok", found or "no C++ compiler found", ""
    if found is None:
        state, advice = "warning", "install one (Debian: apt install g++) or leave --compile off"
    elif not headers.is_file():
        state, value = "warning", f"{found}, but no {headers}"
        advice = "install Python's headers (Debian: apt install python3-dev)"
    yield Finding("Devices", "torch.compile", state, value, advice)


def machine() -> Iterator[Finding]:
    """Memory (the container's limit where there is one), disk, and what loader workers share."""
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    if hasattr(os, "sysconf"):  # Windows has none
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory = min(physical, int(text)) if text.isdigit() else physical
        yield Finding("Machine", "memory", "ok", f"{memory / GIB:.1f} GiB")
    free = shutil.disk_usage(Path.cwd()).free
    advice = "" if free >= 5 * GIB else "checkpoints may not fit; write runs elsewhere with --out"
    yield Finding("Machine", "disk", "warning" if advice else "ok", f"{free / GIB:.1f} GiB free here", advice)
    shared = Path("/dev/shm")  # noqa: S108  (where Linux keeps what loader processes share)
    if shared.is_dir() and (size := shutil.disk_usage(shared).total) < GIB:
        advice = "loader workers pass batches through it: docker run --shm-size 8g, or no workers"
        yield Finding("Machine", "shared memory", "warning", f"{size / GIB:.2f} GiB", advice)
