"""Verbs about the installation: `doctor`, `completion`, `export`."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from cyclopts import App, Parameter
from packaging.requirements import Requirement

from situs.cli.main import VERBS, verb_type
from situs.cli.parser.flags import POSITIONAL, SHELL, Flag, flags_of
from situs.cli.parser.words import app_of
from situs.cli.shell import answer, as_document
from situs.cli.tables import print_table
from situs.errors import SitusError
from situs.presets import preset_names
from situs.results import Table

IMPORTED = ("torch", "torchvision", "timm")
"""Packages whose import is tried: compiled parts of the wrong build fail only there, not in their version."""


GIB = 2**30


@dataclass(frozen=True)
class Doctor:
    """What is installed here, what is missing and how to get it. Exits with 1 when something needed is broken.

    For example: situs doctor
    """

    def run(self) -> int:
        """Gathers every finding and prints them."""
        sections = {"Packages": [*packages()], "Extras": [*extras()], "Devices": [*devices()], "Machine": [*machine()]}
        broken = [each.name for found in sections.values() for each in found if each.state == "broken"]
        answer([{"section": name, **each._asdict()} for name, found in sections.items() for each in found])
        if not as_document():
            for name, found in sections.items():
                rows = [(f.name, f.state, "; ".join(filter(None, (f.value, f.advice)))) for f in found]
                print_table(Table(name, (), rows))
            print(f"broken: {', '.join(broken)}" if broken else "Everything that situs needs is here.")
        return int(bool(broken))


class Check(NamedTuple):
    """One line of the report. state: ok, missing, warning or broken, which alone makes the command fail."""

    name: str
    state: str
    value: str
    advice: str = ""


def packages() -> Iterator[Check]:
    """Python and every package situs cannot do without, as situs's own metadata lists them."""
    yield Check("python", "ok", f"{platform.python_version()} at {sys.executable}")
    if not installed("situs"):
        yield Check("situs", "broken", "not installed, only on the path", "pip install -e .")
    for need in needs():
        wrong, advice = failure(need)
        yield Check(need.name, "broken" if wrong else "ok", wrong or installed(need.name), advice)


def extras() -> Iterator[Check]:
    """The optional parts: what each has, or the command that brings it."""
    for extra in sorted((metadata("situs").get_all("Provides-Extra") or ()) if installed("situs") else ()):
        lacking = [need.name for need in needs(extra) if failure(need)[0]]
        held = ", ".join(lacking or (f"{need.name} {installed(need.name)}" for need in needs(extra)))
        yield Check(extra, "missing", held, f"pip install 'situs[{extra}]'") if lacking else Check(extra, "ok", held)


def needs(extra: str = "") -> list[Requirement]:
    """What situs needs for all, or for an extra alone."""
    every = map(Requirement, (requires("situs") or ()) if installed("situs") else ())
    return [need for need in every if (need.marker.evaluate({"extra": extra}) if need.marker else not extra)]


