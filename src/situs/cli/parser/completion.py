"""A script that completes verbs, flags and their words in your shell.

For example: situs completion bash --install
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from cyclopts import App, Parameter

from situs.cli.main import VERBS
from situs.cli.parser.flags import POSITIONAL, SHELL, Flag, flags_of
from situs.cli.parser.words import app_of
from situs.cli.shell import answer
from situs.errors import SitusError
from situs.presets import preset_names

Shell = Literal["bash", "zsh", "fish", "powershell"]


@dataclass(frozen=True)
class Args:
    """Completion in a shell."""

    shell: Annotated[Shell | None, POSITIONAL, Parameter(metavar="SHELL")] = None
    """bash, zsh, fish or powershell; by default that of $SHELL."""

    install: bool = False
    """Write the script where the shell finds it, and name it in the shell's startup file."""


def run(args: Args) -> None:
    """Prints the script, or writes it where the shell finds it."""
    own = Path(os.environ.get("SHELL", "")).name
    shell: Any = args.shell or (own if own in get_args(Shell) else None)
    if shell is None:
        raise SitusError("which shell it is cannot be told: say bash, zsh, fish or powershell", field="shell")
    if args.install:
        path = whole_app().install_completion(shell=shell)
        answer({"file": path}, f"{path}: open a new {shell} to use it")
        return
    print(whole_app().generate_completion(prog_name="situs", shell=shell))


def whole_app() -> App:
    """Every verb with its flags, those of all methods among them."""
    root = App(name="situs", help_flags=("--help", "-h"), version_flags=("--version",))
    groups: dict[str, App] = {}
    for verb, (module, text) in VERBS.items():
        group, _, name = verb.rpartition(" ")
        if group and group not in groups:
            groups[group] = App(name=group)
            root.command(groups[group])
        flags = [*map(_named, flags_of(import_module(module).Args, every=True)), *SHELL]
        (groups[group] if group else root).command(app_of(flags, name, text))
    return root


def _named(flag: Flag) -> Flag:
    """A flag whose words are names that come with situs."""
    if flag.name != "--preset":
        return flag
    return replace(flag, kind=Literal[tuple(preset_names())])  # pyright: ignore[reportInvalidTypeForm]
