"""What is installed here, what is missing and how to get it. Exits with 1 when something needed is broken."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.requirements import Requirement

from situs.cli.tables import print_table

IMPORTED = ("torch", "torchvision", "timm")
"""Packages whose import is tried: compiled parts of the wrong build fail only there, not in their version."""

GIB = 2**30


@dataclass(frozen=True)
class Args:
    """What is installed here, what is missing and how to get it."""

    json: bool = False
    """Print JSON instead of tables."""


class Finding(NamedTuple):
    """One line of the report. Only `broken` makes the command fail; `advice` says what to do."""

    section: Literal["Packages", "Devices", "Extras", "Machine"]
    name: str
    state: Literal["ok", "missing", "warning", "broken"]
    value: str
    advice: str = ""


def run(args: Args) -> int:
    """Gathers every finding and prints them."""
    findings = [*packages(), *devices(), compiler(), *machine()]
    broken = [finding.name for finding in findings if finding.state == "broken"]
    if args.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
        return int(bool(broken))
    for section in dict.fromkeys(f.section for f in findings):
        own = [f for f in findings if f.section == section]
        print_table(section, [(f.name, f.state, "; ".join(filter(None, (f.value, f.advice)))) for f in own])
    print(f"broken: {', '.join(broken)}" if broken else "Everything that situs needs is here.")
    return int(bool(broken))


def packages() -> Iterator[Finding]:
    """Python, every package situs cannot do without, and its extras, as situs's own metadata lists them."""
    yield Finding("Packages", "python", "ok", f"{platform.python_version()} at {sys.executable}")
    if not installed("situs"):
        yield Finding("Packages", "situs", "broken", "not installed, only on the path", "pip install -e .")
        return
    needs = list(map(Requirement, requires("situs") or []))
    for need in needs:
        if need.marker is None:
            wrong, advice = failure(need)
            yield Finding("Packages", need.name, "broken" if wrong else "ok", wrong or installed(need.name), advice)
    for extra in sorted(metadata("situs").get_all("Provides-Extra") or ()):
        own = [need for need in needs if need.marker is not None and need.marker.evaluate({"extra": extra})]
        lacking = [need.name for need in own if failure(need)[0]]
        held = ", ".join(lacking or (f"{need.name} {installed(need.name)}" for need in own))
        advice = f"pip install 'situs[{extra}]'" if lacking else ""
        yield Finding("Extras", extra, "missing" if lacking else "ok", held, advice)


def installed(name: str) -> str:
    """The version of a package; empty where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def failure(need: Requirement) -> tuple[str, str]:
    """What is wrong with a package and what mends it; empty where nothing is."""
    held, fix = installed(need.name), f"pip install '{need.name}{need.specifier}'"
    if not held:
        return "not installed", fix
    if not need.specifier.contains(held, prereleases=True):
        return f"{held}, not {need.specifier}", fix
    if need.name in IMPORTED:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import_module(need.name)
        except Exception as error:  # noqa: BLE001  (whatever goes wrong in there is the finding)
            told = f"{held} does not load: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return told, "install the release made for this torch" if need.name == "torchvision" else fix
    return "", ""


def devices() -> Iterator[Finding]:
    """The processors torch can use; nothing where torch itself does not load."""
    try:
        torch = import_module("torch")
    except Exception:  # noqa: BLE001  (told with the packages)
        return
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    yield Finding("Devices", "cpu", "ok", f"{cores} cores, {torch.backends.cpu.get_cpu_capability()}")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        has = torch.cuda.get_device_properties(index)
        bf16 = "bf16 yes" if has.major >= 8 else "bf16 no (use fp16)"
        yield Finding("Devices", f"cuda:{index}", "ok", f"{has.name}, {has.total_memory / GIB:.0f} GiB, {bf16}")
    if not count and torch.version.cuda and (said or shutil.which("nvidia-smi")):
        why = str(said[0].message).splitlines()[0] if said else "torch finds no device, though nvidia-smi is here"
        yield Finding("Devices", "cuda", "warning", why, f"check the driver: torch wants CUDA {torch.version.cuda}")
    elif not count:
        yield Finding("Devices", "cuda", "missing", "no NVIDIA device; training runs on the CPU")
    if torch.backends.mps.is_available():
        yield Finding("Devices", "mps", "ok", "Apple GPU")


def compiler() -> Finding:
    """Whether torch.compile can build its kernels: a C++ compiler, and Python's headers for its bindings."""
    found = next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++", "cl"))), None)
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    told = ("ok", found or "", "")
    if found is None:
        told = "warning", "no C++ compiler found", "install one (Debian: apt install g++) or leave --train.compile off"
    elif not headers.is_file():
        told = "warning", f"{found}, but no {headers}", "install Python's headers (Debian: apt install python3-dev)"
    return Finding("Devices", "torch.compile", *told)


def machine() -> Iterator[Finding]:
    """Disk, and what loader workers share."""
    free = shutil.disk_usage(Path.cwd()).free
    advice = "" if free >= 5 * GIB else "checkpoints may not fit; write runs elsewhere with --out"
    yield Finding("Machine", "disk", "warning" if advice else "ok", f"{free / GIB:.1f} GiB free here", advice)
    shared = Path("/dev/shm")  # noqa: S108  (where Linux keeps what loader processes share)
    if shared.is_dir() and (size := shutil.disk_usage(shared).total) < GIB:
        advice = "loader workers pass batches through it: docker run --shm-size 8g, or no workers"
        yield Finding("Machine", "shared memory", "warning", f"{size / GIB:.2f} GiB", advice)
