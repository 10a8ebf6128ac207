"""From the words of a command line to a verb's `Args`.

A verb with a config derives from `Recipe` and has one field made by `configured`:

    @dataclass(frozen=True)
    class Args(Recipe):
        data: Path
        config: PretrainConfig = configured(PretrainConfig)

Every field of the config is then a flag of the verb (`--batch 32`, `--optim.lr 1e-3`, `--method.mask-ratio .5`) that
overrides the preset and the user's TOML file. Each `choice` in it is a flag too: `--method mae` decides which
`--method.*` flags exist. A list is comma-separated: `--optim.betas .9,.95`; `none` unsets an optional field. `--help`
shows the short flags, `--help optim` those of a group, `--help all` all of them.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from cyclopts import CycloptsError, Parameter

from situs.api import FLAGGED, files_of, layered
from situs.cli.parser.flags import SHELL, Configured, Flag, configured_of, flag_name, flags_of
from situs.cli.parser.helptext import help_topic, print_help
from situs.cli.parser.words import app_of, identifier, members_of, sentence
from situs.cli.retired import EVERYWHERE
from situs.cli.retired import FLAGS as RETIRED
from situs.config import choices_of, convert, from_dict, merge, tables_of
from situs.errors import SitusError
from situs.presets import LENGTHS, merge_layers, one_length

T = TypeVar("T")
Ground = Callable[[str], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Where a verb's config comes from. Flags override the TOML file, and the TOML file overrides the preset."""

    preset: Annotated[str | None, Parameter(metavar="NAME")] = None
    """An included config; see --help presets."""

    config_file: Annotated[Path | None, Parameter(name="--config", metavar="FILE")] = None
    """Your own TOML file; it overrides the preset."""


BELOW = {"preset": "--preset", "config_file": "--config", "resume": "--resume", "source": "--from"}
"""Fields of `Args` whose values the flags override, and their flags: a preset, a file, the config of a resumed run, and
(lowest) what is known about the model to start from."""


def configured(
    cls: type[Any],
    ground: Ground | None = None,
    short: Mapping[str, tuple[str, ...]] | None = None,
    without: tuple[str, ...] = (),
) -> Any:
    """The field of `Args` that holds the resolved config; every field of `cls` needs a default.

    ground: makes from the value of --from the tables that the preset overrides. short: short flags for fields of the
    config, as {"epochs": ("train.epochs",)}. without: fields without a flag, because a flag of the verb sets them.
    """
    spec = Configured(cls, ground, short or {}, without)
    return field(default_factory=cls, kw_only=True, metadata={"situs.configured": spec})


def parse(args_type: type[T], argv: Sequence[str], prog: str) -> T:
    """The verb's Args, or a `SitusError` of one sentence. --help is printed and ends with exit status 0."""
    configured_field, topic = configured_of(args_type), help_topic(argv)
    start, below = None, {}
    if configured_field is not None:
        below = layers_of(args_type, argv)
        cls = configured_field[1].cls
        start = from_dict(cls, merge_layers(cls, below.values()), where=files_of(below))
    flags = [*flags_of(args_type, start), *SHELL]
    if topic is not None:
        print_help(flags, start, topic, prog, inspect.getdoc(args_type) or "", _peek(argv, "--preset"))
        raise SystemExit(0)
    parsed = parse_flags(flags, argv, prog)
    args = {f.fields[0]: convert(f.kind, value, f.fields[0]) for f, value in parsed if f.in_args and f not in SHELL}
    if configured_field is not None:
        name, spec = configured_field
        by_flag = [(f.name, path, value) for f, value in parsed if not f.in_args for path in f.fields]
        over = one_length(tables_of(by_flag))
        args[name] = config = from_dict(
            spec.cls, merge(merge_layers(spec.cls, below.values()), over, choices_of(spec.cls))
        )
        flags_by_path = {path: flag for flag, path, _ in by_flag}
        if spec.ground is not None and args.get("source") and "backbone.name" in flags_by_path:
            reason = f"backbone={config.backbone.name}: {args['source']} has its own backbone"
            hint = f"do not set backbone, or give {args['source']} as init to load only its weights"
            raise SitusError(f"{reason}; {hint}", field=("backbone.name", "init"))
        report_length(below, flags_by_path)
    return args_type(**args)


# --- words -> values ----------------------------------------------------------------------------------------


class ParsedFlag(NamedTuple):
    """A flag of the command line and its value."""

    flag: Flag
    value: Any


