"""The flags of a verb: one for each field of its `Args` and of the config in it, with the fields that it sets.

Parser, help, completion and the flag behind an error all read them here. A field of `Args` is a flag of its name; what
else is to be said of it stands with its type, as in `Annotated[Path, Parameter(metavar="FILE")]`; `POSITIONAL` there
makes it a word without a flag; the class's `topics` name groups of fields that `--help` only lists. Of a config every
field is a flag: `--batch`, `--optim.lr`, `--method.mask-ratio`.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
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
"""In a field's type: it is given without a flag."""

METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", NoneType: "none"}

PREFERRED = {"img_size": "data.img_size", "in_chans": "data.channels", "positions": "backbone.positions"}
"""Which field of a run's config is meant where several end alike."""


@dataclass(frozen=True)
class Flag:
    """One flag. fields: what it sets, as paths from `Args` (own) or from the config. group: "" for an everyday one."""

    name: str
    fields: tuple[str, ...]
    kind: Any
    default: Any
    help: str
    metavar: str
    group: str = ""
    own: bool = False
    positional: bool = False

    @property
    def required(self) -> bool:
        return self.default is MISSING


SHELL = tuple(Flag(f"--{name}", (name,), bool, False, text, "", own=True) for name, text in FLAGS.items())
"""Flags of every verb, for which `situs.cli.shell` stands and no field of its `Args`."""


@dataclass(frozen=True)
class Configured:
    """What `arguments.configured` leaves in a field: the config's class, short flags that stand for its fields, and
    those of its fields that are no flags."""

    cls: type[Any]
    ground: Any
    short: Mapping[str, tuple[str, ...]]
    without: tuple[str, ...] = ()


def configured_of(args_type: type[Any]) -> tuple[str, Configured] | None:
    """The field of a verb's `Args` that holds its config."""
    found = [(f.name, f.metadata["situs.configured"]) for f in fields(args_type) if "situs.configured" in f.metadata]
    return found[0] if found else None


def flags_of(args_type: type[Any], start: Any = None, *, every: bool = False) -> list[Flag]:
    """A verb's flags in the order they are shown: its own, short ones of its config, the config's.

    start: the config whose values are the defaults, and whose choices say which flags there are (the method's). every:
    the flags of all choices instead.
    """
    held = configured_of(args_type)
    found = list(_own(args_type, held[0] if held else ""))
    if held is not None:
        start = held[1].cls() if start is None else start
        config = [f for f in (*_choices(start), *_below(start, "", every)) if f.fields[0] not in held[1].without]
        by_path = {flag.fields[0]: flag for flag in config}
        found += [_short(name, by_path[paths[0]], paths) for name, paths in held[1].short.items()]
        found += config
    topics = {name: topic for topic, names in getattr(args_type, "topics", {}).items() for name in names}
    return [replace(flag, group=topics.get(_field(flag), flag.group)) for flag in found]


def _field(flag: Flag) -> str:
    """What a flag is called in `topics`."""
    return flag.fields[0] if flag.own else flag.name[2:].replace("-", "_")


def _own(args_type: type[Any], config: str) -> Iterator[Flag]:
    kinds, texts = _hints(args_type, include_extras=True), texts_of(args_type)
    for each in fields(args_type):
        if each.name == config:
            continue
        kind, *notes = get_args(kinds[each.name]) if get_origin(kinds[each.name]) is Annotated else (kinds[each.name],)
        told = next((note for note in notes if isinstance(note, Parameter)), Parameter())
        metavar = told.metavar or metavar_of(kind)
        positional = POSITIONAL in notes
        name = metavar if positional else (told.name or (flag_name(each.name),))[0]  # pyright: ignore[reportIndexIssue]
        default = each.default if each.default_factory is MISSING else each.default_factory()
        yield Flag(name, (each.name,), kind, default, texts[each.name], metavar, own=True, positional=positional)


def _choices(start: Any) -> Iterator[Flag]:
    """`--method mae`: a flag for each field whose class is chosen by name."""
    for path, chosen in choices_of(type(start)).items():
        held = start
        for key in path.split("."):
            held = getattr(held, key)
        text = f"{', '.join(sorted(chosen.options))}; see --help {path}."
        kind = Literal[tuple(sorted(chosen.options))]  # pyright: ignore[reportInvalidTypeForm]
        yield Flag(flag_name(path), (f"{path}.name",), kind, chosen.name_of(held), text, "NAME")


def _below(config: Any, path: str, every: bool) -> Iterator[Flag]:
    """A config's own fields first, then those of the configs in it, each a group."""
    kinds, texts, choices = _hints(type(config)), texts_of(type(config)), choices_of(type(config))
    groups = []
    for each in fields(config):
        value, below = getattr(config, each.name), f"{path}{each.name}"
        if is_dataclass(value):
            groups.append((each.name, value, below))
        else:
            kind = kinds[each.name]
            metavar = "PATH" if each.name == "path" else metavar_of(kind)
            yield Flag(flag_name(below), (below,), kind, value, texts[each.name], metavar, path.partition(".")[0])
    for name, value, below in groups:
        if every and name in choices:
            options = choices[name].options
            seen = {f.name: f for option in options for f in _below(options[option].Config(), f"{below}.", every)}
            yield from seen.values()
        else:
            yield from _below(value, f"{below}.", every)


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
    """The docstrings under fields, of every class of a module; none where its source is not at hand."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return {}
    return dict(_classes(tree.body, ""))


def _classes(body: Sequence[ast.stmt], path: str) -> Iterator[tuple[str, dict[str, str]]]:
    for each in body:
        match each:
            case ast.ClassDef():
                yield f"{path}{each.name}", dict(_under(each.body))
                yield from _classes(each.body, f"{path}{each.name}.")
            case ast.FunctionDef():
                yield from _classes(each.body, f"{path}{each.name}.<locals>.")


def _under(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    for each, after in pairwise(body):
        match each, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split())


def metavar_of(kind: Any) -> str:
    """What stands behind a flag in its help: INT, FLOAT,FLOAT, {mean,cls}."""
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


def explained(error: SitusError, args_type: type[Any]) -> str:
    """The sentence, with the flags that mend it behind: those of its fields that are flags of the verb."""
    flags = dict.fromkeys(filter(None, (flag_of(field, args_type) for field in error.fields)))
    said = str(error)
    return f"{said} ({', '.join(flags)})" if flags and not all(flag in said for flag in flags) else said


def flag_of(field: str, args_type: type[Any]) -> str | None:
    """The flag that sets this field, or None where the verb has none; a short flag before the long one.

    A field that the verb does not have as it is named (a method says mask_ratio, the verb has method.mask_ratio) is the
    one that ends in it, if there is only one.
    """
    field = field.partition("[")[0]
    known: dict[str, str] = {}
    for flag in flags_of(args_type, every=True):
        for path in flag.fields:
            known.setdefault(path.removesuffix(".name") if flag.metavar == "NAME" else path, flag.name)
        known.setdefault(flag.name.lstrip("-").replace("-", "_"), flag.name)
    for name in (field, PREFERRED.get(field)):
        if name in known:
            return known[name]
    ends = {flag for path, flag in known.items() if path.endswith(f".{field}")}
    return ends.pop() if len(ends) == 1 else None
