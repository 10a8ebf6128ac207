"""From the words of a command line to a verb's `Args`.

A verb with a config derives from `Recipe` and has one field made by `configured`:

    @dataclass(frozen=True)
    class Args(Recipe):
        data: Path
        config: PretrainConfig = configured(PretrainConfig)

Every field of the config is then a flag of the verb (`--batch 32`, `--optim.lr 1e-3`, `--method.mask-ratio .5`), laid
over the preset and the user's TOML, and each `choice` in it is a flag by itself: `--method mae` says whose fields the
`--method.*` flags are. A list is one word, apart by commas: `--optim.betas .9,.95`; `none` takes back what may be none.
`--help` shows the everyday flags, `--help optim` those of a group, `--help all` all of them.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from cyclopts import CycloptsError, Parameter

from situs.api import FLAGGED, layered, named
from situs.cli.parser.flags import SHELL, Configured, Flag, configured_of, flag_name, flags_of
from situs.cli.parser.helptext import asked_topic, print_help
from situs.cli.parser.printing import print_config, tell_length
from situs.cli.parser.words import app_of, identifier, members_of, sentence
from situs.config import choices_of, convert, from_dict, merge, tables_of
from situs.errors import SitusError
from situs.presets import laid, one_length

T = TypeVar("T")
Ground = Callable[[str], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Where a verb's config starts from: preset < TOML file < flags."""

    preset: Annotated[str | None, Parameter(metavar="NAME")] = None
    """A recipe that comes with situs (--help presets); flags override it."""

    config_file: Annotated[Path | None, Parameter(name="--config", metavar="FILE")] = None
    """A TOML file of your own, laid over the preset."""

    print_config: bool = False
    """Print every value and where it comes from, as a TOML file for --config, and end."""


BELOW = {"preset": "--preset", "config_file": "--config", "resume": "--resume", "source": "--from"}
"""Fields of `Args` that say what lies below the flags, and their flags: preset < file, or the config of a run that is
gone on with; lowest, what is known of the model to start from."""

HELD = ("preset", "config_file", "print_config", "dry_run", "out", "resume", "device")
"""Fields of `Args` that a printed config holds or that make no other run of it; the others are to be given again."""


def configured(
    cls: type[Any],
    ground: Ground | None = None,
    short: Mapping[str, tuple[str, ...]] | None = None,
    without: tuple[str, ...] = (),
) -> Any:
    """The field of `Args` that holds the resolved config; every field of `cls` needs a default.

    ground: what makes of the value of --from the tables that lie below the preset. short: everyday flags that stand for
    fields of the config, as {"epochs": ("train.epochs",)}. without: fields that are no flags, because one of the verb's
    own sets them.
    """
    held = Configured(cls, ground, short or {}, without)
    return field(default_factory=cls, kw_only=True, metadata={"situs.configured": held})


def parse(args_type: type[T], argv: Sequence[str], prog: str) -> T:
    """The verb's Args; a `SitusError` of one sentence where that cannot be. Prints help and exits with 0."""
    held, topic = configured_of(args_type), asked_topic(argv)
    start, below = None, {}
    if held is not None:
        below = layers_of(args_type, argv)
        start = from_dict(held[1].cls, laid(held[1].cls, below.values()), where=named(below))
    flags = [*flags_of(args_type, start), *SHELL]
    if topic is not None:
        print_help(flags, start, topic, prog, inspect.getdoc(args_type) or "", _peek(argv, "--preset"))
        raise SystemExit(0)
    given = words_of(flags, argv, prog)
    own = {f.fields[0]: convert(f.kind, value, f.fields[0]) for f, value in given if f.own and f not in SHELL}
    if held is not None:
        cls, by_flag = held[1].cls, [(f.name, path, value) for f, value in given if not f.own for path in f.fields]
        over = one_length(tables_of(by_flag))
        own[held[0]] = config = from_dict(cls, merge(laid(cls, below.values()), over, choices_of(cls)))
        flags_by_path = {path: name for name, path, _ in by_flag}
        if held[1].ground is not None and own.get("source") and "backbone.name" in flags_by_path:
            said = f"backbone={config.backbone.name}: {own['source']} brings its own"
            raise SitusError(f"{said}; leave it out, or give its weights alone", field=("backbone.name", "init"))
        tell_length(below, flags_by_path)
        if own.get("print_config"):
            beside = [f.name for f, _ in given if f.own and f not in SHELL and f.fields[0] not in HELD]
            print_config(config, {**below, FLAGGED: over}, flags_by_path, prog, beside)
            raise SystemExit(0)
    return args_type(**own)


