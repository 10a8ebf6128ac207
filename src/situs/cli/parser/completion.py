"""A script that completes verbs, flags and their words in your shell.

For example, in bash: situs completion bash > ~/.local/share/bash-completion/completions/situs
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Literal

from cyclopts import App, Parameter

from situs.cli.main import VERBS
from situs.cli.parser.flags import POSITIONAL, flags_of
from situs.cli.parser.words import app_of


@dataclass(frozen=True)
class Args:
    """Completion in a shell."""

    shell: Annotated[Literal["bash", "zsh", "fish", "powershell"], POSITIONAL, Parameter(metavar="SHELL")]
    """bash, zsh, fish or powershell."""


def run(args: Args) -> None:
    """Prints the script."""
    print(whole_app().generate_completion(prog_name="situs", shell=args.shell))


def whole_app() -> App:
    """Every verb with its flags, those of all methods among them."""
    root = App(name="situs", help_flags=("--help", "-h"), version_flags=("--version",))
    groups: dict[str, App] = {}
    for verb, (module, text) in VERBS.items():
        group, _, name = verb.rpartition(" ")
        if group and group not in groups:
            groups[group] = App(name=group)
            root.command(groups[group])
        flags = flags_of(import_module(module).Args, every=True)
        (groups[group] if group else root).command(app_of(flags, name, text))
    return root
