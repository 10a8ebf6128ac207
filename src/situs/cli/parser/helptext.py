"""Prints help: `--help` explains the short flags and lists the others, which `--help GROUP` or `--help all` explain."""

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


def help_topic(argv: Sequence[str]) -> str | None:
    """The word after --help, "" if there is none; None without --help."""
    for index, word in enumerate(argv):
        if word in HELP:
            following = argv[index + 1] if index + 1 < len(argv) else ""
            return "" if following.startswith("-") else following
        if word.startswith("--help="):
            return word.removeprefix("--help=")
    return None


def print_help(flags: Sequence[Flag], config: Any, topic: str, prog: str, description: str, preset: str | None) -> None:
    """Prints the help of a topic, with the defaults of the preset, the file and the chosen method."""
    tables = [f.name for f in fields(config) if is_dataclass(getattr(config, f.name))] if config is not None else []
    groups = list(dict.fromkeys([*tables, *(flag.group for flag in flags if flag.group)]))
    presets = any(flag.name == "--preset" for flag in flags)
    if not groups:
        topic = ""
    elif topic and topic not in (topics := (*groups, *(["presets"] if presets else []), "all")):
        raise unknown_name("topic of --help", topic, topics)
    if topic == "presets":
        print(presets_text(preset))
        return
    flags = [_with_key(flag) if get_origin(flag.kind) is dict else flag for flag in flags]
    explained = [flag for flag in flags if topic in ("all", flag.group) and flag not in SHELL]
    about = f"The flags --{topic}.* and their values." if topic in tables else description
    app_of(explained, prog, about).help_print([])
    if groups and not topic:
        print(other_flags([flag for flag in flags if flag.group], groups, prog, presets=presets))
    if topic in ("", "all"):
        shared = ", ".join(f"{flag.name} ({flag.help})" for flag in SHELL)
        print(textwrap.fill(f"Every verb takes {shared}.", _width(), **_WHOLE))


def _with_key(flag: Flag) -> Flag:
    """The flag of a table with free keys, as --NAME.KEY VALUE."""
    return replace(flag, name=f"{flag.name}.KEY", kind=str, metavar="VALUE", default=None)


def other_flags(flags: Sequence[Flag], groups: Sequence[str], prog: str, *, presets: bool) -> str:
    """The names of the flags in groups, and how to get their help."""
    listing = " --help presets lists the presets." if presets else ""
    topics = f"More flags: {prog} --help GROUP explains one group, and --help all explains every flag.{listing}"
    lines = textwrap.wrap(topics, _width(), **_WHOLE)
    column = max(map(len, groups)) + 4
    for group in groups:
        members = [flag.name for flag in flags if flag.group == group]
        keys = dict.fromkeys(_short(name.removeprefix(f"--{group}.")) for name in members if f"--{group}." in name)
        names = [*(name for name in members if f"--{group}." not in name), *keys]
        if keys:
            names[-len(keys)] = f"--{group}.{names[-len(keys)]}"
        line = ", ".join(names) or "none"
        lines.append(f"  {group:<{column - 2}}{textwrap.shorten(line, _width() - column, placeholder=' …', **_WHOLE)}")
    return "\n".join(lines)


def _short(name: str) -> str:
    """The name of a flag within its group; all flags of a nested table as one."""
    table, dot, key = name.partition(".")
    return name if not dot or key == "KEY" else f"{table}.…"


def presets_text(preset: str | None) -> str:
    """The list of presets with a description of each, or the whole header of one."""
    if preset is not None:
        return preset_header(preset)
    lines = ["Presets. For the command, hardware and expected figures of one preset: --preset NAME --help presets", ""]
    for name in preset_names():
        header = preset_header(name).splitlines()
        end = next(i for i, line in enumerate(header) if line.startswith(("situs ", "torchrun ")))
        lines += [name, *textwrap.wrap(" ".join(header[:end]), _width(), initial_indent="  ", subsequent_indent="  ")]
    return "\n".join(lines)


_WHOLE: dict[str, Any] = {"break_on_hyphens": False, "break_long_words": False}


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 120)