def parse_flags(flags: Sequence[Flag], argv: Sequence[str], prog: str) -> list[ParsedFlag]:
    """The flags in `argv`, with their values as a TOML file would hold them."""
    removed = EVERYWHERE | RETIRED.get(prog.removeprefix("situs "), {})
    for word in argv:
        if (name := word.partition("=")[0]) in removed:
            raise SitusError(f"{name} was removed: {removed[name]} (see {prog} --help)")
    try:
        app = app_of(_needed(flags, argv), prog)
        _, bound, _ = app.parse_args([*argv], exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise SitusError(f"{sentence(error, prog, flags)} (see {prog} --help)") from None
    by_name = {identifier(flag): flag for flag in flags}
    return [ParsedFlag(by_name[name], _value(by_name[name], value)) for name, value in bound.arguments.items()]


def _needed(flags: Sequence[Flag], argv: Sequence[str]) -> Sequence[Flag]:
    """The flags that parse these words, since a parser of a hundred flags is slow; all of them if a word is unknown."""
    words = {word.partition("=")[0] for word in argv if word.startswith("-")}
    few = [flag for flag in flags if flag.positional or flag.required or any(_names(word, flag) for word in words)]
    return few if all(any(_names(word, flag) for flag in few) for word in words) else flags


def _names(word: str, flag: Flag) -> bool:
    """Whether a word is the flag, or a key of its table: --backbone.model-args.depth."""
    return word == flag.name or (get_origin(flag.kind) is dict and word.startswith(f"{flag.name}."))


def _value(flag: Flag, parsed: Any) -> Any:
    if isinstance(parsed, dict):
        return {key.replace("-", "_"): _from_json(text) for key, text in parsed.items()}
    if isinstance(parsed, tuple):
        return [*parsed]
    return parsed if isinstance(parsed, bool) else from_text(flag.kind, parsed)


def from_text(kind: Any, text: str) -> Any:
    """A word as the value that a TOML file would hold for a field of this type."""
    members = members_of(kind)
    words = {str(word): word for member in members if get_origin(member) is Literal for word in get_args(member)}
    if text in words:
        return words[text]
    if text.lower() == "none" and NoneType in members:
        return None
    lists = [member for member in members if get_origin(member) in (tuple, list)]
    if lists and ("," in text or len(lists) == len([member for member in members if member is not NoneType])):
        return [from_text(get_args(lists[0])[0], part.strip()) for part in text.split(",") if part.strip()]
    return _number(text) if {int, float} & {*members} else text


def _number(text: str) -> Any:
    """The number that the text is, or the text itself."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _from_json(text: str) -> Any:
    """A value of a table with free keys: what JSON reads (numbers, true, lists), or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return _number(text)


# --- layers -------------------------------------------------------------------------------------------------


def layers_of(args_type: type[Any], argv: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """The tables that the flags override, by their origin, and the choices that `argv` makes.

    It is read before the parser runs, because the chosen method decides which flags exist.
    """
    configured_field = configured_of(args_type)
    assert configured_field is not None
    spec = configured_field[1]
    values = {field.name: _peek(argv, BELOW[field.name]) for field in fields(args_type) if field.name in BELOW}
    run, source = values.get("resume"), values.get("source")
    ground = None if spec.ground is None or source is None or run is not None else spec.ground(source)
    backbone = _peek(argv, "--backbone") or _peek(argv, "--backbone.name")
    first = _peek(argv, "--init") or (source if spec.ground is None else None)
    init = None if backbone or not hasattr(spec.cls, "init") else first
    below = layered(values.get("preset"), values.get("config_file"), run, ground, init)
    choices = [(flag_name(path), f"{path}.name", _peek(argv, flag_name(path))) for path in choices_of(spec.cls)]
    chosen = tables_of(choice for choice in choices if choice[2] is not None)
    return {**below, **({FLAGGED: chosen} if chosen else {})}


def _peek(argv: Sequence[str], flag: str) -> str | None:
    """The last value of a flag, before the parser runs."""
    value = None
    for index, word in enumerate(argv):
        if word == flag and index + 1 < len(argv):
            value = argv[index + 1]
        elif word.startswith(f"{flag}="):
            value = word.removeprefix(f"{flag}=")
    return value


def report_length(layers: Mapping[str, Mapping[str, Any]], flags: Mapping[str, str]) -> None:
    """Says on stderr that --epochs or --steps overrides the other length in a preset or file."""
    lengths = [name for name in LENGTHS if f"train.{name}" in flags]
    if len(lengths) != 1 or os.environ.get("RANK", "0") != "0":
        return
    flag = flags[f"train.{lengths[0]}"]
    [other] = [name for name in LENGTHS if name not in lengths]
    for source, tables in reversed([*layers.items()]):
        table = tables.get("train", {})
        if other in table:
            if table[other] not in (None, "none"):
                print(f"situs: {flag} overrides train.{other}={table[other]} of {source}", file=sys.stderr)
            return
