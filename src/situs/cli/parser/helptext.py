"""What `--help` shows: the everyday flags, with the names of the others; `--help GROUP` and `--help all` the rest."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_origin

from situs.cli.parser.flags import SHELL, Flag
from situs.cli.parser.words import app_of
from situs.errors import unknown_name
from situs.presets import preset_header, preset_names

HELP = ("-h", "--help")


def asked_topic(argv: Sequence[str]) -> str | None:
    """The word behind --help, "" where there is none; None where no help is asked for."""
    for index, word in enumerate(argv):
        if word in HELP:
            following = argv[index + 1] if index + 1 < len(argv) else ""
            return "" if following.startswith("-") else following
        if word.startswith("--help="):
            return word.removeprefix("--help=")
    return None


def print_help(flags: Sequence[Flag], config: Any, topic: str, prog: str, description: str, preset: str | None) -> None:
    """Prints what `topic` asks for; defaults are those that preset, file and chosen method give."""
    tables = [f.name for f in fields(config) if is_dataclass(getattr(config, f.name))] if config is not None else []
    groups = list(dict.fromkeys([*tables, *(flag.group for flag in flags if flag.group)]))
    recipes = any(flag.name == "--preset" for flag in flags)
    if not groups:
        topic = ""
    elif topic and topic not in (topics := (*groups, *(["presets"] if recipes else []), "all")):
        raise unknown_name("topic of --help", topic, topics)
    if topic == "presets":
        print(presets_text(preset))
        return
    flags = [_with_key(flag) if get_origin(flag.kind) is dict else flag for flag in flags]
    shown = [flag for flag in flags if topic in ("all", flag.group) and flag not in SHELL]
    about = f"The flags --{topic}.* and their values." if topic in tables else description
    app_of(shown, prog, about).help_print([])
    if groups and not topic:
        print(other_flags([flag for flag in flags if flag.group], groups, prog, presets=recipes))
    if topic in ("", "all"):
        every = ", ".join(f"{flag.name} ({flag.help})" for flag in SHELL)
        print(textwrap.fill(f"Every verb takes {every}.", _width(), **_WHOLE))


def _with_key(flag: Flag) -> Flag:
    """A table that takes any key, as it is written."""
    return replace(flag, name=f"{flag.name}.KEY", kind=str, metavar="VALUE", default=None)


def other_flags(flags: Sequence[Flag], groups: Sequence[str], prog: str, *, presets: bool) -> str:
    """The names of the flags in groups, and how to read on."""
    recipes = ", --help presets the recipes" if presets else ""
    topics = f"{prog} --help GROUP explains a group below, --help all every flag{recipes}."
    told = textwrap.wrap(topics, _width(), **_WHOLE)
    column = max(map(len, groups)) + 4
    for group in groups:
        members = [flag.name for flag in flags if flag.group == group]
        keys = dict.fromkeys(_short(name.removeprefix(f"--{group}.")) for name in members if f"--{group}." in name)
        names = [*(name for name in members if f"--{group}." not in name), *keys]
        if keys:
            names[-len(keys)] = f"--{group}.{names[-len(keys)]}"
        line = ", ".join(names) or "none"
        told.append(f"  {group:<{column - 2}}{textwrap.shorten(line, _width() - column, placeholder=' …', **_WHOLE)}")
    return "\n".join(told)


def _short(name: str) -> str:
    """A flag of a table within a group by the table alone, unless that takes any key."""
    table, dot, key = name.partition(".")
    return name if not dot or key == "KEY" else f"{table}.…"


def presets_text(preset: str | None) -> str:
    """The recipes with what each one's opening comment says before its command, or all of one's."""
    if preset is not None:
        return preset_header(preset)
    told = ["Recipes (--preset NAME --help presets: the command, the hardware and the figures to expect)", ""]
    for name in preset_names():
        header = preset_header(name).splitlines()
        end = next(i for i, line in enumerate(header) if line.startswith(("situs ", "torchrun ")))
        told += [name, *textwrap.wrap(" ".join(header[:end]), _width(), initial_indent="  ", subsequent_indent="  ")]
    return "\n".join(told)


_WHOLE: dict[str, Any] = {"break_on_hyphens": False, "break_long_words": False}


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 120)
