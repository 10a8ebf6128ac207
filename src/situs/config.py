"""Frozen dataclasses <-> TOML / JSON, strictly: a key or a value that does not fit is an error with its path.

A config is a frozen dataclass beside the component it configures. Its fields are int, float, bool, str, Path,
Literal, tuple, list, dict, other configs, or unions of these. Further rules are annotations of the type, and a config
that derives from `Checked` is checked however it is made. Rules between several fields are in `check`:

    @dataclass(frozen=True)
    class MP3Config(Checked):
        mask_ratio: Annotated[float, Within("[0, 1)")] = 0.75
        epochs: Annotated[int, Within(">= 1")] | None = None

A field made by `choice` takes its class from a dict by the key `name` of its table:

    [method]
    name = "mp3"
    mask_ratio = 0.75

Layers of one recipe are plain dicts that `merge` combines: preset < the user's TOML < flags.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache, wraps
from inspect import Parameter, signature
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from situs.errors import SitusError, unknown_name
from situs.limits import Rule

T = TypeVar("T")
P = ParamSpec("P")

# --- a config that is checked --------------------------------------------------------------------------------


ANY: Any = object()
"""Every value, in `Checked.retired`."""


class Checked:
    """Base of frozen configs: every value is checked against its field's type and rules when the config is made."""

    retired: ClassVar[Mapping[str, tuple[Any, str]]] = {}
    """Fields of earlier versions. Each has the value that a file may still contain (`ANY`: every value), and the
    replacement for other values."""

    def __post_init__(self) -> None:
        cls = type(self)
        for name, (kind, chosen) in _fields(cls).items():
            value = getattr(self, name)
            if chosen is None and value is not getattr(cls, name, MISSING):  # a default needs no check
                convert(kind, value, name)
        self.check()

    def check(self) -> None:
        """Rules between several fields: raises a `SitusError` with the field to change."""


# --- a field whose class is chosen by name ------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """Metadata of a field made by `choice`: the options, and the default name."""

    options: Mapping[str, Any]
    default: str

    def make_default(self) -> Any:
        return self.options[self.default].Config()

    def config_class(self, kind: str, name: str) -> type[Any]:
        if name not in self.options:
            raise unknown_name(kind, name, self.options, field=kind)
        return self.options[name].Config

    def name_of(self, config: Any) -> str:
        for name in self.options:  # one at a time: looking up an option may import another package
            if self.options[name].Config is type(config):
                return name
        raise SitusError(
            f"{type(config).__name__}: is not a config that is accepted here; give the config of one of these: "
            f"{', '.join(self.options)}"
        )


def choice(options: Mapping[str, Any], default: str) -> Any:
    """A config field whose class is `options[name].Config`, as in `method: Any = choice(METHODS, "mp3")`."""
    metadata = Choice(options, default)
    return field(default_factory=metadata.make_default, metadata={"situs.choice": metadata})


def choices_of(cls: type[Any], path: str = "") -> dict[str, Choice]:
    """The choice fields of a config class and of the configs in it: "method" or "a.method" -> Choice."""
    choices: dict[str, Choice] = {}
    for name, (kind, chosen) in _fields(cls).items():
        if chosen is not None:
            choices[path + name] = chosen
        elif isinstance(kind, type) and is_dataclass(kind):
            choices |= choices_of(kind, f"{path}{name}.")
    return choices


@cache
def _fields(cls: type[Any]) -> dict[str, tuple[Any, Choice | None]]:
    """The fields a caller may set: name -> (type, Choice or None)."""
    hints = get_type_hints(cls, include_extras=True)
    return {f.name: (hints[f.name], f.metadata.get("situs.choice")) for f in fields(cls) if f.init}


# --- dict <-> config ----------------------------------------------------------------------------------------


def from_dict(cls: type[T], data: Mapping[str, Any], where: str = "") -> T:
    """The config that `data` describes. `where` (a file, a preset) opens the sentence of every error."""
    try:
        return _table(cls, data, "")
    except SitusError as error:
        if not where:
            raise
        raise error.prefixed(where) from None


def to_dict(config: Any) -> dict[str, Any]:
    """The plain dict of a config, as in JSON; `from_dict` is its inverse."""
    return _plain(config, "")


