"""The flags of a verb: one for each field of its `Args` and of the config in it.

Parser, help, completion and error sentences all use this list. A field of `Args` is a flag of its name; its type may
add details, as in `Annotated[Path, Parameter(metavar="FILE")]`, or `POSITIONAL` for an argument without a flag. The
class's `topics` are groups of fields that `--help` lists without explaining. Every field of the config is a flag:
`--batch`, `--optim.lr`, `--method.mask-ratio`.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from cyclopts import Parameter

from situs.cli.shell import FLAGS
from situs.config import choices_of
from situs.errors import SitusError

POSITIONAL = object()
"""In a field's type: an argument without a flag."""

METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", NoneType: "none"}

PREFERRED = {"img_size": "data.img_size", "in_chans": "data.channels", "positions": "backbone.positions"}
"""Which field of a run's config a short name means, if several end in it."""


@dataclass(frozen=True)
class Flag:
    """One flag. fields: the paths it sets, in `Args` (in_args) or in the config. group: "" if `--help` explains it."""

    name: str
    fields: tuple[str, ...]
    kind: Any
    default: Any
    help: str
    metavar: str
    group: str = ""
    in_args: bool = False
    positional: bool = False

    @property
    def required(self) -> bool:
        return self.default is MISSING


SHELL = tuple(Flag(f"--{name}", (name,), bool, False, text, "", in_args=True) for name, text in FLAGS.items())
"""Flags of every verb, which `situs.cli.shell` reads."""


@dataclass(frozen=True)
class Configured:
    """The metadata of a field made by `arguments.configured`; see there."""

    cls: type[Any]
    ground: Any
    short: Mapping[str, tuple[str, ...]]
    without: tuple[str, ...] = ()


def configured_of(args_type: type[Any]) -> tuple[str, Configured] | None:
    """The field of a verb's `Args` that holds its config: its name and metadata."""
    specs = ((field.name, field.metadata.get("situs.configured")) for field in fields(args_type))
    return next(((name, spec) for name, spec in specs if spec is not None), None)


def flags_of(args_type: type[Any], start: Any = None, *, every: bool = False) -> list[Flag]:
    """A verb's flags in the order they are shown: its own, short ones of its config, the config's.

    start: the config whose values are the defaults, and whose choices (the method) decide which flags exist. every: the
    flags of all choices instead.
    """
    configured_field = configured_of(args_type)
    flags = list(_args_flags(args_type, configured_field[0] if configured_field else ""))
    if configured_field is not None:
        spec = configured_field[1]
        start = spec.cls() if start is None else start
        config_flags = [*_choice_flags(start), *_config_flags(start, "", every)]
        config_flags = [flag for flag in config_flags if flag.fields[0] not in spec.without]
        by_path = {flag.fields[0]: flag for flag in config_flags}
        flags += [_short(name, by_path[paths[0]], paths) for name, paths in spec.short.items()]
        flags += config_flags
    topics = {name: topic for topic, names in getattr(args_type, "topics", {}).items() for name in names}
    return [replace(flag, group=topics.get(_name_in_topics(flag), flag.group)) for flag in flags]


def _name_in_topics(flag: Flag) -> str:
    return flag.fields[0] if flag.in_args else flag.name[2:].replace("-", "_")


def _args_flags(args_type: type[Any], config: str) -> Iterator[Flag]:
    """A flag for each field of `Args` except the config."""
    kinds, texts = _hints(args_type, include_extras=True), texts_of(args_type)
    for field in fields(args_type):
        if field.name == config:
            continue
        hint = kinds[field.name]
        kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        parameter = next((note for note in notes if isinstance(note, Parameter)), Parameter())
        metavar = parameter.metavar or metavar_of(kind)
        positional = POSITIONAL in notes
        names: Any = parameter.name or (flag_name(field.name),)
        name = metavar if positional else names[0]
        default = field.default if field.default_factory is MISSING else field.default_factory()
        yield Flag(name, (field.name,), kind, default, texts[field.name], metavar, in_args=True, positional=positional)


def _choice_flags(start: Any) -> Iterator[Flag]:
    """`--method mae`: a flag for each field whose class is chosen by name."""
    for path, choice in choices_of(type(start)).items():
        value = start
        for key in path.split("."):
            value = getattr(value, key)
        text = f"{', '.join(sorted(choice.options))}; see --help {path}."
        kind = Literal[tuple(sorted(choice.options))]  # pyright: ignore[reportInvalidTypeForm]
        yield Flag(flag_name(path), (f"{path}.name",), kind, choice.name_of(value), text, "NAME")