def installed(name: str) -> str:
    """The version of a package; empty where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def failure(need: Requirement) -> tuple[str, str]:
    """What is wrong with a package and what mends it; empty where nothing is."""
    held, fix = installed(need.name), f"pip install '{need.name}{need.specifier}'"
    if not held or not need.specifier.contains(held, prereleases=True):
        return f"{held}, not {need.specifier}" if held else "not installed", fix
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if need.name in IMPORTED:
                import_module(need.name)
    except Exception as error:  # noqa: BLE001  (whatever goes wrong in there is the finding)
        told = f"{held} does not load: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return told, "install the release made for this torch" if need.name == "torchvision" else fix
    return "", ""


def devices() -> Iterator[Check]:
    """The processors torch can use; nothing where torch itself does not load."""
    if failure(Requirement("torch"))[0]:
        return
    import torch

    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    yield Check("cpu", "ok", f"{cores} cores, {torch.backends.cpu.get_cpu_capability()}")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        has = torch.cuda.get_device_properties(index)
        bf16 = "bf16 yes" if has.major >= 8 else "bf16 no (use fp16)"
        yield Check(f"cuda:{index}", "ok", f"{has.name}, {has.total_memory / GIB:.0f} GiB, {bf16}")
    if not count and torch.version.cuda and (said or shutil.which("nvidia-smi")):
        why = str(said[0].message).splitlines()[0] if said else "torch finds no device, though nvidia-smi is here"
        yield Check("cuda", "warning", why, f"check the driver: torch wants CUDA {torch.version.cuda}")
    elif not count:
        yield Check("cuda", "missing", "no NVIDIA device; training runs on the CPU")
    if torch.backends.mps.is_available():
        yield Check("mps", "ok", "Apple GPU")
    yield compiler()


def compiler() -> Check:
    """Whether torch.compile can build its kernels: a C++ compiler, and Python's headers for its bindings."""
    found = next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++", "cl"))), "")
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if found and headers.is_file():
        return Check("torch.compile", "ok", found)
    lacks, advice = f"{found}, but no {headers}", "install Python's headers (Debian: apt install python3-dev)"
    if not found:
        lacks, advice = "no C++ compiler found", "install one (Debian: apt install g++) or leave --train.compile off"
    return Check("torch.compile", "warning", lacks, advice)


def machine() -> Iterator[Check]:
    """Disk, and what loader workers share."""
    free = shutil.disk_usage(Path.cwd()).free
    advice = "" if free >= 5 * GIB else "checkpoints may not fit; write runs elsewhere with --out"
    yield Check("disk", "warning" if advice else "ok", f"{free / GIB:.1f} GiB free here", advice)
    shared = Path("/dev/shm")  # noqa: S108  (where Linux keeps what loader processes share)
    if shared.is_dir() and (size := shutil.disk_usage(shared).total) < GIB:
        advice = "loader workers pass batches through it: docker run --shm-size 8g, or no workers"
        yield Check("shared memory", "warning", f"{size / GIB:.2f} GiB", advice)


Shell = Literal["bash", "zsh", "fish", "powershell"]


@dataclass(frozen=True)
class Completion:
    """A script that completes verbs, flags and their words in your shell.

    For example: situs completion bash --install
    """

    shell: Annotated[Shell | None, POSITIONAL, Parameter(metavar="SHELL")] = None
    """bash, zsh, fish or powershell; by default that of $SHELL."""

    install: bool = False
    """Write the script where the shell finds it, and name it in the shell's startup file."""

    def run(self) -> None:
        """Prints the script, or writes it where the shell finds it."""
        own = Path(os.environ.get("SHELL", "")).name
        shell: Any = self.shell or (own if own in get_args(Shell) else None)
        if shell is None:
            raise SitusError("which shell it is cannot be told: say bash, zsh, fish or powershell", field="shell")
        if self.install:
            path = whole_app().install_completion(shell=shell)
            answer({"file": path}, f"{path}: open a new {shell} to use it")
            return
        print(whole_app().generate_completion(prog_name="situs", shell=shell))


def whole_app() -> App:
    """Every verb with its flags, those of all methods among them."""
    root = App(name="situs", help_flags=("--help", "-h"), version_flags=("--version",))
    groups: dict[str, App] = {}
    for verb, (_, text) in VERBS.items():
        group, _, name = verb.rpartition(" ")
        if group and group not in groups:
            groups[group] = App(name=group)
            root.command(groups[group])
        flags = [*map(_named, flags_of(verb_type(verb), every=True)), *SHELL]
        (groups[group] if group else root).command(app_of(flags, name, text))
    return root


def _named(flag: Flag) -> Flag:
    """A flag whose words are names that come with situs."""
    if flag.name != "--preset":
        return flag
    return replace(flag, kind=Literal[tuple(preset_names())])  # pyright: ignore[reportInvalidTypeForm]