def _table(cls: type[Any], data: Any, path: str) -> Any:
    if not isinstance(data, Mapping):
        raise _wrong(path or cls.__name__, data, "a table")
    known = _fields(cls)
    for key in data:
        if key not in known and not _is_retired(cls, key, data[key], path):
            raise unknown_key(f"{path}.{key}" if path else str(key), known)
    values = {}
    for name, (kind, chosen) in known.items():
        below = f"{path}.{name}" if path else name
        if name in data:
            values[name] = convert(kind, data[name], below) if chosen is None else _chosen(chosen, data[name], below)
    required = {f.name for f in fields(cls) if f.init and f.default is MISSING and f.default_factory is MISSING}
    if missing := sorted(required - values.keys()):
        absent = [f"{path}.{name}" if path else name for name in missing]
        raise SitusError(f"{path or cls.__name__}: missing {', '.join(missing)}", field=absent)
    try:
        return cls(**values)
    except SitusError as error:
        raise (error.under(path) if path else error) from None


def _is_retired(cls: type[Any], key: str, value: Any, path: str) -> bool:
    """Whether a key is a retired field with the value that a file may still have; another value is refused."""
    retired = getattr(cls, "retired", {})
    if key not in retired:
        return False
    allowed, instead = retired[key]
    if allowed is not ANY and value != allowed:
        name = f"{path}.{key}" if path else key
        raise SitusError(f"{name}={value}: is no longer a setting; {instead}", field=name)
    return True


def _chosen(chosen: Choice, data: Any, path: str) -> Any:
    if not isinstance(data, Mapping):
        raise _wrong(path, data, "a table with the key 'name'")
    name = convert(str, data.get("name", chosen.default), f"{path}.name")
    cls = chosen.config_class(path, name)
    return _table(cls, {key: value for key, value in data.items() if key != "name"}, path)


def convert(kind: Any, value: Any, path: str) -> Any:
    """The value in this type, checked by the type's rules; a mismatch is an error of the field `path`."""
    if kind is Any or (type(value) is kind and kind in _EXACT):  # as most are
        return value
    origin, inner = _origin_and_args(kind)
    if origin is Annotated:
        return _ruled(kind, value, path)
    if is_dataclass(kind):
        is_config = isinstance(value, kind)  # pyright: ignore[reportArgumentType]
        return value if is_config else _table(kind, value, path)  # pyright: ignore[reportArgumentType]
    if origin in (Union, types.UnionType):
        return _union(kind, value, path)
    if origin is tuple and isinstance(value, (list, tuple)):
        types_of_items = (inner[0],) * len(value) if inner[-1] is Ellipsis else inner
        if len(types_of_items) == len(value):
            pairs = zip(types_of_items, value, strict=True)
            return tuple(convert(k, v, f"{path}[{i}]") for i, (k, v) in enumerate(pairs))
    elif origin is list and isinstance(value, (list, tuple)):
        return [convert(inner[0], v, f"{path}[{i}]") for i, v in enumerate(value)]
    elif origin is dict and isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: convert(inner[1], v, f"{path}.{key}") for key, v in value.items()}
    elif origin is Literal:
        if any(type(value) is type(option) and value == option for option in inner):
            return value
    elif kind in _SCALARS and (converted := _SCALARS[kind][1](value)) is not MISSING:
        return converted
    raise _wrong(path, value, expected(kind))