# --- words -> values ----------------------------------------------------------------------------------------


class Given(NamedTuple):
    """A flag that was given, and its value."""

    flag: Flag
    value: Any


def words_of(flags: Sequence[Flag], argv: Sequence[str], prog: str) -> list[Given]:
    """The flags that `argv` gives, with their values as they would stand in a TOML file."""
    try:
        _, bound, _ = app_of(_asked(flags, argv), prog).parse_args([*argv], exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise SitusError(f"{sentence(error, prog, flags)} (see {prog} --help)") from None
    by_name = {identifier(flag): flag for flag in flags}
    return [Given(by_name[name], _value(by_name[name], text)) for name, text in bound.arguments.items()]


def _asked(flags: Sequence[Flag], argv: Sequence[str]) -> Sequence[Flag]:
    """The flags that a parser of these words needs: a hundred cost most of a start. All, where one is not known."""
    named = {word.partition("=")[0] for word in argv if word.startswith("-")}
    few = [flag for flag in flags if flag.positional or flag.required or any(_names(word, flag) for word in named)]
    return few if all(any(_names(word, flag) for flag in few) for word in named) else flags


def _names(word: str, flag: Flag) -> bool:
    """Whether a word is the flag, or one key of the table that it takes: --backbone.model-args.depth."""
    return word == flag.name or (get_origin(flag.kind) is dict and word.startswith(f"{flag.name}."))


def _value(flag: Flag, given: Any) -> Any:
    if isinstance(given, dict):
        return {key.replace("-", "_"): _free(text) for key, text in given.items()}
    if isinstance(given, tuple):
        return [*given]
    return given if isinstance(given, bool) else from_text(flag.kind, given)


def from_text(kind: Any, text: str) -> Any:
    """The value that a word stands for: what a TOML file would hold for a field of this type."""
    members = members_of(kind)
    words = {str(word): word for each in members if get_origin(each) is Literal for word in get_args(each)}
    if text in words:
        return words[text]
    if text.lower() == "none" and NoneType in members:
        return None
    lists = [each for each in members if get_origin(each) in (tuple, list)]
    if lists and ("," in text or len(lists) == len([each for each in members if each is not NoneType])):
        return [from_text(get_args(lists[0])[0], part.strip()) for part in text.split(",") if part.strip()]
    return _number(text) if {int, float} & {*members} else text


def _number(text: str) -> Any:
    """A number where the text is one, or else the text itself."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _free(text: str) -> Any:
    """A value of a table that takes any key: a number, what JSON writes (true, lists), or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return _number(text)


# --- layers -------------------------------------------------------------------------------------------------


def layers_of(args_type: type[Any], argv: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """What lies below the flags, by where it comes from, and the choices that `argv` names.

    It is read before the parser runs: which method it is says which flags there are.
    """
    held = configured_of(args_type)
    assert held is not None
    spec = held[1]
    given = {each.name: _peek(argv, BELOW[each.name]) for each in fields(args_type) if each.name in BELOW}
    run, source = given.get("resume"), given.get("source")
    ground = None if spec.ground is None or source is None or run is not None else spec.ground(source)
    named_here = _peek(argv, "--backbone") or _peek(argv, "--backbone.name")
    init = None if named_here or not hasattr(spec.cls, "init") else _peek(argv, "--init")
    below = layered(given.get("preset"), given.get("config_file"), run, ground, init)
    chosen = [(flag_name(path), f"{path}.name", _peek(argv, flag_name(path))) for path in choices_of(spec.cls)]
    here = tables_of(each for each in chosen if each[2] is not None)
    return {**below, **({FLAGGED: here} if here else {})}


def _peek(argv: Sequence[str], flag: str) -> str | None:
    """The last value of a flag that takes one, before any parser runs."""
    value = None
    for index, word in enumerate(argv):
        if word == flag and index + 1 < len(argv):
            value = argv[index + 1]
        elif word.startswith(f"{flag}="):
            value = word.removeprefix(f"{flag}=")
    return value
