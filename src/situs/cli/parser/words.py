"""cyclopts' parser of a verb's flags. It gives words; what they mean is for `situs.config`, as it is for files."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import cyclopts
from cyclopts import App, Parameter

from situs.cli.parser.flags import Flag
from situs.cli.retired import FLAGS as RETIRED


def app_of(flags: Sequence[Flag], prog: str, about: str = "") -> App:
    """The parser of these flags; its help shows them in groups."""

    def verb(*_: Any, **__: Any) -> None:
        raise AssertionError("parsed, never called")

    places = [flag for flag in flags if flag.positional]
    parameters = [
        inspect.Parameter(
            identifier(flag),
            inspect.Parameter.POSITIONAL_ONLY if flag.positional else inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if flag.required else flag.default,
            annotation=_annotation(flag),
        )
        for flag in (*places, *(flag for flag in flags if not flag.positional))
    ]
    verb.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    usage = " ".join([prog, *(flag.metavar for flag in places), "[FLAGS]"])
    app = App(name=prog, help=about, usage=usage, help_flags=(), version_flags=(), result_action="return_value")
    app.default(verb)
    return app


def identifier(flag: Flag) -> str:
    """The name that the parser knows a flag by."""
    return "flag_" + (flag.fields[0] if flag.positional else flag.name[2:].replace("-", "_").replace(".", "__"))


def _annotation(flag: Flag) -> Any:
    words = [str(word) for each in members_of(flag.kind) if get_origin(each) is Literal for word in get_args(each)]
    if words and NoneType in members_of(flag.kind) and flag.default is not None:
        words.append("none")  # nothing else says it
    kind: Any = str
    if get_origin(flag.kind) is dict:
        kind = dict[str, str]
    elif flag.positional and get_origin(flag.kind) is tuple:
        kind = tuple[str, ...]
    elif flag.kind is bool:
        kind = bool
    # What is off by itself needs no word that puts it off; but a preset may have put a config's on.
    twin = flag.kind is bool and not (flag.own and flag.default is False)
    return Annotated[
        kind,
        Parameter(
            name=flag.name,
            negative=None if twin else (),
            allow_repeating=kind in (str, bool),  # the last one counts, so that a script may add to a command
            choices=words or None,
            allow_leading_hyphen="," in flag.metavar,  # of a list the first number may be below 0
            show_choices=False,
            help=flag.help,
            metavar=flag.metavar if kind is str else None,
            show_default=_shown(flag),
            group="Arguments" if flag.positional else flag.group or "Flags",
        ),
    ]


def _shown(flag: Flag) -> Any:
    """How the help shows a default: a list as it is written, and nothing where it would say nothing."""
    value = flag.default
    if value in (None, "", ()) or isinstance(value, dict) or (flag.own and value is False):
        return False
    if isinstance(value, bool):
        return lambda _: "yes" if value else "no"
    if isinstance(value, float):
        return lambda _: f"{value:.4g}"
    if isinstance(value, tuple):
        return lambda _: ",".join(f"{each:g}" if isinstance(each, float) else str(each) for each in value)
    return True


def members_of(kind: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    if get_origin(kind) is Annotated:
        return members_of(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return tuple(each for member in get_args(kind) for each in members_of(member))
    return (kind,)


OTHERS = {
    "--model": "--backbone",
    "--arch": "--backbone",
    "--backbone": "--backbone.name",
    "--batch-size": "--batch",
    "--learning-rate": "--optim.lr",
    "--checkpoint": "--init",
    "--weights": "--init",
    "--gpu": "--device",
    "--output": "--out",
    "--max-steps": "--steps",
}
"""What other programs call a flag -> ours, where the verb has it."""


def meant(word: str, flags: Sequence[Flag]) -> str:
    """The flag that a word of other programs, or the end of one of ours, stands for; "" where none does."""
    names = [flag.name for flag in flags]
    ends = [name for name in names if name.endswith(f".{word.lstrip('-')}")]
    other = OTHERS.get(word, "")
    return next((name for name in (other, OTHERS.get(other, ""), *sorted(ends, key=_first)) if name in names), "")


def _first(name: str) -> bool:
    """Puts the optimiser's flags before those of other groups."""
    return not name.startswith("--optim.")


def sentence(error: cyclopts.CycloptsError, prog: str, flags: Sequence[Flag] = ()) -> str:
    """One sentence for what the parser found; its own words where it is of no form that is known here."""
    said = str(error).strip().rstrip(".")
    nearest = said.partition("Did you mean ")[2].strip('"?')
    perhaps = f"; perhaps {nearest}" if nearest else ""
    match error:
        case cyclopts.UnknownOptionError():
            word = (error.token.keyword or error.token.value).partition("=")[0]
            if instead := RETIRED.get(prog.removeprefix("situs "), {}).get(word):
                return f"{word} is gone: {instead}"
            other = meant(word, flags)
            return f"{word}: {prog} has no such flag{f'; perhaps {other}' if other else perhaps}"
        case cyclopts.UnusedCliTokensError():
            words = " ".join(error.unused_tokens or ())
            names = [name for name in ("--from", "--data", "--out") if any(flag.name == name for flag in flags)]
            if not any(flag.positional for flag in flags) and names:
                return f"{words}: {prog} takes no word without its flag; perhaps {names[0]} {words}"
            return f"{words}: more than {prog} takes; a list is one word, apart by commas"
        case cyclopts.MissingArgumentError() if error.argument is not None:
            needs = "needs a value" if error.keyword or error.argument.tokens else "must be given"
            return f"{error.keyword or error.argument.name}: {needs}"
        case cyclopts.CoercionError() if error.token is not None and get_args(error.target_type):
            name = error.token.keyword or (error.argument.name if error.argument else "")
            if get_origin(error.target_type) is dict:
                key, sign, value = error.token.value.partition("=")
                shown = f"{name}.{key} {value}" if sign else f"{name}.NAME VALUE"
                return f"{name} {error.token.value}: must be given one by one, as {shown}"
            *words, last = map(str, get_args(error.target_type))
            return f"{name} {error.token.value}: must be {', '.join(words)} or {last}{perhaps}"
    return said