def _origin_and_args(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return _analysed(kind, getattr(kind, "__args__", None))


@cache
def _analysed(kind: Any, _: Any) -> tuple[Any, tuple[Any, ...]]:
    """With its arguments as a second key: unions of the same types are equal in any order."""
    return get_origin(kind), get_args(kind)


def _ruled(kind: Any, value: Any, path: str) -> Any:
    bare, *annotations = _origin_and_args(kind)[1]
    converted = convert(bare, value, path)
    for rule in annotations:
        if isinstance(rule, Rule) and not rule.holds(converted):
            raise _RuleError(field=path, value=value, allowed=rule.allowed)
    return converted


class _RuleError(SitusError):
    """A value of the right type that breaks its rule."""


def _union(kind: Any, value: Any, path: str) -> Any:
    """The value in the first member type that takes it unchanged, or otherwise in the first that can convert it."""
    _, members = _origin_and_args(kind)
    if type(value) in members and type(value) in _EXACT:  # as most are; trying all members takes longer
        return value
    fits, reasons = [], []
    for member in members:
        try:
            fit = convert(member, value, path)
        except SitusError as error:
            reasons.append((member, error))
            continue
        if type(fit) is type(value) and fit == value:
            return fit
        fits.append(fit)
    if fits:
        return fits[0]
    if value == "none" and types.NoneType in members:
        return None  # TOML has no null
    if broken := [error for _, error in reasons if isinstance(error, _RuleError)]:
        raise broken[0]
    # A table is meant for the config among the members, whose own error says more than "wrong type".
    tables = [error for member, error in reasons if is_dataclass(member)]
    if isinstance(value, Mapping) and len(tables) == 1:
        raise tables[0]
    raise _wrong(path, value, expected(kind))


def _float(value: Any) -> Any:
    """A finite number: JSON has no others."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return MISSING
    try:
        return float(value) if math.isfinite(value) else MISSING
    except OverflowError:
        return MISSING


def _exactly(*kinds: type[Any]) -> Callable[[Any], Any]:
    return lambda value: value if type(value) in kinds else MISSING


_EXACT = (bool, int, str, types.NoneType)
_SCALARS: dict[Any, tuple[str, Callable[[Any], Any]]] = {
    bool: ("true or false", _exactly(bool)),
    int: ("an integer", _exactly(int)),
    float: ("a finite number", _float),
    str: ("text", _exactly(str)),
    types.NoneType: ("none", _exactly(types.NoneType)),
    Path: ("a path", lambda value: Path(value) if isinstance(value, (str, Path)) else MISSING),
}
"""type -> (its name in errors, the value in that type or MISSING)."""


def expected(kind: Any) -> str:
    """A type in words: `int | None` is "an integer or none"."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return " ".join([expected(inner[0]), *(rule.allowed for rule in inner[1:] if isinstance(rule, Rule))])
    if origin in (Union, types.UnionType):
        return " or ".join(expected(member) for member in inner)
    if origin is Literal:
        return f"one of {', '.join(map(repr, inner))}"
    if origin is list or (origin is tuple and inner[-1] is Ellipsis):
        if inner[0] is Any:
            return "a list"
        return f"a list, each {expected(inner[0])}"
    if origin is tuple:
        return f"a list of {len(inner)}: {', '.join(map(expected, inner))}"
    if origin is dict or is_dataclass(kind):
        return "a table"
    if kind not in _SCALARS:
        raise TypeError(f"a config field cannot be of type {kind!r}")
    return _SCALARS[kind][0]


def _plain(value: Any, path: str) -> Any:
    if is_dataclass(value):
        choices = {name: chosen for name, (_, chosen) in _fields(type(value)).items()}  # pyright: ignore[reportArgumentType]
        table = {name: _plain(getattr(value, name), f"{path}.{name}".lstrip(".")) for name in choices}
        for name, chosen in choices.items():
            if chosen is not None:
                table[name] = {"name": chosen.name_of(getattr(value, name))} | table[name]
        return table
    if isinstance(value, Mapping):
        return {key: _plain(value[key], f"{path}.{key}") for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise _wrong(path, value, expected(float))
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{path}: a config cannot have a {type(value).__name__}")


# --- arguments of functions -----------------------------------------------------------------------------------

SHOWN = 60
"""Characters of a value in an error of an argument; of a longer one only the class is named."""


def checks_arguments(
    *skipped: str, extra: Callable[[], Mapping[str, Any]] = dict
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Makes a public function refuse arguments that its annotations do not allow, before it begins.

    skipped: arguments that have a check of their own. extra: the names that its module imports for type checkers
    alone. Options in `**options` are checked where a TypedDict lists them. Arguments that cannot be checked by class
    or by value are allowed.
    """

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        parameters = signature(function).parameters

        @cache
        def kinds() -> dict[str, Any]:
            names = {**extra(), **vars(sys.modules[function.__module__])}
            known = {name: _evaluated(parameter.annotation, names) for name, parameter in parameters.items()}
            for name, parameter in parameters.items():
                if parameter.kind is Parameter.VAR_KEYWORD:
                    for table in get_args(known.pop(name)):  # Unpack[TypedDict]
                        names |= vars(sys.modules[table.__module__])
                        known |= {key: _evaluated(kind, names) for key, kind in table.__annotations__.items()}
            return {name: kind for name, kind in known.items() if name not in skipped}

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            for name, value in {**dict(zip(parameters, args, strict=False)), **kwargs}.items():
                usual = parameters[name].default if name in parameters else None
                if value is not usual and not _allows(kind := kinds().get(name, Any), value):
                    text = repr(value)
                    text = f"a {type(value).__name__}" if len(text) > SHOWN or "\n" in text else text
                    allowed = in_words(kind)
                    if usual and isinstance(usual, str | int | float | tuple) and str(usual) not in allowed:
                        allowed += f", such as {usual!r}"
                    raise SitusError(f"{name}={text}: must be {allowed}", field=name, value=value, allowed=allowed)
            return function(*args, **kwargs)

        return checked

    return decorated


def _evaluated(annotation: Any, names: dict[str, Any]) -> Any:
    """The type of an annotation; Any where it cannot be resolved."""
    text = getattr(annotation, "__forward_arg__", annotation)
    if not isinstance(text, str):
        return text
    try:
        return eval(text, names)  # noqa: S307  (our own annotations)
    except (NameError, AttributeError, TypeError):
        return Any


def _members(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    inner = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return inner if len(inner) == 1 else tuple(member for part in inner for member in _members(part))


def _allows(kind: Any, value: Any) -> bool:
    """Whether a value is of a type, as far as that can be seen."""
    origin, inner = get_origin(kind), get_args(kind)
    if len(members := _members(kind)) > 1:
        return any(_allows(member, value) for member in members)
    if origin is Annotated:
        rules = [rule for rule in inner[1:] if isinstance(rule, Rule)]
        return _allows(inner[0], value) and all(rule.holds(value) for rule in rules)
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in inner)
    if kind is None or kind is types.NoneType:
        return value is None
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    cls = Mapping if is_typeddict(kind) else origin or kind
    if cls in _LISTS:
        listed = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
        items = value if listed and isinstance(value, list | tuple) else ()
        return listed and all(_allows(inner[0] if inner else Any, item) for item in items)
    if cls is Any or not isinstance(cls, type) or getattr(cls, "_is_protocol", False):
        return True
    return isinstance(value, cls)


_LISTS = (list, tuple, Sequence, Iterable)


def in_words(kind: Any) -> str:
    """The type of an argument in words: `str | Path | None` is "text, a path or none"."""
    *others, last = dict.fromkeys(map(_word, _members(kind)))
    return f"{', '.join(others)} or {last}" if others else last


def _word(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return " ".join([in_words(inner[0]), *(rule.allowed for rule in inner[1:] if isinstance(rule, Rule))])
    if origin is Literal:
        first, *others = inner
        return f"one of {', '.join(map(str, inner))}" if others else repr(first)
    kind = types.NoneType if kind is None else kind
    if kind in _SCALARS:
        return _SCALARS[kind][0]
    cls = origin or kind
    if cls in _LISTS:
        return "a list" if not inner or inner[0] is Any else f"a list of {in_words(inner[0])}"
    if cls is Mapping or cls is dict or is_typeddict(cls):
        return "a dict"
    if cls is PathLike:
        return "a path"
    name = "function" if cls is Callable else getattr(cls, "__name__", str(cls))
    return f"a{'n' * (name[0] in 'AEIO')} {name}"


# --- layers and single values -------------------------------------------------------------------------------


def merge(
    base: Mapping[str, Any], override: Mapping[str, Any], choices: Collection[str] = (), path: str = ""
) -> dict[str, Any]:
    """`base` with the values of `override`, table by table; neither is changed.

    choices: paths such as "method" (`choices_of`) whose table is replaced whole when the override names another
    choice, because the base's keys belong to the old one.
    """
    merged = dict(base)
    for key, value in override.items():
        below = f"{path}{key}"
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            new_choice = below in choices and "name" in value and value["name"] != old.get("name", value["name"])
            value = dict(value) if new_choice else merge(old, value, choices, f"{below}.")
        merged[key] = value
    return merged


def tables_of(values: Iterable[tuple[str, str, Any]]) -> dict[str, Any]:
    """(name of the flag, path of its field, value) as tables; a field that is set twice is refused."""
    by_path: dict[str, str] = {}
    tables: dict[str, Any] = {}
    for name, path, value in values:
        *above, last = path.split(".")
        table: dict[str, Any] = {last: value}
        for key in reversed(above):
            table = {key: table}
        for leaf in flat(table):
            if leaf in by_path:
                raise SitusError(f"{by_path[leaf]} and {name} set the same field: give only one of them")
            by_path[leaf] = name
        tables = merge(tables, table)
    return tables


def differences(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """The fields in which two configs differ: path -> (old, new), None if one has no such field."""
    before, after = flat(to_dict(old)), flat(to_dict(new))
    paths = [*before, *(path for path in after if path not in before)]
    pairs = {path: (before.get(path), after.get(path)) for path in paths}
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}


def flat(table: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """A table of tables as one: {"a": {"b": 1}} -> {"a.b": 1}."""
    leaves: dict[str, Any] = {}
    for key, value in table.items():
        leaves |= flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {path + key: value}
    return leaves


# --- errors ---------------------------------------------------------------------------------------------------


def _wrong(path: str, value: Any, allowed: str) -> SitusError:
    return SitusError(field=path, value=value, allowed=allowed)


def unknown_key(path: str, known: Collection[str]) -> SitusError:
    """The error for an unknown key: the nearest known one, and all there are."""
    close = get_close_matches(path.rpartition(".")[2], known, n=1, cutoff=0.5)
    perhaps = f", perhaps {close[0]}" if close else ""
    return SitusError(
        f"{path}: unknown key{perhaps}; known keys here: {', '.join(sorted(known)) or 'none'}", field=path
    )
