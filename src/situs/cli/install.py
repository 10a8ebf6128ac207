"""Verbs about the installation: `doctor`, `completion`."""

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
"""Packages that are also imported, since a wrong build of compiled code fails only then."""

GIB = 2**30


@dataclass(frozen=True)
class Doctor:
    """Show what is installed, what is missing, and how to install the missing parts. The exit status is 1 if a required
    package is broken.

    For example: situs doctor
    """

    def run(self) -> int:
        """Runs all checks and prints them."""
        sections = {"Packages": [*packages()], "Extras": [*extras()], "Devices": [*devices()], "Machine": [*machine()]}
        broken = [check.name for checks in sections.values() for check in checks if check.state == "broken"]
        answer([{"section": name, **check._asdict()} for name, checks in sections.items() for check in checks])
        if not as_document():
            for name, checks in sections.items():
                rows = [(check.name, check.state, "; ".join(filter(None, check[2:]))) for check in checks]
                print_table(Table(name, (), rows))
            print(f"broken: {', '.join(broken)}" if broken else "Everything that situs needs is installed.")
        return int(bool(broken))


class Check(NamedTuple):
    """One line of the report. The state is ok, missing, warning or broken. The command fails only if a package is
    broken."""

    name: str
    state: str
    value: str
    advice: str = ""


def packages() -> Iterator[Check]:
    """Python and the packages that situs requires, from its metadata."""
    yield Check("python", "ok", f"{platform.python_version()} at {sys.executable}")
    if not installed("situs"):
        yield Check(
            "situs", "broken", "Python finds a folder named situs, but the package is not installed", "pip install -e ."
        )
    for need in needs():
        wrong, advice = failure(need)
        yield Check(need.name, "broken" if wrong else "ok", wrong or installed(need.name), advice)


def extras() -> Iterator[Check]:
    """The extras: the packages of each, or the command that installs it."""
    for extra in sorted((metadata("situs").get_all("Provides-Extra") or ()) if installed("situs") else ()):
        if extra == "all":  # the union of others
            continue
        lacking = [need.name for need in needs(extra) if failure(need)[0]]
        listed = ", ".join(lacking or (f"{need.name} {installed(need.name)}" for need in needs(extra)))
        fix = f"pip install 'situs[{extra}]'"
        yield Check(extra, "missing", listed, fix) if lacking else Check(extra, "ok", listed)


def needs(extra: str = "") -> list[Requirement]:
    """The requirements of situs itself, or of one extra."""
    every = map(Requirement, (requires("situs") or ()) if installed("situs") else ())
    return [need for need in every if (need.marker.evaluate({"extra": extra}) if need.marker else not extra)]


def installed(name: str) -> str:
    """The version of a package; empty if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def failure(need: Requirement) -> tuple[str, str]:
    """What is wrong with a package and how to fix it; empty texts if nothing is."""
    release, fix = installed(need.name), f"pip install '{need.name}{need.specifier}'"
    if not release or not need.specifier.contains(release, prereleases=True):
        return f"{release}, not {need.specifier}" if release else "not installed", fix
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if need.name in IMPORTED:
                import_module(need.name)
    except Exception as error:  # noqa: BLE001  (any error of the import is the finding)
        reason = f"{release} does not load: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return reason, "install the torchvision release made for this torch" if need.name == "torchvision" else fix
    return "", ""


def devices() -> Iterator[Check]:
    """The processors torch can use; nothing if torch does not load."""
    if failure(Requirement("torch"))[0]:
        return
    import torch

    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    yield Check("cpu", "ok", f"{cores} cores, {torch.backends.cpu.get_cpu_capability()}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        gpu = torch.cuda.get_device_properties(index)
        bf16 = "bf16 yes" if gpu.major >= 8 else "bf16 no (use fp16)"
        yield Check(f"cuda:{index}", "ok", f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB, {bf16}")
    if not count and torch.version.cuda and (caught or shutil.which("nvidia-smi")):
        why = str(caught[0].message).splitlines()[0] if caught else "torch finds no device, but nvidia-smi is installed"
        yield Check("cuda", "warning", why, f"check the driver: torch needs CUDA {torch.version.cuda}")
    elif not count:
        yield Check("cuda", "missing", "no NVIDIA device, so training runs on the CPU")
    if torch.backends.mps.is_available():
        yield Check("mps", "ok", "Apple GPU")
    yield check_compiler()


def check_compiler() -> Check:
    """Whether torch.compile can build its kernels: it needs a C++ compiler and Python's headers."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++", "cl"))), "")
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if compiler and headers.is_file():
        return Check("torch.compile", "ok", compiler)
    if compiler:
        advice = "install Python's headers (Debian: apt install python3-dev)"
        return Check("torch.compile", "warning", f"{compiler}, but no {headers}", advice)
    advice = "install a compiler (Debian: apt install g++) or use --no-train.compile"
    return Check("torch.compile", "warning", "no C++ compiler found", advice)


def machine() -> Iterator[Check]:
    """Free disk space, and the shared memory of loader workers."""
    free = shutil.disk_usage(Path.cwd()).free
    advice = "" if free >= 5 * GIB else "checkpoints may not fit; write runs elsewhere with --out"
    yield Check("disk", "warning" if advice else "ok", f"{free / GIB:.1f} GiB free here", advice)
    shared = Path("/dev/shm")  # noqa: S108  (the shared memory of Linux)
    if shared.is_dir() and (size := shutil.disk_usage(shared).total) < GIB:
        advice = "loader workers need more shared memory: use docker run --shm-size 8g, or no loader workers"
        yield Check("shared memory", "warning", f"{size / GIB:.2f} GiB", advice)


Shell = Literal["bash", "zsh", "fish", "powershell"]


@dataclass(frozen=True)
class Completion:
    """Print or install a script for shell completion of verbs, flags and their values.

    For example: situs completion bash --install
    """

    shell: Annotated[Shell | None, POSITIONAL, Parameter(metavar="SHELL")] = None
    """bash, zsh, fish or powershell. Default: from $SHELL."""

    install: bool = False
    """Write the script to the completion folder of the shell, and change the startup file of the shell to load this
    script."""

    def run(self) -> None:
        """Prints or installs the script."""
        current = Path(os.environ.get("SHELL", "")).name
        shell: Any = self.shell or (current if current in get_args(Shell) else None)
        if shell is None:
            raise SitusError("shell: cannot be detected; give bash, zsh, fish or powershell", field="shell")
        if self.install:
            path = whole_app().install_completion(shell=shell)
            answer({"file": path}, f"{path}: completion is installed; open a new {shell} to use completion")
            return
        print(whole_app().generate_completion(prog_name="situs", shell=shell))


def whole_app() -> App:
    """All verbs with all their flags, also those of every method."""
    root = App(name="situs", help_flags=("--help", "-h"), version_flags=("--version",))
    groups: dict[str, App] = {}
    for verb, (_, text) in VERBS.items():
        group, _, name = verb.rpartition(" ")
        if group and group not in groups:
            groups[group] = App(name=group)
            root.command(groups[group])
        flags = [*map(_with_presets, flags_of(verb_type(verb), every=True)), *SHELL]
        (groups[group] if group else root).command(app_of(flags, name, text))
    return root


def _with_presets(flag: Flag) -> Flag:
    """The flag; --preset with the names of all presets as its values."""
    if flag.name != "--preset":
        return flag
    return replace(flag, kind=Literal[tuple(preset_names())])  # pyright: ignore[reportInvalidTypeForm]
