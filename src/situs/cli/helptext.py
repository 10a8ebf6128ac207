"""What `--help` shows: the everyday flags, with the names of the others; `--help GROUP` and `--help all` the rest.

A config brings some eighty flags, in groups (`--optim.lr` is in `optim`). The parser would print them all; here it
is given types in which the fields that were not asked for are suppressed, and does the printing itself.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from situs.errors import unknown_name
from situs.presets import preset_header, preset_names

HELP = ("-h", "--help")

METAVARS = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH"}


def asked_topic(argv: Sequence[str]) -> str | None:
    """The word behind --help, "" where there is none; None where no help is asked for."""
    for index, word in enumerate(argv):
        if word in HELP:
            following = argv[index + 1] if index + 1 < len(argv) else ""
            return "" if following.startswith("-") else following
        if word.startswith("--help="):
            return word.removeprefix("--help=")
    return None


def groups_of(config: Any) -> dict[str, Any]:
    """The configs in a config, each a group of flags: "optim" -> its OptimConfig."""
    held = {f.name: getattr(config, f.name) for f in fields(config)}
    return {name: value for name, value in held.items() if is_dataclass(value)}


def check_topic(topic: str, config: Any) -> None:
    """Refuses a word behind --help that names nothing."""
    topics = (*groups_of(config), "presets", "all")
    if topic and topic not in topics:
        raise unknown_name("topic of --help", topic, topics)


# --- types that show less -----------------------------------------------------------------------------------


def everyday(args_type: type[Any]) -> type[Any]:
    """`args_type`, where a flag without a default value says nothing of None."""
    kinds = get_type_hints(args_type, include_extras=True)
    changed = {f.name: _without_none(kinds[f.name]) for f in fields(args_type) if f.default is None}
    return _changed(args_type, changed)


def narrowed(args_type: type[Any], name: str, config: Any, topic: str) -> type[Any]:
    """`args_type`, whose field `name` holds `config`, with the flags that belong to `topic` and no others."""
    groups = groups_of(config)
    cls = type(config)
    kinds = get_type_hints(cls, include_extras=True)
    names = [f.name for f in fields(cls)]
    shown = {"": [name for name in names if name not in groups], "all": names}.get(topic, [topic])
    hidden = {each: _hidden(groups, each, kinds[each]) for each in names if each not in shown}
    config_type = _changed(everyday(cls), hidden)
    start = config_type(**{f.name: getattr(config, f.name) for f in fields(cls) if f.init})
    own = get_type_hints(args_type, include_extras=True)
    changed: dict[str, Any] = {name: Annotated[config_type, tyro.conf.arg(name="")]}
    if topic not in ("", "all"):
        changed |= {f.name: _hidden({}, f.name, own[f.name]) for f in fields(args_type) if f.name != name}
    return _changed(everyday(args_type), changed, {name: lambda: start})


def _hidden(groups: dict[str, Any], name: str, kind: Any) -> Any:
    return Annotated[type(groups[name]) if name in groups else kind | None, tyro.conf.Suppress]


def _without_none(kind: Any) -> Any:
    """The same type for the parser, named without None; a name that the field has already stays."""
    inner, *notes = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    members = get_args(inner) if get_origin(inner) in (Union, UnionType) else (inner,)
    members = tuple(member for member in members if member is not NoneType)
    metavar = None
    if len(members) == 1:
        [only] = members
        literal = get_origin(only) is Literal
        metavar = "{" + ",".join(map(str, get_args(only))) + "}" if literal else METAVARS.get(only)
    return Annotated[(inner, tyro.conf.arg(metavar=metavar, help_behavior_hint=""), *notes)]  # pyright: ignore[reportInvalidTypeForm]


def _changed(cls: type[Any], kinds: dict[str, Any], factories: dict[str, Callable[[], Any]] | None = None) -> type[Any]:
    """`cls` with other types for some fields, in their places and with their docstrings and defaults."""
    known: dict[str, Field[Any]] = {f.name: f for f in fields(cls)}
    new = [(name, kind, _same_default(known[name], (factories or {}).get(name))) for name, kind in kinds.items()]
    return make_dataclass(cls.__name__, new, bases=(cls,), frozen=True)


def _same_default(old: Field[Any], factory: Callable[[], Any] | None) -> Any:
    if factory is not None:
        return field(default_factory=factory, kw_only=old.kw_only)
    if old.default is MISSING and old.default_factory is MISSING:
        return field(default=None, kw_only=old.kw_only)  # required, and hidden: the parser would ask for it
    return field(  # pyright: ignore[reportCallIssue, reportUnknownVariableType]
        default=old.default,
        default_factory=old.default_factory,  # pyright: ignore[reportArgumentType]
        kw_only=old.kw_only,
        metadata=old.metadata,
    )


def free_tables(cls: type[Any], path: str = "") -> list[str]:
    """The paths of a config's tables with keys of any name, such as "backbone.model_args"."""
    found: list[str] = []
    for name, kind in get_type_hints(cls).items():
        if get_origin(kind) is dict:
            found.append(path + name)
        elif isinstance(kind, type) and is_dataclass(kind):
            found += free_tables(kind, f"{path}{name}.")
    return found


# --- what stands below the flags ----------------------------------------------------------------------------


def other_flags(config: Any, prog: str) -> str:
    """The names of the flags in groups, and how to read on."""
    width = shutil.get_terminal_size().columns
    lines = [f"{prog} --help GROUP explains the flags of a group below, --help all every flag,"]
    lines += ["--help presets the recipes."]
    groups = groups_of(config)
    column = max(map(len, groups)) + 4
    for group, held in groups.items():
        free = free_tables(type(held))
        names = [f.name.replace("_", "-") + ".KEY" * (f.name in free) for f in fields(held)]
        names[:1] = [f"--{group}.{name}" for name in names[:1]]
        text = ", ".join(names) or "none"
        lead = f"  {group:<{column - 2}}"
        lines += textwrap.wrap(text, width, initial_indent=lead, subsequent_indent=" " * column, break_on_hyphens=False)
    return "\n".join(lines)


def free_flags(config: Any, topic: str) -> str:
    """A line for each table of any keys in what `topic` shows: the parser knows only the keys that are there."""
    paths = [path for path in free_tables(type(config)) if topic == "all" or path.partition(".")[0] == topic]
    flags = [f"--{path.replace('_', '-')}.KEY VALUE" for path in paths]
    return "\n".join(f"Also {flag}: any key, handed to the model's constructor." for flag in flags)


def presets_text(preset: str | None) -> str:
    """The recipes with the first line of each one's opening comment, or all of one's."""
    if preset is not None:
        return preset_header(preset)
    width = shutil.get_terminal_size().columns
    lines = ["Recipes (--preset NAME --help presets: the command, the hardware and the figures to expect)", ""]
    for name in preset_names():
        first = preset_header(name).partition("\n")[0]
        lines += [name, *textwrap.wrap(first, width, initial_indent="  ", subsequent_indent="  ")]
    return "\n".join(lines)