def _config_flags(config: Any, path: str, every: bool) -> Iterator[Flag]:
    """The fields of a config first, then those of the configs in it, each a group."""
    kinds, texts, choices = _hints(type(config)), texts_of(type(config)), choices_of(type(config))
    groups = []
    for field in fields(config):
        value, below = getattr(config, field.name), f"{path}{field.name}"
        if is_dataclass(value):
            groups.append((field.name, value, below))
        else:
            kind = kinds[field.name]
            metavar = "PATH" if field.name == "path" else metavar_of(kind)
            yield Flag(flag_name(below), (below,), kind, value, texts[field.name], metavar, path.partition(".")[0])
    for name, value, below in groups:
        options = _importable(choices[name].options) if every and name in choices else ()
        configs = [option.Config() for option in options] or [value]
        by_name = {flag.name: flag for inner in configs for flag in _config_flags(inner, f"{below}.", every)}
        yield from by_name.values()


def _importable(options: Mapping[str, Any]) -> Iterator[Any]:
    """The classes of a choice. Another package's class that cannot be imported has no flags."""
    for name in options:
        with suppress(SitusError):
            yield options[name]


def _short(name: str, long: Flag, paths: tuple[str, ...]) -> Flag:
    text = f"{long.help.partition(';')[0].rstrip('.')} ({', '.join(map(flag_name, paths))})."
    return Flag(flag_name(name), paths, long.kind, long.default, text, long.metavar)


# --- words --------------------------------------------------------------------------------------------------


def flag_name(path: str) -> str:
    """`optim.warmup_epochs` -> `--optim.warmup-epochs`."""
    return "--" + path.replace("_", "-")


_hints = cache(get_type_hints)


@cache
def texts_of(cls: type[Any]) -> dict[str, str]:
    """The docstring under each field of a class and of those it derives from."""
    texts = dict.fromkeys((f.name for f in fields(cls)), "")
    for base in reversed(cls.__mro__):
        if is_dataclass(base):
            texts |= _written(base.__module__).get(base.__qualname__, {})
    return texts


@cache
def _written(module: str) -> dict[str, dict[str, str]]:
    """Class -> field -> the docstring under it, of a module; nothing if its source is not available."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return {}
    return dict(_classes(tree.body, ""))


def _classes(body: Sequence[ast.stmt], path: str) -> Iterator[tuple[str, dict[str, str]]]:
    for node in body:
        match node:
            case ast.ClassDef():
                yield f"{path}{node.name}", dict(_field_docstrings(node.body))
                yield from _classes(node.body, f"{path}{node.name}.")
            case ast.FunctionDef():
                yield from _classes(node.body, f"{path}{node.name}.<locals>.")


def _field_docstrings(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    for node, following in pairwise(body):
        match node, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split())


def metavar_of(kind: Any) -> str:
    """The placeholder of a flag's value in its help: INT, FLOAT,FLOAT, {mean,cls}."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return metavar_of(inner[0])
    if origin in (Union, UnionType):
        return "|".join(metavar_of(member) for member in inner if member is not NoneType)
    if origin is Literal:
        return "{" + ",".join(map(str, inner)) + "}"
    if origin is list or (origin is tuple and inner[-1] is Ellipsis):
        return f"{metavar_of(inner[0])},…"
    if origin is tuple:
        return ",".join(map(metavar_of, inner))
    return METAVARS.get(kind, "VALUE")


# --- the flag behind an error -------------------------------------------------------------------------------


def with_flags(error: SitusError, args_type: type[Any]) -> str:
    """The error's sentence, followed by the verb's flags that set the fields it names."""
    flags = dict.fromkeys(filter(None, (flag_of(field, args_type) for field in error.fields)))
    sentence = str(error)
    return sentence if all(flag in sentence for flag in flags) else f"{sentence} ({', '.join(flags)})"


def flag_of(field: str, args_type: type[Any]) -> str | None:
    """The flag that sets this field, the short one if there are two; None if the verb has none.

    If the verb has no field of that name, it is the only one that ends in it: mask_ratio means method.mask_ratio.
    A verb without a config has short names alone: data.held_out is held_out.
    """
    field = field.partition("[")[0]
    by_path: dict[str, str] = {}
    for flag in flags_of(args_type, every=True):
        for path in flag.fields:
            by_path.setdefault(path.removesuffix(".name") if flag.metavar == "NAME" else path, flag.name)
        by_path.setdefault(flag.name.lstrip("-").replace("-", "_"), flag.name)
    for name in (field, PREFERRED.get(field)):
        if name in by_path:
            return by_path[name]
    if not any("." in path for path in by_path):
        return by_path.get(field.rpartition(".")[2])
    ends = {flag for path, flag in by_path.items() if path.endswith(f".{field}")}
    return ends.pop() if len(ends) == 1 else None
